"""The coded lane: weights of fp8 linears, whose compute is 8-bit codes and one scale for each parameter.

    full, mine   codes, one byte for each element; gathered and freed as in any lane
    codes        the same, cut into parameters: what the linears multiply by
    scales       one for each parameter, the same on every rank
    parts        what the user's parameters lie over: nothing (`Coded` in memory/param.py)
    master       in memory of its own

See Note [Codes] in memory/float8.py. A change of the master leaves codes behind until `recode`, which every rank calls:
a step does at its end, for all lanes together, and so does whoever fills masters part by part (a load). Who gives a
whole value on every rank (`store`) needs nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.axes import Axes
from zeor.layout import Segment
from zeor.memory.buffers import Ledger
from zeor.memory.float8 import Decoded, encode_into, scales_of
from zeor.memory.param import Coded, Whole, nothing_like
from zeor.spec.lane_spec import LaneSpec
from zeor.step.lane import Lane
from zeor.tiers.rest import LaneRest


class CodedLane(Lane):
    coded = True

    def __init__(self, spec: LaneSpec, values: Sequence[Tensor], axes: Axes, ledger: Ledger, rest: LaneRest):
        self.scales = torch.ones(len(spec.layout.shapes), device=axes.device)
        super().__init__(spec, values, axes, ledger, rest)
        self.codes = self.parts
        self.parts = [nothing_like(shape, torch.bfloat16, axes.device) for shape in spec.layout.shapes]
        self.scale_of = list(self.scales.unbind())
        updated = [segment.param for segment in self.segments]
        self._updated_params = torch.tensor(updated, device=axes.device, dtype=torch.long)

    # ---- what its parameters are to others

    def _watched(self) -> Sequence[Tensor]:
        return self.codes

    def readable(self, param: int) -> Tensor:
        found: Tensor = Decoded.apply(self.params[param], self.codes[param], self.scale_of[param])
        return found

    def show_native(self, native: bool) -> None:
        """While a compiled module runs its parameters are of a class that torch.compile takes for a plain one."""
        self._classes = [(Whole, Whole) if native else (Coded, Coded)] * len(self.params)
        self.dress()

    def keep_writes(self) -> None:
        """There are none but whole values, by `store`."""

    # ---- codes from values

    def _cast_whole(self, flat: Tensor) -> None:
        parts = [self.part(flat, param) for param in range(len(self.layout.shapes))]
        self.scales.copy_(scales_of(_largest(parts, flat), self.full.flat.dtype))
        self.full.flat.zero_()
        for param, part in enumerate(parts):
            encode_into(self.part(self.full.flat, param), part, self.scales[param])

    @torch.no_grad()
    def store(self, param: int, value: Tensor) -> None:
        """This rank's part of one parameter's full value, which every rank has, into master and codes."""
        self.settle()
        assert self.master is not None
        flat = value.detach().to(self.axes.device, self.master.dtype).reshape(-1)
        self.scales[param] = scales_of(_largest([flat], flat), self.full.flat.dtype)[0]
        if self.full.inflated:
            encode_into(self.part(self.full.flat, param), flat, self.scales[param])
        for segment in self.segments:
            if segment.param == param:
                self.master.store(segment.offset, flat[segment.start : segment.start + segment.numel])
        for segment in self.layout.segments_in(self.kept):
            if segment.param == param:
                part = flat[segment.start : segment.start + segment.numel]
                encode_into(_at(self.mine, segment), part, self.scales[param])
        if self.params:
            self.changed([param])

    def recode(self) -> None:
        recode([self])

    def amaxima(self) -> Tensor:
        """The largest magnitude of this rank's part of each parameter; 0 where it has none."""
        assert self.master is not None
        found = torch.zeros_like(self.scales)
        parts = [_at(self.master.values, segment) for segment in self.segments]
        return found.index_copy_(0, self._updated_params, _largest(parts, found)) if parts else found

    def encode(self, amaxima: Tensor) -> None:
        """New codes of what this rank updates, from the largest magnitudes of whole parameters."""
        assert self.master is not None
        self.settle()  # a gather of the old codes -> the new ones
        self.scales.copy_(scales_of(amaxima, self.full.flat.dtype))
        codes = self._written.tensor
        for segment in self.segments:
            encode_into(_at(codes, segment), _at(self.master.values, segment), self.scales[segment.param])


def _at(flat: Tensor, segment: Segment) -> Tensor:
    return flat[segment.offset : segment.offset + segment.numel]


def _largest(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(torch._foreach_norm(list(parts), math.inf)).to(like.device, torch.float32)


@torch.no_grad()
def recode(lanes: Iterable[Lane], publishes: bool = False) -> None:
    """The codes of these lanes follow their masters: one exchange for all of them; every rank calls it. With
    `publishes` ranks that hold more codes than they make get those of the others too."""
    coded = [lane for lane in lanes if isinstance(lane, CodedLane)]
    if not coded:
        return
    largest = torch.cat([lane.amaxima() for lane in coded])
    updaters = coded[0].axes.over(coded[0].spec.table.cut("update"))
    if updaters.size > 1:
        largest = verbs.gather_vector(updaters, largest, "largest magnitudes of the weights in fp8").amax(0)
    for lane, amaxima in zip(coded, largest.split([lane.scales.numel() for lane in coded])):
        lane.encode(amaxima)
        if publishes and lane.publishes:
            lane.start_publish(f"{lane.place.publish} after a change beside a step")
            lane.wait()
