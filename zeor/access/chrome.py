"""Records as events of Chrome's trace format, which chrome://tracing and Perfetto read. Nothing else is known here.

A process is a rank and a thread is a track, of which the names and the order are TRACKS. Complete events of one thread
must lie inside each other or apart, so what overlaps goes to further rows of its track. Times are in microseconds,
with three decimals. Bytes are counters: what rests by role, and what is transient by kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zeor.comm.observe import ACTION, CODE, MOVE, PASS, WAIT, Record
from zeor.tiers.streams import DeviceClock

COMPUTE, EXPOSED, HOST = "compute", "exposed wait", "host actions"
TRACKS = (COMPUTE, EXPOSED, "gather", "reduce", "update", "fetch and spill", "agree", HOST)
DEVICE = "device: "  # before the name of a track whose times are the device's
_ROWS = 100  # tids of one track
_OF_VERB = {"gather": "gather", "reduce": "reduce", "update": "update", "fetch": "fetch and spill",
            "spill": "fetch and spill"}  # fmt: skip


class Bar(NamedTuple):
    """A record on a track, by times of one clock."""

    track: str
    begin: int
    end: int
    record: Record


class Clock(NamedTuple):
    """`base`: where the trace begins, on rank 0's clock. `offset`: of this rank's. `now`: when what is open ends."""

    base: int
    offset: int
    now: int
    device: DeviceClock | None = None

    def microseconds(self, ns: int) -> float:
        return (ns - self.offset - self.base) / 1000


def track_of(record: Record) -> str:
    if record.kind == PASS:
        return COMPUTE
    if record.kind == WAIT:
        return EXPOSED
    if record.kind == CODE:
        return HOST
    if record.kind == MOVE:
        return _OF_VERB.get(record.verb, "agree")
    return _OF_VERB[record.verb] if record.verb in ("update", "fetch", "spill") else HOST


def bars(records: Iterable[Record], clock: Clock) -> list[Bar]:
    """By host times, and once more by the device's where it was asked."""
    found = []
    for record in records:
        track = track_of(record)
        found.append(Bar(track, record.begin, max(record.begin, record.end or clock.now), record))
        if clock.device is not None and record.marks is not None and len(record.marks) == 2:
            begin, end = (clock.device.at_ns(mark) for mark in record.marks)
            found.append(Bar(DEVICE + track, begin, max(begin, end), record))
    return found


def rows(track: Sequence[Bar]) -> list[list[Bar]]:
    """Bars of one track in as few rows as the first that takes each gives: inside each other, or apart."""
    found: list[list[Bar]] = []
    ends: list[list[int]] = []  # of the bars that are open in each row, the outermost first
    for bar in sorted(track, key=lambda bar: (bar.begin, -bar.end)):
        for row, open_ends in zip(found, ends):
            while open_ends and open_ends[-1] <= bar.begin:
                open_ends.pop()
            if not open_ends or bar.end <= open_ends[-1]:
                row.append(bar)
                open_ends.append(bar.end)
                break
        else:
            found.append([bar])
            ends.append([bar.end])
    return found


def events_of(
    rank: int, name: str, records: Sequence[Record], counts: Sequence[tuple[int, dict[str, int]]], clock: Clock
) -> list[dict[str, Any]]:
    """Everything of one rank."""
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
    ]
    by_track: dict[str, list[Bar]] = {}
    for bar in bars(records, clock):
        by_track.setdefault(bar.track, []).append(bar)
    order = [*TRACKS, *(DEVICE + track for track in TRACKS)]
    for place, track in enumerate(order):
        for number, row in enumerate(rows(by_track.get(track, []))):
            tid = _ROWS * (place + 1) + number
            shown = f"{track} ({number + 1})" if number else track
            found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": shown}})
            found.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}})
            found += [_complete(bar, rank, tid, clock) for bar in row]
    live = [(record.end, record.live) for record in records if record.kind == ACTION and record.live is not None]
    found += _counter("transient bytes", sorted(live, key=lambda each: each[0]), rank, clock)
    return found + _counter("resident bytes", counts, rank, clock)


def _complete(bar: Bar, rank: int, tid: int, clock: Clock) -> dict[str, Any]:
    record = bar.record
    args: dict[str, Any] = {"step": record.step, "kind": record.kind}
    if record.unit:
        args["unit"] = record.unit
    if record.lane is not None:
        args["lane"] = record.lane
    if record.kind in (ACTION, MOVE, CODE):
        args["bytes"] = record.nbytes
    if record.kind == CODE:
        args["exact bytes"] = record.exact
    if record.where:
        args["axis" if record.kind in (MOVE, WAIT) else "tier"] = record.where
    if record.label:
        args["label"] = record.label
    if not record.end:
        args["open"] = True  # it went on when the trace ended
    event = {
        "ph": "X", "name": f"exposed: {record.name}" if record.kind == WAIT else record.name, "cat": record.kind,
        "pid": rank, "tid": tid, "ts": clock.microseconds(bar.begin), "dur": (bar.end - bar.begin) / 1000, "args": args,
    }  # fmt: skip
    return {**event, "cname": "terrible"} if record.kind == WAIT else event  # red, where a viewer heeds it


def _counter(
    name: str, samples: Sequence[tuple[int, dict[str, int]]], rank: int, clock: Clock
) -> list[dict[str, Any]]:  # fmt: skip
    """One event for each change; the same series in all of them, as viewers expect."""
    series = sorted({key for _, values in samples for key in values})
    found, last = [], None
    for when, values in samples:
        now = {key: values.get(key, 0) for key in series}
        if now != last:
            at = clock.microseconds(when)
            found.append({"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": at, "args": now})
        last = now
    return found


def encode(events: Sequence[dict[str, Any]]) -> bytes:
    """A rank's part of the file."""
    return ",\n".join(json.dumps(event) for event in events).encode()


def document(parts: Iterable[bytes]) -> bytes:
    """The file, of every rank's part."""
    return b'{"displayTimeUnit": "ms", "traceEvents": [\n' + b",\n".join(parts) + b"\n]}\n"
