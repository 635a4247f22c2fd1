"""Gradients at rest on another tier, between backward and step.

Put there unit by unit inside backward, beside the computation, so that the device never holds them all. Their norms
of order 2, of which clipping and the watch for non-finite values live, are computed on the way; anything else that is
asked of them brings a lane's gradients back. An update reads them from where they rest, chunk by chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeor.layout import LaneLayout, Segment
from zeor.tiers.rest import LaneRest, Rest
from zeor.tiers.streams import StreamEvent, current_event

WHOLE = -1  # in the place of a parameter: this rank's whole slice


class RestingGrads:
    """Of one lane; true while something rests here."""

    def __init__(self, rest: LaneRest):
        self._rest = rest
        self._memory: dict[torch.dtype, Rest] = {}  # kept from step to step
        self._at: dict[int, tuple[int, int]] = {}  # parameter or WHOLE -> elements of the memory
        self._norms: dict[int, Tensor] = {}
        self.spilled = StreamEvent()
        self.dtype = torch.float32

    def __bool__(self) -> bool:
        return bool(self._at)

    def put(self, held: dict[int, Tensor], own: dict[int, Tensor], layout: LaneLayout) -> None:
        """`held`: what is to rest. `own`: this rank's part of each parameter, of which norms are taken."""
        self.dtype = next(iter(held.values())).dtype
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        parts = [param for param, part in own.items() if part.numel()]
        norms = torch._foreach_norm([own[param] for param in parts], 2.0, dtype=wide) if parts else ()
        self._norms = dict(zip(parts, norms))
        if self.dtype not in self._memory:
            numel = max(tensor.numel() for tensor in held.values()) if WHOLE in held else layout.slice_numel
            self._memory[self.dtype] = self._rest.make("grads", numel, self.dtype, f"grads-{self.dtype.itemsize}")
        memory, stream = self._memory[self.dtype].tensor, self._rest.store.spills
        current_event(next(iter(held.values())).device).hold(stream)  # the sum -> its copy
        with stream():
            for param, tensor in held.items():
                begin = 0 if param == WHOLE else layout.offsets[param]
                self._at[param] = (begin, begin + tensor.numel())
                memory[begin : begin + tensor.numel()].copy_(tensor, non_blocking=True)
            self.spilled = stream.record_event()
        leaving = self._rest.store.leaving
        leaving.add(list(held.values()), self.spilled)
        leaving.let_go(but=1)  # a copy has as long as the next unit's backward takes

    def rest(self, segment: Segment, by_parameter: bool) -> tuple[Rest, int]:
        """See GradLane.at_rest."""
        begin, _ = self._at[segment.param if by_parameter else WHOLE]
        return self._memory[self.dtype], segment.offset - begin if by_parameter else 0

    def norm(self, param: int, ord: float) -> Tensor | None:
        """This rank's part of one gradient's norm, where it is known."""
        return self._norms.get(param) if self and ord == 2.0 else None

    def take_back(self, device: torch.device) -> dict[int, Tensor]:
        self.spilled.wait()
        memory = self._memory[self.dtype].tensor
        held = {param: memory[begin:end].to(device, copy=True) for param, (begin, end) in self._at.items()}
        self.forget()
        return held

    def forget(self) -> None:
        self._at, self._norms = {}, {}
