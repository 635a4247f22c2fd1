"""The schedule is data: what it prints for a small model is held here, and what the engine does is what it says.

Three layers and a root that uses a parameter of its own after them. Golden texts are for the reader too: they
show the step of each stage line by line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from zeor import api
from zeor.comm.observe import ACTION
from zeor.plan import Plan
from zeor.step.schedule import FIRST_READER, Action, LaneTraits, Schedule, Traits
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
        lane = LaneTraits(frees=stage == 3, trains=trains, publishes=trains and stage in (1, 2))
        units.append(Traits(name, (lane,)))
    return Schedule(tuple(units), (0, 1, 2, 3), (0, 3, 2, 1), Plan(stage=stage, prefetch=prefetch, overlap=overlap))


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
step            root  update(root)
step            a     update(a)
step            b     update(b)
step            c     update(c)"""

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
step            root  update(root)
step            a     update(a)
step            b     update(b)
step            c     update(c)"""

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
step            root  update(root)
step            a     update(a)
step            b     update(b)
step            c     update(c)"""

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
step            root  update(root)  publish(root)
step            a     update(a)  publish(a)
step            b     update(b)  publish(b)
step            c     update(c)  publish(c)
first reader    root  wait(root)
first reader    a     wait(a)
first reader    b     wait(b)
first reader    c     wait(c)"""

STAGE_0 = STAGE_2.partition("first reader")[0].rstrip("\n")
for _name in ("root", "a", "b", "c"):
    STAGE_0 = STAGE_0.replace(f"  publish({_name})", "")


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
    assert lines(found, "step") == ["step            a     update(a)", "step            c     update(c)"]


def test_a_last_unit_that_backward_does_not_begin_with_is_freed() -> None:
    found = Schedule(schedule(3).units, (0, 1, 2, 3), (0, 2, 3, 1), Plan(prefetch=0))
    assert found.stays is None
    assert lines(found, "forward exit")[2] == "forward exit    c     free(c)"


def test_events_that_were_not_expected_have_no_actions() -> None:
    found = schedule(3)
    assert found.at("forward enter", 7) == ()
    assert [str(action) for action in found.at("forward exit", 1)] == ["free(1, lane 0)"]


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'gahter' is not an action of a schedule; use one of .*'gather'"):
        Action("gahter", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("action", [Action("update", 0, 0), Action("wait", 0, 0), Action("publish", 0)], ids=str)
def test_an_action_that_a_pass_cannot_carry_out_is_refused(action: Action) -> None:
    model = Model()
    zeor.shard(model, stage=2)
    with pytest.raises(ValueError, match=f"{re.escape(str(action))} is not an action that a pass can carry out"):
        api._state(model).engine.passes.do([action])


SEVERAL_LANES = """\
forward enter   root  wait(root)  fetch(a, lane 0)  gather(a, lane 0)  gather(a, lane 1)
forward enter   a     wait(a)
forward exit    a
forward exit    root
backward enter  root  wait(root)
backward enter  a     wait(a)
backward exit   a     reduce(a, lane 0)  free(a, lane 0)  free(a, lane 1)
backward end          finish(a, lane 0)  spill(a, lane 0)  reduce(root)  finish(root)
step            root  update(root)
step            a     fetch(a, lane 0)  update(a, lane 0)  spill(a, lane 0)
step            root  publish(root)
first reader    root  wait(root)"""


def test_lanes_of_a_unit_and_tiers_are_told_apart() -> None:
    """A root that is whole everywhere, and a unit of which one lane rests on the host and one is frozen."""
    root = Traits("root", (LaneTraits(frees=False, trains=True, publishes=True),))
    away = LaneTraits(True, True, False, fetched=True, spills=True, streams=True, update=("fetch", "update", "spill"))
    unit = Traits("a", (away, LaneTraits(frees=True, trains=False, publishes=False)))
    assert str(Schedule((root, unit), (0, 1), (0, 1), Plan(offload=zeor.Offload()))) == SEVERAL_LANES


# What the engine does is what the schedule says.


class Traced(NamedTuple):
    done: list[str]  # the third step's record
    planned: list[str]  # what the schedule lists for it
    text: str
    left: list[str]  # waits for lanes that the step left under way
    readers: list[str]  # the same as listed


def trace_one(build: Callable[[], nn.Module] = Model, adam: bool = False, **options: Any) -> Traced:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters()) if adam else torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, **options)
    engine = api._state(model).engine
    done: list[str] = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with engine.observer.listening(x.device) as records:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        actions = [record for record in records if record.kind == ACTION]
        done = [str(Action(each.verb, each.index, each.lane)) for each in actions]  # type: ignore[arg-type]
        assert {each.step for each in records} == {step}
        under_way = [each.verb for each in actions if not each.end]  # by a thread of its own
        assert set(under_way) <= {"fetch", "update", "spill"}
        assert min(each.end - each.begin for each in actions if each.end) >= 0
    left = [
        str(Action("wait", unit.index, number))
        for unit in engine.step_order()
        for number, lane in enumerate(unit.lanes)
        if lane.under_way
    ]
    planned: dict[bool, list[str]] = {True: [], False: []}
    for event, _, actions in engine.schedule.rows:
        planned[event == FIRST_READER] += map(str, actions)
    return Traced(done, planned[False], str(engine.schedule), left, planned[True])


SETTINGS = [
    *((stage, prefetch, True) for stage in (0, 1, 2, 3) for prefetch in (0, 1, 2)),
    *((stage, 1, False) for stage in (0, 1, 2, 3)),
]


def trace_all() -> dict[tuple[int, int, bool], Traced]:
    return {s: trace_one(stage=s[0], prefetch=s[1], overlap=s[2]) for s in SETTINGS}


@pytest.fixture(scope="module")
def traces(ranks: Callable[..., list[Any]]) -> list[dict[tuple[int, int, bool], Traced]]:
    return ranks(trace_all, 2)


@pytest.mark.parametrize("stage, prefetch, overlap", SETTINGS)
def test_the_engine_does_what_the_schedule_says(traces: Any, stage: int, prefetch: int, overlap: bool) -> None:
    for rank in traces:
        found = rank[stage, prefetch, overlap]
        assert found.done == found.planned
        assert found.left == found.readers


class Block(nn.Module):
    """Lanes of three sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))  # its master is wider

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.linear(x)) @ self.gain


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Block() for _ in range(3)])
        self.last = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) @ self.last


HOST = {"moments": "host", "master": "host"}
ALL_HOST = {**HOST, "grads": "host", "compute": "host"}
ON_DEVICE = {"moments": "device", "master": "device"}
TIERS: list[dict[str, Any]] = [
    *({"stage": stage, "offload": HOST, "overlap": overlap} for stage in (0, 1, 2, 3) for overlap in (True, False)),
    *({"stage": stage, "offload": {**HOST, "update": "host"}} for stage in (0, 1, 2, 3)),
    *({"stage": stage, "offload": {**ON_DEVICE, "grads": "host"}} for stage in (2, 3)),
    {"stage": 3, "offload": {**HOST, "grads": "host", "update": "host"}},
    {"stage": 3, "offload": {**ON_DEVICE, "compute": "host"}},
    {"stage": 3, "offload": {**HOST, "moments": {"device": 0.5, "host": 0.5}}},
    *({"stage": 3, "offload": ALL_HOST, "overlap": overlap} for overlap in (True, False)),
    *({"stage": stage, "release": True, "overlap": overlap} for stage in (0, 1, 2, 3) for overlap in (True, False)),
    *({"stage": stage, "release": True, "offload": HOST} for stage in (0, 1, 2, 3)),
    *({"stage": 3, "release": True, "offload": ALL_HOST, "overlap": overlap} for overlap in (True, False)),
    *({"stage": stage, "delay": 1, "offload": HOST} for stage in (0, 1, 2, 3)),
    *({"stage": stage, "keep_whole": 64} for stage in (2, 3)),
]


def trace_tiers() -> list[Traced]:
    """nonfinite="ignore": on a CPU the look at gradients that rest elsewhere brings them back before the update."""
    same = {"precision": "bf16", "nonfinite": "ignore"}
    return [trace_one(Blocks, adam=True, **same, **options) for options in TIERS]


@pytest.fixture(scope="module")
def tier_traces(ranks: Callable[..., list[Any]]) -> list[list[Traced]]:
    return ranks(trace_tiers, 2)


@pytest.mark.parametrize("setting", range(len(TIERS)), ids=lambda n: str(TIERS[n]))
def test_lanes_are_fetched_updated_spilled_and_published_as_the_schedule_says(tier_traces: Any, setting: int) -> None:
    for rank in tier_traces:
        found = rank[setting]
        assert found.done == found.planned
        assert found.left == found.readers


def test_a_root_whose_output_is_its_last_unit_s_is_entered_first_all_the_same(ranks: Callable[..., list[Any]]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])

    for found in ranks(trace_one, 2, build, stage=3, prefetch=2):
        assert found.done == found.planned


def test_the_engine_s_own_schedule_is_the_golden_one(traces: Any) -> None:
    for (stage, prefetch), golden in {(3, 1): STAGE_3, (3, 0): STAGE_3_PREFETCH_0, (2, 1): STAGE_2}.items():
        text = traces[0][stage, prefetch, True].text
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
step            root       update(root)
step            tokens     update(tokens)
step            positions  update(positions)
step            blocks.0   update(blocks.0)
step            blocks.1   update(blocks.1)
step            head       update(head)

axis     verb  sent per step and rank
-----  ------  ----------------------
ranks  gather                  1.9 MB
ranks  reduce                959.0 kB
"""


def test_zeor_schedule_prints_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "--layers", "2", "--stage", "3"]) == 0
    assert capsys.readouterr().out == COMMAND
