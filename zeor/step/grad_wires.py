"""How the gradients of one lane travel: what Reduction asks before each reduce, and before each gather of a sum.

A codec rounds by chance only where the plan says so; then the noise is a function of the seed (of the last checkpoint),
the steps since, which of the step's reduces of this lane it is, the lane and the rank: never of when it ran. Nothing
else in step/ knows of codecs for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeor.comm import along
from zeor.comm.axes import Axes
from zeor.comm.observe import Place
from zeor.comm.wires import Coded
from zeor.memory.buffers import Ledger
from zeor.memory.noise import Noise, mix
from zeor.spec.lane_spec import LaneSpec
from zeor.spec.wires import ByAxis, LaneWires

_REDUCE, _SPREAD = 0, 2  # kinds of noise; each has one for either axis


class GradWires:
    def __init__(self, spec: LaneSpec, axes: Axes, ledger: Ledger):
        self._slice_numel, self._axes, self._ledger = spec.layout.slice_numel, axes, ledger
        self._counted = (-1, -1)  # (seedings, steps) of what was counted last
        self._count = 0  # of reduces in that step
        self._place = (0, 0)
        self.follow(spec.wires)

    def follow(self, wires: LaneWires) -> None:
        """From the next reduce on."""
        self._wires = wires

    def of_reduce(self, place: Place) -> along.ByAxis:
        """A reduce begins."""
        standing = self._axes.everyone.standing
        counted = standing.seedings, standing.steps
        self._count = self._count + 1 if counted == self._counted else 0
        self._counted, self._place = counted, (place.index, place.lane or 0)
        return self._coded(self._wires.reduce, _REDUCE)

    def of_spread(self, legs: Sequence[along.Leg]) -> list[along.Leg]:
        """The gather of what was reduced last."""
        how, found = self._coded(self._wires.spread, _SPREAD), []
        for leg in legs:
            coded = how[leg.axis]
            if coded is not None and coded.noise is not None:
                coded = replace(coded, noise=coded.noise.beyond(leg.source.begin))
            found.append(leg._replace(coded=coded))
        return found

    def _coded(self, codecs: ByAxis, kind: int) -> along.ByAxis:
        if codecs == (None, None):
            return along.EXACTLY
        inside, across = (
            None if codec is None else Coded(codec, self._slice_numel, self._ledger, noise=self._noise(kind + axis))
            for axis, codec in enumerate(codecs)
        )
        return inside, across

    def _noise(self, kind: int) -> Noise:
        everyone = self._axes.everyone
        steps = everyone.steps - everyone.standing.seeded_at
        return Noise(mix(everyone.standing.seed, steps, self._count, *self._place, everyone.rank, kind))
