"""A sharded optimizer's state dict is one rank's part, and says so: whoever may not load it gets a sentence."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops

CUT = (1, 2, 3)


def made(kind: str, stage: int, name: str = "AdamW") -> tuple[nn.Module, Optimizer]:
    """A model and its sharded optimizer. `kind`: by zeor.shard, or a drop-in."""
    model = loops.net()
    if kind == "drop-in":
        return model, getattr(zeor.optim, name)(model.parameters(), lr=0.1, stage=stage)
    return zeor.shard(model, getattr(torch.optim, name)(model.parameters(), lr=0.1), stage=stage)


def full_values(kind: str, model: nn.Module) -> dict[str, Tensor]:
    if kind == "drop-in":
        return loops.values(model)
    with zeor.full_params(model):
        return loops.values(model)


def sent_from(rank: int, value: Any) -> Any:
    """What one rank has, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=rank)
    return box[0]


WAYS = [("shard", 1), ("shard", 2), ("shard", 3), ("drop-in", 1), ("drop-in", 2)]


# ---- refused


def check_rank_0_saves_all_load(kind: str, stage: int) -> str:
    model, optimizer = made(kind, stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    before = copy.deepcopy(optimizer.state_dict())
    saved = sent_from(0, before)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(saved)
        return ""
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict(), before), "a refused load changes nothing"
    return str(caught.value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("kind", "stage"), WAYS)
def test_rank_0_saves_and_all_load_is_refused_on_the_others(ranks, kind, stage, world):
    texts = ranks(check_rank_0_saves_all_load, world, kind, stage)
    for rank in range(1, world):
        assert f"the part of rank 0 of {world}, and this is rank {rank} of {world}" in texts[rank]
        assert all(word in texts[rank] for word in ("zeor.save", "zeor.load", "zeor.unshard"))


def part_of_rank_0(kind: str, stage: int) -> dict[str, Any]:
    model, optimizer = made(kind, stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    return copy.deepcopy(optimizer.state_dict())


def check_other_world(kind: str, stage: int, state: dict[str, Any]) -> str:
    _, optimizer = made(kind, stage)
    if dist.get_rank() > 0:
        return ""
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(state)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "stage"), [("shard", 3), ("drop-in", 1)])
def test_another_worlds_is_refused(ranks, kind, stage):
    state = ranks(part_of_rank_0, 2, kind, stage)[0]
    assert "rank 0 of 2, and this is rank 0 of 3" in ranks(check_other_world, 3, kind, stage, state)[0]
    assert "rank 0 of 2, and this is rank 0 of 1" in ranks(check_other_world, 1, kind, stage, state)[0]
    assert "rank 0 of 2, and this is rank 0 of 1" in ranks(check_other_world, 2, "shard", 0, state)[0]


def check_other_layout() -> str:
    model = loops.net()
    _, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    loops.train(model, optimizer, range(1), loops.own_loss)
    other = loops.net()
    _, theirs = zeor.shard(other, torch.optim.AdamW(other.parameters()), stage=2, units=[other.head])
    with pytest.raises(ValueError) as caught:
        theirs.load_state_dict(optimizer.state_dict())
    return str(caught.value)


def test_another_layouts_is_refused(ranks):
    for text in ranks(check_other_layout, 2):
        assert "cut differently" in text and "zeor.load" in text


def check_plain_refuses(kind: str, stage: int) -> None:
    model, optimizer = made(kind, stage)
    loops.train(model, optimizer, range(1), loops.own_loss)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    plain = torch.optim.AdamW(loops.net().parameters())
    with pytest.raises(ValueError, match="doesn't match the size"):
        plain.load_state_dict(saved)
    assert not plain.state
    assert all("zeor.save" in group["params"][-1] for group in saved["param_groups"]), "the file itself says why"


@pytest.mark.parametrize(("kind", "stage"), WAYS)
def test_a_plain_optimizer_refuses_a_ranks_part(ranks, kind, stage):
    ranks(check_plain_refuses, 2, kind, stage)


def check_unmarked_part() -> str:
    """As older versions wrote them."""
    model, optimizer = made("shard", 3)
    loops.train(model, optimizer, range(1), loops.own_loss)
    state = optimizer.state_dict()
    del state["zeor"]
    for group in state["param_groups"]:
        group["params"].pop()
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(state)
    return str(caught.value)


def test_a_part_without_a_mark_is_refused(ranks):
    for text in ranks(check_unmarked_part, 2):
        assert "has no mark of a rank's part" in text and "zeor.load" in text


# ---- loaded


def check_own(kind: str, stage: int, name: str) -> None:
    model, optimizer = made(kind, stage, name)
    loops.train(model, optimizer, range(2), loops.own_loss)
    weights, file = full_values(kind, model), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    loops.train(model, optimizer, range(2, 4), loops.own_loss)
    other = loops.net()
    other.load_state_dict(weights)
    file.seek(0)
    if kind == "drop-in":
        resumed = getattr(zeor.optim, name)(other.parameters(), lr=0.7, stage=stage)
    else:
        _, resumed = zeor.shard(other, getattr(torch.optim, name)(other.parameters(), lr=0.7), stage=stage)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    loops.train(other, resumed, range(2, 4), loops.own_loss)
    loops.assert_equal(full_values(kind, other), full_values(kind, model))
    assert resumed.state_dict().keys() == optimizer.state_dict().keys()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("kind", "stage"), [("shard", 0), *WAYS])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_each_rank_resumes_from_its_own_in_bits(ranks, kind, stage, name, world):
    ranks(check_own, world, kind, stage, name)


def check_own_offloaded(moments: str, loads: bool) -> dict[str, Tensor]:
    model = loops.net().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3, offload="host", moments=moments)
    loss = functools.partial(loops.own_loss, dtype=torch.float32)
    loops.train(model, optimizer, range(3), loss)
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
    loops.train(model, optimizer, range(3, 5), loss)
    return full_values("shard", model)


@pytest.mark.parametrize("moments", ["exact", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_state_that_rests_elsewhere_is_loaded_from_itself_in_bits(ranks, world, moments):
    """The dict shows the memory that the load writes into."""
    for loaded, straight in zip(*(ranks(check_own_offloaded, world, moments, loads) for loads in (True, False))):
        loops.assert_equal(loaded, straight)


def check_between_stages() -> None:
    model, optimizer = made("shard", 1)
    loops.train(model, optimizer, range(2), loops.own_loss)
    _, theirs = made("shard", 3)
    theirs.load_state_dict(optimizer.state_dict())
    assert same(theirs.state_dict()["state"], optimizer.state_dict()["state"])


def test_stages_that_cut_alike_share_parts(ranks):
    ranks(check_between_stages, 2)


def check_whole(stage: int) -> None:
    """Where every rank has all of the state, its state dict is a plain one, both ways."""
    model, optimizer = made("shard", stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    state = copy.deepcopy(optimizer.state_dict())
    assert "zeor" not in state
    plain = loops.net()
    plain.load_state_dict(full_values("shard", model))
    theirs = torch.optim.AdamW(plain.parameters())
    theirs.load_state_dict(state)
    loops.train(model, optimizer, range(2, 3), loops.own_loss)
    loops.train(plain, theirs, range(2, 3), loops.joint_loss)
    loops.assert_close(full_values("shard", model), loops.values(plain))


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 0)])
def test_a_whole_state_loads_into_a_plain_optimizer(ranks, world, stage):
    ranks(check_whole, world, stage)


def check_kept_groups() -> None:
    model = loops.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3)
    loops.train(model, optimizer, range(1), loops.own_loss)
    kept = optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    for group in (kept, *optimizer.param_groups):
        for found, param in zip(group["params"], model.parameters(), strict=True):
            assert found is param


def test_groups_that_the_user_kept_hold_his_parameters_after_a_load(ranks):
    ranks(check_kept_groups, 2)
