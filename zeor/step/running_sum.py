"""The running sum of a lane's gradients: where it is, and the factors it is only remembered to be multiplied by.

It lies on the device, as one slice or by parameter, or rests on another tier (resting.py), from where asking for it
brings it back. How gradients get here is told in grads.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeor.comm.mesh import Mesh
from zeor.layout import Segment
from zeor.step.resting import WHOLE, RestingGrads


class RunningSum:
    mesh: Mesh
    partial: Tensor | None
    _where: dict[int, Segment]

    def __init__(self, mesh: Mesh, count: int, resting: RestingGrads | None):
        self.mesh, self.resting = mesh, resting
        self._sum: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        self.has = [False] * count  # the user has a gradient for this parameter
        self.scales: list[Tensor | float | None] = [None] * count
        self.folds = 0  # how often remembered factors were multiplied in; norms from before that are stale
        self._product: tuple | None = None

    def local(self, param: int) -> Tensor:
        """This rank's part of one parameter's gradient, flat."""
        raise NotImplementedError

    @property
    def sum(self) -> Tensor | None:
        """The running sum; SLICE or FULL as the column says. On the device: asking brings it back."""
        self._recall()
        return self._sum

    @sum.setter
    def sum(self, value: Tensor | None) -> None:
        self._sum = value

    @property
    def parts(self) -> dict[int, Tensor]:
        """The running sum by parameter, flat, where gradients are adopted."""
        self._recall()
        return self._parts

    def _recall(self) -> None:
        if self.resting is not None and self.resting:
            held = self.resting.take_back(self.mesh.device)
            self._sum = held.pop(WHOLE, None)
            self._parts = held

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum: wider than the reduce dtype once gradients were accumulated."""
        if self.resting:
            return self.resting.dtype
        if self.sum is not None:
            return self.sum.dtype
        return next(iter(self.parts.values())).dtype

    def _forget(self) -> None:
        self._sum, self._parts = None, {}
        if self.resting is not None:
            self.resting.forget()

    # ---- factors

    def scale(self, param: int, factor: Tensor | float) -> None:
        """Remember a factor; only one can be remembered, so a second is multiplied into the first."""
        before = self.scales[param]
        if before is None:
            self.scales[param] = factor
            return
        # The same two factors for every parameter (unscale, then clip) stay one factor for the lane.
        if self._product is None or self._product[0] is not before or self._product[1] is not factor:
            self._product = (before, factor, before * factor)
        self.scales[param] = self._product[2]

    def apply_scales(self) -> None:
        """Multiply what was only remembered into the sum, in fp32 at least."""
        held = bool(self.resting) or self._sum is not None or bool(self._parts)
        if self.partial is not None or not held or all(s is None for s in self.scales):
            return
        self.widen()
        for param, scale in enumerate(self.scales):
            if scale is not None and self.has[param] and param in self._where:
                self.local(param).mul_(scale)
        self.scales = [None] * len(self.scales)
        self.folds += 1

    def common_scale(self) -> tuple[bool, Tensor | float | None]:
        """(True, factor) when one remembered factor, or none, holds for every gradient of this lane."""
        seen = {id(s): s for s, has in zip(self.scales, self.has) if has}
        return (True, next(iter(seen.values()))) if len(seen) == 1 else (not seen, None)

    def widen(self) -> None:
        """Make the sum fp32 or wider: it is about to be changed by more than a sum of gradients."""
        if self.sum is not None:
            self.sum = self.sum.to(wide(self.sum.dtype))
        self._parts = {param: part.to(wide(part.dtype)) for param, part in self.parts.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
