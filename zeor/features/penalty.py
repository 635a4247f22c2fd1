"""`penalty`: a number computed from the parameters themselves, to be added to the loss, on slices.

Each rank computes its own part of the masters; the sum over ranks is the same number, and at equal world size the same
bits, on every rank and at every stage. The gradient is final where it is made: see Note [Direct gradients] in
grads.py. It is computed with the value, so that backward needs no collective of its own.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeor.access.sharded import state_of
from zeor.comm import verbs
from zeor.features.freezing import Freezing
from zeor.features.mean_loss import Counts
from zeor.layout import Segment
from zeor.step import events
from zeor.step.backward import Backward
from zeor.step.extension import Extension
from zeor.step.grads import State
from zeor.step.lane import Lane
from zeor.step.reduces import Reducer
from zeor.step.unit import Slot, Unit

Chosen = Callable[[str], bool] | Iterable[str | nn.Parameter] | None
_Fn = tuple[Callable[..., Tensor], bool]  # the user's function, and whether it takes names
_TRIED_NUMEL = 16


class Found(NamedTuple):
    """The penalty of one parameter: its value by rank (a list of one where it is computed whole), and this rank's
    part of its gradient."""

    slot: Slot
    values: list[Tensor | None]
    grad: Tensor  # meaningless where gradients are off


def penalty(
    model: nn.Module, fn: Callable[..., Tensor], *, params: Chosen = None, named: bool = False, whole: bool = False
) -> Tensor:
    """The sum of `fn` over the model's trainable parameters: a number to add to the loss. All ranks call it alike.

        loss = criterion(model(x), y) + 1e-4 * zeor.penalty(model, lambda p: p.abs().sum())

    Its value is the same on every rank and its gradient the one of a single process, once for each backward it is in
    (it is not averaged over ranks again), with accumulation, no_sync, mean_loss and at every stage.

    fn      takes a flat tensor of some elements of one parameter, as wide as the master (fp32 or wider), and returns
            their sum of something: fn of a parameter must be the sum of fn over its pieces.
    named   fn takes (name, values, cut) instead; cut(t) gives the matching elements of a tensor t of the
            parameter's shape: lambda name, p, cut: (cut(fisher[name]) * (p - cut(start[name])).square()).sum()
    whole   fn takes whole parameters in their own shape (and cut(t) is t), for what is no sum over elements, such as
            a matrix norm. They are gathered unit by unit, and every rank computes all of them.
    params  names, parameters, or a function of the name: only these.
    """
    engine = state_of(model).engine
    engine.refuse_divided("zeor.penalty adds up what data-parallel ranks hold alone; add the term to the loss itself.")
    if not whole:
        _check_separable(fn, named)
    engine.announce(events.OTHER, "zeor.penalty")
    engine.unfilled.check()
    engine.feature(Freezing).settle()
    units = engine.units
    everything = [slot for unit in units for slot in unit.slots]
    slots = [slot for slot in _choose(everything, params) if slot.trains]
    compute = _by_slices if not whole else _by_wholes
    wants_grad = torch.is_grad_enabled()
    found = [each for lane, members in _lanes(units, slots) for each in compute(lane, members, (fn, named))]
    value = _total(everything, found)
    if not wants_grad or not found:
        return value
    anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
    penalties = engine.find(Penalties)
    if penalties is None:  # the first penalty of this model
        counts = engine.feature(Counts)
        penalties = Penalties(units, engine.reducer, engine.backward, counts, engine.plan.release)
        engine.add_extension(penalties)
    total: Tensor = _Penalty.apply(anchor, value, weakref.ref(penalties), found)
    return total


class Penalties(Extension):
    """Gradients of penalties on their way into the sums: see Note [Direct gradients] in grads.py."""

    def __init__(self, units: Sequence[Unit], reducer: Reducer, backward: Backward, counts: Counts, release: bool):
        self._units, self._reducer, self.backward = units, reducer, backward
        self._counts, self._releases = counts, release

    @torch.no_grad()
    def deliver(self, found: list[Found], factor: Tensor) -> None:
        for slot, _, grad in found:
            self._collect(slot, grad * factor)

    def _collect(self, slot: Slot, grad: Tensor) -> None:
        self.backward.begin()
        if self._releases:
            raise RuntimeError(
                f"zeor.penalty brings the gradient of {slot.name!r} a part of its own at the end of backward, and "
                "release=True uses gradients up before; leave one of them out."
            )
        if slot.trains and slot.lane.grads is not None:
            slot.lane.grads.add_direct(slot.index, grad)
            self._reducer.new.add(slot)

    def end_backward(self) -> None:
        """Counts are known by now."""
        counts = self._counts
        for unit in self._units:
            for lane in unit.lanes:
                if lane.grads is not None and lane.grads.state is State.UNREDUCED:
                    lane.grads.fold_direct([counts.of(s) for s in unit.members(lane)] if counts.mean else None)


class _Penalty(torch.autograd.Function):
    """Hands the gradients that were computed with the value over to the slices."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, penalties: weakref.ref[Penalties], found: list[Found]
    ) -> Tensor:
        ctx.penalties, ctx.found = penalties, found  # weak: graphs hold no model
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        penalties = ctx.penalties()
        if penalties is None:
            raise RuntimeError("The model that this zeor.penalty was computed of is gone; keep the model.")
        deliver = partial(penalties.deliver, ctx.found, grads[0])
        if penalties.backward.running:
            deliver()
        else:
            # What comes next may still say what kind of backward this is (mean_loss); else it is this alone.
            torch.autograd.Variable._execution_engine.queue_callback(deliver)
        return None, None, None, None


# ---- values and gradients


def _lanes(units: Sequence[Unit], slots: list[Slot]) -> Iterator[tuple[Lane, list[Slot]]]:
    """In the order of the model: the same on every rank."""
    chosen = set(slots)
    for unit in units:
        for lane in unit.lanes:
            members = [slot for slot in unit.slots if slot.lane is lane and slot in chosen]
            if members:
                yield lane, members


def _by_slices(lane: Lane, slots: list[Slot], fn: _Fn) -> Iterator[Found]:
    """Each rank its own slice. One that updates everything computes everybody's, with the same cuts: the same bits."""
    assert lane.master is not None and lane.grads is not None
    layout, grid, device = lane.layout, lane.spec.grid, lane.axes.device
    updated = grid.stretch(lane.axes.coords, lane.spec.table.cut("update"))
    for slot in slots:
        values: list[Tensor | None] = [None] * grid.count
        grads = []
        for place in updated:
            for part in layout.segments(place):
                if part.param == slot.index:
                    shift = (place - updated.start) * layout.slice_numel
                    at = Segment(part.param, part.start, part.numel, part.offset + shift)
                    leaf = torch.empty(part.numel, dtype=lane.master.dtype, device=device)
                    lane.read_master(at, leaf)
                    values[place], grad = _evaluate(slot, leaf, fn, partial(_cut, slot, part.start, part.numel))
                    grads.append(grad)
        none = torch.empty(0, dtype=lane.master.dtype, device=device)
        yield Found(slot, values, torch.cat([none, *grads]))


def _by_wholes(lane: Lane, slots: list[Slot], fn: _Fn) -> Iterator[Found]:
    flat = lane.gather_master()
    for slot in slots:
        leaf = lane.part(flat, slot.index).view(slot.shape).clone()
        value, grad = _evaluate(slot, leaf, fn, partial(_same, slot))
        yield Found(slot, [value], slot.held.cut(grad).clone() if torch.is_grad_enabled() else grad)


def _evaluate(slot: Slot, leaf: Tensor, fn: _Fn, cut: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """fn of some elements of a parameter, and its gradient where the caller wants one."""
    wants_grad = torch.is_grad_enabled()
    call, named = fn
    with torch.enable_grad():
        leaf.requires_grad_(wants_grad)
        value = call(slot.name, leaf, cut) if named else call(leaf)
        _check_number(value, slot.name)
        if not wants_grad:
            return value.detach(), leaf[:0]
        grad = torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros_like(leaf)
    return value.detach(), grad


def _cut(slot: Slot, start: int, numel: int, full: Tensor) -> Tensor:
    return _same(slot, full).reshape(-1)[start : start + numel]


def _same(slot: Slot, full: Tensor) -> Tensor:
    if tuple(full.shape) != slot.shape:
        raise ValueError(f"cut() takes a tensor of the shape of {slot.name!r}, {slot.shape}, not {tuple(full.shape)}.")
    return full.detach().to(slot.lane.axes.device)


def _total(slots: Sequence[Slot], found: list[Found]) -> Tensor:
    """Per fine slice in the order of the model, then over slices in their order."""
    lane = slots[0].lane
    masters = {each.slot.lane.master.dtype for each in found if each.slot.lane.master is not None}
    dtype = torch.float64 if torch.float64 in masters else torch.float32
    width = max((len(each.values) for each in found), default=1)
    sums = torch.zeros(width, dtype=dtype, device=lane.axes.device)
    for each in found:
        for place, value in enumerate(each.values):
            if value is not None:
                sums[place] += value
    if width > 1 and lane.spec.cut("update"):
        axes, grid = lane.axes, lane.spec.grid
        own = sums[grid.place(axes.coords)].view(1)
        sums = verbs.gather_vector(axes.everyone, own, "sum of zeor.penalty")[axes.in_order(grid)]
    return sums.view(-1).sum()


# ---- what the user gave


def _choose(slots: list[Slot], params: Chosen) -> list[Slot]:
    if params is None:
        return slots
    if callable(params):
        return [slot for slot in slots if params(slot.name)]
    by_name = {slot.name: slot for slot in slots}
    by_id = {id(slot.param): slot for slot in slots}
    chosen = set()
    for item in params:
        slot = by_name.get(item) if isinstance(item, str) else by_id.get(id(item))
        if slot is None:
            close = difflib.get_close_matches(item, by_name, n=1) if isinstance(item, str) else []
            what = repr(item) if isinstance(item, str) else f"a tensor of shape {tuple(item.shape)}"
            hint = f", did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"zeor.penalty was given {what}, which is no parameter of this model{hint}")
        chosen.add(slot)
    return [slot for slot in slots if slot in chosen]


def _check_number(value: Any, name: str) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.dim() != 0 or not value.is_floating_point():
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"The function given to zeor.penalty returned {found} for {name!r}; it must return one floating number: "
            "a sum over the elements it was given."
        )


def _check_separable(fn: Callable[..., Tensor], named: bool) -> None:
    """Tried on a few numbers, the same on every rank. What depends on the name cannot be tried without knowing it."""
    if named:
        return
    tried = torch.linspace(-1.5, 2.0, _TRIED_NUMEL, dtype=torch.float64)
    with torch.no_grad():
        parts = [fn(part) for part in (tried, tried[:5], tried[5:])]
    for part in parts:
        _check_number(part, "some numbers it was tried on")
    together, first, second = (float(part) for part in parts)
    if abs(together - first - second) > 1e-6 * (abs(first) + abs(second) + 1e-12):
        raise ValueError(
            f"The function given to zeor.penalty is no sum over elements (it gives {together:.6g} for some numbers, "
            f"and {first:.6g} and {second:.6g} for the two parts of them), so it cannot work on slices; pass "
            "whole=True to give it whole parameters."
        )
