"""Full parameters for a while: what `full_params`, and the way back out of sharding, are made of.

Gathers every unit, puts plain parameters into the modules, and takes them out again. What the user
sees is exact: the master's value in the parameter's own dtype. A write context sends rank 0's values to
every rank, so that a change made on one rank, or differently on each, cannot tear them apart.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.runtime.engine import Engine
from zeor.runtime.lane import Lane
from zeor.runtime.unit import Slot


def gather_values(engine: Engine, lane: Lane, slots: list[Slot]) -> dict[Slot, Tensor]:
    """The full values of a lane's parameters, in memory of their own, each in its own dtype."""
    lane.wait()
    source = lane.mine
    whole = lane.full.flat if not lane.frees else None
    if lane.master is not None and any(slot.dtype != lane.key.compute_dtype for slot in slots):
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


def all_values(engine: Engine) -> dict[Slot, nn.Parameter]:
    """Plain parameters with the full value of every parameter of the model."""
    params: dict[Slot, nn.Parameter] = {}
    for unit in engine.units:
        for lane in unit.lanes:
            members = [slot for slot in unit.slots if slot.lane is lane]
            with torch.no_grad():
                values = gather_values(engine, lane, members)
            for slot, value in values.items():
                params[slot] = nn.Parameter(value, requires_grad=slot.user.requires_grad)
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


def show(engine: Engine, params: dict[Slot, nn.Parameter]) -> None:
    """Put plain parameters into the modules."""
    for unit in engine.units:
        unit.put(params)


def hide(engine: Engine) -> None:
    """Put the user's views back."""
    for unit in engine.units:
        unit.put({slot: slot.user for slot in unit.slots})


def check_unchanged(engine: Engine, params: dict[Slot, nn.Parameter]) -> None:
    """Inside a write context values may change; parameters may not be exchanged for others. Raises on every rank,
    so that none is left waiting for the others' values."""
    mine = next((text for slot, param in params.items() if (text := _exchanged(slot, param))), "")
    found = [mine] if engine.mesh.fake else exchange(engine.mesh, mine, "check at the end of zeor.full_params")
    for rank, text in enumerate(found):
        if text:
            raise RuntimeError(
                f"Parameter {text} inside zeor.full_params (on rank {rank}); only its values may change there. "
                "To change the model itself: zeor.unshard, change it, zeor.shard."
            )


def _exchanged(slot: Slot, param: nn.Parameter) -> str:
    for module, attr in slot.owners:
        found = module._parameters.get(attr)
        if found is None:
            return f"{slot.name!r} was removed"
        if found is not param or tuple(param.shape) != slot.shape:
            return f"{slot.name!r} was replaced by one of shape {tuple(found.shape)}"
    return ""


@torch.no_grad()
def write_back(engine: Engine, params: dict[Slot, nn.Parameter]) -> None:
    """Rank 0's values of these parameters into master and compute, on every rank."""
    for slot, param in params.items():
        verbs.broadcast(engine.mesh, param.data, f"broadcast of {slot.name!r}")
        slot.lane.store(slot.index, param)
