"""What a parameter says of itself, and what may be written to it: full sizes always, changes that reach all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return dict(zeor.iter_full(model))


def check_sizes(stage: int) -> None:
    plain, model = loops.net(), zeor.shard(loops.net(), stage=stage)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert sum(p.nelement() * p.element_size() for p in model.parameters()) == 254 * 8
    for (name, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert mine.shape == theirs.shape and mine.size() == theirs.size() and mine.dim() == theirs.dim(), name
        if stage == 3:
            assert str(tuple(theirs.shape)) in repr(mine) and name in repr(mine)
        else:
            assert repr(mine) == repr(theirs)
    assert repr(model) == repr(plain)


@pytest.mark.parametrize("stage", STAGES)
def test_shape_numel_sums_and_repr_show_full_sizes(ranks, stage):
    ranks(check_sizes, 3, stage)


def check_writes(stage: int) -> dict[str, Tensor]:
    model = loops.net(torch.float32)
    model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    with zeor.full_params(model, write=True):
        torch.manual_seed(20 + dist.get_rank())  # rank 0's counts
        nn.init.orthogonal_(model.head.weight)
        model.blocks[0].up.bias.data.fill_(0.5)
        with torch.no_grad():
            weight = model.blocks[1].up.weight
            weight[weight.abs() < weight.abs().median()] = 0.0
    loops.train(model, optimizer, range(1), lambda m, step: 0.0 * loops.own_loss(m, step, torch.float32))
    return full_state(model)


@pytest.mark.parametrize("stage", STAGES)
def test_an_init_and_a_pruning_on_rank_0_reach_all_ranks(ranks, stage):
    plain = loops.net(torch.float32)
    torch.manual_seed(20)
    nn.init.orthogonal_(plain.head.weight)
    with torch.no_grad():
        plain.blocks[0].up.bias.fill_(0.5)
        weight = plain.blocks[1].up.weight
        weight[weight.abs() < weight.abs().median()] = 0.0
    wanted = loops.values(plain)
    for found in ranks(check_writes, 3, stage):
        loops.assert_equal({name: found[name] for name in wanted}, wanted)


def resize_by_a_new_module(model: loops.Net) -> None:
    model.head = nn.Linear(6, 9).double()


def resize_in_place(model: loops.Net) -> None:
    model.head.weight.data = torch.zeros(9, 6, dtype=torch.float64)


def prune_by_reparametrisation(model: loops.Net) -> None:
    prune.l1_unstructured(model.head, "weight", 0.5)


def check_refused(how: str) -> str:
    model = zeor.shard(loops.net())
    with pytest.raises(RuntimeError) as caught, zeor.full_params(model, write=True):
        if dist.get_rank() == 1:
            globals()[how](model)
    return str(caught.value)


@pytest.mark.parametrize("how, text", [
    ("resize_in_place", "Parameter 'head.weight' was replaced by one of shape (9, 6)"),
    ("prune_by_reparametrisation", "Parameter 'head.weight' was removed"),
])  # fmt: skip
def test_a_resize_is_refused_on_every_rank_naming_the_parameter(ranks, how, text):
    for found in ranks(check_refused, 2, how):
        assert found == (
            f"{text} inside zeor.full_params (on rank 1); only its values may change there. To change the model "
            "itself: zeor.unshard, change it, zeor.shard."
        )


def check_new_module() -> str:
    model = zeor.shard(loops.net())
    with pytest.raises(RuntimeError) as caught, zeor.full_params(model, write=True):
        resize_by_a_new_module(model)
    return str(caught.value)


def test_a_module_exchanged_for_a_larger_one_is_refused(ranks):
    for text in ranks(check_new_module, 2):
        assert text.startswith("Parameter 'head.weight' was lost with its Linear inside zeor.full_params (on rank 0)")
        assert "zeor.unshard, change it, zeor.shard" in text


def check_added() -> str:
    model = zeor.shard(loops.net())
    with pytest.raises(RuntimeError) as caught, zeor.full_params(model, write=True):
        model.extra = nn.Linear(2, 2)
    return str(caught.value)


def test_a_module_added_in_a_write_context_is_refused(ranks):
    for text in ranks(check_added, 2):
        assert text.startswith("Parameter 'extra.weight' was added inside zeor.full_params (on rank 0)")


def check_unshard_resize_shard() -> None:
    model = zeor.shard(loops.net())
    before = full_state(model)
    model = zeor.unshard(model)
    kept = model.head
    model.head = nn.Linear(6, 9).double()
    with torch.no_grad():
        model.head.weight[:5], model.head.bias[:5] = kept.weight, kept.bias
    model = zeor.shard(model)
    assert model.head.weight.shape == (9, 6)
    after = full_state(model)
    assert torch.equal(after["head.weight"][:5], before["head.weight"])
    assert model(loops.batch(0)[0]).shape == (loops.ROWS, 9)


def test_unshard_resize_shard_again(ranks):
    ranks(check_unshard_resize_shard, 2)
