"""What a step does about gradients that hold inf or nan: warn, raise, skip, or nothing.

All ranks come to the same answer, and the first parameter affected is named. Knows gradients and their norms;
the optimizer asks it once per step, before anything is updated. (GradScaler's own check: `check_and_unscale` in
step/handle.py.)

Note [What finding out costs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Where the loop has computed norms (clipping), they are the same on every rank and are looked at: nothing is
   computed or sent.
2. Else "raise" and "skip" compute norms: one pass over this rank's slice and one small exchange, and the host
   waits for the answer.
3. Else "warn" looks at this rank's own slice only, on a host by its sum (a sum over inf or nan is never finite), and
   what it finds travels with the exchange that ends the next backward. No message is added, and on an accelerator
   the host waits for nothing: the answer is picked up when it has arrived. The warning comes one step late.
A sum or a norm may overflow where no gradient does, so what looks bad is confirmed element by element.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeor.comm.axes import Axes
from zeor.memory.device import Arriving
from zeor.step.extension import NEWS, Extension
from zeor.step.norms import Norms, own_norms
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
        """By norms, which are the same on every rank; confirmed by the largest element."""
        bad = None
        for ord in dict.fromkeys((self._norms.known_order(slots) or 2.0, math.inf)):
            bad = _first_nonfinite(torch.stack(self._norms.of_grads(slots, ord)))
            if bad is None:
                return None
        # Where clipping multiplied everything by nan, the culprit is the one that was bad before.
        culprit = _first_nonfinite(torch.stack(self._norms.of_grads(slots, math.inf, scaled=False)))
        assert bad is not None
        return slots[bad if culprit is None else culprit]

    # ---- warn

    def _look(self, slots: list[Slot]) -> None:
        self._pick_up()
        ord = self._norms.known_order(slots)
        if ord is not None:
            norms, agreed = torch.stack(self._norms.of_grads(slots, ord, scaled=False)), True
        elif self._axes.device.type == "cpu":
            bad = _first_bad_here(slots)
            if bad is not None and self.travels:
                self._found = (self._step, bad)
                self._know()
            elif bad is not None:
                self._warn(self._step, bad)
            return
        else:
            norms, agreed = _own_norms(slots), not self.travels
        self._arriving = (self._step, slots, agreed, Arriving(norms))
        self._pick_up()
        self._know()

    def _know(self) -> None:
        """Whether there is anything to tell."""
        self.tells = None if self._found or self._arriving else [0] * self.told_count

    def _pick_up(self) -> None:
        """What was found at an earlier step, if the host knows by now."""
        if self._arriving is None or not self._arriving[3].is_here():
            return
        step, slots, agreed, arriving = self._arriving
        self._arriving = None
        bad = _first_nonfinite(arriving.value)
        if bad is None:
            return
        if agreed:
            self._warn(step, slots[bad])
        elif self._found is None:
            self._found = (step, slots[bad])

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


def _first_nonfinite(norms: Tensor) -> int | None:
    bad = (~torch.isfinite(norms)).nonzero()
    return int(bad[0]) if len(bad) else None


def _own_norms(slots: Sequence[Slot]) -> Tensor:
    """The largest element of this rank's part of each gradient (of what rests elsewhere the norm of order 2); zero
    where it holds none."""
    grads = [(slot.lane.grads, slot.index) for slot in slots if slot.lane.grads is not None]
    wide = torch.float64 if any(each.dtype == torch.float64 for each, _ in grads) else torch.float32
    none = torch.zeros((), device=slots[0].lane.axes.device, dtype=wide)
    rests = [bool(each.resting) for each, _ in grads]
    away = iter(own_norms([each for each, rested in zip(grads, rests) if rested], 2.0, none))
    here = iter(own_norms([each for each, rested in zip(grads, rests) if not rested], math.inf, none))
    return torch.stack([next(away) if rested else next(here) for rested in rests])


def _first_bad_here(slots: Sequence[Slot]) -> Slot | None:
    """On a host: by sums, since norms of infinite order take ten times as long there."""
    grads = {slot.lane: slot.lane.grads for slot in slots if slot.lane.grads is not None}
    suspect = {lane for lane, each in grads.items() if not all(math.isfinite(part.sum()) for part in each.own_parts())}
    for slot in slots:
        if slot.lane in suspect and not torch.isfinite(grads[slot.lane].own(slot.index)).all():
            return slot
    return None
