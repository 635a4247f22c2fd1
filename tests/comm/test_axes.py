"""Axes: what each is today, and that other groups can take their place while a model trains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeor
from tests import loops
from zeor.access.sharded import state_of
from zeor.comm.axes import Axes, Axis
from zeor.comm.meshes import make_axes
from zeor.memory.roles import Sizes

HOST = torch.device("cpu")


def test_a_lane_is_cut_over_everyone_and_repeated_by_nobody() -> None:
    axis = Axis(2, 4, HOST)
    axes = Axes.of_one(axis)
    assert axes.inside is axis and axes.everyone is axis and axes.device == HOST
    assert (axes.across.rank, axes.across.size) == (0, 1) and axes.sizes == Sizes(4, 1)


@pytest.mark.parametrize(("rank", "size"), [(1, 4), (2, 3)])
def test_axes_of_another_shape_do_not_fit(rank: int, size: int) -> None:
    axes = Axes.of_one(Axis(2, 4, HOST))
    with pytest.raises(ValueError, match=rf"along 'inside' this rank is {rank} of {size} on cpu and was 2 of 4 on cpu"):
        axes.replace(Axes.of_one(Axis(rank, size, HOST)))
    assert axes.sizes == Sizes(4, 1)


def trained(stage: int, replaced: bool, early: int) -> dict[str, Any]:
    """Weights and traffic of some steps; after `early` of them all groups are others, and the first are gone. After
    seven, paths are settled, and an answer is under way."""
    first, second = (dist.new_group() for _ in range(2))
    model = loops.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=stage, mesh=first)
    loops.train(model, optimizer, range(early), loops.own_loss)
    engine = state_of(model).engine
    if replaced:
        engine.drain()
        before = engine.axes.everyone
        before.stuck = True  # as after a collective that failed
        engine.axes.replace(make_axes(second, HOST, True, 60.0))
        for group in (before.gather, before.reduce, before.control, first):
            dist.destroy_process_group(group)
        gone = weakref.ref(before)
        del before, group
        gc.collect()
        assert gone() is None, "somebody keeps an axis that was replaced"
        assert not engine.axes.everyone.stuck
    loops.train(model, optimizer, range(early, early + 3), loops.own_loss)
    with zeor.full_params(model):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return {"weights": weights, "traffic": zeor.traffic(model), "steps": engine.axes.everyone.steps}


@pytest.mark.parametrize("early", [2, 7])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_over_other_groups_with_the_same_bits(
    ranks: Callable[..., list[Any]], stage: int, early: int
) -> None:
    expected, found = (ranks(trained, 2, stage, replaced, early) for replaced in (False, True))
    for before, after in zip(expected, found, strict=True):
        assert after["steps"] == before["steps"] == early + 3
        moved, wanted = (each["traffic"]["bytes_by_verb"] for each in (after, before))
        assert moved["gather"] == wanted["gather"] and moved["reduce"] == wanted["reduce"]
        assert early > 2 or moved == wanted, "settled paths are settled anew, by more agreements"
        for name, value in before["weights"].items():
            assert torch.equal(after["weights"][name], value), name
