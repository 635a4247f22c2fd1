"""Room on the disk tier: whether the folder can be used and what ranks will keep there fits, asked at shard().

Before anything of the model has changed, and of all ranks together: those of one host may share a disk, and where one
of them cannot go on the others must not wait for it. An estimate: fractions are kept by whole lanes, and moments come
to rest at the first step. The arrays themselves take their space when they are made (tiers/files.py).
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence

from torch.optim import Optimizer

from zeor.comm.agree import exchange
from zeor.comm.axes import Axes
from zeor.memory.roles import STAGES, Sizes, table_of
from zeor.optim.streaming.moments import moment_count, moment_itemsize
from zeor.plan import Plan
from zeor.spec.keys import lane_key, small_numel
from zeor.step.unit import Slot
from zeor.tiers.folders import free_disk_nbytes
from zeor.tiers.master import master_itemsize
from zeor.tiers.rest import Store


def check_disk(
    plan: Plan, axes: Axes, store: Store, slots: Sequence[Slot], optimizers: Sequence[Optimizer]
) -> None:  # fmt: skip
    """Raises on every rank. `store`: has the folder."""
    offload = plan.offload
    if offload is None or not offload.uses_disk or axes.everyone.fake:
        return
    refused, place, free = "", "", 0
    try:
        folder = store.folder.folder
        place = f"{socket.gethostname()}:{os.stat(folder).st_dev}"
        free = free_disk_nbytes(folder)
    except (RuntimeError, OSError) as error:
        refused = str(error)
    need = needed_nbytes(plan, axes.sizes, slots, optimizers)
    everyone = exchange(axes.everyone, [refused, place, need, free], "check of the offload folder")
    if refused:
        raise RuntimeError(refused)
    for rank, (theirs, *_) in enumerate(everyone):
        if theirs:
            raise RuntimeError(f"Rank {rank} cannot offload to disk: {theirs}")
    for rank, (_, where, _, room) in enumerate(everyone):
        sharing = [number for number, each in enumerate(everyone) if each[1] == where]
        total = sum(everyone[number][2] for number in sharing)
        if total > room:
            raise RuntimeError(
                f"The offload folder {offload.folder} of rank {rank} has {room:,} bytes free, but {len(sharing)} "
                f"rank(s) will keep about {total:,} there; free some space, choose another folder=, or keep more on "
                "the host."
            )


def needed_nbytes(plan: Plan, sizes: Sizes, slots: Sequence[Slot], optimizers: Sequence[Optimizer]) -> int:
    """What this rank will keep on disk, but for padding."""
    table = table_of(plan.stages)
    cut = {role: math.prod(sizes[axis] for axis in table.cut(role)) for role in ("compute", "grad", "update")}
    assert plan.offload is not None
    count = max((moment_count(each) for each in optimizers), default=0)
    roles = ("compute", "master", "grads", "moments")
    compute, master, grads, moments = (dict(getattr(plan.offload, role)).get("disk", 0.0) for role in roles)
    total, small = 0.0, small_numel(plan, math.prod(sizes))
    for slot in slots:
        key = lane_key(slot.param, slot.owners, plan.precision, small)
        numel = slot.param.numel()
        updated = numel / cut["update"]
        total += 0 if key.stays_whole else compute * numel / cut["compute"] * key.compute_dtype.itemsize
        if key.trainable and key.master_dtype is not None:
            total += master * updated * master_itemsize(key.master_dtype, key.compute_dtype)
            total += moments * updated * count * moment_itemsize(plan.moments, key.master_dtype)
            total += 0 if STAGES[plan.stage].grad_buffer else grads * numel / cut["grad"] * key.reduce_dtype.itemsize
    return int(total)
