"""Low rank: the arithmetic of PowerSGD for one matrix, and how much of a hop of a reduce it leaves to be sent.

    P = M Q      the sum of it over ranks, made orthonormal: P^      Q = M^T P^      what is sent of M: P^ Q^T

One step of a power iteration, which goes on from the last Q. This file knows flat tensors; how P and Q travel is in
comm/lowrank.py, which matrices there are in layout/matrices.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeor.memory.noise import Noise

_DEPENDENT = 1e-3  # of a column: what is left of it is rounding, not a direction of its own
_LEAST = 1e-30
_EXPONENT = 0x7F800000  # its bits in fp32; alone they are a power of two


@dataclass(frozen=True)
class LowRank:
    """How one axis of a lane's reduces travels. rank: of the factors. sends: fp32 elements that a reduce of all
    ranks' parts and a gather of the sums are of, both factors together. keeps: elements of Q at rest."""

    rank: int
    sends: int = 0
    keeps: int = 0

    @property
    def message_nbytes(self) -> int:
        """What a rank sends is (W - 1) / W of it: each sum is reduced, and gathered."""
        return 2 * 4 * self.sends


def begun(q: Tensor, noise: Noise) -> Tensor:
    """Q's columns at length 1. Those that say nothing (at first, of a gradient of zeros or of less rank, or of one that
    was not finite) begin anew, by chance. The same bits on every rank."""
    fresh = noise.fractions(q.numel(), q.device).view(q.shape).sub_(0.5)
    q = q / _powers(q)
    length = q.norm(dim=0)
    usable = (length > _LEAST) & length.isfinite()
    chosen = torch.where(usable, q, fresh)
    return chosen.div_(torch.where(usable, length, fresh.norm(dim=0)))


def make_orthonormal(p: Tensor) -> None:
    """P's columns, in place, one after another and each twice against those before it (Gram-Schmidt). A column that
    depends on those before becomes zeros: there is nothing of the matrix along it."""
    p.div_(_powers(p))
    for column in range(p.shape[1]):
        here, before = p[:, column], p[:, :column]
        length = here.norm()
        for _ in range(2 if column else 0):
            here.sub_(before @ (before.T @ here))
        left = here.norm()
        counts = (left > _DEPENDENT * length) & (left > _LEAST)
        here.mul_(torch.where(counts | left.isnan(), left.reciprocal(), 0.0))


def _powers(columns: Tensor) -> Tensor:
    """For each column the power of two that brings its largest element below 2, and no less than 1: squares of numbers
    above 1e19 are more than fp32 holds. Dividing by it changes no bit of a direction."""
    largest = columns.abs().amax(dim=0)
    powers = (largest.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=1.0)
    return torch.where(largest.isfinite(), powers, 1.0)
