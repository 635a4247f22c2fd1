"""A lane's update under way, beside the computation: who waits for it, and what it keeps meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from zeor.memory.lines import Mark


class Update:
    """A lane's update under way. `hold`: the computation waits for it. `wait`: the host does.

    Note [Gradients until they are used]
    An update reads gradients beside the computation, which is done with them. Their memory must not be given to others
    before it is done, and the allocator can be told so (record_stream); but then it is free only when the host
    happens to see that, and a host that runs ahead takes new memory instead. So the update itself keeps them until the
    computation waits for it, which it does before it reads the new weights: what is allocated from then on may lie
    there.
    """

    def __init__(
        self, job: Future | None, updated: Mark, spilled: Mark, compute_away: bool, keeps: Sequence[Tensor] = ()
    ):
        self._job, self.updated, self.spilled = job, updated, spilled
        self._compute_away, self._held, self._keeps = compute_away, False, keeps
        self.then: Callable[[], None] | None = None  # called once it is held

    def hold(self) -> None:
        if not self._held:
            self._finish_job()
            (self.spilled if self._compute_away else self.updated).hold()
            self._held, self._keeps = True, ()
            if self.then is not None:
                self.then()

    def wait(self) -> None:
        self._finish_job()
        self.spilled.wait()
        self.hold()

    def _finish_job(self) -> None:
        if self._job is not None:
            self.updated, self.spilled = self._job.result()
            self._job = None  # not before: what has failed half-way must fail for everybody who asks
