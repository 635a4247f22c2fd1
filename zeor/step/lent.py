"""Lent memory that follows each step: whoever keeps a tensor over a sharded parameter sees its new values.

Where parameters are freed between uses, a tensor that somebody keeps over one (a view made in forward, a hook's
dictionary) holds its memory (Note [Lent] in memory/buffers.py). In plain PyTorch such a tensor shows new values after
step(). So at the end of a backward ranks agree on which units are looked at anywhere, and these are gathered once more
when their values have changed. Where nobody keeps anything this costs one number per unit in an exchange that there
is anyway. Where paths are settled (settling.py) ranks hear one backward late that somebody began to keep a tensor: it
shows the values of the step before until the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeor.step.extension import NEWS, Extension
from zeor.step.unit import Unit


class Lent(Extension):
    riding = NEWS  # one rank alone may keep a tensor, and no run may end for that

    def __init__(self, units: Sequence[Unit]):
        self._units = [unit for unit in units if unit.frees]
        self._agreed: list[Unit] = []  # looked at on some rank, as the last backward found it

    @property
    def told_count(self) -> int:
        return len(self._units)

    def told(self) -> list[int]:
        return [any(lane.full.lent for lane in unit.lanes if lane.frees) for unit in self._units]

    def heard(self, largest: Sequence[int]) -> None:
        self._agreed = [unit for unit, lent in zip(self._units, largest) if lent]

    def refill(self) -> None:
        """Values have changed, on every rank alike, and no unit is in use."""
        for unit in self._agreed:
            unit.start_gather()
            unit.wait()
            unit.free()
