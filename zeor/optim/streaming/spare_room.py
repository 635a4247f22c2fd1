"""How much of a device's memory a step leaves unused while activations are away, measured in a step like it.

From the last backward of a step to the end of the next step's first backward memory that activations held is free for
a while. Within a backward there are moments, one for each unit that is done; the peaks between them, and from the last
of them to the end, are measured in one step. From a moment on so much is free as the step's own peak is above the
largest of the peaks that follow. So nothing that is taken by this rule raises the peak that a run has had before.

Note [When it is measured]
~~~~~~~~~~~~~~~~~~~~~~~~~~
1. In the third step of which it is known how many backwards it has: recompute="auto" has decided by then
   (features/keeping.py), and keeps no more later. There must be two or more: with one the time in question holds the
   step's own peak, and nothing is free.
2. Anew after a backward that had more in use at some moment than was measured there, after a forward with larger inputs
   than the measured one, and after memory ran out. Nothing is taken until then.
3. On a host nobody knows what is used: there nothing is free but what the plan names in bytes.
"""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch

from zeor.memory.device import DeviceMemory

SETTLES = 2  # steps that are let pass
SLACK_NBYTES = 1 << 26  # by which steps that are alike may differ at a moment
HOLES = 0.02  # of the device, left for what lies between the allocator's blocks


class SpareRoom:
    """Of one optimizer's updates. `most`: bytes that the plan allows, or None: what is measured. `budget`: of the
    device, where the plan names one."""

    _all: ClassVar[weakref.WeakSet[SpareRoom]] = weakref.WeakSet()  # of this process: they share its memory

    def __init__(self, device: torch.device, most: int | None, budget: int | None):
        self._memory, self._device, self._most, self._budget = DeviceMemory(device), device, most, budget
        self._failures = self._memory.failures()
        self._used: list[int] = []  # by moment
        self._peaks: list[int] = []  # between two moments, and at last from the last moment to the end
        self._limit = self._numel = self._next = self._steps = 0
        self._measures = False
        self.taken_nbytes = 0  # by whoever asked
        SpareRoom._all.add(self)

    @property
    def _knows(self) -> bool:
        """On an accelerator: it was measured."""
        return bool(self._peaks) and not self._measures

    def begin(self, backwards: int) -> None:
        """The last backward of a step begins; it has so many."""
        failures, self._failures = self._failures, self._memory.failures()
        if self._failures > failures:
            self.forget()
        self._next, self._steps = 0, self._steps + 1
        if self._memory.total_nbytes() is None or self._knows or backwards < 2 or self._steps <= SETTLES:
            return
        if not any(other._measures for other in SpareRoom._all if other is not self):
            self._measures, self._used, self._peaks, self._numel = True, [], [], 0
            self._memory.reset_peak()

    def moment(self, fixed_nbytes: int) -> int:
        """One more unit's backward is over. How many bytes may be taken from here on, those that are taken included;
        `fixed_nbytes`: that will be needed besides."""
        if self._memory.total_nbytes() is None:
            return self._most or 0
        used, number = self._memory.used_nbytes() - self.taken_nbytes, self._next
        self._next += 1
        if self._measures:
            self._used.append(used)
            self._peaks.append(self._memory.reset_peak())
        if not self._knows or number >= len(self._used):
            return 0
        if used > self._used[number] + SLACK_NBYTES:
            self.forget()
            return 0
        others = sum(other.taken_nbytes for other in SpareRoom._all if other is not self)
        free = self._limit - max(self._peaks[number + 1 :]) - fixed_nbytes - others
        return max(0, free if self._most is None else min(free, self._most))

    def saw(self, numel: int) -> bool:
        """The next step's first forward begins, whose inputs have so many elements. Whether it is larger than the
        measured one, so that what was taken must be given back first."""
        if self._measures:
            self._numel = numel
        larger = self._knows and numel > self._numel
        if larger:
            self.forget()
        return larger

    def end(self, whole: bool) -> None:
        """The next step's first backward is over (`whole`), or something else has come in its place."""
        if self._measures and not whole:
            self.forget()
        elif self._measures:
            self._peaks.append(self._memory.reset_peak())
            total = self._memory.total_nbytes() or 0
            total = total if self._budget is None else min(total, self._budget)
            self._limit = min(self._memory.peak_nbytes(), int((1 - HOLES) * total))
            self._measures = False

    def forget(self) -> None:
        """To be measured again."""
        self._measures, self._used, self._peaks = False, [], []
