"""How long some steps took, and how much of that the computation stood still for gathers and reduces.

The observer (observe.py) hands each wait for a collective over as it begins and ends. On a host its length is known at
once; on an accelerator the wait is a place in the stream of the computation, so its two ends are marked there and
read when the step is over.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import torch

from zeor.tiers.streams import DeviceClock

VERBS = ("gather", "reduce")  # whose bytes a wire changes


class Metered(NamedTuple):
    seconds: float
    waited: float


class Meter:
    """It runs from its making on."""

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)
        self._open: list[torch.Event] = []  # where waits began that are not over
        self._waits: list[tuple[torch.Event, torch.Event]] = []
        self._waited_ns = 0
        self._begin = perf_counter_ns()

    def begins(self) -> None:
        """A wait."""
        if self._clock.ticks:
            self._open.append(self._clock.mark())

    def ends(self, ns: int) -> None:
        """The wait that began last; so long by the host's clock."""
        if not self._clock.ticks:
            self._waited_ns += ns
        elif self._open:
            self._waits.append((self._open.pop(), self._clock.mark()))

    def end(self) -> Metered:
        """On an accelerator the host waits here until the step is done there too."""
        self._clock.finish()
        for begin, end in self._waits:
            self._waited_ns += self._clock.at_ns(end) - self._clock.at_ns(begin)
        return Metered((perf_counter_ns() - self._begin) / 1e9, self._waited_ns / 1e9)
