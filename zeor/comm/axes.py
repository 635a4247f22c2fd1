"""Axes: along which ranks a lane may be cut, and who must agree.

An axis is a set of ranks and the groups their traffic travels on. Gathers and reduces have one each: on a single
group, ranks whose autograd interleaves the two differently would wait for each other for ever. `control` carries small
host tensors over Gloo (small.py), so that agreeing on something never makes the host wait for the accelerator. An axis
of one rank has no groups.

Note [Axes]
~~~~~~~~~~~
    inside      the innermost axis: ranks with the fastest links between them (the GPUs of a node), or all ranks
    across      the outer one: ranks at the same place of each node. One rank alone where the mesh has one axis
    everyone    whose gradients are averaged, and who must agree: both together
    tensor      mesh dimensions that are not ours, along which parameters are DTensors (tensor parallelism). Lanes
                hold the local part, so ranks at other places along them have other lanes, and no gradient is averaged
                over them. `whole` is all of these ranks with everyone: norms and checkpoints are theirs
    experts     the axes of lanes of experts' parameters, where a part of everyone has other experts (expert
                parallelism): inside, across and everyone are the ranks with the same experts, and `tensor` the others
A stage is chosen for each axis; what a role is cut along, and so which stretch of a lane a rank holds, is a table
(memory/roles.py) and a grid (layout/grid.py). Gathers go along one axis after another, outermost first, and reduces
innermost first, so that what crosses nodes is a node's sum and each byte of it crosses once. A lane has one of two sets
of axes, by its key: the model's own, or that of experts. What concerns the model (agreements, events, by how many ranks
a sum is divided) goes over the model's own, so all ranks come to all collectives in one order. Parts keep the set,
never one axis of it, so that other groups can take its place (`replace`): after a failure, say, when the same ranks
have met anew. What holds for all ranks (a failed collective, a meeting that has begun, the number of steps) is one
`Standing` that all axes share.
"""

from __future__ import annotations

import socket
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm.observe import Observer, Traffic
from zeor.layout import Cut, Grid
from zeor.memory.roles import Sizes


@dataclass
class Standing:
    """How the ranks of a model stand together; one for all its axes."""

    stuck: bool = False  # a collective failed: nothing more can be expected of these groups
    meeting: Callable[[], None] | None = None  # one that has begun: what waits for its end, before a collective
    steps: int = 0  # calls of step() here: ranks that differ in it have different weights in their slices
    seed: int = 0  # of noise: a function of the checkpoint that was saved or loaded last, at so many steps
    seeded_at: int = 0
    seedings: int = 0
    run_steps: int = 0  # of the whole run, over checkpoints; several optimizers after one backward make one step

    def seed_noise(self, seed: int) -> None:
        """Noise is a function of this, and of the steps since, from here on: so a run that goes on after a save and one
        that resumes from it round alike."""
        self.seed, self.seeded_at, self.seedings = seed, self.steps, self.seedings + 1

    def go_on(self, before: Standing) -> None:
        """The same run, over other groups."""
        self.steps, self.seed, self.seeded_at = before.steps, before.seed, before.seeded_at
        self.run_steps = before.run_steps


@dataclass
class Axis:
    rank: int  # this one's place on the axis
    size: int
    device: torch.device
    gather: Any = None
    reduce: Any = None
    control: Any = None
    meets: bool = False  # everything goes over Gloo, so ranks meet before each event: see meeting.py
    native_reduce: bool = True  # the backend's own reduce-scatter is both exact in order and frugal
    fake: bool = False  # one rank of an imagined world: nothing moves, nothing can be compared
    timeout: float = 600.0
    backend: str = "no process group"
    name: str = "ranks"  # of the mesh's dimension, for reports and errors
    known_as: Sequence[int] = ()  # where the axis is one of several: its ranks, as everyone counts them
    apart: bool = False  # its ranks are on several hosts, all of them know, and everything goes over Gloo
    observer: Observer = field(default_factory=Observer)  # hears of every collective
    standing: Standing = field(default_factory=Standing)

    @property
    def traffic(self) -> Traffic:
        return self.observer.traffic

    @property
    def stuck(self) -> bool:
        return self.standing.stuck

    @stuck.setter
    def stuck(self, value: bool) -> None:
        self.standing.stuck = value

    @property
    def steps(self) -> int:
        return self.standing.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.standing.steps = value


@dataclass
class TensorRanks:
    """The ranks beside this one along mesh dimensions that are not ours: see Note [Axes]."""

    dims: tuple[Axis, ...]  # one for each dimension of the mesh that parameters are DTensors over
    coords: tuple[int, ...]  # of this rank along them
    whole: Axis  # all ranks that hold the model: everyone, of every place along these dimensions
    places: tuple[tuple[int, int], ...]  # of each rank of `whole`: which of these places, and which of everyone


class Axes:
    """See Note [Axes]. `members`: for each rank of everyone, its coordinates, innermost first."""

    def __init__(self, inside: Axis, across: Axis, everyone: Axis, members: Sequence[tuple[int, ...]]):
        self.inside, self.across, self.everyone = inside, across, everyone
        self.members = tuple(members)
        self.device = everyone.device
        self.tensor: TensorRanks | None = None  # None: these lanes hold no part of a DTensor
        self.experts: Axes | None = None  # of lanes of experts' parameters; None: there are none
        self._replaced: list[weakref.WeakMethod[Callable[[], None]]] = []
        for axis in (inside, across):
            axis.observer, axis.standing = everyone.observer, everyone.standing

    @classmethod
    def of_one(cls, axis: Axis) -> Axes:
        """All of these ranks are on one axis."""
        alone = Axis(0, 1, axis.device, timeout=axis.timeout, name="across")
        return cls(axis, alone, axis, [(rank, 0) for rank in range(axis.size)])

    @property
    def whole(self) -> Axis:
        """All ranks that hold a part of the model, or the same."""
        return self.everyone if self.tensor is None else self.tensor.whole

    @property
    def tensor_coords(self) -> tuple[int, ...]:
        return () if self.tensor is None else self.tensor.coords

    def stand_beside(self, ranks: TensorRanks) -> None:
        """The model's parameters are DTensors along mesh dimensions that are not ours."""
        self.tensor = ranks
        for axis in (*ranks.dims, ranks.whole):
            axis.observer, axis.standing = self.everyone.observer, self.everyone.standing

    def stand_over(self, experts: Axes) -> None:
        """Lanes of experts have these axes."""
        self.experts = experts
        for axis in (*experts.each, experts.everyone):
            axis.observer, axis.standing = self.everyone.observer, self.everyone.standing

    def of(self, experts: bool) -> Axes:
        """Those of a lane of experts, or of any other."""
        if not experts:
            return self
        assert self.experts is not None
        return self.experts

    @property
    def each(self) -> tuple[Axis, Axis]:
        """By number, as in layout/grid.py."""
        return self.inside, self.across

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.inside.size, self.across.size)

    @property
    def coords(self) -> tuple[int, int]:
        """Of this rank."""
        return self.inside.rank, self.across.rank

    def over(self, cut: Cut) -> Axis:
        """The ranks that together hold what is cut along these axes."""
        along = [self.each[axis] for axis in sorted(cut) if self.sizes[axis] > 1]
        if len(along) > 1:
            return self.everyone
        return along[0] if along else Axis(0, 1, self.device, observer=self.everyone.observer)

    def holder(self, grid: Grid, cut: Cut, number: int) -> int:
        """The rank of `over(cut)` that holds stretch `number` of what is cut along these axes."""
        return self.in_order(grid)[number] if self.over(cut) is self.everyone else number

    def in_order(self, grid: Grid) -> list[int]:
        """The ranks of everyone in the order of their fine slices."""
        return sorted(range(len(self.members)), key=lambda rank: grid.place(self.members[rank]))

    def whole_in_order(self, grid: Grid) -> list[int]:
        """The same of all ranks that hold a part of the model, place by place along the other dimensions."""
        if self.tensor is None:
            return self.in_order(grid)
        turn = {rank: number for number, rank in enumerate(self.in_order(grid))}
        places = self.tensor.places
        return sorted(range(len(places)), key=lambda rank: (places[rank][0], turn[places[rank][1]]))

    def replace(self, new: Axes) -> None:
        """Other groups of as many ranks, with this one at the same place, take over; nothing may be under way. What
        was counted goes on."""
        if (self.experts is None) != (new.experts is None):
            raise ValueError("These axes cannot take the others' place: only one of both has axes of experts.")
        for name in ("inside", "across", "everyone"):
            old, other = getattr(self, name), getattr(new, name)
            if (old.rank, old.size, old.device) != (other.rank, other.size, other.device):
                raise ValueError(
                    f"These axes cannot take the others' place: along {name!r} this rank is {other.rank} of "
                    f"{other.size} on {other.device} and was {old.rank} of {old.size} on {old.device}, so slices would "
                    "have to be cut anew; save a checkpoint and load it over the new ranks."
                )
            other.observer = old.observer
        new.everyone.standing.go_on(self.everyone.standing)
        if new.tensor is not None:
            self.stand_beside(new.tensor)
        if self.experts is not None and new.experts is not None:
            self.experts.replace(new.experts)
        self.inside, self.across, self.everyone, self.members = new.inside, new.across, new.everyone, new.members
        for method in filter(None, (each() for each in self._replaced)):
            method()

    def when_replaced(self, method: Callable[[], None]) -> None:
        """A method to call then, of an object that may be gone by then."""
        self._replaced.append(weakref.WeakMethod(method))


# Groups cost sockets and threads, so models sharded over the same ranks share them. Keyed weakly by the
# parent group: when the user destroys it, its groups go with it.
_groups: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, ...]]] = weakref.WeakKeyDictionary()


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
    gather, reduce, control, meets, apart = _groups_over(parent, device, timeout)
    # Gloo's reduce-scatter was measured to send as much as an all-reduce, twice the ideal.
    native = backend != "gloo" and not deterministic
    return Axis(
        rank, size, device, gather, reduce, control, meets, native_reduce=native, fake=backend == "fake",
        timeout=timeout, backend=backend, apart=apart,
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
        return mesh.get_group() if mesh.ndim == 1 else _flat_group(mesh)
    raise TypeError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh or a process group.")


def _flat_group(mesh: Any) -> Any:
    """Of all ranks of a mesh of two dimensions."""
    if mesh.ndim != 2:
        raise ValueError(
            f"The DeviceMesh has {mesh.ndim} dimensions; give zeor the one or two to shard over, such as mesh['dp'] or "
            "mesh['node', 'gpu']."
        )
    return group_of(sorted(mesh.mesh.flatten().tolist()))


def group_of(ranks: Sequence[int]) -> Any:
    """A process group of these ranks, which is made once. They alone take part."""
    if list(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    if dist.get_rank() not in ranks:
        raise ValueError("This rank is not in the mesh given to zeor; call zeor.shard only on its ranks.")
    known = _parents.setdefault(dist.group.WORLD, {})
    if tuple(ranks) not in known:
        known[tuple(ranks)] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="zeor axis")
    return known[tuple(ranks)]


# Groups of a part of the world, by the default group and their ranks.
_parents: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


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
        cache[key] = (*made, backend == "gloo", backend == "gloo" and _several_hosts(made[2]))
    return cache[key]


def _several_hosts(control: Any) -> bool:
    """Whether a link lies between any two of a group's ranks: then large parts travel otherwise (Note [Messages] in
    verbs.py), and so all ranks must know alike. A network namespace is a host of its own."""
    here = [socket.gethostname()]
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")):
        if path.exists():
            here.append(str(path.stat().st_ino) if path.name == "net" else path.read_text())
    mine = torch.tensor([zlib.crc32(" ".join(here).encode())], dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
    dist.all_gather(found, mine, group=control)
    return len({int(each) for each in found}) > 1
