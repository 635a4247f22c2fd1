"""Full parameters for a while: what `full_params`, and the way back out of sharding, are made of.

Gathers every unit, puts plain parameters into the modules, and takes them out again. What the user
sees is exact: the master's value in the parameter's own dtype. A write context sends rank 0's values to
every rank, so that a change made on one rank, or differently on each, cannot tear them apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.runtime.lane import Lane
from zeor.runtime.unit import Slot

if TYPE_CHECKING:
    from zeor.runtime.engine import Engine


def gather_values(engine: Engine, lane: Lane, slots: list[Slot]) -> dict[Slot, Tensor]:
    """The full values of a lane's parameters, in memory of their own, each in its own dtype."""
    lane.settle()
    lane.keep_writes()
    source = lane.mine.to(engine.mesh.device)
    whole = lane.full.flat if not lane.frees else None
    if lane.master is not None and (lane.lags or any(slot.dtype != lane.key.compute_dtype for slot in slots)):
        # Compute is only a cast of what the user gave: the master is exact.
        lane.master.fetch()
        source = lane.master.values
        whole = source if lane.updates_whole or engine.mesh.world == 1 else None
    if whole is None:
        whole = torch.empty(lane.layout.numel, dtype=source.dtype, device=source.device)
        verbs.gather(engine.mesh, whole, source, "gather of full parameters").wait()
    values = {s: lane.part(whole, s.index).view(s.shape).to(s.dtype, copy=True) for s in slots}
    if lane.master is not None:
        lane.master.spill()
    return values


def all_values(engine: Engine, blank: bool = False) -> dict[Slot, Tensor]:
    """The full value of every parameter of the model, in memory of its own. With `blank`, parameters that have no
    values yet are NaN, to be written; otherwise they raise."""
    found: dict[Slot, Tensor] = {}
    if not blank:
        engine.unfilled.check()
    for unit in engine.units:
        for lane in unit.lanes:
            members = [slot for slot in unit.slots if slot.lane is lane]
            with torch.no_grad():
                values = gather_values(engine, lane, members)
            for slot, value in values.items():
                found[slot] = value
                if slot in engine.unfilled.slots and value.is_floating_point():
                    value.fill_(math.nan)
    return found


def all_grads(engine: Engine) -> dict[Slot, Tensor]:
    """The full gradient of every parameter that has one."""
    found: dict[Slot, Tensor] = {}
    for unit in engine.units:
        for lane in unit.lanes:
            if lane.grads is None or not any(lane.grads.has):
                continue
            members = [slot for slot in unit.slots if slot.lane is lane]
            members[0].ready_grads()
            grads = lane.gather_grads()
            for slot in members:
                if lane.grads.has[slot.index]:
                    found[slot] = grads[slot.index].view(slot.shape).to(slot.dtype, copy=True)
    return found


def take_part(engine: Engine, grads: bool) -> None:
    """The collectives of reading everything, unit by unit, keeping nothing: for a rank that only follows."""
    for unit in engine.units:
        for lane in unit.lanes:
            gather_values(engine, lane, [slot for slot in unit.slots if slot.lane is lane])
    if grads:
        for unit in engine.units:
            for lane in unit.lanes:
                if lane.grads is not None and any(lane.grads.has):
                    lane.gather_grads()


class Shown:
    """Every parameter of a model as a plain one, with its full value: the same objects over other memory."""

    def __init__(self, engine: Engine, values: dict[Slot, Tensor], grads: dict[Slot, Tensor]):
        self._engine, self.values = engine, values
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
                slot.set_requires_grad(flag)
        return written


def check_unchanged(engine: Engine, slots: Collection[Slot]) -> None:
    """Inside a write context values may change; parameters may not be exchanged for others. Raises on every rank,
    so that none is left waiting for the others' values."""
    root = engine.units[0].module
    assert root is not None
    present = set(root.modules())
    mine = next((text for slot in slots if (text := _exchanged(slot, present))), "")
    known = {id(slot.param) for slot in slots}
    added = [f"{name!r} was added" for name, param in root.named_parameters() if id(param) not in known]
    mine = mine or next(iter(added), "")
    found = [mine] if engine.mesh.fake else exchange(engine.mesh, mine, "check at the end of zeor.full_params")
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
        if found is not slot.param or tuple(found.shape) != slot.shape:
            return f"{slot.name!r} was replaced by one of shape {tuple(found.shape)}"
    return ""


@torch.no_grad()
def spread(engine: Engine, slots: Collection[Slot]) -> dict[Slot, Tensor]:
    """Rank 0's values of these parameters, which are shown as plain ones, on every rank."""
    values = {}
    for slot in slots:
        values[slot] = slot.param.detach().clone()
        verbs.broadcast(engine.mesh, values[slot], f"broadcast of {slot.name!r}")
    return values


@torch.no_grad()
def write_back(engine: Engine, values: dict[Slot, Tensor]) -> None:
    """Values that are the same on every rank into master and compute. A parameter that had none and was not written
    still has none."""
    for slot, value in values.items():
        if slot not in engine.unfilled.slots or not bool(value.isnan().all()):
            slot.store(value)


def sum_of_bits(value: Tensor) -> int:
    """Differs, as good as surely, where values differ in any bit; one fast pass."""
    raw = value.detach().contiguous().view(-1).view(torch.uint8)
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    return int(words.sum()) ^ int(raw[words.numel() * 8 :].sum())
