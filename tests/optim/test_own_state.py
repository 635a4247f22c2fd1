"""`optimizer.state[p]` of a sharded optimizer: reads show this rank's part, edits work on it, a reset is a reset."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops

STAGES = (0, 1, 2, 3)
Edit = Callable[[Optimizer, nn.Module], None]


def made(stage: int, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = loops.net()
    return zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage, **options)


def drop_in(stage: int) -> tuple[nn.Module, Optimizer]:
    model = loops.net()
    return model, zeor.optim.AdamW(model.parameters(), lr=0.1, stage=stage)


def values(model: nn.Module) -> dict[str, Tensor]:
    if not hasattr(model, "_zeor_sharded"):
        return loops.values(model)
    with zeor.full_params(model):
        return loops.values(model)


# ---- reading


def check_reads(make: Callable, stage: int) -> None:
    model, optimizer = make(stage)
    for param in model.parameters():
        assert param not in optimizer.state and optimizer.state.get(param) is None, "nothing yet"
    loops.train(model, optimizer, range(2), loops.own_loss)
    plain = loops.net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    loops.train(plain, theirs, range(2))
    numel = 0
    for mine, param in zip(model.parameters(), plain.parameters(), strict=True):
        if mine not in optimizer.state:
            with pytest.raises(KeyError, match="updates no part of this parameter"):
                optimizer.state[mine]["exp_avg"]
            assert optimizer.state[mine] == {} and optimizer.state.get(mine) is None
            continue
        state = optimizer.state[mine]
        assert state is optimizer.state.get(mine) and float(state["step"]) == 2.0
        numel += state["exp_avg"].numel()
        whole = theirs.state[param]["exp_avg"]
        found = set(round_all(state["exp_avg"]))
        assert found <= set(round_all(whole)), "these are elements of the plain optimizer's"
    total = torch.tensor(numel)
    dist.all_reduce(total) if stage else None
    assert total == sum(p.numel() for p in plain.parameters()), "each element on exactly one rank"
    optimizer.load_state_dict(optimizer.state_dict())  # reading has left nothing behind
    loops.train(model, optimizer, range(2, 3), loops.own_loss)
    loops.train(plain, theirs, range(2, 3))
    loops.assert_close(values(model), loops.values(plain))


def round_all(tensor: Tensor) -> list[float]:
    return [round(x, 8) for x in tensor.reshape(-1).tolist()]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_reads_show_this_ranks_part(ranks, stage, world):
    ranks(check_reads, world, made, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_reads_of_a_drop_in(ranks, stage):
    ranks(check_reads, 2, drop_in, stage)


def check_state_dict_after_reads(stage: int) -> None:
    model, optimizer = made(stage)
    for param in model.parameters():
        optimizer.state[param]
    optimizer.load_state_dict(optimizer.state_dict())
    loops.train(model, optimizer, range(1), loops.own_loss)
    model2, untouched = made(stage)
    loops.train(model2, untouched, range(1), loops.own_loss)
    loops.assert_equal(values(model), values(model2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_read_before_the_first_step_breaks_nothing(ranks, stage):
    ranks(check_state_dict_after_reads, 2, stage)


# ---- editing, as in plain PyTorch


def halve(optimizer: Optimizer, model: nn.Module) -> None:
    for param in model.parameters():
        if param in optimizer.state:
            optimizer.state[param]["exp_avg"].mul_(0.5)


def replace(optimizer: Optimizer, model: nn.Module) -> None:
    for param in model.parameters():
        if param in optimizer.state:
            state = optimizer.state[param]
            state["exp_avg"] = state["exp_avg"] * 0.5


def pop_one(optimizer: Optimizer, model: nn.Module) -> None:
    optimizer.state.pop(next(iter(model.parameters())), None)
    optimizer.state.pop(model.head.weight)


def delete_one(optimizer: Optimizer, model: nn.Module) -> None:
    del optimizer.state[model.head.weight]


def clear(optimizer: Optimizer, model: nn.Module) -> None:
    optimizer.state.clear()


def new_dict(optimizer: Optimizer, model: nn.Module) -> None:
    optimizer.state = defaultdict(dict)


def set_whole(optimizer: Optimizer, model: nn.Module) -> None:
    """A whole parameter's state: each rank takes its part."""
    weight = model.head.weight
    ramp = torch.arange(weight.numel(), dtype=torch.float64).view(weight.shape)
    optimizer.state[weight] = {"step": torch.tensor(5.0), "exp_avg": ramp, "exp_avg_sq": ramp + 1}


EDITS = {each.__name__: each for each in (halve, replace, pop_one, delete_one, clear, new_dict, set_whole)}


def check_edit(make: Callable, stage: int, edit: Edit) -> None:
    model, optimizer = make(stage)
    plain = loops.net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for mine, its, loss in ((model, optimizer, loops.own_loss), (plain, theirs, loops.joint_loss)):
        loops.train(mine, its, range(2), loss)
        edit(its, mine)
        loops.train(mine, its, range(2, 4), loss)
    loops.assert_close(values(model), loops.values(plain))
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", EDITS)
def test_edits_equal_plain_pytorch(ranks, stage, name):
    ranks(check_edit, 2, made, stage, EDITS[name])


@pytest.mark.parametrize("name", EDITS)
def test_edits_of_a_drop_in_equal_plain_pytorch(ranks, name):
    ranks(check_edit, 2, drop_in, 2, EDITS[name])


# ---- state that rests elsewhere


def offloaded(stage: int) -> tuple[nn.Module, Optimizer]:
    return made(stage, offload="host")


def check_offloaded(stage: int) -> None:
    model, optimizer = offloaded(stage)
    loops.train(model, optimizer, range(1), loops.own_loss)
    refused = 0
    for param in model.parameters():
        try:
            optimizer.state[param]
        except RuntimeError as error:
            refused += 1
            assert "rests outside the optimizer" in str(error) and "state_dict()" in str(error)
    assert refused > 0
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("stage", [1, 3])
def test_state_at_rest_says_where_to_look(ranks, stage):
    ranks(check_offloaded, 2, stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["clear", "new_dict"])
def test_a_reset_reaches_state_at_rest(ranks, stage, name):
    ranks(check_edit, 2, offloaded, stage, EDITS[name])


# ---- the rest of the world


def check_copies() -> None:
    model, optimizer = made(0)
    loops.train(model, optimizer, range(1), loops.own_loss)
    assert type(copy.copy(optimizer.state)) is defaultdict and type(optimizer.state.copy()) is defaultdict
    assert len(pickle.loads(pickle.dumps(optimizer.state))) == len(optimizer.state)
    zeor.unshard(model, optimizer)
    assert type(optimizer.state) is defaultdict
    assert {id(param) for param in optimizer.state} == {id(param) for param in model.parameters()}


def test_copies_are_plain_and_unshard_gives_a_plain_one_back(ranks):
    ranks(check_copies, 1)
