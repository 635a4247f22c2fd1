"""Full parameters for a while: what `full_params`, and the way back out of sharding, are made of.

Gathers every unit, puts plain parameters into the modules, and takes them out again. What the user
sees is exact: the master's value in the parameter's own dtype. A write context sends rank 0's values to
every rank, so that a change made on one rank, or differently on each, cannot tear them apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeor.access.stream import DEFAULT_NBYTES, iter_slots
from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.step.engine import Engine
from zeor.step.handed_out import HandedOut
from zeor.step.unfilled import Unfilled
from zeor.step.unit import Slot, Unit, gather_values


def all_values(units: Sequence[Unit], unfilled: Unfilled, blank: bool = False) -> dict[Slot, Tensor]:
    """The full value of every parameter of the model, in memory of its own. With `blank`, parameters that have no
    values yet are NaN, to be written; otherwise they raise."""
    found: dict[Slot, Tensor] = {}
    if not blank:
        unfilled.check()
    for unit in units:
        for lane in unit.lanes:
            with torch.no_grad():
                values = gather_values(lane, unit.members(lane))
            for slot, value in values.items():
                found[slot] = value
                if slot in unfilled.slots and value.is_floating_point():
                    value.fill_(math.nan)
    return found


def values_for(engine: Engine, to_rank: int | None, device: Any) -> dict[Slot, Tensor]:
    """The same on one rank (None: on every), on a device of the caller's; the others pass on what the stream brings,
    and keep nothing of it."""
    keeps = to_rank in (None, engine.axes.everyone.rank)
    slots = {slot.name: slot for slot in engine.slots}
    found: dict[Slot, Tensor] = {}
    for name, value in iter_slots(engine, engine.slots, DEFAULT_NBYTES, lambda slot: slot.dtype):
        if keeps:
            found[slots[name]] = value.to(device)
        del value
    return found


def refuse_forward(model: nn.Module, rank: int) -> Any:
    """On a rank that holds nothing while another holds the model whole: the handle of a hook that says so."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f"The model was called inside zeor.full_params(to_rank={rank}) on another rank than {rank}, which alone "
            "holds it whole; call it there, or leave to_rank= out."
        )

    return model.register_forward_pre_hook(refuse, prepend=True)


def all_grads(units: Sequence[Unit], handed_out: HandedOut) -> dict[Slot, Tensor]:
    """The full gradient of every parameter that has one."""
    found: dict[Slot, Tensor] = {}
    handed_out.heed()
    for unit in units:
        for lane in unit.lanes:
            if lane.grads is None or not any(lane.grads.has):
                continue
            members = unit.members(lane)
            members[0].ready_grads()
            grads = lane.gather_grads()
            for slot in members:
                if lane.grads.has[slot.index]:
                    found[slot] = slot.wrap(grads[slot.index].view(slot.shape).to(slot.dtype, copy=True))
    return found


def take_part(units: Sequence[Unit], grads: bool) -> None:
    """The collectives of reading everything, unit by unit, keeping nothing: for a rank that only follows."""
    lanes = [(unit, lane) for unit in units for lane in unit.lanes]
    for unit, lane in lanes:
        gather_values(lane, unit.members(lane))
    for _, lane in lanes if grads else ():
        if lane.grads is not None and any(lane.grads.has):
            lane.gather_grads()


class Shown:
    """Every parameter of a model as a plain one, with its full value: the same objects over other memory."""

    def __init__(self, values: dict[Slot, Tensor], grads: dict[Slot, Tensor]):
        self.values = values
        self._flags = {slot: slot.param.requires_grad for slot in values}
        for slot, value in values.items():
            slot.unbind(value)
            slot.param.grad = grads.get(slot)
        self._sums = {slot: sum_of_bits(value) for slot, value in values.items()}

    def hide(self) -> list[str]:
        """The parameters over their lanes again; the names of those whose values have changed meanwhile. What the user
        froze or unfroze lasts."""
        flags = {slot: slot.param.requires_grad for slot in self.values}
        written = [slot.name for slot, value in self.values.items() if sum_of_bits(value) != self._sums[slot]]
        for slot in self.values:
            slot.bind_again()
            for module, attr in slot.owners:
                module._parameters[attr] = slot.param  # something else may have been put there, and was refused
        for lane in dict.fromkeys(slot.lane for slot in self.values):
            lane.dress()
            lane.changed()  # graphs that were made with the plain values are stale
        for slot, flag in flags.items():
            if flag != self._flags[slot]:
                slot.held.set_requires_grad(flag)
        return written


def check_unchanged(axis: Axis, root: nn.Module, slots: Collection[Slot]) -> None:
    """Inside a write context values may change; parameters may not be exchanged for others. Raises on every rank,
    so that none is left waiting for the others' values."""
    present = set(root.modules())
    mine = next((text for slot in slots if (text := _exchanged(slot, present))), "")
    known = {id(slot.param) for slot in slots}
    added = [f"{name!r} was added" for name, param in root.named_parameters() if id(param) not in known]
    mine = mine or next(iter(added), "")
    found = exchange(axis, mine, "check at the end of zeor.full_params")
    for rank, text in enumerate(found):
        if text:
            raise RuntimeError(
                f"Parameter {text} inside zeor.full_params (on rank {rank}); only its values may change there. "
                "To change the model itself: zeor.unshard, change it, zeor.shard."
            )


def _exchanged(slot: Slot, present: set[nn.Module]) -> str:
    for module, attr in slot.owners:
        if module not in present:
            return f"{slot.name!r} was lost with its {type(module).__name__}"
        found = module._parameters.get(attr)
        if found is None:
            return f"{slot.name!r} was removed"
        if found is not slot.param or tuple(found.shape) != slot.whole_shape:
            return f"{slot.name!r} was replaced by one of shape {tuple(found.shape)}"
    return ""


@torch.no_grad()
def spread(slots: Collection[Slot]) -> dict[Slot, Tensor]:
    """Rank 0's values of these parameters, which are shown as plain ones, on every rank; of a DTensor the first of the
    ranks that have the same part."""
    values = {}
    for slot in slots:
        values[slot] = slot.value.detach().clone()
        axes = slot.lane.axes
        axis = axes.whole if slot.placed is None else axes.everyone
        verbs.broadcast(axis, values[slot], f"broadcast of {slot.name!r}")
    return values


@torch.no_grad()
def write_back(unfilled: Unfilled, values: dict[Slot, Tensor]) -> None:
    """Values that are the same on every rank into master and compute. A parameter that had none and was not written
    still has none."""
    for slot, value in values.items():
        if slot not in unfilled.slots or not bool(value.isnan().all()):
            slot.held.store(value)


def sum_of_bits(value: Tensor) -> int:
    """Differs, as good as surely, where values differ in any bit; one fast pass."""
    raw = value.detach().contiguous().view(-1).view(torch.uint8)
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    return int(words.sum()) ^ int(raw[words.numel() * 8 :].sum())
