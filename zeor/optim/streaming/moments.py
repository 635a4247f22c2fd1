"""Moments at rest: the state an optimizer keeps for each element, on a tier and in a format, by lane.

Between steps an optimizer whose lanes are streamed (streaming.py) holds only counters in its own `state`; the rest
lies here, one array for each lane and name, in the order of the lane's segments:

    codes    one for each element of the lane's update part: fp32 (exact), bf16, or 8 bits
    scales   format int8: one for each block of a segment; a segment's blocks begin at `bases[param]`

`take()` moves what somebody put into the optimizer's state (a load, a first step) to where it rests, `show()` gives it
back for whoever must see it. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.layout import Segment
from zeor.memory import small
from zeor.optim.parts.pieces import Read
from zeor.plan import BLOCK_NUMEL
from zeor.step.lane import Lane
from zeor.tiers.rest import Rest

# State that is never negative, in torch.optim and in what follows its names.
UNSIGNED = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "step_size"})
COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})  # one number per parameter, whatever its shape


# Moments an optimizer keeps per element, by class name.
MOMENTS = {
    "SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "Adadelta": 2,
    "RMSprop": 1, "ASGD": 1, "Rprop": 2, "Muon": 1,
}  # fmt: skip


def moment_count(optimizer: Optimizer) -> int:
    """How many values an optimizer will keep for each element; two where nobody knows."""
    name, extra = type(optimizer).__name__, 0
    for group in optimizer.param_groups:
        more = bool(group.get("amsgrad")) + bool(group.get("centered"))
        if name in ("SGD", "RMSprop") and group.get("momentum"):
            more += 1
        extra = max(extra, more)
    return MOMENTS.get(name, 2) + extra


def moment_itemsize(format: str, master_dtype: torch.dtype) -> float:
    """Bytes per element of one moment at rest, scales included."""
    if format == "exact":
        return master_dtype.itemsize
    return 2 if format == "bf16" else 1 + 4 / BLOCK_NUMEL


@dataclass
class Moment:
    """One name of one lane."""

    name: str
    codes: Rest
    scales: Rest | None

    def arrays(self) -> Iterator[tuple[str, Rest]]:
        yield self.name, self.codes
        if self.scales is not None:
            yield f"{self.name} scales", self.scales


class Moments:
    """All of one optimizer's."""

    def __init__(self, optimizer: Optimizer, format: str):
        self._optimizer, self.format = optimizer, format
        self._of: dict[Lane, dict[str, Moment]] = {}
        self._names: dict[nn.Parameter, list[str]] = {}  # of a segment: those that have values
        self._bases: dict[Lane, dict[int, int]] = {}

    def nbytes_per_element(self) -> float:
        """Of everything that the optimizer will keep, where the master is fp32."""
        return moment_count(self._optimizer) * moment_itemsize(self.format, torch.float32)

    # ---- arrays

    def of(self, lane: Lane) -> dict[str, Moment]:
        return self._of.setdefault(lane, {})

    def rests(self, lane: Lane) -> bool:
        """Whether anything of a lane does."""
        return bool(self._of.get(lane))

    def names(self, segment: nn.Parameter) -> list[str]:
        return self._names.setdefault(segment, [])

    def need(self, lane: Lane, name: str, dtype: torch.dtype = torch.float32) -> Moment:
        """The arrays of a name, made of zeros where there are none."""
        held = self.of(lane)
        if name not in held:
            last = lane.segments[-1]  # what lies behind it is padding and needs no moments
            numel = last.offset + last.numel
            codes_dtype, _ = small.storage_of(self.format, numel, name not in UNSIGNED)
            if self.format == "exact":
                codes_dtype = dtype
            codes = lane.rest.make("moments", numel, codes_dtype, name)
            scales = None
            if self.format == "int8":
                scales = lane.rest.make("moments", sum(self._blocks(lane).values()), torch.float32, f"{name}-scales")
            held[name] = Moment(name, codes, scales)
        return held[name]

    @staticmethod
    def _blocks(lane: Lane) -> dict[int, int]:
        return {segment.param: small.scale_count(segment.numel) for segment in lane.segments}

    def scale_range(self, lane: Lane, segment: Segment, begin: int, end: int) -> slice:
        """The scales of elements [begin, end) of the lane, which lie in this segment and begin with a block."""
        if lane not in self._bases:
            self._bases[lane], at = {}, 0
            for param, count in self._blocks(lane).items():
                self._bases[lane][param] = at
                at += count
        assert (begin - segment.offset) % BLOCK_NUMEL == 0
        first = self._bases[lane][segment.param] + (begin - segment.offset) // BLOCK_NUMEL
        return slice(first, first + small.scale_count(end - begin))

    # ---- in and out of the optimizer's state

    @torch.no_grad()
    def take(self, lane: Lane, where: Segment, segment: nn.Parameter) -> None:
        """What the optimizer's state holds for each element of a segment goes to rest."""
        state = self._optimizer.state.get(segment)
        if not state:
            return
        for name, value in [(name, value) for name, value in state.items() if is_moment(name, value, segment)]:
            moment = self.need(lane, name, value.dtype)
            part = moment.codes.tensor[where.offset : where.offset + where.numel]
            if part.data_ptr() != value.data_ptr():
                self.write(lane, where, moment, value)
            del state[name]
            if name not in self.names(segment):
                self.names(segment).append(name)

    def write(self, lane: Lane, where: Segment, moment: Moment, value: Tensor) -> None:
        end = where.offset + where.numel
        part = moment.codes.tensor[where.offset : end]
        if moment.scales is None:
            part.copy_(value.reshape(-1))
        else:
            scales = moment.scales.tensor[self.scale_range(lane, where, where.offset, end)]
            wide = value.reshape(-1).to(part.device, torch.float32)
            small.encode_into(part, scales, wide, moment.name not in UNSIGNED)

    @torch.no_grad()
    def show(self, lane: Lane, where: Segment, segment: nn.Parameter) -> dict[str, Tensor]:
        """The values of a segment's state by name: the memory they rest in where the format is exact, else a copy.
        Wherever they rest, on the device or the host."""
        shown = {}
        assert lane.master is not None
        lane.master.settle()
        for name in self.names(segment):
            moment = self.of(lane)[name]
            end = where.offset + where.numel
            if self.format == "exact":
                part = moment.codes.tensor[where.offset : end]
            else:
                codes, scales = moment.codes.read(where.offset, end), None
                if moment.scales is not None:
                    blocks = self.scale_range(lane, where, where.offset, end)
                    scales = moment.scales.read(blocks.start, blocks.stop)
                part = torch.empty(codes.shape, device=codes.device)
                small.decode_into(part, codes, scales)
            shown[name] = part.view(segment.shape)
        return shown

    def reads(self, lane: Lane, where: Segment, segment: nn.Parameter) -> dict[str, Read]:
        """How to look at the values of a segment's state that `show` gives as maps of files, later and by range."""
        held = {name: self.of(lane)[name].codes for name in self.names(segment) if self.format == "exact"}
        begin = where.offset
        return {
            name: lambda first, last, rest=rest: rest.read(begin + first, begin + last)  # type: ignore[misc]  # a default in a lambda
            for name, rest in held.items()
            if rest.file is not None
        }

    def move(self, lane: Lane) -> None:
        """To the tier the lane's moments rest on now."""
        for moment in self.of(lane).values():
            for field, rest in (("codes", moment.codes), ("scales", moment.scales)):
                if rest is not None and rest.tier != lane.rest.tiers.moments:
                    numel = rest.tensor.numel()
                    made = lane.rest.make("moments", numel, rest.dtype, f"{moment.name}-{field}-moved")
                    made.tensor.copy_(rest.tensor)
                    setattr(moment, field, made)

    def forget(self) -> None:
        """Every parameter begins anew."""
        for held in self._of.values():
            for moment in held.values():
                for _, rest in moment.arrays():
                    rest.tensor.zero_()
        self._names.clear()

    def all(self) -> list[Rest]:
        # Copies: a first update beside may be making some.
        moments = [moment for held in list(self._of.values()) for moment in list(held.values())]
        return [rest for moment in moments for _, rest in moment.arrays()]

    def nbytes(self) -> int:
        return sum(rest.nbytes for rest in self.all())


def is_moment(name: str, value: Any, segment: nn.Parameter) -> bool:
    """One value for each element, as against a counter. Of a parameter that is one number both are alike, but for
    their names."""
    if type(value) is not Tensor or not value.is_floating_point() or value.numel() != segment.numel():
        return False
    return value.dim() > 0 or (segment.dim() == 0 and name not in COUNTERS)
