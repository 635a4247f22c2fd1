"""`mean_loss`: gradients of the mean over all items of all ranks and micro-batches, whose number nobody knows before.

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
from torch import Tensor

from zeor.comm.agree import exchange
from zeor.comm.mesh import Mesh
from zeor.step.events import Announcer
from zeor.step.extension import Extension
from zeor.step.unit import Slot


class Counts(Extension):
    """The items behind the gradients of one engine."""

    told_count = 2

    def __init__(self, mesh: Mesh, slots: Sequence[Slot], announcer: Announcer):
        self._mesh, self._slots, self._announcer = mesh, slots, announcer
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
        end = functools.partial(self._forget_note)
        self._noted, self._note_holds = count, weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _forget_note(self) -> None:
        self._noted = None

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
            elif grads.reduced and grads.scales[slot.index] is factor:
                grads.scales[slot.index] = None
                off.append((grads, slot.index, count))
            elif grads.reduced and count:
                grads.scale(slot.index, count)
        for grads, param, count in off:  # last: what is taken off is a gradient that is not reduced yet
            grads.unfold_direct(param, count)
        self._scaled.clear()

    def factor(self) -> float | None:
        return 1.0 if self.mean else None

    # ---- its end

    def told(self) -> list[int]:
        if self._announcer.playing:
            return [0, 0]
        return [int(self.mean), int(not self.mean)]

    def heard(self, largest: Sequence[int]) -> None:
        self._mixed = bool(largest[0] and largest[1])

    def end_backward(self) -> None:
        """The sums are there, on every rank: step 2 of the Note."""
        if self._mixed:
            self._mixed = False
            raise RuntimeError(
                "In one backward some ranks used zeor.mean_loss and others a plain loss; use the same on all ranks."
            )
        if not self.mean:
            return
        mine = sum(_number(count) for count in self._waiting)
        counts = [mine] if self._mesh.fake else exchange(self._mesh, mine, "exchange of the counts of zeor.mean_loss")
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


def _number(count: Any) -> int | float:
    return count.item() if isinstance(count, Tensor) else count
