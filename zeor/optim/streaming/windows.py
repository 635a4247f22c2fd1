"""Windows: where a chunk of what rests elsewhere is while it is updated.

A window is a block of device memory, cut into the arrays of one chunk; beside it, for arrays on disk, a block of host
memory that files are read into. A few windows go round: one is filled, one updated, one emptied.

    file --read--> staging --copy--> window --update--> window --copy--> staging --write--> file
    host memory ----------copy-----> window --update--> window --copy--> host memory

Where there is room for more of them, chunks of host memory are fetched before their update is asked for (ahead.py).
Knows lines and files; knows nothing of optimizers.

Note [Fetched ahead]
~~~~~~~~~~~~~~~~~~~~
What lies in a window ahead of its update is a copy; the host memory stays the truth, and whoever reads state reads
that. The copy is used only if it is what the update would fetch now:

1. the chunk is the same: the same arrays (`Rest`s, by identity) and the same elements of each. So a lane that moved, a
   parameter without a gradient, other groups or a new moment leave it unused;
2. nobody wrote into these arrays since: torch counts in-place writes (`Rest.version`), through any view. What the ring
   itself writes back is not counted: it writes elements whose turn is over, never those of a chunk that still waits.

What is not used is overwritten by the next chunk. Gradients are never fetched ahead: they are not complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.tiers.rest import Rest
from zeor.tiers.streams import SideStream, StreamEvent, current_event

WINDOWS = 3
_ALIGNED = 4096  # bytes: any dtype may begin there, vectorised, and be read past the page cache


class Done(NamedTuple):
    """Everything of an update is queued. `updated`: compute is new. `spilled`: nothing is on its way between device and
    host. `writes`: to files."""

    updated: StreamEvent
    spilled: StreamEvent
    writes: Sequence[Future[None]] = ()

    def future(self) -> Future[Done]:
        made: Future[Done] = Future()
        made.set_result(self)
        return made


class ChunkPart(NamedTuple):
    """Elements [begin, end) of an array at rest, as a chunk needs them."""

    name: str
    rest: Rest
    begin: int
    end: int
    reads: bool = True
    writes: bool = True

    @property
    def home(self) -> Tensor:
        return self.rest.tensor[self.begin : self.end]

    @property
    def may_be_ahead(self) -> bool:
        """It is read from where it rests, and is state: gradients are read only, and not complete before the update."""
        return self.rest.away and self.reads and self.writes

    @property
    def nbytes(self) -> int:
        return -(-(self.end - self.begin) * self.rest.dtype.itemsize // _ALIGNED) * _ALIGNED


Chunk = Sequence[ChunkPart]


class _Window:
    def __init__(self) -> None:
        self.device: Tensor | None = None
        self.outgrown: list[Tensor] = []  # blocks it had before, which copies may still read
        self.host: Tensor | None = None
        self.empty = StreamEvent()  # emptied by the copies of the chunk before
        self.writes: list[Future[None]] = []
        self.reads: list[Future[None]] = []
        self.parts: dict[str, Tensor] = {}
        self.staged: dict[str, Tensor] = {}
        self.arrived: StreamEvent | None = None  # what was fetched ahead is there
        self.versions: list[int] = []  # of the arrays it came from

    def finish_writes(self) -> None:
        writes, self.writes = self.writes, []
        for write in writes:
            write.result()


class Work:
    """A lane's chunks, which is at least one. `before` is called first of all; of `updates` one for each chunk in
    turn, with its tensors by name."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        updates: Sequence[Callable[[dict[str, Tensor]], None]],
        before: Callable[[], None],
    ):
        self.left, self.updates, self.before = deque(chunks), updates, before
        self.count, self.passed, self.is_new = len(chunks), 0, True
        self.writes: list[Future[None]] = []
        self.done: Future[Done] = Future()

    def fail(self, error: BaseException) -> None:
        self.left.clear()
        if not self.done.done():
            self.done.set_exception(error)


class WindowRing:
    """Runs chunks of lanes through. One thread at a time."""

    def __init__(self, device: torch.device):
        self._device = device
        self.fetches, self.updates, self.spills = SideStream(device), SideStream(device), SideStream(device)
        self._windows = [_Window() for _ in range(WINDOWS)]
        self._idle = deque(self._windows)  # the one that is empty first is the first
        self._ahead: dict[tuple[Any, ...], _Window] = {}  # filled, and their update was not asked for yet
        self._most_nbytes = 0

    def run(self, works: deque[Work]) -> None:
        """Until nothing is left of them, what comes meanwhile included; errors go to who waits for the lane. Files are
        read ahead, of the next lane too, and written behind; where there are none the host waits for nothing."""
        coming: deque[tuple[Work, Chunk, _Window]] = deque()
        while works or coming:
            while works and len(coming) < WINDOWS - 1:
                work = works[0]
                try:
                    coming.append((work, *self._enter(work)))
                except BaseException as error:
                    work.fail(error)
                if not work.left:
                    works.popleft()
            if coming:
                work, chunk, window = coming.popleft()
                try:
                    self._pass(work, chunk, window)
                except BaseException as error:
                    work.fail(error)

    def _enter(self, work: Work) -> tuple[Chunk, _Window]:
        """The next chunk of a lane gets a window, into which its files are read."""
        if work.is_new:
            work.before()
            self._make_room(work.left)
            work.is_new = False
        chunk = work.left.popleft()
        window = self._window_for(chunk)
        try:
            self._read(window, chunk)
        except BaseException:
            self._idle.append(window)
            raise
        return chunk, window

    def _window_for(self, chunk: Chunk) -> _Window:
        """One that the chunk was fetched into ahead, if that is still what rests there; else the one that is empty
        first."""
        found = self._ahead.pop(_key(chunk), None)
        if found is not None:
            if found.versions == _versions(chunk):
                return found
            self._unfill(found)
        return self._idle.popleft()

    def _pass(self, work: Work, chunk: Chunk, window: _Window) -> None:
        try:
            self._update(work, chunk, window)
        finally:
            window.arrived = None
            self._idle.append(window)

    def _update(self, work: Work, chunk: Chunk, window: _Window) -> None:
        self._finish_reads(window)
        if work.done.done():
            return  # an earlier chunk has failed
        self._fetch(window, chunk)
        try:
            with self.updates():
                work.updates[work.passed](window.parts)
                updated = self.updates.record_event()
        except BaseException:
            self.updates.record_event().hold(self.spills)
            window.empty = self.spills.record_event()  # what is queued of it -> the next chunk in this window
            raise
        updated.hold(self.spills)  # update -> copies back
        self._spill(window, chunk)
        work.writes += window.writes
        work.passed += 1
        if work.passed == work.count:
            work.done.set_result(Done(updated, self.spills.record_event(), work.writes))

    def leave(self) -> None:
        """Give the device's memory back: the computation goes on when it is empty, and may have it then."""
        if any(window.device is not None for window in self._windows):
            for stream in (self.fetches, self.updates, self.spills):
                stream.record_event().hold()  # the last use of the windows -> whoever gets their memory
            for window in self._windows:
                window.device, window.parts, window.outgrown, window.arrived = None, {}, [], None
            if len(self._windows) > WINDOWS:
                self._windows, self._ahead = self._windows[:WINDOWS], {}
                self._idle = deque(self._windows)

    # ---- ahead of an update: see Note [Fetched ahead]

    @property
    def window_nbytes(self) -> int:
        """Of one window; 0 before the first update."""
        return self._most_nbytes + _ALIGNED if self._most_nbytes else 0

    @property
    def spares(self) -> int:
        """Windows beside those that always go round."""
        return len(self._windows) - WINDOWS

    @property
    def waits_for_update(self) -> bool:
        """Something was fetched ahead, and its update was not asked for yet."""
        return bool(self._ahead)

    def is_ahead(self, chunk: Chunk) -> bool:
        found = self._ahead.get(_key(chunk))
        return found is not None and found.versions == _versions(chunk)

    def suits(self, chunk: Chunk) -> bool:
        """It is no larger than windows have been so far, and not so small that one would be wasted on it."""
        nbytes = sum(part.nbytes for part in self._copied(chunk))
        return 0 < nbytes <= self._most_nbytes <= 2 * nbytes

    @torch.no_grad()
    def fetch_ahead(self, chunk: Chunk) -> None:
        """Into a window more, of memory that the computation is done with. Raises where there is none."""
        window = _Window()
        window.device = _block(self._most_nbytes, self._device)
        current_event(self._device).hold(self.fetches)  # whoever had this memory -> copies into it
        window.parts, window.versions = _cut(window.device, self._copied(chunk)), _versions(chunk)
        with self.fetches():
            for part in chunk:
                if part.may_be_ahead:
                    window.parts[part.name].copy_(part.home, non_blocking=True)
        window.arrived = self.fetches.record_event()
        self._windows.append(window)
        self._ahead[_key(chunk)] = window

    def drop_ahead(self) -> None:
        """Updates that use it will not come: the windows go round with the others."""
        while self._ahead:
            self._unfill(self._ahead.popitem()[1])

    def _unfill(self, window: _Window) -> None:
        window.arrived = None
        self._idle.appendleft(window)

    # ---- one window

    def _read(self, window: _Window, chunk: Chunk) -> None:
        """The window cut for a chunk, and its files read into the staging part of it."""
        if window.outgrown and window.empty.reached:
            window.outgrown = []
        window.finish_writes()
        window.empty.wait() if any(part.rest.file for part in chunk) else None  # the copies out of it -> new reads
        window.parts = {part.name: part.home for part in chunk if not part.rest.away}
        staged = self._staged(chunk)
        window.parts.update(_cut(window.device, self._copied(chunk)))
        window.staged = _cut(window.host, staged)
        if self._device.type == "cpu":
            window.parts.update(window.staged)  # there is nothing between
        window.reads = [
            part.rest.file.read_async(part.begin, part.end, window.staged[part.name])
            for part in staged
            if part.reads and part.rest.file is not None
        ]

    @staticmethod
    def _staged(chunk: Chunk) -> list[ChunkPart]:
        return [part for part in chunk if part.rest.file is not None]

    def _copied(self, chunk: Chunk) -> list[ChunkPart]:
        """What has a place of its own in the window; on a host, where files are read to is the window."""
        on_host = self._device.type == "cpu"
        return [part for part in chunk if part.rest.away and not (on_host and part.rest.file is not None)]

    def _make_room(self, chunks: Iterable[Chunk]) -> None:
        """Every window takes the largest of all chunks so far at once: the host waits for nothing here."""
        device_nbytes = max((sum(part.nbytes for part in self._copied(chunk)) for chunk in chunks), default=0)
        host_nbytes = max((sum(part.nbytes for part in self._staged(chunk)) for chunk in chunks), default=0)
        if device_nbytes > self._most_nbytes and self._ahead:
            self.drop_ahead()  # their blocks are about to be replaced
        self._most_nbytes = max(device_nbytes, self._most_nbytes)
        for window in self._windows:
            if device_nbytes > (0 if window.device is None else window.device.numel()):
                if window.device is not None:
                    window.outgrown.append(window.device)
                window.device = _block(self._most_nbytes, self._device)
                current_event(self._device).hold(self.fetches)  # whoever had this memory -> copies into it
            if host_nbytes > (0 if window.host is None else window.host.numel()):
                window.finish_writes()  # out of the block -> whoever gets its memory
                window.empty.wait()
                window.host = _block(host_nbytes, torch.device("cpu"), pinned=self._device.type != "cpu")

    @staticmethod
    def _finish_reads(window: _Window) -> None:
        reads, window.reads = window.reads, []
        wait(reads)  # all of them, also where one has failed: the next chunk is read to the same place
        for read in reads:
            read.result()

    def _fetch(self, window: _Window, chunk: Chunk) -> None:
        """All of a chunk, or what was not fetched ahead."""
        ahead = window.arrived
        if ahead is not None:
            ahead.hold(self.updates)  # copies, earlier -> update
        left = [part for part in chunk if part.rest.away and part.reads and not (ahead and part.may_be_ahead)]
        if not left:
            return
        window.empty.hold(self.fetches)  # copies out of the window -> copies into it
        with self.fetches():
            for part in left:
                source = window.staged.get(part.name, part.home)
                if source is not window.parts[part.name]:
                    window.parts[part.name].copy_(source, non_blocking=True)
        self.fetches.record_event().hold(self.updates)  # copies -> update

    def _spill(self, window: _Window, chunk: Chunk) -> None:
        away = [part for part in chunk if part.rest.away and part.writes]
        with self.spills():
            for part in away:
                into = window.staged.get(part.name, part.home.data)  # uncounted: see Note [Fetched ahead]
                if into is not window.parts[part.name]:
                    into.copy_(window.parts[part.name], non_blocking=True)
            window.empty = self.spills.record_event()
        filed = [(part, part.rest.file) for part in away if part.rest.file is not None]
        if filed:
            window.empty.wait()
            window.writes = [file.write_async(part.begin, part.end, window.staged[part.name]) for part, file in filed]
        window.parts = {}  # gradients are kept by who needs them


def _key(chunk: Chunk) -> tuple[Any, ...]:
    """Which elements of which arrays."""
    return tuple((part.rest, part.begin, part.end) for part in chunk if part.may_be_ahead)


def _versions(chunk: Chunk) -> list[int]:
    return [part.rest.version for part in chunk if part.may_be_ahead]


def _block(nbytes: int, device: torch.device, pinned: bool = False) -> Tensor:
    made = torch.empty(nbytes + _ALIGNED, dtype=torch.uint8, device=device, pin_memory=pinned)
    return made[-made.data_ptr() % _ALIGNED :]


def _cut(block: Tensor | None, parts: Chunk) -> dict[str, Tensor]:
    cut, at = {}, 0
    for part in parts:
        assert block is not None
        numel = part.end - part.begin
        cut[part.name] = block[at : at + numel * part.rest.dtype.itemsize].view(part.rest.dtype)
        at += part.nbytes
    return cut
