"""Ranges that ranks have and want, cut into messages; and what a change of plan sends and holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeor
from tests.parity.models import Setting, placed
from zeor.access.sharded import state_of
from zeor.comm.axes import make_axis
from zeor.replan import moving
from zeor.replan.moving import Moved, Mover, Wanted
from zeor.replan.ranges import ALIGN_NBYTES, Range, common, length, stream, windows, without

RANGES = st.lists(st.integers(0, 40), max_size=6, unique=True).map(
    lambda cuts: [Range(a, b) for a, b in zip(sorted(cuts)[::2], sorted(cuts)[1::2])]
)


def elements(ranges: Any) -> set[int]:
    return {element for each in ranges for element in range(each.begin, each.end)}


@given(RANGES, RANGES)
def test_what_is_in_both_and_what_is_in_one_alone(some: list[Range], others: list[Range]) -> None:
    assert elements(common(some, others)) == elements(some) & elements(others)
    assert elements(without(some, others)) == elements(some) - elements(others)
    assert sum(each.numel for each in without(some, others)) == len(elements(some) - elements(others))


@given(st.lists(st.tuples(RANGES, RANGES, st.sampled_from([1, 2, 4, 8])), max_size=4), st.integers(1, 5))
@settings(max_examples=60)
def test_windows_hold_everything_once_and_no_more_than_they_may(tensors: list[Any], granules: int) -> None:
    has, wants, sizes = ([each[place] for each in tensors] for place in range(3))
    limit, seen = granules * ALIGN_NBYTES, []
    for window in windows(stream(has, wants), sizes, limit):
        assert 0 < length(window, sizes) <= limit
        ends = [0]
        for (tensor, begin, end), at in window:
            assert at % ALIGN_NBYTES == 0 and at >= ends[-1] and begin < end
            ends.append(at + (end - begin) * sizes[tensor])
            seen += [(tensor, element) for element in range(begin, end)]
    wanted = {(n, e) for n, (a, b) in enumerate(zip(has, wants)) for e in elements(a) & elements(b)}
    assert len(seen) == len(wanted) and set(seen) == wanted


def every_element_arrives(message: int, group: int) -> None:
    """Five tensors of several dtypes; each rank has a part, and wants another, overlapping or all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = make_axis(None, torch.device("cpu"), True, 60.0)
    moving.MESSAGE_NBYTES, moving.GROUP_NBYTES = message, group
    tensors, found, whole = [], [], []
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float32)):
        numel = 97 + 31 * number
        values = (torch.arange(numel) * (number + 3) % 113).to(dtype)
        cut = [Range(numel * r // size, numel * (r + 1) // size) for r in range(size)]
        wants = [Range(numel * r // (2 * size), numel) for r in range(size)]
        into: list[torch.Tensor] = []
        whole.append(values[wants[rank].begin :])
        found.append(into)
        wanted = [Wanted(wants[rank], torch.device("cpu"), into.append)]
        lacks = [without([each], [cut[r]]) for r, each in enumerate(wants)]
        read = lambda begin, end, values=values: values[begin:end]
        tensors.append(Moved(dtype, [[each] for each in cut], lacks, numel, [cut[rank]], read, wanted))
    groups = 0

    def taken() -> None:
        nonlocal groups
        groups += 1

    mover = Mover(axis)
    mover.move(tensors, taken)
    assert mover.problem is None and groups == (5 if group == 1 else 1)
    for values, into in zip(whole, found, strict=True):
        assert len(into) == 1 and torch.equal(into[0], values)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_element_arrives_in_messages_of_any_length(ranks: Callable, world: int) -> None:
    kept = moving.MESSAGE_NBYTES, moving.GROUP_NBYTES
    for message, group in ((1, 1), (256, 1 << 20), (1 << 20, 1)):
        ranks(every_element_arrives, world, message, group)
    ranks(setattr, world, moving, "MESSAGE_NBYTES", kept[0])
    ranks(setattr, world, moving, "GROUP_NBYTES", kept[1])


# ---- of a whole job


def sent_by(old: Any, new: Any) -> dict[str, int]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    as_options = lambda stage: placed(Setting(stage, shape=(2, 2))) if isinstance(stage, tuple) else {"stage": stage}
    zeor.shard(model, optimizer, **as_options(old), keep_whole=0)
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = zeor.traffic(model)["bytes_by_verb"]
    zeor.replan(model, optimizer, **{"mesh": None, **as_options(new)})
    after = zeor.traffic(model)["bytes_by_verb"]
    numel = sum(lane.layout.numel for unit in state_of(model).engine.units for lane in unit.lanes)
    sent = {verb: after.get(verb, 0) - before.get(verb, 0) for verb in ("all_to_all", "gather", "broadcast", "reduce")}
    return {**sent, "model": 4 * numel, "held": sum(p.numel() for p in model.parameters()) * 4}


def test_a_change_sends_what_ranks_lack_and_nothing_else(ranks: Callable) -> None:
    """Between stages of one axis state stays where it is; what all are to hold each is sent once."""
    for found in ranks(sent_by, 4, 3, 3):
        assert found["all_to_all"] == found["broadcast"] == found["reduce"] == found["gather"] == 0
    for found in ranks(sent_by, 4, 3, 1):  # weights are published
        assert found["all_to_all"] == 0 and found["gather"] == found["model"] * 3 // 4
    down = ranks(sent_by, 4, 3, 0)  # weights and two moments, three quarters of each to everybody
    assert sum(found["all_to_all"] for found in down) == pytest.approx(4 * 3 * down[0]["held"] * 3 / 4, rel=0.001)
    for found in ranks(sent_by, 4, 0, 3):
        assert found["all_to_all"] == 0
    over = ranks(sent_by, 4, (3, 3), (0, 2))
    assert 0 < sum(found["all_to_all"] for found in over) < 3 * 3 * over[0]["held"]
