"""Full parameters for a while: what `full_params`, and the way back out of sharding, are made of.

Gathers every unit, puts plain parameters into the modules, and takes them out again. What the user
sees is exact: the master's value in the parameter's own dtype. A write context sends rank 0's values to
every rank, so that a change made on one rank, or differently on each, cannot tear them apart.
"""

from __future__ import annotations

import math
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
    lane.wait()
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


def all_values(engine: Engine, blank: bool = False) -> dict[Slot, nn.Parameter]:
    """Plain parameters with the full value of every parameter of the model. With `blank`, parameters that have no
    values yet are NaN, to be written; otherwise they raise."""
    params: dict[Slot, nn.Parameter] = {}
    if not blank:
        engine.unfilled.check()
    for unit in engine.units:
        for lane in unit.lanes:
            members = [slot for slot in unit.slots if slot.lane is lane]
            with torch.no_grad():
                values = gather_values(engine, lane, members)
            for slot, value in values.items():
                params[slot] = slot.dress(nn.Parameter(value, requires_grad=slot.user.requires_grad))
                if slot in engine.unfilled.slots and value.is_floating_point():
                    value.fill_(math.nan)
    return params


def attach_grads(engine: Engine, params: dict[Slot, nn.Parameter]) -> None:
    """Full gradients onto plain parameters; None where nobody has one."""
    for unit in engine.units:
        for lane in unit.lanes:
            if lane.grads is None or not any(lane.grads.has):
                continue
            members = [slot for slot in unit.slots if slot.lane is lane]
            members[0].ready_grads()
            grads = lane.gather_grads()
            for slot in members:
                if lane.grads.has[slot.index]:
                    params[slot].grad = grads[slot.index].view(slot.shape).to(slot.dtype, copy=True)


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


def show(engine: Engine, params: dict[Slot, nn.Parameter]) -> None:
    """Put plain parameters into the modules."""
    for unit in engine.units:
        unit.put(params)


def hide(engine: Engine) -> None:
    """Put the user's views back."""
    for unit in engine.units:
        unit.put({slot: slot.user for slot in unit.slots})


def keep_flags(params: dict[Slot, nn.Parameter]) -> None:
    """What the user froze or unfroze while plain parameters were shown lasts."""
    for slot, param in params.items():
        if param.requires_grad != slot.user.requires_grad:
            slot.user.requires_grad_(param.requires_grad)


def check_unchanged(engine: Engine, params: dict[Slot, nn.Parameter]) -> None:
    """Inside a write context values may change; parameters may not be exchanged for others. Raises on every rank,
    so that none is left waiting for the others' values."""
    root = engine.units[0].module
    assert root is not None
    present = set(root.modules())
    mine = next((text for slot, param in params.items() if (text := _exchanged(slot, param, present))), "")
    known = {id(param) for param in params.values()}
    added = [f"{name!r} was added" for name, param in root.named_parameters() if id(param) not in known]
    mine = mine or next(iter(added), "")
    found = [mine] if engine.mesh.fake else exchange(engine.mesh, mine, "check at the end of zeor.full_params")
    for rank, text in enumerate(found):
        if text:
            raise RuntimeError(
                f"Parameter {text} inside zeor.full_params (on rank {rank}); only its values may change there. "
                "To change the model itself: zeor.unshard, change it, zeor.shard."
            )


def _exchanged(slot: Slot, param: nn.Parameter, present: set[nn.Module]) -> str:
    for module, attr in slot.owners:
        if module not in present:
            return f"{slot.name!r} was lost with its {type(module).__name__}"
        found = module._parameters.get(attr)
        if found is None:
            return f"{slot.name!r} was removed"
        if found is not param or tuple(param.shape) != slot.shape:
            return f"{slot.name!r} was replaced by one of shape {tuple(found.shape)}"
    return ""


@torch.no_grad()
def write_back(engine: Engine, params: dict[Slot, nn.Parameter]) -> None:
    """Rank 0's values of these parameters into master and compute, on every rank. One that had no values and was
    not written still has none."""
    for slot, param in params.items():
        verbs.broadcast(engine.mesh, param.data, f"broadcast of {slot.name!r}")
        if slot not in engine.unfilled.slots or not bool(param.isnan().all()):
            slot.store(param)
