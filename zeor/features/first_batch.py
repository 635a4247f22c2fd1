"""One warning when every rank was fed the same first batch: the most common way to waste all but one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zeor.comm.agree import exchange
from zeor.comm.axes import Axes
from zeor.data import fingerprint
from zeor.step.extension import Extension

log = logging.getLogger("zeor")


class FirstBatch(Extension):
    """Compares what the ranks see first: inputs where there is a forward hook, gradients where there is none.
    `leave(self)` is called then, as there is nothing more to do."""

    def __init__(self, axes: Axes, leave: Callable[[Extension], None]):
        self._axes, self._leave = axes, leave
        self.done = axes.everyone.size == 1 or axes.everyone.fake
        self._prints: list[int] = []

    def meets(self, train: bool, alone: bool) -> bool:
        return train and not alone and not self.done

    def begin_forward(self, train: bool, alone: bool) -> None:
        if train and not alone:
            self.compare()

    def saw_input(self, value: Any) -> None:
        """Part of what this rank was fed."""
        if not self.done:
            self._prints.append(fingerprint(value))

    def compare(self) -> None:
        """Once, on every rank."""
        if self.done:
            return
        self.done = True
        self._leave(self)
        seen = exchange(self._axes.everyone, self._prints, "comparison of the ranks' first batches")
        if self._axes.everyone.rank == 0 and all(rank == seen[0] for rank in seen):
            log.warning(
                "All %d ranks were fed the same first batch: every rank does the same work. Give each its own part "
                "of the data with zeor.data.shard(loader).",
                self._axes.everyone.size,
            )
