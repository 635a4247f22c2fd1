"""Gradients that need no reduce: a penalty's, which is computed on slices.

Note [Direct gradients]
~~~~~~~~~~~~~~~~~~~~~~~
What is computed on a slice is final where it is made: it is neither reduced nor divided by the world. It waits here
until the backward that reduces is over, and is added to the sum then, in one order whatever was reduced when. Where the
sum is one over items that carries 1 / count as a remembered factor (counts.py) it is added `count` times, and taken off
before the factor changes. Knows one lane's gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeor.memory.roles import Residency

if TYPE_CHECKING:
    from zeor.runtime.grads import GradLane


class Direct:
    def __init__(self) -> None:
        self._waiting: dict[int, Tensor] = {}  # not in the sum yet, by parameter
        self._folded: dict[int, Tensor] = {}  # in the sum, and to be taken off again

    def __bool__(self) -> bool:
        """Something is not in the sum yet."""
        return bool(self._waiting)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._waiting.values()
        yield from self._folded.values()

    def collect(self, param: int, grad: Tensor) -> None:
        """Of the size of this rank's part of the parameter, or empty as that is."""
        held = self._waiting.get(param)
        self._waiting[param] = grad if held is None else held.add_(grad)

    def fold(self, grads: GradLane, counts: Sequence[float] | None) -> None:
        """Into the sum. `counts`: by parameter, where the sum is one over items."""
        if not self._waiting:
            return
        if grads.sum is None and not grads.adopts:
            numel = grads.layout.numel if grads.column.grad is Residency.FULL else grads.layout.slice_numel
            wide = torch.promote_types(grads.reduce_dtype, torch.float32)
            grads.sum = torch.zeros(numel, dtype=wide, device=grads.mesh.device)
        grads.widen()
        for param, grad in self._waiting.items():
            if grads.adopts and param not in grads.parts:
                grads.parts[param] = torch.zeros_like(grad)
            if counts is None:
                grads.local(param).add_(grad)
            else:
                grads.local(param).add_(grad, alpha=counts[param])
                self._folded[param] = grad
        self._waiting = {}

    def unfold(self, grads: GradLane, param: int, count: float) -> None:
        """The factor 1 / `count` of this gradient was taken off."""
        grad = self._folded.pop(param, None)
        if grad is not None:
            grads.local(param).sub_(grad, alpha=count)
            self.collect(param, grad)

    def drop(self, param: int) -> None:
        self._waiting.pop(param, None)
        self._folded.pop(param, None)
