"""The rules of Chrome's trace format, as far as zeor.trace uses it, for tests: `read` checks a file and sorts it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


class Found(NamedTuple):
    bars: list[Event]  # complete events
    counters: list[Event]
    tracks: dict[tuple[int, int], str]  # names by (pid, tid)
    processes: dict[int, str]

    def of(self, rank: int, kind: str) -> list[Event]:
        """In the order they begin."""
        return sorted((e for e in self.bars if e["pid"] == rank and e["cat"] == kind), key=lambda e: e["ts"])


def read(path: Path) -> Found:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(data)
    return check(document["traceEvents"])


def check(events: list[Event]) -> Found:
    """AssertionError where a rule is broken."""
    assert {event["ph"] for event in events} <= {"X", "M", "C"}
    bars, counters = ([event for event in events if event["ph"] == ph] for ph in "XC")
    named = {"process_name": {}, "thread_name": {}}  # type: dict[str, dict[Any, str]]
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            assert key not in named[event["name"]], f"{key} is named twice"
            named[event["name"]][key] = event["args"]["name"]
    rows: dict[tuple[int, int], list[Event]] = {}
    for bar in bars:
        assert bar["ts"] >= 0 and bar["dur"] >= 0 and bar["name"] and isinstance(bar["args"]["step"], int), bar
        assert bar["pid"] in named["process_name"] and (bar["pid"], bar["tid"]) in named["thread_name"], bar
        rows.setdefault((bar["pid"], bar["tid"]), []).append(bar)
    for row in rows.values():
        check_row(row)
    for counter in counters:
        assert counter["ts"] >= 0 and counter["args"], counter
        assert {type(value) for value in counter["args"].values()} == {int} and min(counter["args"].values()) >= 0
    series = {(c["pid"], c["name"], tuple(sorted(c["args"]))) for c in counters}
    assert len(series) == len({each[:2] for each in series}), "a counter changes its series"
    return Found(bars, counters, named["thread_name"], named["process_name"])


def check_row(row: list[Event]) -> None:
    """Events of one thread lie inside each other, or apart. In whole nanoseconds, as decimals of two sums differ."""
    spans = sorted(((round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"])), e["name"]) for e in row),
                   key=lambda span: (span[0], -span[1]))  # fmt: skip
    ends: list[int] = []
    for begin, end, name in spans:
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], f"{name} begins inside another and ends after it"
        ends.append(end)
