"""offload="auto" before the run: the choice that optim/streaming/auto.py will make, from budgets and a traced step.

The same rule and the same margins; only what the first step's peak will be is predicted here and measured there.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from zeor.memory.device import DeviceMemory
from zeor.optim.streaming.auto import DISK_SHARE, HOST_SHARE, Room, choose, holes_nbytes, size
from zeor.optim.streaming.moments import moment_itemsize
from zeor.optim.streaming.windows import WINDOWS
from zeor.plan import Offload
from zeor.planner.peaks import (
    LIBRARIES_NBYTES,
    WORKSPACE_NBYTES,
    Model,
    accumulated_nbytes,
    computing_nbytes,
    first_update,
    gathered_nbytes,
)
from zeor.planner.rests import Array, PlannedLane, moved, rounded_nbytes
from zeor.spec.places import crowds
from zeor.tiers.folders import free_disk_nbytes
from zeor.tiers.host import free_host_nbytes


class OverBudgetError(ValueError):
    """A step does not fit on the device wherever its state rests, or the state fits nowhere."""


def place(model: Model) -> Model:
    """With every lane's state where there is room for it. OverBudgetError with the numbers where there is none."""
    offload = model.setting.plan.offload
    assert offload is not None
    budget, host_nbytes = _budgets(offload)
    lanes = [lane for lane in model.flat if lane.updates]
    largest = max((lane.held("update") for lane in lanes), default=0)
    window = int(WINDOWS * min(model.setting.chunk, largest) * (_moments(model) + 2))
    free = budget - _used_nbytes(model) - window - _margin(model, budget)
    disk = 0 if offload.folder is None else int(DISK_SHARE * free_disk_nbytes(offload.folder))
    room = Room(free, host_nbytes, disk)
    try:
        chosen = choose([_need(model, lane) for lane in lanes], room, spread=model.setting.plan.release)
    except ValueError as error:
        raise OverBudgetError(str(error)) from None
    tiers = dict(zip(map(id, lanes), chosen))
    placed = [[moved(lane, tiers[id(lane)]) if id(lane) in tiers else lane for lane in unit] for unit in model.lanes]
    return replace(model, lanes=placed)


def check_peak(model: Model, peak: int) -> None:
    """OverBudgetError where a step needs more of the device than the budget, with all the state that can leave away."""
    offload = model.setting.plan.offload
    assert offload is not None
    budget = _budgets(offload)[0]
    if peak > budget:
        activations = f", {size(model.trace.peak)} of it activations" if model.trace.peak else ""
        raise OverBudgetError(
            f"A step needs {size(peak)} on the device{activations}, but the budget is {size(budget)}; allow more, use "
            "release=True, zeor.Offload(auto=True, grads='host', compute='host'), a smaller batch or more ranks."
        )


def begun_nbytes(model: Model) -> int:
    """What the host holds before state is placed: every remainder, where the device would be crowded with them."""
    offload = model.setting.plan.offload
    assert offload is not None
    lanes = [lane for lane in model.flat if lane.updates and lane.beside_itemsize == 2]
    numel = sum(lane.held("update") for lane in lanes)
    crowded = model.setting.native and crowds(numel, model.setting.plan.release, _budgets(offload)[0])
    return 2 * numel + LIBRARIES_NBYTES if crowded else 0


def _budgets(offload: Offload) -> tuple[int, int]:
    """Bytes on the device, and on the host: as given, else what is free here."""
    device, host = offload.device_budget, offload.host_budget
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and not (isinstance(device, int) and isinstance(host, int)):
        raise ValueError(
            "offload='auto' is planned by what is free, and here is no accelerator to ask; give both budgets, such as "
            "zeor.Offload(auto=True, device_budget='80GiB', host_budget='500GiB'), or gpu= and host=."
        )
    if not isinstance(device, int):
        assert accelerator is not None
        here = torch.device(accelerator.type, torch.accelerator.current_device_index())
        device = DeviceMemory(here).total_nbytes()
    if not isinstance(host, int):
        free = free_host_nbytes()
        host = 1 << 62 if free is None else int(HOST_SHARE * free)
    assert device is not None
    return device, host


def _moments(model: Model) -> float:
    return model.setting.moments * moment_itemsize(model.setting.plan.moments, torch.float32)


def _need(model: Model, lane: PlannedLane) -> int:
    """As Auto._need."""
    assert lane.key.master_dtype is not None
    numel = lane.held("update")
    wide = lane.key.master_dtype.itemsize / 4 if model.setting.plan.moments == "exact" else 1
    split = lane.beside_itemsize == 2 and lane.key.master_dtype == torch.float32
    return int(numel * (_moments(model) * wide + (2 if split else 0)))


def _used_nbytes(model: Model) -> int:
    """What the first step will have needed when state is placed, without state."""
    compute = [a for a in model.arrays() if a.tier == "device" and a.role in ("compute", "lagging")]
    buffered = [a for a in model.arrays() if a.role == "grad" and model.setting.grad_buffer]
    whole = [
        Array("master", "device", (lane.held("update") * lane.beside_itemsize,))
        for lane in model.flat if lane.updates and lane.beside_itemsize > 2 and lane.tiers.master == "device"
    ]  # fmt: skip
    used = rounded_nbytes(compute + whole + buffered) + model.buffers_nbytes + gathered_nbytes(model)
    used += WORKSPACE_NBYTES if model.setting.native else 0
    used += accumulated_nbytes(model)
    return used + computing_nbytes(model, 0, first_update(model))


def _margin(model: Model, budget: int) -> int:
    """As Auto._margin."""
    offload, rest = model.setting.plan.offload, 0
    assert offload is not None
    if model.setting.plan.release:
        rest = max(sum(lane.held("compute") * lane.key.compute_dtype.itemsize for lane in unit) for unit in model.lanes)
    return holes_nbytes(budget, offload.device_budget is not None) + rest
