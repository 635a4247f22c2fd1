"""Axes: along which ranks a lane is cut, along which it is repeated, and who must agree.

An axis is a set of ranks and the groups their traffic travels on. Gathers and reduces have one each: on a single
group, ranks whose autograd interleaves the two differently would wait for each other for ever. `control` carries small
host tensors over Gloo (small.py), so that agreeing on something never makes the host wait for the accelerator. An axis
of one rank has no groups.

Note [Axes]
~~~~~~~~~~~
    shard       the ranks that a lane is cut over: slices, gathers, reduces, norms
    replicate   the ranks that hold the same slice
    everyone    whose gradients are averaged, and who must agree: both together
Every lane has axes, and today all lanes of a model share one set: `shard` is everyone and `replicate` is this rank
alone. Parts keep the set, never one axis of it, so that other groups can take its place (`replace`): after a failure,
say, when the same ranks have met anew. What still assumes that `shard` is everyone: the report of traffic, the mark of
a failed collective (`stuck`), a meeting that has begun, and owners of matrices, who share the work along `shard`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm.observe import Observer, Traffic
from zeor.memory.roles import Sizes


@dataclass
class Axis:
    rank: int  # this one's place on the axis
    size: int
    device: torch.device
    gather: Any = None
    reduce: Any = None
    control: Any = None
    meets: bool = False  # everything goes over Gloo, so ranks meet before each event: see meeting.py
    meeting: Callable[[], None] | None = None  # one that has begun: what waits for its end, before a collective
    native_reduce: bool = True  # the backend's own reduce-scatter is both exact in order and frugal
    fake: bool = False  # one rank of an imagined world: nothing moves, nothing can be compared
    timeout: float = 600.0
    stuck: bool = False  # a collective failed: nothing more can be expected of these groups
    backend: str = "no process group"
    steps: int = 0  # calls of step() here: ranks that differ in it have different weights in their slices
    name: str = "shard"  # which of a model's axes it is, for its observer
    observer: Observer = field(default_factory=Observer)  # hears of every collective

    @property
    def traffic(self) -> Traffic:
        return self.observer.traffic


class Axes:
    """See Note [Axes]."""

    def __init__(self, shard: Axis, replicate: Axis, everyone: Axis):
        self.shard, self.replicate, self.everyone = shard, replicate, everyone
        self.device = everyone.device
        self._replaced: list[weakref.WeakMethod[Callable[[], None]]] = []

    @classmethod
    def of_one(cls, axis: Axis) -> Axes:
        """Every lane is cut over all of these ranks."""
        return cls(axis, Axis(0, 1, axis.device, timeout=axis.timeout, name="replicate"), axis)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.shard.size, self.replicate.size)

    def replace(self, new: Axes) -> None:
        """Other groups of as many ranks, with this one at the same place, take over; nothing may be under way. What
        was counted goes on."""
        for name in ("shard", "replicate", "everyone"):
            old, other = getattr(self, name), getattr(new, name)
            if (old.rank, old.size, old.device) != (other.rank, other.size, other.device):
                raise ValueError(
                    f"These axes cannot take the others' place: along {name!r} this rank is {other.rank} of "
                    f"{other.size} on {other.device} and was {old.rank} of {old.size} on {old.device}, so slices would "
                    "have to be cut anew; save a checkpoint and load it over the new ranks."
                )
            other.steps, other.observer = old.steps, old.observer
        self.shard, self.replicate, self.everyone = new.shard, new.replicate, new.everyone
        for method in filter(None, (each() for each in self._replaced)):
            method()

    def when_replaced(self, method: Callable[[], None]) -> None:
        """A method to call then, of an object that may be gone by then."""
        self._replaced.append(weakref.WeakMethod(method))


# Groups cost sockets and threads, so models sharded over the same ranks share them. Keyed weakly by the
# parent group: when the user destroys it, its groups go with it.
_groups: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def make_axes(mesh: Any, device: torch.device, deterministic: bool, timeout: float) -> Axes:
    """From `shard(mesh=...)`: None (everybody), a process group, or a one-dimensional DeviceMesh."""
    return Axes.of_one(make_axis(mesh, device, deterministic, timeout))


def make_axis(mesh: Any, device: torch.device, deterministic: bool, timeout: float) -> Axis:
    parent = _parent_group(mesh)
    if parent is None:
        return Axis(0, 1, device, timeout=timeout)
    rank = dist.get_rank(parent)
    if rank < 0:
        raise ValueError("This rank is not in the mesh given to zeor; call zeor.shard only on its ranks.")
    size = dist.get_world_size(parent)
    if size == 1:
        return Axis(0, 1, device, timeout=timeout)
    backend = _backend(parent, device)
    gather, reduce, control, meets = _groups_over(parent, device, timeout)
    # Gloo's reduce-scatter was measured to send as much as an all-reduce, twice the ideal.
    native = backend != "gloo" and not deterministic
    return Axis(
        rank, size, device, gather, reduce, control, meets, native_reduce=native, fake=backend == "fake",
        timeout=timeout, backend=backend,
    )  # fmt: skip


def control_axis(mesh: Any) -> Axis:
    """The ranks of a mesh for small host messages alone, by a group that is there already if any is."""
    parent = _parent_group(mesh)
    host = torch.device("cpu")
    if parent is None or dist.get_world_size(parent) == 1:
        return Axis(0, 1, host)
    rank, size = dist.get_rank(parent), dist.get_world_size(parent)
    known = next(reversed(_groups.get(parent, {}).values()), None)  # those of the model that was sharded last
    config = str(dist.get_backend_config(parent))
    if known is not None:
        control = known[2]
    elif "cpu:gloo" in config or config == "gloo" or "fake" in config:
        control = parent
    else:
        control = _groups_over(parent, torch.accelerator.current_accelerator() or host, 600.0)[2]
    meets = known is not None and known[3]
    return Axis(rank, size, host, control=control, meets=meets, fake="fake" in config)


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

        def new(backend: str, use: str) -> Any:
            """`use` is shown by torch's flight recorder beside each collective of the group."""
            return dist.new_group(
                ranks, timeout=limit, backend=backend, use_local_synchronization=local, group_desc=f"zeor {use}"
            )

        control = "fake" if backend == "fake" else "gloo"
        made = (new(backend, "gather"), new(backend, "reduce"), new(control, "control"))
        cache[key] = (*made, backend == "gloo")
    return cache[key]
