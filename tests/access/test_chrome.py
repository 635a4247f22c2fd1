"""Records as events: which track, which row, which numbers; and that the tests' own rules of the format can fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.traces import check
from zeor.access import chrome
from zeor.comm.observe import ACTION, MOVE, PASS, WAIT, Record


def record(kind: str, verb: str, begin: int, end: int, **fields: Any) -> Record:
    made = Record(kind, verb, fields.pop("step", 0))
    made.begin, made.end = begin, end
    for name, value in fields.items():
        setattr(made, name, value)
    return made


CLOCK = chrome.Clock(base=1000, offset=500, now=9500)


def events(*records: Record) -> list[dict[str, Any]]:
    return chrome.events_of(3, "rank 3", records, [], CLOCK)


def test_a_record_becomes_a_complete_event_on_its_rank_and_track() -> None:
    made = record(
        MOVE, "gather", 2500, 4750, unit="blocks.3", lane=1, nbytes=64, where="shard", label="gather of it", step=7
    )
    found = check(events(made))
    (bar,) = found.bars
    assert bar == {
        "ph": "X", "name": "gather blocks.3, lane 1", "cat": "move", "pid": 3, "tid": 300, "ts": 1.0, "dur": 2.25,
        "args": {"step": 7, "kind": "move", "unit": "blocks.3", "lane": 1, "bytes": 64, "axis": "shard",
                 "label": "gather of it"},
    }  # fmt: skip
    assert found.tracks == {(3, 300): "gather"} and found.processes == {3: "rank 3"}


def test_tracks() -> None:
    wanted = {
        (PASS, "forward"): "compute", (PASS, "step"): "compute", (WAIT, "reduce"): "exposed wait",
        (MOVE, "reduce"): "reduce", (MOVE, "agree"): "agree", (MOVE, "broadcast"): "agree",
        (ACTION, "update"): "update", (ACTION, "fetch"): "fetch and spill", (ACTION, "spill"): "fetch and spill",
        (ACTION, "gather"): "host actions", (ACTION, "publish"): "host actions", (ACTION, "wait"): "host actions",
    }  # fmt: skip
    assert {key: chrome.track_of(record(*key, 0, 1)) for key in wanted} == wanted


def test_an_exposed_wait_is_named_and_red() -> None:
    (bar,) = check(events(record(WAIT, "gather", 2000, 3000, unit="a"))).bars
    assert bar["name"] == "exposed: gather a" and bar["cname"] == "terrible"


def test_what_overlaps_goes_to_another_row() -> None:
    spans = [(2000, 4000), (3000, 5000), (4000, 6000), (4500, 5500), (5200, 7000)]
    found = check(events(*(record(MOVE, "reduce", *span) for span in spans)))
    assert found.tracks == {(3, 400): "reduce", (3, 401): "reduce (2)"}
    by_row = {tid: [(b["ts"], b["dur"]) for b in found.bars if b["tid"] == tid] for tid in (400, 401)}
    assert by_row == {400: [(0.5, 2.0), (2.5, 2.0), (3.0, 1.0)], 401: [(1.5, 2.0), (3.7, 1.8)]}


def test_what_is_under_way_at_the_end_is_marked() -> None:
    (bar,) = check(events(record(MOVE, "gather", 2000, 0))).bars
    assert bar["dur"] == 7.5 and bar["args"]["open"] is True


def test_counters_have_the_same_series_and_only_changes() -> None:
    lives = [{"grad": 1}, {"grad": 1}, {"grad": 0, "compute": 8}]
    made = [record(ACTION, "free", 2000 + n, 2100 + n, live=live) for n, live in enumerate(lives)]
    counts = [(2000, {"compute": 1, "moments": 2}), (3000, {"compute": 3, "moments": 2})]
    found = check(chrome.events_of(0, "rank 0", made, counts, CLOCK))
    assert [(c["name"], c["ts"], c["args"]) for c in found.counters] == [
        ("transient bytes", 0.6, {"compute": 0, "grad": 1}),
        ("transient bytes", 0.602, {"compute": 8, "grad": 0}),
        ("resident bytes", 0.5, {"compute": 1, "moments": 2}),
        ("resident bytes", 1.5, {"compute": 3, "moments": 2}),
    ]


def test_device_times_stand_on_tracks_of_their_own() -> None:
    class Clock:
        def at_ns(self, mark: int) -> int:
            return mark

    made = record(ACTION, "update", 2000, 2100, marks=[5000, 8000], unit="a")
    clock = chrome.Clock(1000, 500, 9500, Clock())  # type: ignore[arg-type]
    found = check(chrome.events_of(0, "rank 0", [made], [], clock))
    assert {found.tracks[0, bar["tid"]]: (bar["ts"], bar["dur"]) for bar in found.bars} == {
        "update": (0.5, 0.1), "device: update": (3.5, 3.0),
    }  # fmt: skip


def test_the_document_is_every_rank_s_part() -> None:
    parts = [chrome.encode(chrome.events_of(rank, f"rank {rank}", [record(PASS, "step", 2000, 3000)], [], CLOCK))
             for rank in (0, 1)]  # fmt: skip
    document = json.loads(chrome.document(parts))
    assert document["displayTimeUnit"] == "ms"
    assert [bar["pid"] for bar in check(document["traceEvents"]).bars] == [0, 1]


GOOD = {"ph": "X", "name": "a", "cat": "pass", "pid": 0, "tid": 1, "ts": 0.0, "dur": 2.0, "args": {"step": 0}}
NAMES = [
    {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "compute"}},
]


@pytest.mark.parametrize(
    "wrong",
    [
        [*NAMES, {**GOOD, "dur": -1.0}],
        [*NAMES, {**GOOD, "ts": -0.1}],
        [*NAMES, GOOD, {**GOOD, "ts": 1.0}],
        [*NAMES[:1], GOOD],
        [*NAMES[1:], GOOD],
        [*NAMES, *NAMES],
        [{"ph": "C", "name": "bytes", "pid": 0, "tid": 0, "ts": 0.0, "args": {"grad": 1.5}}],
        [{"ph": "B", "name": "bytes", "pid": 0, "tid": 0, "ts": 0.0}],
    ],
)
def test_the_rules_can_be_broken(wrong: list[dict[str, Any]]) -> None:
    check([*NAMES, GOOD, {**GOOD, "ts": 0.5, "dur": 1.5}, {**GOOD, "ts": 2.0}])
    with pytest.raises(AssertionError):
        check(wrong)
