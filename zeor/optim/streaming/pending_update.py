"""A lane's update under way, beside the computation: who waits for it, and what it keeps meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.tiers.lines import Mark, current_stream_id


class Done(NamedTuple):
    """Everything of an update is queued. `updated`: compute is new. `spilled`: nothing is on its way between device and
    host. `writes`: to files."""

    updated: Mark
    spilled: Mark
    writes: Sequence[Future[None]] = ()

    def future(self) -> Future[Done]:
        made: Future[Done] = Future()
        made.set_result(self)
        return made


class Update:
    """`hold`: the computation waits for it. `wait`: the host does. What has failed fails for everybody who asks.

    Note [Gradients until they are used]
    An update reads gradients beside the computation, which is done with them. Their memory must not be given to others
    before it is done, and the allocator can be told so (record_stream); but then it is free only when the host
    happens to see that, and a host that runs ahead takes new memory instead. So the update itself keeps them until the
    computation waits for it, which it does before it reads the new weights: what is allocated from then on may lie
    there.
    """

    def __init__(self, queued: Future[Done], device: torch.device, compute_away: bool, keeps: Sequence[Tensor]):
        self._queued, self._device, self._compute_away, self._keeps = queued, device, compute_away, keeps
        self._home = current_stream_id(device)  # what it keeps goes back to who computes here
        self._held_by: set[int] = set()  # streams
        self._then: Callable[[], None] | None = None

    @property
    def spilled(self) -> Mark:
        return self._queued.result().spilled

    def hold(self) -> None:
        stream = current_stream_id(self._device)
        if stream in self._held_by:
            return
        done = self._queued.result()
        if self._compute_away:
            self.written()
            done.spilled.hold()
        else:
            done.updated.hold()
        self._held_by.add(stream)
        if stream == self._home:
            self._keeps = ()
            if self._then is not None:
                self._then()

    def written(self) -> None:
        """The host waits until files have everything."""
        for write in self._queued.result().writes:
            write.result()

    def wait(self) -> None:
        self.spilled.wait()
        self.written()
        self.hold()

    def when_held(self, then: Callable[[], None]) -> None:
        """By the stream it was begun on; at once where it is."""
        if self._home in self._held_by:
            then()
        else:
            self._then = then
