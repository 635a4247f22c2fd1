"""The update of lanes on the host: the stock optimizer over memory that rests there.

    device   gradient --widened, scaled--> fp32 ----\\                    /----> fp32 --cast--> compute
    link                                             copy              copy
    host                                               \\--> stock step --/   master, moments: updated in place

The link carries fp32 and the device does the casts, so the host makes no pass over the data but the step itself, which
is torch's fused kernel where the optimizer has one. Neighbouring segments go together, in batches that are large
against what Python does for each; while one is updated the next gradients come down and the last weights go up, across
lanes as well. One thread calls the optimizer, with threads of its own number beneath, which are given back when nothing
is left; another one queues the copies.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.memory.device import thread_beside, use_threads
from zeor.memory.formats import cast_and_spoil
from zeor.optim.kernels.run import LaneRun
from zeor.optim.streaming.chunks import Begun, Chunk, StockSteps
from zeor.optim.streaming.windows import Done
from zeor.step.lane import Lane
from zeor.tiers.rest import Rest
from zeor.tiers.streams import SideStream, StreamEvent

AHEAD = 2  # batches whose gradients are on their way down: the link is faster than the step
MOST_NUMEL = 1 << 24  # elements of a batch
CUT_NUMEL = 64  # segments are cut, and lie in a batch, at multiples of this: kernels go on there as they would uncut
_SWITCH_S = 5e-4  # another thread may run Python for so long when the step's thread wants to; 5e-3 is Python's own


class HostPart(NamedTuple):
    """Elements [begin, end) of a lane, of one segment, and where their gradients are: elements from `first` on."""

    begin: int
    end: int
    grad: Rest
    first: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


class Batch(NamedTuple):
    """What one call of the optimizer updates. `step(gradients of the parts)`: its own step over the host's memory.
    `published`: master on the host, and compute that follows it."""

    parts: Sequence[HostPart]
    published: Sequence[tuple[Tensor, Tensor]]
    scale: Tensor | float | None
    step: Callable[[list[Tensor]], None]

    @property
    def dtype(self) -> torch.dtype:
        return self.published[0][0].dtype

    def places(self) -> list[slice]:
        """Of the parts, in a slot."""
        ends = _packed([part.numel for part in self.parts])
        return [slice(end - part.numel, end) for part, end in zip(self.parts, ends)]


class _Slot:
    """Where a batch's gradients arrive, and what gradients and weights pass through on the device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self._numel, self._dtype, self._device = numel, dtype, device
        self.grad = torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")
        self.down = self.up = self.grad[:0]
        self.arrived = StreamEvent()

    def make_room(self) -> None:
        if not self.down.numel():
            self.down, self.up = (torch.empty(self._numel, dtype=self._dtype, device=self._device) for _ in range(2))

    def leave(self) -> None:
        self.down = self.up = self.grad[:0]


class _Lane:
    """Batches that are still to be sent down, of one lane; never none while it is queued."""

    def __init__(self, batches: Sequence[Batch], ready: Callable[[], None]):
        self.left, self._ready = deque(batches), ready
        self.done: Future[Done] = Future()

    def be_ready(self) -> None:
        ready, self._ready = self._ready, lambda: None
        ready()

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Sent(NamedTuple):
    """A batch whose gradients are on their way down, to a slot."""

    lane: _Lane
    batch: Batch
    slot: Future[_Slot]
    is_last: bool  # of its lane


class HostUpdate:
    def __init__(self, device: torch.device, batch_numel: int, threads: int | None):
        self._device, self.batch_numel = device, batch_numel
        self.threads = threads or default_threads()
        self.widens, self._downs, self.ups = SideStream(device), SideStream(device), SideStream(device)
        self._slots: dict[torch.dtype, deque[_Slot]] = {}
        self._lanes: deque[_Lane] = deque()
        self._updater = ThreadPoolExecutor(1, "zeor-host-update")
        self._mover = ThreadPoolExecutor(1, "zeor-host-copies")
        self._latest: Future[Done] | None = None

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(slot.down.nbytes + slot.up.nbytes for slot in self._every_slot())

    def reserve(self, dtype: torch.dtype) -> None:
        """Memory for updates in this dtype, before `start`: where there is none, the caller is told."""
        if dtype not in self._slots:
            self._slots[dtype] = deque(_Slot(self.batch_numel, dtype, self._device) for _ in range(AHEAD + 1))
        for slot in list(self._slots[dtype]):
            slot.make_room()

    def start(self, batches: Sequence[Batch], ready: Callable[[], None]) -> Future[Done]:
        """Queue a lane. `ready` is called before anything of it is touched, and waits until it may be."""
        lane = _Lane(batches, ready)
        if not batches:
            lane.done.set_result(Done(StreamEvent(), StreamEvent()))
            return lane.done
        self._latest = lane.done
        self._lanes.append(lane)
        self._updater.submit(self._work)
        return lane.done

    def leave(self) -> None:
        """Give the device's memory back, unless it is being used."""
        if self._latest is None or not self._latest.done():
            return
        for stream in (self.widens, self._downs, self.ups):
            stream.record_event().hold()  # its last use, of lanes that have failed too -> whoever gets this memory
        for slot in self._every_slot():
            slot.leave()

    def _every_slot(self) -> list[_Slot]:
        """Of lists that are copied first, as `reserve` does: the thread that queues copies turns them meanwhile."""
        return [slot for slots in list(self._slots.values()) for slot in list(slots)]

    def close(self) -> None:
        self._updater.shutdown(wait=True)
        self._mover.shutdown(wait=True)

    # ---- the thread that updates

    def _work(self) -> None:
        """Lanes until none is left, those that come meanwhile included."""
        if not self._lanes:
            return
        sent: deque[_Sent] = deque()
        try:
            with thread_beside(self._device), use_threads(self.threads), _Turns.short():
                while self._lanes or sent:
                    self._send_ahead(sent)
                    each = sent.popleft()
                    try:
                        self._update(each)
                    except BaseException as error:
                        each.lane.fail(error)
        except BaseException as error:  # while the interpreter ends, say: nobody may wait for ever
            for each in sent:
                each.lane.fail(error)
            while self._lanes:
                self._lanes.popleft().fail(error)

    def _send_ahead(self, sent: deque[_Sent]) -> None:
        while self._lanes and len(sent) < AHEAD:
            lane = self._lanes[0]
            batch = lane.left.popleft()
            sent.append(_Sent(lane, batch, self._mover.submit(self._send_down, lane, batch), not lane.left))
            if not lane.left:
                self._lanes.popleft()

    def _update(self, sent: _Sent) -> None:
        slot = sent.slot.result()
        if sent.lane.done.done():
            return  # it has failed
        slot.arrived.wait()
        sent.batch.step([slot.grad[place] for place in sent.batch.places()])
        self._mover.submit(self._publish, sent, slot)

    # ---- the thread that queues copies

    def _publish(self, sent: _Sent, slot: _Slot) -> None:
        try:
            with thread_beside(self._device):
                self._send_up(sent.batch, slot)
                if sent.is_last and not sent.lane.done.done():
                    up = self.ups.record_event()
                    sent.lane.done.set_result(Done(up, up))
        except BaseException as error:
            sent.lane.fail(error)

    def _slot(self, dtype: torch.dtype) -> _Slot:
        """The one that was used longest ago: nothing is in it that is still needed."""
        slots = self._slots[dtype]
        slots.rotate(-1)
        return slots[-1]

    def _send_down(self, lane: _Lane, batch: Batch) -> _Slot:
        with thread_beside(self._device):
            lane.be_ready()
            return self._bring(batch)

    def _bring(self, batch: Batch) -> _Slot:
        slot, places = self._slot(batch.dtype), batch.places()
        whole = slice(0, places[-1].stop)
        with self.widens():
            slot.arrived.hold(self.widens)  # the copy out of it, a round ago -> new values
            for part, place in zip(batch.parts, places):
                grad = part.grad.tensor[part.first : part.first + part.numel]
                slot.down[place].copy_(grad, non_blocking=True)
            if batch.scale is not None:
                slot.down[whole].mul_(batch.scale)
        self.widens.record_event().hold(self._downs)  # widened -> copied
        with self._downs():
            slot.grad[whole].copy_(slot.down[whole], non_blocking=True)
            slot.arrived = self._downs.record_event()
        return slot

    def _send_up(self, batch: Batch, slot: _Slot) -> None:
        ends = _packed([master.numel() for master, _ in batch.published])
        with self.ups():  # in one stream: the casts of an earlier batch in this slot -> these copies
            for (master, compute), end in zip(batch.published, ends):
                up = slot.up[end - master.numel() : end]
                up.copy_(master, non_blocking=True)
                cast_and_spoil(compute, up)


def batch_numel(chunk: int, lanes: Iterable[tuple[int, int]]) -> int:
    """Elements of the largest batch, where lanes have so many elements and segments, and a chunk at most so many."""
    largest = max((numel + CUT_NUMEL * segments for numel, segments in lanes), default=0)
    return max(CUT_NUMEL, min(chunk, MOST_NUMEL, largest) // CUT_NUMEL * CUT_NUMEL)


def _packed(numels: Sequence[int]) -> list[int]:
    """Where each of several ends in a slot."""
    ends, at = [], 0
    for numel in numels:
        at = -(-at // CUT_NUMEL) * CUT_NUMEL + numel
        ends.append(at)
    return ends


class _Cut(NamedTuple):
    begun: Begun
    begin: int
    end: int


def batches_of(
    lane: Lane,
    runs: Sequence[LaneRun],
    steps: StockSteps,
    groups: list[dict[str, Any]],
    scale: Tensor | float | None,
    most: int,
) -> list[Batch]:
    """Of at most so many elements; `groups`: the settings each step is called with."""
    master, grads = lane.master, lane.grads
    assert master is not None and master.own is not None and grads is not None
    own, compute = master.own.tensor, master.compute.tensor

    def batch_of(cuts: list[_Cut]) -> Batch:
        parts, chunks = [], []
        for begun, begin, end in cuts:
            rest, first = grads.at_rest(begun.run.where)
            parts.append(HostPart(begin, end, rest, begin - first))
            at = {name: steps.moments.need(lane, name).codes.tensor[begin:end] for name in begun.names}
            chunks.append(Chunk(begun, begin, end, {"master": own[begin:end], **at}))

        def step(given: list[Tensor]) -> None:
            for chunk, grad in zip(chunks, given):
                chunk.at["grad"] = grad
            steps.step(lane, chunks, groups, None)

        published = [(own[begin:end], compute[begin:end]) for begin, end in _joined(cuts)]
        return Batch(parts, published, scale, step)

    return [batch_of(cuts) for cuts in _cut([steps.begun(run, host=True) for run in runs], most)]


def _cut(begun: Sequence[Begun], most: int) -> Iterator[list[_Cut]]:
    batch: list[_Cut] = []
    room = most
    for each in begun:
        at = each.run.begin
        while at < each.run.end:
            end = min(each.run.end, at + room // CUT_NUMEL * CUT_NUMEL)
            batch.append(_Cut(each, at, end))
            room -= -(-(end - at) // CUT_NUMEL) * CUT_NUMEL
            at = end
            if room < CUT_NUMEL:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def _joined(cuts: Sequence[_Cut]) -> list[tuple[int, int]]:
    """The same elements in as few ranges as they lie in."""
    ranges: list[tuple[int, int]] = []
    for _, begin, end in cuts:
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return ranges


def default_threads() -> int:
    """This rank's share of the cores the process may use; where there are many, a quarter is left to the loop and its
    loader. The step lives on the memory's bandwidth, and a thread that must wait for a core holds up all others: with
    clipping twelve of sixteen cores were faster than fifteen, without it a little slower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, share * 3 // 4 if share > 4 else share)


class _Turns:
    """Python's switch interval is the process's: short while any update wants it so, of two optimizers too, so that its
    thread need not wait long for its turn."""

    _lock, _wanted, _before = threading.Lock(), 0, 0.0

    @classmethod
    @contextlib.contextmanager
    def short(cls) -> Iterator[None]:
        cls._count(1)
        try:
            yield
        finally:
            cls._count(-1)

    @classmethod
    def _count(cls, more: int) -> None:
        with cls._lock:
            if not cls._wanted:
                cls._before = sys.getswitchinterval()
                sys.setswitchinterval(min(cls._before, _SWITCH_S))
            cls._wanted += more
            if not cls._wanted:
                sys.setswitchinterval(cls._before)
