"""State that is fetched before its update is asked for: while the activations of a step's last micro-batch leave.

With clipping an update can begin only at step(), and it waits for the link. What it reads is known before: the state of
the lanes that forward reads first is fetched into windows of their own while the last backward goes on, as far as there
is room (spare_room.py), and updated at once when step() comes. Those windows go round with the others then, so spills
drain under the next forward and backward while fetches go on; when that backward is over their memory is given back.
`zeor.Offload(ahead=...)` asks for it.

Note [The last backward]
~~~~~~~~~~~~~~~~~~~~~~~~
Inside zeor.no_sync and zeor.accumulate a backward is not the last one. Of those outside the last is the one with the
number that the last step had. A wrong guess costs memory and time, never a bit: whatever comes in step()'s place (a
forward, another backward, an error, somebody who asks for the state, the end of training) gives the windows back before
it begins, and a step that comes without them fetches by itself. What is fetched for a lane that is not updated after
all (no gradient, a skipped step) is dropped; what somebody has changed meanwhile too (Note [Fetched ahead] in
windows.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeor.comm.observe import Observer
from zeor.layout import Segment
from zeor.memory.buffers import Ledger
from zeor.optim.streaming.spare_room import SpareRoom
from zeor.optim.streaming.windows import WINDOWS, ChunkPart, WindowRing
from zeor.step.backward import Backward
from zeor.step.extension import Extension
from zeor.step.lane import Lane
from zeor.step.unit import Unit

# From the last backward to step(), and from there to the end of the next backward.
FILLING, DRAINING = "filling", "draining"


class Stretch(NamedTuple):
    """Elements [begin, end) of a lane, which begin with those of a segment at `where`: a chunk."""

    lane: Lane
    where: Segment
    segment: nn.Parameter
    begin: int
    end: int


class Ahead(Extension):
    """Of one optimizer's windows. `state_of`: the arrays of a chunk's state."""

    def __init__(
        self, windows: WindowRing, backward: Backward, observer: Observer, ledger: Ledger, room: SpareRoom,
        state_of: Callable[[Stretch], list[ChunkPart]],
    ):  # fmt: skip
        self._windows, self._backward, self._observer, self._ledger = windows, backward, observer, ledger
        self._room, self._state_of = room, state_of
        self._learnt: list[Stretch] = []  # in the order of the last update
        self._learning: list[Stretch] = []
        self._todo: deque[Stretch] = deque()  # of the step under way
        self._usual = 0  # how many backwards the last step had, of those that may be the last one
        self._count = self._forwards = 0  # of such backwards, and of forwards, since the last step
        self._phase = ""
        self._counted = 0  # bytes, in the ledger

    # ---- what updates tell

    def learn(self, stretch: Stretch) -> None:
        """A chunk of the update that is being queued: the next one will have it too."""
        self._learning.append(stretch)

    def step_queued(self) -> None:
        """All of it is. What was fetched for others will not be used."""
        self._learnt, self._learning = self._learning or self._learnt, []
        self._windows.drop_ahead()
        self._forwards, self._phase = 0, DRAINING if self._phase == FILLING else ""

    def leave(self) -> None:
        """Forward waits for the last update of a step, or a backward begins: the windows' memory may go, unless spills
        are to drain under that backward."""
        drains = self._phase == DRAINING and self._windows.spares and self._usual > 1
        if not drains and not self._windows.waits_for_update:
            self._windows.leave()
            self._count_bytes()

    # ---- a backward

    def begin_backward(self, said: dict[str, Any]) -> None:
        if self._phase == FILLING:
            self.give_back()  # the one before was not the last
        if not self._backward.sync or self._backward.accumulates:
            return
        self._count += 1
        if self._count == self._usual and self._learnt:
            self.give_back()
            self._phase, self._todo = FILLING, deque(self._learnt)
            self._room.begin(self._usual)

    def unit_reduced(self, unit: Unit) -> None:
        if self._phase == FILLING:
            self._fetch()

    def grads_there(self) -> None:
        if self._phase == FILLING:
            self._fetch()
        elif self._phase == DRAINING:
            self._room.end(whole=True)
            self.give_back()

    @torch.no_grad()
    def _fetch(self) -> None:
        """As much as there is room for."""
        windows, each = self._windows, self._windows.window_nbytes
        room = self._room.moment(WINDOWS * each)
        if windows.spares * each > room:  # this backward needs more than the measured one
            return self.give_back()
        while self._todo and each and (windows.spares + 1) * each <= room:
            stretch = self._todo.popleft()
            chunk = self._state_of(stretch)
            if any(part.rest.file is not None for part in chunk) or not windows.suits(chunk):
                continue
            try:
                self._fetch_chunk(stretch.lane, chunk)
            except torch.OutOfMemoryError:  # there was no block as large as a window
                self._todo.clear()
        self._count_bytes()

    def _fetch_chunk(self, lane: Lane, chunk: list[ChunkPart]) -> None:
        windows, record = self._windows, None
        spilled = getattr(lane.master.pending, "spilled", None) if lane.master is not None else None
        if spilled is not None:
            spilled.hold(windows.fetches)  # copies back, a step ago -> copies of the same memory
        if self._observer.on:
            parts = [part for part in chunk if part.may_be_ahead]
            tiers = ", ".join(sorted({part.rest.tier for part in parts}))
            nbytes = sum(part.nbytes for part in parts)
            record = self._observer.begin("fetch", lane.place, nbytes, tiers, windows.fetches)
        windows.fetch_ahead(chunk)
        if record is not None:
            self._observer.end(record)

    # ---- what may come in step()'s place, or between it and the next backward

    def saw_input(self, value: Any) -> None:
        if self._phase == DRAINING and not self._forwards:
            numel = sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
            if self._room.saw(numel):
                self.give_back()

    def begin_forward(self, train: bool, alone: bool) -> None:
        self._forwards += 1
        if self._phase == FILLING or not train or self._forwards > 1:
            self.give_back()

    def end_step(self) -> None:
        if self._count:
            self._usual, self._count = self._count, 0

    def abandon(self) -> None:
        self.give_back()

    def drain(self) -> None:
        self.give_back()

    def give_back(self) -> None:
        """The memory of all windows; what was fetched ahead is dropped."""
        self._phase = ""
        self._room.end(whole=False)
        if self._windows.spares:
            self._windows.leave()
            self._count_bytes()

    def _count_bytes(self) -> None:
        """In the ledger and in the room."""
        nbytes = self._windows.spares * self._windows.window_nbytes
        self._ledger.add("ahead", nbytes - self._counted)
        self._counted = self._room.taken_nbytes = nbytes
