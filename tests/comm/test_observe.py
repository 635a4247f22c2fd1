"""The observer: what it hears and in which order, that it is silent where nobody listens, and what torch is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from zeor import api
from zeor.comm import verbs
from zeor.comm.axes import Axis
from zeor.comm.observe import ACTION, MOVE, PASS, WAIT, Observer, Place, in_words

HOST = torch.device("cpu")


def test_nobody_listens_and_only_what_was_sent_is_counted() -> None:
    observer = Observer()
    assert observer.on is False
    assert [observer.sent("gather", nbytes, "a gather", "shard") for nbytes in (100, 20)] == [None, None]
    assert observer.traffic.summary() == {
        "bytes_sent": 120, "collectives": 2, "calls": {"gather": 2}, "bytes_by_verb": {"gather": 120},
        "bytes_by_axis": {"shard": {"gather": 120}}, "steps": 0, "last_step": {}, "seconds_by_axis": {},
    }  # fmt: skip
    assert observer.records is None and observer.counts == []


def test_records_come_in_the_order_things_begin() -> None:
    observer, place = Observer(), Place("blocks.1", 4, 1)
    observer.live = {"grad": 7}
    observer.step = 3
    with observer.listening(HOST, residents=lambda: {"compute": 5}) as records:
        observer.enter("forward", Place("root", 0))
        action = observer.begin("gather", place, 64)
        move = observer.sent("gather", 32, place.gather, "shard")
        observer.end(action)
        assert move is not None and move.end == 0
        waited = observer.waits("gather", place.gather)
        observer.arrived(waited)
        observer.arrived(move)
        observer.close("forward")
        observer.count()
    assert observer.on is False and observer.records is None
    assert [record.kind for record in records] == [PASS, ACTION, MOVE, WAIT]
    assert [record.name for record in records] == ["forward root", *["gather blocks.1, lane 1"] * 3]
    assert [record.nbytes for record in records] == [0, 64, 32, 0]
    assert [record.step for record in records] == [3] * 4
    assert (action.index, action.lane, action.live) == (4, 1, {"grad": 7})
    assert (move.where, move.label) == ("shard", "gather of unit 'blocks.1', lane 1")
    assert move.begin < waited.begin <= waited.end <= move.end
    assert [record.marks for record in records] == [None] * 4, "a host has no streams"
    assert [values for _, values in observer.counts] == [{"compute": 5}] * 3  # at the beginning, when asked, at the end


def test_steps_bound_what_is_heard() -> None:
    observer = Observer()
    observer.step = 7
    heard = []
    with observer.listening(HOST, steps=2):
        for _ in range(3):
            observer.look()
            heard.append(observer.on)
            observer.step += 1
    assert heard == [True, True, False]


def test_an_action_that_was_none_is_taken_back() -> None:
    observer, place = Observer(), Place("a", 1, 0)
    with observer.listening(HOST) as records:
        kept = observer.begin("reduce", place)
        observer.cancel(observer.begin("spill", place))
        observer.end(kept)
    assert [record.verb for record in records] == ["reduce"]


def test_passes_that_are_closed_together_lie_inside_each_other() -> None:
    observer = Observer()
    with observer.listening(HOST) as records:
        for index, name in enumerate(("root", "a", "b")):
            observer.enter("backward", Place(name, index))
        observer.leave("backward", Place("a", 1))
        observer.leave("backward", Place("never entered", 9))
        observer.close("forward")
        assert [record.end > 0 for record in records] == [False, True, False]
        observer.close("backward")
    root, a, b = records
    assert a.end <= b.end <= root.end


def test_places_say_what_errors_say() -> None:
    place = Place("h.0", 2, 1)
    assert (
        str(place.gather) == "gather of unit 'h.0', lane 1" and str(Place("h.0", 2, 0).gather) == "gather of unit 'h.0'"
    )
    assert str(place.publish) == "publishing of unit 'h.0', lane 1"
    assert str(place.reduce) == "reduce of the gradients of unit 'h.0'"
    assert (place.reduce.unit, place.reduce.lane) == ("h.0", 1)


@pytest.mark.parametrize(
    "nbytes, words", [(0, ""), (1, " 1 B"), (999, " 999 B"), (12_600_000, " 12.6 MB"), (5 * 10**15, " 5000.0 TB")]
)
def test_bytes_in_words(nbytes: int, words: str) -> None:
    assert in_words(nbytes) == words


class Slow:
    """A collective that is under way until somebody waits for it."""

    def __init__(self) -> None:
        self.waited = False

    def is_completed(self) -> bool:
        return self.waited

    def wait(self, timeout: Any = None) -> None:
        self.waited = True


@pytest.mark.parametrize("patient", [True, False])
def test_a_wait_is_exposed_where_the_host_really_waits(patient: bool) -> None:
    axis, result = Axis(0, 2, HOST), torch.zeros(1)
    with axis.observer.listening(HOST) as records:
        move = verbs.Move(axis, "x", [Slow()], lambda: result, axis.observer.sent("reduce", 4, "x", "shard"))  # type: ignore[list-item]
        if patient:
            assert move.arrives_within(1.0)  # waits there, and wait() finds it done
        assert move.wait() is result and move.wait() is result
    assert [(record.kind, record.verb) for record in records] == [(MOVE, "reduce"), (WAIT, "reduce")]
    moved, waited = records
    assert moved.begin <= waited.begin <= waited.end <= moved.end


def test_a_wait_for_what_is_there_is_none() -> None:
    axis, done = Axis(0, 2, HOST), Slow()
    done.waited = True
    with axis.observer.listening(HOST) as records:
        verbs.Move(axis, "x", [done], lambda: torch.zeros(1), axis.observer.sent("gather", 4, "x", "shard")).wait()  # type: ignore[list-item]
    assert [record.kind for record in records] == [MOVE] and records[0].end > 0


# ---- in a model


def model_and_optimizer(stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, stage=stage, **options)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.full((2, 64), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled(stage: int, options: dict[str, Any]) -> tuple[Counter[str], bool]:
    """zeor's ranges in a profile of one step, and whether it is silent in the step after."""
    model, optimizer = model_and_optimizer(stage, **options)
    for _ in range(2):
        step(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, optimizer)
    step(model, optimizer)
    names = Counter(event.name for event in profile.events() if event.name.startswith("zeor."))
    return names, api._state(model).engine.observer.on


def test_the_profiler_shows_each_action_with_unit_and_bytes(ranks: Callable[..., list[Any]]) -> None:
    for names, on in ranks(profiled, 2, 3, {}):
        assert on is False
        gathers = {name: count for name, count in names.items() if name.startswith("zeor.gather")}
        assert gathers == {"zeor.gather 0 16.6 kB": 2, "zeor.gather 1 16.6 kB": 2, "zeor.gather 2 16.6 kB": 1}
        assert names["zeor.reduce 1 16.6 kB"] == 1 and names["zeor.update 1 8.3 kB"] == 1


def test_the_profiler_shows_fetches_spills_and_publishes(ranks: Callable[..., list[Any]]) -> None:
    for names, _ in ranks(profiled, 2, 2, {"offload": "host", "precision": "bf16"}):
        verbs_shown = {name.split()[0] for name in names}
        assert {"zeor.fetch", "zeor.update", "zeor.spill", "zeor.publish", "zeor.reduce"} <= verbs_shown


def descriptions() -> list[str]:
    model, _ = model_and_optimizer(3)
    axis = api._state(model).engine.axes.everyone
    return [group.group_desc for group in (axis.gather, axis.reduce, axis.control)]


def test_groups_are_named_for_torch_s_flight_recorder(ranks: Callable[..., list[Any]]) -> None:
    wanted = ["zeor gather", "zeor reduce", "zeor control"]
    assert ranks(descriptions, 2) == [wanted] * 2


def after_a_failure() -> tuple[list[str], list[bool]]:
    """A forward that raises inside a unit, and a step after it: what is open in the end."""
    model, optimizer = model_and_optimizer(3)
    step(model, optimizer)
    observer = api._state(model).engine.observer
    with observer.listening(HOST) as records:
        fails = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 64))
        fails.remove()
        step(model, optimizer)
    passes = [record for record in records if record.kind == PASS]
    return [record.verb for record in passes if record.unit == ""], [record.end == 0 for record in passes]


def test_a_forward_that_raised_leaves_nothing_open(ranks: Callable[..., list[Any]]) -> None:
    for steps, left_open in ranks(after_a_failure, 2):
        assert steps == ["step"] and not any(left_open) and len(left_open) > 8
