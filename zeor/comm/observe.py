"""The observer: one stream of records of what a step does, for whoever listens, and the count of what was sent.

Each part of a step says what it begins and ends, with names and numbers: actions of the schedule, collectives in
flight, waits, passes through units. A trace (access/trace.py), `zeor schedule --record` and tests read the records;
torch's profiler is shown the actions as named ranges. It knows no unit, lane or tensor.

Note [Off]
~~~~~~~~~~
Whoever acts asks `observer.on` first, and where nobody listens that is all it costs. A profiler is looked for where a
pass begins (`look`), not at each action: one that starts inside a pass sees zeor's ranges from the next on. What was
sent is always counted, by the one call that makes a record too. The ledger (memory/buffers.py) counts by itself, as
bytes come and go between records; an action only notes what is alive when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch.autograd import profiler

from zeor.comm import meter
from zeor.tiers.streams import DeviceClock, SideStream

ACTION, MOVE, WAIT, PASS, CODE = "action", "move", "wait", "pass", "code"
TIMED = ("update", "fetch", "spill")  # actions that are work of the device's; others only issue or wait

Residents = Callable[[], dict[str, int]]  # bytes at rest on this rank, by role


class Label(str):
    """What a collective is for, in words for errors, and whose it is."""

    __slots__ = ("lane", "unit")

    unit: str
    lane: int | None

    @classmethod
    def of(cls, text: str, unit: str, lane: int | None) -> Label:
        made = cls(text)
        made.unit, made.lane = unit, lane
        return made


class Place:
    """A unit, or one lane of it, by name and number. Its labels are written once, not at each collective."""

    __slots__ = ("gather", "index", "lane", "publish", "reduce", "spread", "unit", "update")

    def __init__(self, unit: str, index: int, lane: int | None = None):
        self.unit, self.index, self.lane = unit, index, lane
        beside = f", lane {lane}" if lane else ""
        self.gather = Label.of(f"gather of unit {unit!r}{beside}", unit, lane)
        self.publish = Label.of(f"publishing of unit {unit!r}, lane {lane}", unit, lane)
        self.reduce = Label.of(f"reduce of the gradients of unit {unit!r}", unit, lane)
        self.spread = Label.of(f"gather of the gradient, unit {unit!r}", unit, lane)
        self.update = Label.of(f"update of unit {unit!r}", unit, lane)


class Record:
    """Something that was done, by host times in nanoseconds; `end` is 0 while it goes on.

    kind    action: of the schedule, while the host carries it out. move: a collective, from its issue until somebody
            has waited for it. wait: time in which nothing else could go on. pass: forward or backward of a unit, a
            step. code: what a move sends or brings as codes is encoded or decoded
    nbytes  of an action the size of what it is done to; of a move what this rank sends; of code the codes
    exact   of code, the bytes that these stand for
    where   the tier of an action, the axis of a move or of a wait for one
    label   what a move or a wait is for, in words
    marks   places in the device's streams, where there is one
    live    transient bytes by kind when an action ends
    """

    __slots__ = (
        "begin", "end", "exact", "index", "kind", "label", "lane", "live", "marks", "nbytes", "shown", "step", "stream",
        "unit", "verb", "where",
    )  # fmt: skip

    def __init__(self, kind: str, verb: str, step: int):
        self.kind, self.verb, self.step = kind, verb, step
        self.unit, self.index, self.lane, self.nbytes, self.where, self.label = "", -1, None, 0, "", ""
        self.begin = self.end = self.exact = 0
        self.marks: list[Any] | None = None
        self.live: dict[str, int] | None = None
        self.stream: SideStream | None = None
        self.shown: Any = None  # torch's range around it

    unit: str
    lane: int | None

    @property
    def name(self) -> str:
        """Such as `gather blocks.3, lane 1`."""
        place = f"{self.unit}, lane {self.lane}" if self.lane else self.unit
        return f"{self.verb} {place}".rstrip()


class Traffic:
    """Collectives and the bytes this rank sends, by verb and axis. Counted is the least that a verb can send; a gather
    or a reduce of n bytes sends n * (size - 1) / size; where codes travel n is theirs. What is sent in a step is
    decided elsewhere: which roles travel by the stages' table (memory/roles.py), when by the schedule
    (step/schedule.py, `zeor schedule` prints it), in which order by step/order.py and step/reduces.py."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_nbytes: Counter[tuple[str, str]] = Counter()  # by axis and verb
        self.steps = 0
        self._last: Counter[tuple[str, str]] = Counter()  # sent by the last step
        self._before: Counter[tuple[str, str]] = Counter()  # sent when it began
        self._ns: Counter[tuple[str, str, str]] = Counter()  # by axis, verb and kind of record
        self.saved_nbytes: Counter[tuple[str, str]] = Counter()  # by axis and verb, that codes were shorter than values
        self.coding_ns: Counter[str] = Counter()  # encode, decode: of a host's work, and of a device's in a trace
        self._last_codes, self._codes_before = (0, Counter[str]()), (0, Counter[str]())  # (bytes saved, coding_ns)

    def end_step(self) -> None:
        """What is sent from here on belongs to the next step."""
        self.steps += 1
        self._last, self._before = self.sent_nbytes - self._before, self.sent_nbytes.copy()
        (saved, spent), now = self._codes_before, (sum(self.saved_nbytes.values()), self.coding_ns.copy())
        self._last_codes, self._codes_before = (now[0] - saved, now[1] - spent), now

    def took(self, record: Record) -> None:
        """A move or a wait that was listened to is over."""
        if record.where:
            self._ns[record.where, record.verb, record.kind] += record.end - record.begin

    def seconds(self) -> dict[str, dict[str, dict[str, float]]]:
        """Of what was listened to, by axis and verb: from the issue until somebody had waited, the part in which this
        rank stood still, and the rest, which computation has hidden. By the host's clock."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for axis, verb in {(axis, verb): None for axis, verb, _ in self._ns}:
            moved, waited = self._ns[axis, verb, MOVE] / 1e9, self._ns[axis, verb, WAIT] / 1e9
            times = {"under_way": moved, "exposed": waited, "hidden": max(moved - waited, 0.0)}
            found.setdefault(axis, {})[verb] = times
        return found

    def shortened(self, axis: str, verb: str, nbytes: int) -> None:
        """A collective sends codes that are so many bytes shorter."""
        self.saved_nbytes[axis, verb] += nbytes

    def summary(self) -> dict[str, object]:
        verbs: Counter[str] = Counter()
        for (_, verb), nbytes in self.sent_nbytes.items():
            verbs[verb] += nbytes
        axes = _by_axis(self.sent_nbytes)
        shorter: dict[str, Any] = {}
        for (axis, verb), nbytes in self.saved_nbytes.items():
            sent = self.sent_nbytes[axis, verb]
            shorter.setdefault(axis, {})[verb] = round((sent + nbytes) / sent, 3) if sent else 1.0
        coded: dict[str, object] = {}
        if shorter:
            saved, spent = self._last_codes
            sent = sum(self._last[axis, verb] for axis, verb in self._last if verb in ("gather", "reduce"))
            coded["compression"] = shorter
            coded["coding_seconds"] = _seconds(self.coding_ns)
            ratio = round((sent + saved) / sent, 3) if sent else 1.0
            coded["last_step_codes"] = {"compression": ratio, **_seconds(spent)}
        return {
            "bytes_sent": sum(verbs.values()),
            "collectives": sum(self.calls.values()),
            "calls": dict(self.calls),
            "bytes_by_verb": dict(verbs),
            "bytes_by_axis": axes,
            "steps": self.steps,
            "last_step": _by_axis(self._last),
            "seconds_by_axis": self.seconds(),
            **coded,
        }


def _seconds(spent: Counter[str]) -> dict[str, float]:
    return {verb: spent[verb] / 1e9 for verb in ("encode", "decode")}


def _by_axis(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (axis, verb), nbytes in counts.items():
        found.setdefault(axis, {})[verb] = nbytes
    return found


class Observer:
    """Of one model. `on`: somebody listens, so say what is done. `live`: the ledger's bytes by kind."""

    def __init__(self) -> None:
        self.on = False
        self.step = 0  # steps done before
        self.traffic = Traffic()
        self.live: Mapping[str, int] = {}
        self.records: list[Record] | None = None
        self.counts: list[tuple[int, dict[str, int]]] = []  # bytes at rest by role, and when
        self.clock: DeviceClock | None = None
        self.meter: meter.Meter | None = None  # of a step that somebody wants the length of
        self._residents: Residents | None = None
        self._until: int | None = None
        self._open: list[Record] = []  # passes

    # ---- who listens

    @contextmanager
    def listening(
        self, device: torch.device, steps: int | None = None, residents: Residents | None = None
    ) -> Iterator[list[Record]]:
        """Records of what happens inside, of so many steps (None: all), in the order it begins. `residents` is asked
        for the bytes at rest where a pass begins or ends."""
        assert self.records is None
        found: list[Record] = []
        self.records, self.counts, self._residents, self.clock = found, [], residents, DeviceClock(device)
        self._until = None if steps is None else self.step + steps
        self.look()
        self.count()
        try:
            yield found
        finally:
            self.close()
            self.count()
            self._count_coding(found)
            self.records = self._residents = self.clock = None
            self.look()

    def _count_coding(self, records: Sequence[Record]) -> None:
        """What encoding and decoding took on a device, which is known when it is done with all of it."""
        if self.clock is None or not self.clock.ticks:
            return
        self.clock.finish()
        for record in records:
            if record.kind == CODE and record.marks is not None and len(record.marks) == 2:
                begin, end = (self.clock.at_ns(mark) for mark in record.marks)
                self.traffic.coding_ns[record.verb] += max(0, end - begin)

    def look(self) -> None:
        """A pass begins: whether anybody listens."""
        listens = self.records is not None and (self._until is None or self.step < self._until)
        self.on = listens or profiler._is_profiler_enabled or self.meter is not None
        if self._open and not self.on:
            self._open.clear()

    # ---- actions

    def begin(
        self, verb: str, place: Place, nbytes: int = 0, where: str = "", stream: SideStream | None = None
    ) -> Record:
        """An action of the schedule; `stream`: where its work queues up, if not with the computation."""
        record = Record(ACTION, verb, self.step)
        record.unit, record.index, record.lane = place.unit, place.index, place.lane
        record.nbytes, record.where, record.stream = nbytes, where, stream
        self._start(record)
        if profiler._is_profiler_enabled:
            record.shown = torch.profiler.record_function(f"zeor.{record.name}{in_words(nbytes)}")
            record.shown.__enter__()
        return record

    def end(self, record: Record) -> None:
        if record.shown is not None:
            record.shown.__exit__(None, None, None)
            record.shown = None
        record.live = dict(self.live)
        self._stop(record)

    def goes_on(self, record: Record) -> None:
        """The host is done with it, and another thread is not: `over` is told when that is."""
        self.end(record)
        record.end, record.live = 0, None

    def cancel(self, record: Record) -> None:
        """It turned out that there was nothing to do."""
        self.end(record)
        if self.records is not None:
            self.records.remove(record)

    def over(self, records: Sequence[Record]) -> None:
        """What actions have left under way beside the computation is done by now; called by any thread."""
        for record in records:
            if record.stream is None:
                record.marks = None  # a host's own work has no place in the device's streams
            self._stop(record)

    # ---- collectives

    def sent(self, verb: str, nbytes: int, label: str, axis: str) -> Record | None:
        """A collective is about to be issued. Always counted; a record where somebody listens."""
        self.traffic.calls[verb] += 1
        self.traffic.sent_nbytes[axis, verb] += nbytes
        if not self.on:
            return None
        record = Record(MOVE, verb, self.step)
        self._of(record, label)
        record.nbytes, record.where = nbytes, axis
        self._start(record)
        return record

    def waits(self, verb: str, label: str, axis: str = "") -> Record:
        """From here on whoever computes waits for it; `axis`: of a collective."""
        record = Record(WAIT, verb, self.step)
        self._of(record, label)
        record.where = axis
        self._start(record)
        if self.meter is not None and verb in meter.VERBS:
            self.meter.begins()
        return record

    @contextmanager
    def coding(self, verb: str, label: str, device: torch.device, nbytes: tuple[int, int]) -> Iterator[None]:
        """What travels as codes is encoded or decoded inside; (bytes of codes, bytes that they stand for). Always timed
        on a host; a device's own time is in the marks of the record, where somebody listens."""
        record, begin = None, perf_counter_ns()
        if self.on:
            record = Record(CODE, verb, self.step)
            self._of(record, label)
            record.nbytes, record.exact = nbytes
            self._start(record)
        yield
        if device.type == "cpu":
            self.traffic.coding_ns[verb] += perf_counter_ns() - begin
        if record is not None:
            self._stop(record)

    def arrived(self, record: Record) -> None:
        """A move, or a wait, is over."""
        self._stop(record)
        self.traffic.took(record)
        if self.meter is not None and record.kind == WAIT and record.verb in meter.VERBS:
            self.meter.ends(record.end - record.begin)

    @staticmethod
    def _of(record: Record, label: str) -> None:
        record.label = label
        if isinstance(label, Label):
            record.unit, record.lane = label.unit, label.lane

    # ---- passes

    def enter(self, verb: str, place: Place | None = None) -> None:
        """A unit computes from here on, in forward or backward; or (without a place) the optimizer steps."""
        record = Record(PASS, verb, self.step)
        if place is not None:
            record.unit, record.index = place.unit, place.index
        self._start(record)
        self._open.append(record)

    def leave(self, verb: str, place: Place | None = None) -> None:
        """The same is over; nothing where it was never entered, or nobody listened then."""
        index = -1 if place is None else place.index
        for at in range(len(self._open) - 1, -1, -1):
            if self._open[at].index == index and self._open[at].verb == verb:
                self._stop(self._open.pop(at))
                return

    def close(self, verb: str | None = None) -> None:
        """All passes of a kind (None: of every kind) are over."""
        if self._open:
            for record in reversed(self._open):
                if verb in (None, record.verb):
                    self._stop(record)
            self._open = [record for record in self._open if verb not in (None, record.verb)]

    def count(self) -> None:
        """Between passes, where what rests does not change: note its bytes."""
        if self._residents is not None:
            self.counts.append((perf_counter_ns(), self._residents()))

    # ---- times

    def _start(self, record: Record) -> None:
        if self.records is not None:
            self.records.append(record)
            if self.clock is not None and self.clock.ticks and (record.kind != ACTION or record.verb in TIMED):
                record.marks = [self.clock.mark(record.stream)]
        record.begin = perf_counter_ns()

    def _stop(self, record: Record) -> None:
        record.end = perf_counter_ns()
        if record.marks and self.clock is not None:
            record.marks[1:] = [self.clock.mark(record.stream)]


def in_words(nbytes: int) -> str:
    """` 12.6 MB`, or nothing for none."""
    if not nbytes:
        return ""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f" {nbytes} B" if unit == "B" else f" {size:.1f} {unit}"
