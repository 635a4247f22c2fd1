"""`mean_loss`: gradients of the mean over all items of all ranks and micro-batches, whose number nobody knows before.

The loss itself is one autograd function; how the gradients come by their divisor:

Note [Counting]
~~~~~~~~~~~~~~~
1. A backward of `mean_loss` brings gradients of the SUM of the items' losses; ranks add theirs up without dividing.
2. At the end of each backward that reduces, the ranks add up how many items there were. The gradients carry
   1 / total as a remembered factor (see grads.py), so norms, clipping and the step see the true mean.
3. The next backward that adds to them takes the factor off first, and puts the new one on at its end. Where the user
   has multiplied in the meantime, or the factor was folded into the sum, the total is multiplied back.
4. A gradient that was dropped counts anew from there; when none is left, everything does.
Whether a backward is one of `mean_loss` travels with the exchange that ends it: who does not use it pays nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeor.access.sharded import engine_of, stage_of
from zeor.comm.agree import numbers_of
from zeor.comm.axes import Axes
from zeor.step.events import Announcer
from zeor.step.extension import COMPARED, Extension
from zeor.step.grads import USABLE
from zeor.step.order import NOTHING
from zeor.step.unit import Slot


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
    if isinstance(model, nn.Module) and stage_of(model)[0].pipeline is not None:
        raise ValueError(
            "zeor.mean_loss was given a stage of a pipeline, and the other stages would not know the count; make the "
            "schedule with scale_grads=False and a loss_fn that divides its sum by the items of the whole step."
        )
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
    mean: Tensor = _MeanLoss.apply(loss_sum.reshape(()), engine.feature(Counts), count)
    return mean


class _MeanLoss(torch.autograd.Function):
    """Shows this rank's mean; lets the gradient of the sum through."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, counts: Counts, count: Any) -> Tensor:
        ctx.counts, ctx.count = counts, count
        divisor = torch.where(count > 0, count, torch.ones_like(count)) if isinstance(count, Tensor) else count or 1
        mean: Tensor = loss_sum / divisor
        return mean

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        ctx.counts.note(ctx.count)
        return grads[0], None, None


# ---- counting


class Counts(Extension):
    """The items behind the gradients of one engine."""

    riding, told_count = COMPARED, 2

    def __init__(self, axes: Axes, slots: Sequence[Slot], announcer: Announcer):
        self._axes, self._slots, self._announcer = axes, slots, announcer
        self.mean = False  # the gradients the user has are those of a mean_loss
        self._noted: Any = None  # the items of the backward that has begun; None: its loss is a plain one
        self.reset()

    def reset(self) -> None:
        """No gradient is left."""
        self._waiting: list[Any] = []  # items of this rank whose number the others do not know yet
        self._total = 0.0
        self._since: dict[Slot, float] = {}  # the total when a gradient was dropped alone
        self._scaled: dict[Slot, tuple[float, float]] = {}  # (the factor put on, the count it stands for)
        self._mixed = False

    # ---- a backward

    def note(self, count: Any) -> None:
        """The backward of a mean_loss begins."""
        if self.begins_mean:
            raise RuntimeError(
                "One backward went through two zeor.mean_loss of the same model; add their sums and their counts and "
                "make one of them."
            )
        # Autograd holds the callback for as long as this backward runs, and drops it where it raises.
        end = functools.partial(setattr, self, "_noted", None)
        self._noted, self._note_holds = count, weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @property
    def begins_mean(self) -> bool:
        return self._noted is not None and self._note_holds() is not None

    def says(self) -> dict[str, Any]:
        return {"mean": self.begins_mean}

    def begin_backward(self, said: dict[str, Any]) -> None:
        mean: bool = said["mean"]
        if not mean and not self.mean:
            return
        held = {slot for slot in self._slots if slot.param.grad is not None}
        if held and mean != self.mean:
            now, before = ("zeor.mean_loss", "a plain loss") if mean else ("a plain loss", "zeor.mean_loss")
            raise RuntimeError(
                f"A backward of {now} would add to gradients of {before}, which are divided by something else; use "
                "one of the two for all micro-batches between two zero_grad()."
            )
        if not held:
            self.reset()
        self.mean = mean
        if mean:
            self._take_off(held)
            self._waiting.append(self._noted if self.begins_mean else 0)

    def _take_off(self, held: set[Slot]) -> None:
        """Back to sums: step 3 of the Note."""
        off = []
        for slot, (factor, count) in self._scaled.items():
            grads = slot.lane.grads
            if slot not in held or grads is None:
                self._since[slot] = self._total
            elif grads.state in USABLE and grads.unscale(slot.index, factor):
                off.append((grads, slot.index, count))
            elif grads.state in USABLE and count:
                grads.scale(slot.index, count)
        for grads, param, count in off:  # last: what is taken off is a gradient that is not reduced yet
            grads.unfold_direct(param, count)
        self._scaled.clear()

    def factor(self) -> float | None:
        return 1.0 if self.mean else None

    # ---- its end

    def told(self) -> list[int]:
        if self._announcer.playing:
            return [NOTHING, NOTHING]
        return [int(self.mean), -int(self.mean)]

    def heard(self, largest: Sequence[int]) -> None:
        self._mixed = largest[0] != -largest[1]

    def end_backward(self) -> None:
        """The sums are there, on every rank: step 2 of the Note."""
        if self._mixed:
            self._mixed = False
            raise RuntimeError(
                "In one backward some ranks used zeor.mean_loss and others a plain loss; use the same on all ranks."
            )
        if not self.mean:
            return
        mine = sum(count.item() if isinstance(count, Tensor) else count for count in self._waiting)
        counts = numbers_of(self._axes.everyone, mine, "exchange of the counts of zeor.mean_loss")
        self._waiting.clear()
        self._total += float(sum(counts))
        factors: dict[float, float] = {}  # one object for each: see GradLane.common_scale
        for slot in self._slots:
            grads = slot.lane.grads
            if grads is not None and grads.has[slot.index]:
                count = self._total - self._since.get(slot, 0.0)
                factor = factors.setdefault(count, 1.0 / count if count else 0.0)
                grads.scale(slot.index, factor)
                self._scaled[slot] = (factor, count)

    def of(self, slot: Slot) -> float:
        """How many items a gradient is of: what it is divided by."""
        return self._scaled[slot][1] if slot in self._scaled else 1.0

    def abandon(self) -> None:
        self.reset()

    def edited(self, slot: Slot, verb: str) -> None:
        """A gradient that is zero begins anew."""
        if verb == "zero_":
            self._since[slot] = self._total
