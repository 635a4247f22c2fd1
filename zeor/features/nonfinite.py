"""What a step does about gradients that hold inf or nan: warn, raise, skip, or nothing.

All ranks come to the same answer, and the first parameter affected is named. Knows gradients and their norms;
the optimizer asks it once per step, before anything is updated. (GradScaler's own check: `check_and_unscale` in
step/handle.py.)

Note [What finding out costs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. "raise" and "skip" end in one small agreement per step: each rank tells which gradient is the first that is not
   finite, as far as it sees. Where the loop has computed norms (clipping) it looks at those, which costs no pass; else
   it computes norms of its own slice. The host waits for the answer.
2. "warn" looks at the norms that the loop has computed, else at this rank's own slice, on a host by its sum (a sum over
   inf or nan is never finite). What norms show all ranks see alike; what one rank finds travels with the exchange that
   ends the next backward, and the warning comes one step late. No message is added, and on an accelerator the host
   waits for nothing: the answer is picked up when it has arrived.
A factor by which the user multiplied gradients is only remembered until they are used. It may be inf, and on one rank
alone. So each rank looks at what it will use, times its own factors, and no rank decides by that before all know.
A sum or a norm may overflow where no gradient does, so what looks bad is confirmed element by element.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.axes import Axes
from zeor.memory.device import Arriving
from zeor.step.extension import NEWS, Extension
from zeor.step.grads import GradLane
from zeor.step.norms import Norms, beside_scaled, first_not_finite, own_norms
from zeor.step.unit import Slot

log = logging.getLogger("zeor")


class NonFinite(Extension):
    """One engine's policy."""

    riding = NEWS

    def __init__(self, axes: Axes, norms: Norms, slots: Sequence[Slot], how: str):
        self._axes, self._norms, self._how = axes, norms, how
        self._slots = list(slots)
        self.travels = axes.everyone.size > 1  # what one rank finds is told to the others at the end of a backward
        self._step = 0
        self._times = 0  # steps whose gradients were not finite
        self._arriving: tuple[int, list[Slot], bool, Arriving] | None = None
        self._found: tuple[int, Slot] | None = None  # on this rank, to be told
        self._know()

    def go_on(self, before: NonFinite) -> None:
        """In the place of another one of the same model: what that has found is still to be told."""
        self._step, self._times = before._step, before._times
        if self._how == before._how == "warn":
            of = {slot.name: slot for slot in self._slots}
            if before._found is not None:
                step, bad = before._found
                self._found = step, of[bad.name]
            if before._arriving is not None:
                step, slots, agreed, arriving = before._arriving
                self._arriving = step, [of[slot.name] for slot in slots], agreed, arriving
            self._know()

    def forbids(self, slots: list[Slot]) -> bool:
        """Called at each step with the parameters whose gradients it uses. True: it must not be taken. RuntimeError, on
        every rank, where that is what was asked for."""
        self._step += 1
        if self._how == "ignore" or not slots:
            return False
        if self._how == "warn":
            self._look(slots)
            return False
        bad = self._first_bad(slots)
        if bad is None:
            return False
        if self._how == "raise":
            raise RuntimeError(
                f"Step {self._step}: the gradient of parameter {bad.name!r} is not finite, so nothing was updated; "
                "look at the loss and the data of this step, or pass such steps by with nonfinite='skip'."
            )
        self._say("Step %d was skipped on every rank: the gradient of parameter %r is not finite", self._step, bad)
        return True

    def _first_bad(self, slots: list[Slot]) -> Slot | None:
        """The same on every rank. Where clipping multiplied everything by nan, the one that was bad before."""
        count = len(slots)
        mine = self._norms.not_finite_here(slots)
        told = torch.tensor([0 if mine is None else 2 * count - mine])  # so that the largest is the first
        verbs.agree_max(self._axes.whole, told, "agreement on gradients that are not finite")
        return slots[(2 * count - int(told)) % count] if told else None

    # ---- warn

    def _look(self, slots: list[Slot]) -> None:
        self._pick_up()
        ord = self._norms.known_order(slots)
        if ord is not None:
            norms = self._norms.of_grads(slots, ord, scaled=False)
        elif self._axes.device.type == "cpu":
            bad = _first_bad_here(slots)
            if bad is not None and self.travels:
                self._found = (self._step, bad)
                self._know()
            elif bad is not None:
                self._warn(self._step, bad)
            return
        else:
            norms = _own_norms(slots)
        self._arriving = (self._step, slots, ord is not None, Arriving(beside_scaled(slots, norms)))
        self._pick_up()
        self._know()

    def _know(self) -> None:
        """Whether there is anything to tell."""
        self.tells = None if self._found or self._arriving else [0] * self.told_count

    def _pick_up(self) -> None:
        """What was found at an earlier step, if the host knows by now."""
        if self._arriving is None or not self._arriving[3].is_here():
            return
        step, slots, all_see, arriving = self._arriving
        self._arriving = None
        bad = first_not_finite(arriving.value)
        if bad is None:
            return
        slot = slots[bad % len(slots)]
        if not self.travels or (all_see and bad < len(slots)):  # factors may be this rank's own
            self._warn(step, slot)
        elif self._found is None:
            self._found = (step, slot)

    @property
    def told_count(self) -> int:
        return 2 if self._how == "warn" and self.travels else 0  # the same for as long as ranks exchange

    def told(self) -> list[int]:
        """The first parameter this rank found, counted from the end so that the largest is the first, and the step."""
        if not self.told_count:
            return []
        self._pick_up()
        found, self._found = self._found, None
        self._know()
        if found is None:
            return [0, 0]
        return [len(self._slots) - self._slots.index(found[1]), found[0]]

    def heard(self, largest: Sequence[int]) -> None:
        if largest and largest[0]:
            self._warn(largest[1], self._slots[len(self._slots) - largest[0]])

    def _warn(self, step: int, slot: Slot) -> None:
        self._say(
            "Step %d: the gradient of parameter %r is not finite and went into the weights; zeor.shard(..., "
            "nonfinite='skip') or 'raise' keeps such gradients out",
            step, slot,
        )  # fmt: skip

    def _say(self, text: str, step: int, slot: Slot) -> None:
        """On rank 0, or by whoever found it; ever more rarely: the first time, the tenth, the hundredth."""
        self._times += 1
        if (self._axes.everyone.rank == 0 or not self.travels) and math.log10(self._times).is_integer():
            log.warning(f"{text} (%d such step(s) so far).", step, slot.name, self._times)


def _own_norms(slots: Sequence[Slot]) -> list[Tensor]:
    """The largest element of this rank's part of each gradient (of what rests elsewhere the norm of order 2); zero
    where it holds none."""
    grads = [(slot.lane.grads, slot.index) for slot in slots if slot.lane.grads is not None]
    wide = torch.float64 if any(each.dtype == torch.float64 for each, _ in grads) else torch.float32
    none = torch.zeros((), device=slots[0].lane.axes.device, dtype=wide)
    rests = [bool(each.resting) for each, _ in grads]
    away = iter(own_norms([each for each, rested in zip(grads, rests) if rested], 2.0, none))
    here = iter(own_norms([each for each, rested in zip(grads, rests) if not rested], math.inf, none))
    return [next(away) if rested else next(here) for rested in rests]


def _first_bad_here(slots: Sequence[Slot]) -> Slot | None:
    """On a host: by sums, since norms of infinite order take ten times as long there."""
    grads = {slot.lane: slot.lane.grads for slot in slots if slot.lane.grads is not None}
    suspect = {lane for lane, each in grads.items() if _is_suspect(each)}
    for slot in slots:
        if slot.lane in suspect:
            own, scale = grads[slot.lane].own(slot.index), grads[slot.lane].scales[slot.index]
            if not torch.isfinite(own if scale is None else own * scale).all():
                return slot
    return None


def _is_suspect(grads: GradLane) -> bool:
    if not all(math.isfinite(part.sum()) for part in grads.own_parts()):
        return True
    return any(scale is not None and not abs(float(scale)) <= 1 for scale in grads.scales)  # it may make inf
