"""The schedule is data: what it prints for a small model is held here, and what the engine does is what it says.

Three layers and a root that uses a parameter of its own after them. Golden texts are for the reader too: they
show the step of each stage line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from zeor import api
from zeor.step.schedule import Schedule, Traits
from zeor.tools import cli


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def schedule(stage: int, prefetch: int = 1, overlap: bool = True, frozen: tuple[str, ...] = ()) -> Schedule:
    units = []
    for name in ("root", "a", "b", "c"):
        trains = name not in frozen
        units.append(Traits(name, frees=stage == 3, trains=trains, publishes=trains and stage in (1, 2)))
    return Schedule(tuple(units), (0, 1, 2, 3), (0, 3, 2, 1), prefetch, overlap)


STAGE_3 = """\
forward enter   root  gather(root)  wait(root)  gather(a)
forward enter   a     wait(a)  gather(b)
forward exit    a     free(a)
forward enter   b     wait(b)  gather(c)
forward exit    b     free(b)
forward enter   c     wait(c)
forward exit    c
forward exit    root
backward enter  root  wait(root)
backward enter  c     wait(c)  gather(b)
backward exit   c     reduce(c)  free(c)
backward enter  b     wait(b)  gather(a)
backward exit   b     finish(c)  reduce(b)  free(b)
backward enter  a     wait(a)
backward exit   a     finish(b)  reduce(a)  free(a)
backward end          free(root)  finish(a)  reduce(root)  finish(root)
step                  update(root)  update(a)  update(b)  update(c)"""

STAGE_3_PREFETCH_0 = """\
forward enter   root  gather(root)  wait(root)
forward enter   a     gather(a)  wait(a)
forward exit    a     free(a)
forward enter   b     gather(b)  wait(b)
forward exit    b     free(b)
forward enter   c     gather(c)  wait(c)
forward exit    c
forward exit    root
backward enter  root  wait(root)
backward enter  c     wait(c)
backward exit   c     reduce(c)  free(c)
backward enter  b     gather(b)  wait(b)
backward exit   b     finish(c)  reduce(b)  free(b)
backward enter  a     gather(a)  wait(a)
backward exit   a     finish(b)  reduce(a)  free(a)
backward end          free(root)  finish(a)  reduce(root)  finish(root)
step                  update(root)  update(a)  update(b)  update(c)"""

STAGE_3_PREFETCH_2 = """\
forward enter   root  gather(root)  wait(root)  gather(a)  gather(b)
forward enter   a     wait(a)  gather(c)
forward exit    a     free(a)
forward enter   b     wait(b)
forward exit    b     free(b)
forward enter   c     wait(c)
forward exit    c
forward exit    root
backward enter  root  wait(root)  gather(b)
backward enter  c     wait(c)  gather(a)
backward exit   c     reduce(c)  free(c)
backward enter  b     wait(b)
backward exit   b     finish(c)  reduce(b)  free(b)
backward enter  a     wait(a)
backward exit   a     finish(b)  reduce(a)  free(a)
backward end          free(root)  finish(a)  reduce(root)  finish(root)
step                  update(root)  update(a)  update(b)  update(c)"""

STAGE_2 = """\
forward enter   root  wait(root)
forward enter   a     wait(a)
forward exit    a
forward enter   b     wait(b)
forward exit    b
forward enter   c     wait(c)
forward exit    c
forward exit    root
backward enter  root  wait(root)
backward enter  c     wait(c)
backward exit   c     reduce(c)
backward enter  b     wait(b)
backward exit   b     finish(c)  reduce(b)
backward enter  a     wait(a)
backward exit   a     finish(b)  reduce(a)
backward end          finish(a)  reduce(root)  finish(root)
step                  update(root)  publish(root)  update(a)  publish(a)  update(b)  publish(b)  update(c)  publish(c)"""  # noqa: E501

STAGE_0 = STAGE_2.rpartition("\n")[0] + "\nstep                  update(root)  update(a)  update(b)  update(c)"


def test_stage_3_gathers_one_unit_ahead_and_keeps_the_last() -> None:
    assert str(schedule(3)) == STAGE_3


def test_stage_3_without_prefetch_gathers_at_the_door() -> None:
    assert str(schedule(3, prefetch=0)) == STAGE_3_PREFETCH_0


def test_stage_3_with_two_units_ahead() -> None:
    assert str(schedule(3, prefetch=2)) == STAGE_3_PREFETCH_2


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_2_publishes_and_never_gathers_whatever_the_prefetch(prefetch: int) -> None:
    assert str(schedule(2, prefetch)) == STAGE_2
    assert str(schedule(1, prefetch)) == STAGE_2


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_0_updates_everything_everywhere(prefetch: int) -> None:
    assert str(schedule(0, prefetch)) == STAGE_0


def lines(of: Schedule, event: str) -> list[str]:
    return [line for line in str(of).splitlines() if line.startswith(event)]


def test_without_overlap_each_reduce_is_finished_at_once() -> None:
    assert lines(schedule(2, overlap=False), "backward e")[-2:] == [
        "backward exit   a     reduce(a)  finish(a)",
        "backward end          reduce(root)  finish(root)",
    ]


def test_a_frozen_unit_is_gathered_but_neither_reduced_nor_updated() -> None:
    found = schedule(3, frozen=("root", "b"))
    assert lines(found, "backward exit")[1:] == [
        "backward exit   b     free(b)",
        "backward exit   a     finish(c)  reduce(a)  free(a)",
    ]
    assert lines(found, "backward end") == ["backward end          free(root)  finish(a)"]
    assert lines(found, "step") == ["step                  update(a)  update(c)"]


def test_a_last_unit_that_backward_does_not_begin_with_is_freed() -> None:
    found = Schedule(schedule(3).units, (0, 1, 2, 3), (0, 2, 3, 1), 0)
    assert found.stays is None
    assert lines(found, "forward exit")[2] == "forward exit    c     free(c)"


def test_events_that_were_not_expected_have_no_actions() -> None:
    found = schedule(3)
    assert found.at("forward enter", 7) == ()
    assert [str(action) for action in found.at("forward exit", 1)] == ["free(1)"]


# What the engine does is what the schedule says.


def trace_one(
    stage: int, prefetch: int, overlap: bool, build: Callable[[], nn.Module] = Model
) -> tuple[list[str], list[str], str]:
    """The third step's record, and the schedule that it followed."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage, prefetch=prefetch, overlap=overlap)
    engine = api._state(model).engine
    for step in range(3):
        engine.trace = []
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.trace is not None
    planned = [str(action) for _, _, actions in engine.schedule.rows for action in actions]
    return [str(action) for action in engine.trace], planned, str(engine.schedule)


SETTINGS = [
    *((stage, prefetch, True) for stage in (0, 1, 2, 3) for prefetch in (0, 1, 2)),
    *((stage, 1, False) for stage in (0, 1, 2, 3)),
]


def trace_all() -> dict[tuple[int, int, bool], tuple[list[str], list[str], str]]:
    return {setting: trace_one(*setting) for setting in SETTINGS}


@pytest.fixture(scope="module")
def traces(ranks: Callable[..., list[Any]]) -> list[dict[tuple[int, int, bool], tuple[list[str], list[str], str]]]:
    return ranks(trace_all, 2)


@pytest.mark.parametrize("stage, prefetch, overlap", SETTINGS)
def test_the_engine_does_what_the_schedule_says(traces: Any, stage: int, prefetch: int, overlap: bool) -> None:
    for rank in traces:
        done, planned, _ = rank[stage, prefetch, overlap]
        assert done == planned


def test_a_root_whose_output_is_its_last_unit_s_is_entered_first_all_the_same(ranks: Callable[..., list[Any]]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])

    for done, planned, _ in ranks(trace_one, 2, 3, 2, True, build=build):
        assert done == planned


def test_the_engine_s_own_schedule_is_the_golden_one(traces: Any) -> None:
    for (stage, prefetch), golden in {(3, 1): STAGE_3, (3, 0): STAGE_3_PREFETCH_0, (2, 1): STAGE_2}.items():
        text = traces[0][stage, prefetch, True][2]
        shown = text.replace("layers.0", "a").replace("layers.1", "b").replace("layers.2", "c")
        assert [line.split() for line in shown.splitlines()] == [line.split() for line in golden.splitlines()]


def publishes_under_way(stage: int, dtype: torch.dtype, keep: bool) -> list[bool]:
    """Of each unit after a second step: whether its publishing goes on behind what the user's loop does next."""
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, stage=stage)
    kept = []
    for _ in range(2):
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        if keep:
            kept = [model.layers[1].weight.detach()]
        optimizer.step()
    found = [any(lane.under_way for lane in unit.lanes) for unit in api._state(model).engine.units]
    assert len(kept) == keep
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_published_weights_travel_behind_the_next_forward(ranks: Any, stage: int, dtype: torch.dtype) -> None:
    for found in ranks(publishes_under_way, 2, stage, dtype, False):
        assert found == [True] * 4
    for found in ranks(publishes_under_way, 2, stage, dtype, True):
        assert found == [True, True, False, True]  # somebody may read this one at any time


# The command that prints it.

COMMAND = """\
forward enter   root       gather(root)  wait(root)  gather(tokens)
forward enter   tokens     wait(tokens)  gather(positions)
forward exit    tokens     free(tokens)
forward enter   positions  wait(positions)  gather(blocks.0)
forward exit    positions  free(positions)
forward enter   blocks.0   wait(blocks.0)  gather(blocks.1)
forward exit    blocks.0   free(blocks.0)
forward enter   blocks.1   wait(blocks.1)  gather(head)
forward exit    blocks.1   free(blocks.1)
forward enter   head       wait(head)
forward exit    head
forward exit    root
backward enter  root       wait(root)
backward enter  head       wait(head)  gather(blocks.1)
backward exit   head       reduce(head)  free(head)
backward enter  blocks.1   wait(blocks.1)  gather(blocks.0)
backward exit   blocks.1   finish(head)  reduce(blocks.1)  free(blocks.1)
backward enter  blocks.0   wait(blocks.0)  gather(positions)
backward exit   blocks.0   finish(blocks.1)  reduce(blocks.0)  free(blocks.0)
backward enter  positions  wait(positions)  gather(tokens)
backward exit   positions  finish(blocks.0)  reduce(positions)  free(positions)
backward enter  tokens     wait(tokens)
backward exit   tokens     finish(positions)  reduce(tokens)  free(tokens)
backward end               free(root)  finish(tokens)  reduce(root)  finish(root)
step                       update(root)  update(tokens)  update(positions)  update(blocks.0)  update(blocks.1)  update(head)
"""  # noqa: E501


def test_zeor_schedule_prints_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "--layers", "2", "--stage", "3"]) == 0
    assert capsys.readouterr().out == COMMAND
