"""`mean_loss`: a loss whose gradient is that of the mean over all items of all ranks and micro-batches.

The loss itself is one autograd function; how the gradients come by their divisor is Note [Counting] in counts.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeor.access.sharded import engine_of
from zeor.features.counts import Counts


def mean_loss(model: Any, loss_sum: Tensor, count: int | float | Tensor) -> Tensor:
    """A loss whose backward makes the gradient of the mean over ALL items: of all ranks, and of all micro-batches
    since the gradients were last dropped. No total need be known in advance, and batches may differ in size:

        loss_sum = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        zeor.mean_loss(model, loss_sum, (labels != -100).sum()).backward()

    model     the sharded model, or a `zeor.optim` optimizer.
    loss_sum  the sum of the losses of this rank's items.
    count     how many items that is (or their weight): a number, or a tensor of one; an accelerator's is waited for
              at the end of backward. A rank without items gives 0; where no rank has any, gradients are zero.

    The value is this rank's own mean, to be printed. Clipping and steps see the gradient of the joint mean. Between
    two zero_grad() either all losses are of this kind or none.
    """
    engine = engine_of(model)
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1 or not loss_sum.is_floating_point():
        found = f"a tensor of shape {tuple(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else repr(loss_sum)
        raise ValueError(f"zeor.mean_loss takes the sum of the items' losses, one floating number; it got {found}.")
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"zeor.mean_loss takes the number of items; it got a tensor of {tuple(count.shape)}.")
        count = count.detach().reshape(()).clone()
    elif isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 <= count < float("inf"):
        raise ValueError(f"zeor.mean_loss takes the number of items, at least 0; it got {count!r}.")
    return _MeanLoss.apply(loss_sum.reshape(()), engine.feature(Counts), count)  # type: ignore[no-any-return]


class _MeanLoss(torch.autograd.Function):
    """Shows this rank's mean; lets the gradient of the sum through."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, counts: Counts, count: Any) -> Tensor:
        ctx.counts, ctx.count = counts, count
        return loss_sum / _divisor(count)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        ctx.counts.note(ctx.count)
        return grads[0], None, None


def _divisor(count: Any) -> Any:
    if isinstance(count, Tensor):
        return torch.where(count > 0, count, torch.ones_like(count))
    return count if count > 0 else 1
