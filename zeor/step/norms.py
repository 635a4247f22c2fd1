"""Norms of gradients: of all of them at once, by one small exchange, remembered until they change.

A user may ask for the norm of everything, of a subset, or parameter by parameter: the first question
computes the answer for every gradient whose norm is not known, so one exchange serves them all. Each
rank sums only its own slice, whatever the stage, and sums over ranks are taken in rank order: the same
bits on every rank and at every stage. A remembered factor multiplies the remembered norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.axes import Axes
from zeor.step import events
from zeor.step.events import Announcer
from zeor.step.grads import GradLane
from zeor.step.handed_out import HandedOut
from zeor.step.lane import Lane
from zeor.step.unit import Slot


class Norms:
    def __init__(self, axes: Axes, announcer: Announcer, handed_out: HandedOut):
        self._axes, self._announcer, self._handed_out = axes, announcer, handed_out
        self._all: Sequence[Slot] = ()
        self._slots: list[Slot] = []  # that have gradients
        self._known: dict[float, dict[Slot, tuple[Tensor, int]]] = {}  # with GradLane.folds at that time
        self._factor: tuple[Tensor, int | None, Tensor] | None = None
        self.of_a_stage = False  # other stages of a pipeline have gradients that these norms do not know

    def watch(self, slots: Sequence[Slot]) -> None:
        self._all, self._slots = slots, [slot for slot in slots if slot.lane.grads is not None]

    def forget(self, slot: Slot) -> None:
        for known in self._known.values():
            known.pop(slot, None)

    def forget_all(self) -> None:
        self._known.clear()

    def keep_factor(self, factor: Tensor | float) -> Tensor | float:
        """A factor that is only remembered must not follow what the user does to that tensor later: one copy for
        all the gradients it scales."""
        if not isinstance(factor, Tensor):
            return factor
        version = None if factor.is_inference() else factor._version
        kept = self._factor
        if kept is None or kept[0] is not factor or version is None or kept[1] != version:
            self._factor = kept = (factor, version, factor.detach().clone())
        return kept[2]

    def of_grads(self, slots: Sequence[Slot], ord: float, scaled: bool = True) -> list[Tensor]:
        """The norm of each gradient; `scaled`: times the factor that is only remembered."""
        self._handed_out.heed()
        grads = _ready_grads(slots)
        known = self._known.setdefault(ord, {})
        if _stale(slots, known):
            held = [slot for slot in self._slots if slot.lane.grads.has[slot.index]]  # type: ignore[union-attr]
            stale = _stale(held, known)
            self._announcer.announce(events.NORM, lambda: {"slots": self._places(stale), "ord": ord})
            self.compute(stale, ord)
        norms = [known[slot][0] for slot in slots]
        return norms if not scaled or ord == 0 else times_factors(grads, slots, norms)

    def compute(self, slots: Sequence[Slot], ord: float, scaled: bool = False) -> Tensor:
        """Find these norms and remember them; a small exchange. `scaled`, of the largest elements: what they are on any
        rank times that rank's factors is returned."""
        folds = _folds(slots)
        known = self._known.setdefault(ord, {})
        found = self._compute(slots, ord, scaled)
        known.update({slot: (norm, folds[slot.lane]) for slot, norm in zip(slots, found.unbind())})
        return found[len(slots) :]

    def known_order(self, slots: Sequence[Slot]) -> float | None:
        """An order above 0 of which the norms of all these gradients are known, so that asking costs nothing."""
        for ord, known in self._known.items():
            if ord > 0 and not _stale(slots, known):
                return ord
        return None

    def total(self, slots: Sequence[Slot], ord: float) -> Tensor:
        """The norm over all these gradients together, as stock clip_grad_norm_ computes it."""
        if not slots:
            return torch.zeros((), device=self._axes.device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(self.of_grads(slots, ord)), ord)
        return norm

    def not_finite_here(self, slots: Sequence[Slot]) -> int | None:
        """Which gradient is the first that is not finite, as far as this rank sees: it has its own part of each, and
        its own remembered factors, which may be others elsewhere. Those after the last are the same ones once more,
        times these factors. No collective."""
        ord = self.known_order(slots)
        norms = self._own(slots, 2.0)[0] if ord is None else self.of_grads(slots, ord, scaled=False)
        if first_not_finite(beside_scaled(slots, norms)) is None:
            return None
        return first_not_finite(beside_scaled(slots, self._own(slots, math.inf)[0]))  # a norm may have overflowed

    @torch.no_grad()
    def _own(self, slots: Sequence[Slot], ord: float) -> tuple[list[Tensor], Tensor]:
        """The norms of this rank's parts, and what a rank without a part says: nothing to a sum or a maximum, nothing
        to a minimum."""
        grads = _ready_grads(slots)
        wide = torch.float64 if torch.float64 in {lane.dtype for lane in set(grads)} else torch.float32
        none = torch.full((), math.inf if ord < 0 else 0.0, dtype=wide, device=self._axes.device)
        return own_norms([(g, slot.index) for slot, g in zip(slots, grads)], ord, none), none

    @torch.no_grad()
    def _compute(self, slots: Sequence[Slot], ord: float, scaled: bool) -> Tensor:
        found, none = self._own(slots, ord)
        # The same elements on several ranks count once.
        found = [norm if slot.counts_on(slot.lane.axes.tensor_coords) else none for norm, slot in zip(found, slots)]
        local = beside_scaled(slots, found) if scaled else torch.stack(found)
        whole = self._axes.whole
        if whole.size == 1:
            return local
        if math.isinf(ord) or ord == 0:
            rows = verbs.gather_vector(whole, local, "norms of the gradients")
            return rows.sum(0) if ord == 0 else rows.amax(0) if ord > 0 else rows.amin(0)
        rows = verbs.gather_vector(whole, local.pow(ord), "norms of the gradients")
        return self._in_order(rows, slots).sum(0).pow(1.0 / ord)

    @staticmethod
    def _in_order(rows: Tensor, slots: Sequence[Slot]) -> Tensor:
        """A row for each part of the gradients, in an order that is the same whoever holds them."""
        orders = {slot.lane.axes: slot.lane.axes.whole_in_order(slot.lane.spec.grid) for slot in slots}
        if len(orders) == 1:
            return rows[next(iter(orders.values()))]
        by_slot = torch.tensor([orders[slot.lane.axes] for slot in slots], device=rows.device)
        return rows.gather(0, by_slot.T)

    def _places(self, slots: Sequence[Slot]) -> list[int]:
        places = {slot: place for place, slot in enumerate(self._all)}
        return [places[slot] for slot in slots]

    def check(self, slots: Sequence[Slot], found_inf: Tensor) -> None:
        """GradScaler: every rank sees the same norms, so all skip the step or none does."""
        if self.of_a_stage:
            raise RuntimeError(
                "GradScaler would leave a step out on this stage of the pipeline alone, and go on with another scale "
                "than the other stages; train in bf16, which needs no scaler."
            )
        self._handed_out.heed()
        told = {"slots": self._places(slots), "ord": math.inf, "scaled": True}
        self._announcer.announce(events.NORM, lambda: told)
        largest = self.compute(slots, math.inf, scaled=True)
        bad = (~torch.isfinite(largest)).any().to(found_inf)
        found_inf.copy_(torch.maximum(found_inf, bad))


def times_factors(grads: Sequence[GradLane], slots: Sequence[Slot], norms: Sequence[Tensor]) -> list[Tensor]:
    """Norms of gradients as they will be used: times the factors that this rank only remembers."""
    scales: list[Any] = [lane.scales[slot.index] for lane, slot in zip(grads, slots)]
    return [norm if scale is None else norm * abs(scale) for norm, scale in zip(norms, scales)]


def beside_scaled(slots: Sequence[Slot], norms: Sequence[Tensor]) -> Tensor:
    """These norms, and behind them the same times factors."""
    return torch.stack([*norms, *times_factors(_ready_grads(slots), slots, norms)])


def first_not_finite(norms: Tensor) -> int | None:
    bad = (~torch.isfinite(norms)).nonzero()
    return int(bad[0]) if len(bad) else None


def own_norms(grads: Sequence[tuple[GradLane, int]], ord: float, none: Tensor) -> list[Tensor]:
    """The norm of this rank's part of each gradient; `none` where it has no part. What rests elsewhere is not brought
    back where its norm is known."""
    known = [g.resting.norm(param, ord) if g.resting else None for g, param in grads]
    parts = [none.new_empty(0) if norm is not None else g.own(param) for norm, (g, param) in zip(known, grads)]
    held = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(held, ord, dtype=none.dtype) if held else ())
    return [
        norm.to(none.dtype) if norm is not None else next(found) if part.numel() else none
        for norm, part in zip(known, parts)
    ]


def _ready_grads(slots: Sequence[Slot]) -> list[GradLane]:
    """Of each; a lane is asked once."""
    found: dict[Lane, GradLane] = {}
    for slot in slots:
        if slot.lane not in found:
            found[slot.lane] = slot.ready_grads()
    return [found[slot.lane] for slot in slots]


def _folds(slots: Sequence[Slot]) -> dict[Lane, int]:
    return {lane: lane.grads.folds for lane in {slot.lane for slot in slots} if lane.grads is not None}


def _stale(slots: Sequence[Slot], known: dict[Slot, tuple[Tensor, int]]) -> list[Slot]:
    """Those whose norm is not known, or is from before a remembered factor was multiplied in."""
    folds = _folds(slots)
    return [slot for slot in slots if slot not in known or known[slot][1] != folds[slot.lane]]
