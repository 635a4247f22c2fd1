"""The mesh: the ranks one model is sharded over, and the groups its traffic travels on.

Groups over the same ranks. Gathers and reduces have one each: on a single group, ranks whose
autograd interleaves the two differently would wait for each other for ever. `control` carries small
host tensors over Gloo, so that agreeing on something never makes the host wait for the accelerator. `meeting`, where
everything goes over Gloo, is for meeting.py alone.
A world of one has no groups. Everything zeor checks, sums or counts is scoped to a mesh.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm.traffic import Traffic


@dataclass
class Mesh:
    rank: int
    world: int
    device: torch.device
    gather: Any = None
    reduce: Any = None
    control: Any = None
    meeting: Any = None
    native_reduce: bool = True  # the backend's own reduce-scatter is both exact in order and frugal
    fake: bool = False  # one rank of an imagined world: nothing moves, nothing can be compared
    timeout: float = 600.0
    stuck: bool = False  # a collective failed: nothing more can be expected of this mesh
    backend: str = "no process group"
    steps: int = 0  # calls of step() here: ranks that differ in it have different weights in their slices
    traffic: Traffic = field(default_factory=Traffic)


# Groups cost sockets and threads, so models sharded over the same ranks share them. Keyed weakly by the
# parent group: when the user destroys it, its groups go with it.
_groups: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def make_mesh(mesh: Any, device: torch.device, deterministic: bool, timeout: float) -> Mesh:
    """From `shard(mesh=...)`: None (everybody), a process group, or a one-dimensional DeviceMesh."""
    parent = _parent_group(mesh)
    if parent is None:
        return Mesh(rank=0, world=1, device=device, timeout=timeout)
    rank = dist.get_rank(parent)
    if rank < 0:
        raise ValueError("This rank is not in the mesh given to zeor; call zeor.shard only on its ranks.")
    world = dist.get_world_size(parent)
    if world == 1:
        return Mesh(rank=0, world=1, device=device, timeout=timeout)
    backend = _backend(parent, device)
    gather, reduce, control, meeting = _groups_over(parent, device, timeout)
    # Gloo's reduce-scatter was measured to send as much as an all-reduce, twice the ideal.
    native = backend != "gloo" and not deterministic
    return Mesh(
        rank, world, device, gather, reduce, control, meeting, native, backend == "fake", timeout, backend=backend
    )  # fmt: skip


def control_mesh(mesh: Any) -> Mesh:
    """The ranks of a mesh for small host messages alone, by a group that is there already if any is."""
    parent = _parent_group(mesh)
    host = torch.device("cpu")
    if parent is None or dist.get_world_size(parent) == 1:
        return Mesh(rank=0, world=1, device=host)
    rank, world = dist.get_rank(parent), dist.get_world_size(parent)
    known = next(iter(_groups.get(parent, {}).values()), None)
    config = str(dist.get_backend_config(parent))
    meeting = None if known is None else known[3]
    if known is not None:
        control = known[2]
    elif "cpu:gloo" in config or config == "gloo" or "fake" in config:
        control = parent
    else:
        control = _groups_over(parent, torch.accelerator.current_accelerator() or host, 600.0)[2]
    return Mesh(rank, world, host, control=control, meeting=meeting, fake="fake" in config)


def _parent_group(mesh: Any) -> Any:
    if mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to ranks outside
        raise ValueError("This rank is not in the mesh given to zeor; call zeor.shard only on its ranks.")
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if isinstance(mesh, dist.device_mesh.DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"The DeviceMesh has {mesh.ndim} dimensions; give zeor the one to shard over, such as mesh['dp']."
            )
        return mesh.get_group()
    raise TypeError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh or a process group.")


def _backend(group: Any, device: torch.device) -> str:
    """The backend that moves this device's tensors in a group."""
    config = dist.get_backend_config(group)
    for part in str(config).split(","):
        kind, _, backend = part.rpartition(":")
        if kind in (device.type, ""):
            return backend
    raise ValueError(
        f"The model is on {device.type} but the process group only serves {config}; initialise it with "
        f"a backend for {device.type}, or move the model."
    )


def _groups_over(parent: Any, device: torch.device, timeout: float) -> tuple[Any, ...]:
    cache = _groups.setdefault(parent, {})
    key = (device.type, timeout)
    if key not in cache:
        ranks = dist.get_process_group_ranks(parent)
        # Ranks outside the mesh take no part in making its groups.
        local = len(ranks) < dist.get_world_size()
        limit = timedelta(seconds=timeout)
        backend = _backend(parent, device)

        def new(backend: str) -> Any:
            return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=local)

        control = "fake" if backend == "fake" else "gloo"
        cache[key] = (new(backend), new(backend), new(control), new("gloo") if backend == "gloo" else None)
    return cache[key]
