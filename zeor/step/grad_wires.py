"""How the gradients of one lane travel: what Reduction asks before each reduce, and before each gather of a sum.

A codec rounds by chance only where the plan says so; then the noise is a function of the seed (of the last checkpoint),
the steps since, which of the step's reduces of this lane it is, the lane and the rank: never of when it ran. Elements
that are chosen by chance are the same on every rank, so that noise knows no rank, nor does that of sums on their way
back. Nothing else in step/ knows of codecs for gradients.

Note [Residuals]
~~~~~~~~~~~~~~~~
What a reduce leaves out is kept (comm/feedback.py), for each axis that has such a wire, and added to what is sent next.
It depends on the past of every rank. So where nothing may (at a save, another wire, another plan) it is flushed: one
exact reduce of all that is left, to this rank's fine slice. That slice is added to the next sum, and is what a
checkpoint holds of it. The last factors of low rank begin anew then, as the noise does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeor.comm import along
from zeor.comm.axes import Axes
from zeor.comm.feedback import Residual
from zeor.comm.lowrank import Factored
from zeor.comm.observe import Place
from zeor.comm.wires import Coded
from zeor.layout import Span
from zeor.layout.grid import Hop
from zeor.layout.matrices import Pieces, inputs, pieces_of, places_of
from zeor.memory.buffers import Ledger
from zeor.memory.lowrank import LowRank
from zeor.memory.noise import Noise, mix
from zeor.memory.sparse import RandomK
from zeor.spec.lane_spec import RESIDUAL, LaneSpec
from zeor.spec.wires import ByAxis

_REDUCE, _SPREAD = 0, 2  # kinds of noise; each has one for either axis


@dataclass
class _Kept:
    """Of one hop, what is left from one reduce to the next. pieces, q: of low rank."""

    hop: Hop
    spans: list[Span]  # of the lane, that it is given
    residual: Residual
    pieces: Pieces | None = None
    q: Tensor | None = None
    seeding: int = -1  # that q belongs to


class GradWires:
    def __init__(self, spec: LaneSpec, axes: Axes, ledger: Ledger):
        self._layout, self._grid, self._axes, self._ledger = spec.layout, spec.grid, axes, ledger
        self._counted = (-1, -1)  # (seedings, steps) of what was counted last
        self._count = 0  # of reduces in that step
        self._place = (0, 0)
        self.follow(spec)

    def follow(self, spec: LaneSpec) -> None:
        """From the next reduce on; what is left by then is flushed, or lost."""
        self._wires = spec.wires
        self._kept: dict[int, _Kept] = {}  # by axis
        hops = list(self._grid.hops())
        for hop, spans in zip(hops, inputs(self._grid, self._axes.coords, self._layout.numel)):
            if spec.wires.keeps[hop.axis]:
                self._kept[hop.axis] = self._keep(hop, spans, spec.wires.reduce[hop.axis])
        self._factors = [axis for axis, kept in self._kept.items() if kept.pieces is not None]

    def _keep(self, hop: Hop, spans: list[Span], codec: object) -> _Kept:
        axis, device = self._axes.each[hop.axis], self._axes.device
        shape = hop.blocks, axis.size, sum(span.numel for span in spans) // hop.blocks // axis.size
        if not isinstance(codec, LowRank):
            return _Kept(hop, spans, Residual(shape, axis.rank, device))
        pieces = pieces_of(self._layout, spans, codec.rank)
        q = torch.zeros(pieces.factor_numels(codec.rank)[1], dtype=RESIDUAL, device=device)
        return _Kept(hop, spans, Residual(shape, axis.rank, device, whole=True), pieces, q)

    @property
    def has_legs(self) -> bool:
        """Reduces of this step go on after backward: see comm/lowrank.py."""
        if not self._factors:
            return False
        return any(not self._warms_up(axis) for axis in self._factors)

    def _warms_up(self, axis: int) -> bool:
        return self._axes.everyone.standing.run_steps < self._wires.warmup[axis]

    @property
    def keeps(self) -> bool:
        return bool(self._kept)

    def of_reduce(self, place: Place) -> along.HowReduced:
        """A reduce begins."""
        standing = self._axes.everyone.standing
        counted = standing.seedings, standing.steps
        self._count = self._count + 1 if counted == self._counted else 0
        self._counted, self._place = counted, (place.index, place.lane or 0)
        if self._wires.reduce == (None, None):
            return along.EXACTLY
        return self._of_axis(0), self._of_axis(1)

    def _of_axis(self, axis: int) -> Coded | Factored | None:
        codec, kept = self._wires.reduce[axis], self._kept.get(axis)
        if codec is None or self._warms_up(axis):
            return None
        if isinstance(codec, LowRank):
            return None if kept is None else self._factored(codec, kept)
        noise = self._noise(_REDUCE + axis, alike=isinstance(codec, RandomK))
        residual = None if kept is None else kept.residual
        return Coded(codec, self._layout.slice_numel, self._ledger, noise=noise, residual=residual)

    def _factored(self, codec: LowRank, kept: _Kept) -> Factored:
        assert kept.pieces is not None and kept.q is not None
        seedings = self._axes.everyone.standing.seedings
        if kept.seeding != seedings:
            kept.q.zero_()
            kept.seeding = seedings
        noise = self._noise(_REDUCE + kept.hop.axis, alike=True)
        return Factored(codec.rank, kept.pieces, kept.residual, kept.q, self._ledger, noise)

    def of_spread(self, legs: Sequence[along.Leg]) -> list[along.Leg]:
        """The gather of what was reduced last. Its noise knows the place alone: along a second axis several ranks
        encode the same sum, each for others, and all must come to the same weights."""
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
            None if codec is None else Coded(codec, self._layout.slice_numel, self._ledger, noise=noise)
            for codec, noise in zip(codecs, (self._noise(kind, alike=True), self._noise(kind + 1, alike=True)))
        )
        return inside, across

    def _noise(self, kind: int, alike: bool = False) -> Noise:
        """`alike`: on every rank."""
        everyone = self._axes.everyone
        steps = everyone.steps - everyone.standing.seeded_at
        rank = 0 if alike else everyone.rank
        return Noise(mix(everyone.standing.seed, steps, self._count, *self._place, rank, kind))

    # ---- what is left: see Note [Residuals]

    def tensors(self) -> Iterator[Tensor]:
        """All memory that it is kept in."""
        for kept in self._kept.values():
            yield kept.residual.flat
            if kept.q is not None:
                yield kept.q

    @torch.no_grad()
    def flush(self, label: str) -> Tensor | None:
        """The sum over ranks of all that is left, in this rank's fine slice; None where nothing can be. A
        collective."""
        left: Tensor | None = None
        for hop in self._grid.hops():
            kept, taken = self._kept.get(hop.axis), None
            if kept is not None:
                taken = self._ledger.take("residual", kept.residual.numel, RESIDUAL, self._axes.device)
                here = kept.residual.copy_to(taken)
                left = here if left is None else here.add_(left)
                kept.residual.clear()
            if left is not None:
                left = along.reduce_hop(self._axes, hop, left, self._ledger, label)
            if taken is not None:
                self._ledger.give("residual", taken)
        return left

    def clear(self) -> None:
        """Nothing is left."""
        for kept in self._kept.values():
            kept.residual.clear()

    def forget(self, param: int) -> None:
        """This parameter trains no more."""
        begin = self._layout.offsets[param]
        for kept in self._kept.values():
            kept.residual.wipe(places_of(kept.spans, Span(begin, begin + self._layout.numels[param])))

    def nbytes(self) -> int:
        found = [kept.residual.flat.nbytes + (0 if kept.q is None else kept.q.nbytes) for kept in self._kept.values()]
        return sum(found)
