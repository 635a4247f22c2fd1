"""From what a user says about ranks (`mesh=`, `hierarchy=`, a stage by axis) to the axes of a model.

A mesh of two dimensions is (across, inside): the last one holds neighbours, as in torch. `hierarchy="auto"` finds which
ranks are on one host; a number says how many are. Ranks compare what they were given before any group of a part of them
is made: those that disagree would wait for each other.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm.agree import exchange, same_everywhere
from zeor.comm.axes import Axes, Axis, control_axis, group_of, make_axis
from zeor.comm.launch.world import ensure_process_group
from zeor.memory.device import default_device
from zeor.plan import Stages, nearest

NODE, GPU = "node", "gpu"  # the axes of a hierarchy
Table = list[list[int]]  # ranks: a row for each node


def make_axes(
    mesh: Any, device: torch.device, deterministic: bool, timeout: float, hierarchy: int | str | None = None
) -> Axes:
    """`mesh`: None (everybody), a process group, or a DeviceMesh of one or two dimensions. `hierarchy`: "auto", or how
    many ranks a node has; in place of a mesh."""
    everyone = make_axis(mesh, device, deterministic, timeout)
    same_everywhere(everyone, "meshes", [f"hierarchy={hierarchy}"])  # first: "auto" asks all ranks for their hosts
    names, table = _described(mesh, hierarchy)
    same_everywhere(everyone, "meshes", [f"axes {names}", f"ranks {table}"])
    if len(names) == 1:
        everyone.name = names[0]
        return Axes.of_one(everyone)
    _check_ascends(table)
    members = _members(table)
    here = members[everyone.rank]
    inside = table[here[1]]
    across = [row[here[0]] for row in table]
    axes: list[Axis] = []
    for name, ranks in zip(reversed(names), (inside, across)):
        axis = Axis(0, 1, device, timeout=timeout)
        if len(ranks) > 1:
            axis = make_axis(group_of(ranks), device, deterministic, timeout)
        axis.name, axis.known_as = name, ranks
        axes.append(axis)
    return Axes(axes[0], axes[1], everyone, members)


def ranks_of(mesh: Any) -> list[int]:
    """The ranks of a mesh, in the order in which everyone counts them."""
    if isinstance(mesh, dist.device_mesh.DeviceMesh):
        found: list[int] = sorted(mesh.mesh.flatten().tolist())
        return found
    if isinstance(mesh, dist.ProcessGroup):
        return list(dist.get_process_group_ranks(mesh))
    if mesh is not None:
        raise TypeError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh or a process group.")
    return list(range(dist.get_world_size())) if dist.is_available() and dist.is_initialized() else [0]


def ranks_on(axis: Axis) -> list[int]:
    """The ranks of an axis, as the default group counts them."""
    if axis.gather is not None:
        return list(dist.get_process_group_ranks(axis.gather))
    return [dist.get_rank()] if dist.is_initialized() else [0]


def _described(mesh: Any, hierarchy: int | str | None) -> tuple[tuple[str, ...], Table]:
    """The names of the axes, outermost first, and the ranks of a mesh of two."""
    if hierarchy is not None:
        if mesh is not None:
            raise ValueError("mesh= says already which ranks stand on which axis; leave out hierarchy=.")
        table = _nodes(hierarchy)
        return ((NODE, GPU), table) if table else (("ranks",), [])
    if isinstance(mesh, dist.device_mesh.DeviceMesh):
        names = tuple(mesh.mesh_dim_names or (("ranks",) if mesh.ndim == 1 else ("across", "inside")))
        return names, mesh.mesh.tolist() if mesh.ndim == 2 else []
    return ("ranks",), []


def _members(table: Table) -> list[tuple[int, int]]:
    """The coordinates (inside, across) of each rank, in the order of ranks, which is that of their group."""
    found = {rank: (inside, across) for across, row in enumerate(table) for inside, rank in enumerate(row)}
    return [found[rank] for rank in sorted(found)]


def _check_ascends(table: Table) -> None:
    """A rank's place on an axis is its rank in the axis' group, and torch sorts groups."""
    for line in (*table, *zip(*table)):
        if list(line) != sorted(line):
            raise ValueError(
                f"The ranks of the mesh, {table}, do not ascend along both dimensions; make it by "
                "torch.distributed.init_device_mesh, or give ranks in ascending order."
            )


# ---- a mesh of all ranks


def mesh(device: Any = None, timeout: float = 600.0, **sizes: int) -> Any:
    """A DeviceMesh of all ranks by names and sizes, outermost first: `zeor.mesh(pp=2, dp=4)`, whose parts are
    `mesh["pp"]` and `mesh["dp"]`. One size may be -1: what is left. Joins the process group where nobody has."""
    where = default_device() if device is None else torch.device(device)
    ensure_process_group(where, timeout)
    world = dist.get_world_size() if dist.is_initialized() else 1
    found = _sizes_of(sizes, world)
    if not dist.is_initialized():
        raise RuntimeError(
            "zeor.mesh needs a process group, and this process is alone; start it with torchrun --nproc-per-node, or "
            "call torch.distributed.init_process_group first."
        )
    made: Any = dist.device_mesh.init_device_mesh(where.type, tuple(found.values()), mesh_dim_names=tuple(found))
    return made


def _sizes_of(sizes: Mapping[str, Any], world: int) -> dict[str, int]:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"zeor.mesh: {name}={size!r}; give how many ranks it has, or -1 for what is left.")
    left = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if not sizes or len(left) > 1:
        raise ValueError("zeor.mesh needs sizes by name, of which at most one is -1: zeor.mesh(pp=2, dp=-1).")
    if world % known if left else world != known:
        told = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"zeor.mesh: {told} does not make the {world} rank(s) there are; change a size, or give -1.")
    return {name: world // known if size == -1 else size for name, size in sizes.items()}


# ---- which ranks are neighbours


def _nodes(hierarchy: int | str) -> Table:
    """The ranks of each node; nothing where there is one node, or one rank in each."""
    axis = control_axis(None)
    if hierarchy == "auto":
        hosts = exchange(axis, socket.gethostname(), "exchange of host names for hierarchy='auto'")
        table = _by_host([str(host) for host in hosts])
    elif isinstance(hierarchy, int) and not isinstance(hierarchy, bool) and hierarchy > 0:
        if axis.size % hierarchy:
            raise ValueError(
                f"hierarchy={hierarchy} ranks per node do not divide the {axis.size} ranks there are; give a number "
                "that does, or 'auto'."
            )
        table = [list(range(first, first + hierarchy)) for first in range(0, axis.size, hierarchy)]
    else:
        raise ValueError(f"hierarchy={hierarchy!r}; give 'auto', or how many ranks a node has.")
    return table if len(table) > 1 and len(table[0]) > 1 else []


def _by_host(hosts: list[str]) -> Table:
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    if len({len(ranks) for ranks in found.values()}) > 1:
        told = ", ".join(f"{host} {len(ranks)}" for host, ranks in list(found.items())[:8])
        raise ValueError(
            f"hierarchy='auto' needs equally many ranks on every host, and there are: {told}; start equally many on "
            "each, or leave out hierarchy=."
        )
    return list(found.values())


# ---- a stage for each axis


def stages_of(stage: Any, mesh: Any, hierarchy: int | str | None) -> tuple[Any, int | None]:
    """(stage inside, stage across or None for the same) from shard's stage=: a number, or one for each axis by name."""
    if not isinstance(stage, Mapping):
        # Parameters are cut inside a node; what crosses nodes is gradients and new values, once per step.
        return stage, 1 if hierarchy is not None and stage == 3 else None
    names = _names(mesh, hierarchy)
    if not names:
        raise ValueError(
            f"stage={dict(stage)!r} names axes, but the ranks have none; give mesh=, a DeviceMesh with mesh_dim_names, "
            "or hierarchy='auto', whose axes are 'node' and 'gpu'."
        )
    for name in stage:
        if name not in names:
            raise ValueError(
                f"stage={dict(stage)!r}: there is no axis {name!r}{nearest(str(name), names)}; the axes are {names}."
            )
    missing = [name for name in names if name not in stage]
    if missing:
        raise ValueError(f"stage={dict(stage)!r} says nothing of axis {missing[0]!r}; give one for each of {names}.")
    found = Stages(*(stage[name] for name in reversed(names))) if len(names) == 2 else (stage[names[0]], None)
    return found[0], found[1]


def _names(mesh: Any, hierarchy: int | str | None) -> list[str]:
    """Outermost first."""
    if hierarchy is not None:
        return [NODE, GPU]
    return list(getattr(mesh, "mesh_dim_names", None) or ())
