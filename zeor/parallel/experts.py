"""Expert parallelism: parameters that are DTensors over a part of the ranks that zeor shards over.

Ranks along `experts=` see different data and hold different experts. The parameters of experts are DTensors that are
cut over this dimension, so their placements say which part of a parameter a rank has; their lanes stand on the ranks
that have the same part. Here these axes are found, and what cannot be taken is refused on every rank before anything
changes. What sends tokens to experts is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from zeor.comm.agree import exchange, same_everywhere, together
from zeor.comm.axes import Axes, Axis, TensorRanks, group_of, make_axis
from zeor.memory.placed import Placed, is_placed
from zeor.plan import Plan


class Places(NamedTuple):
    """Of all ranks that zeor shards over, in the order of everyone: which rank it is, and its place along experts=."""

    ranks: list[int]
    coords: list[int]


def stand_over_experts(model: nn.Module, axes: Axes, experts: Any, plan: Plan) -> None:
    """The model's axes get those of experts' lanes; TypeError or ValueError, on every rank, where there are none."""
    everyone = axes.everyone
    ranks = together(everyone, lambda: _check(model, experts), "check of the model's experts", TypeError)
    placed = [(name, param) for name, param in model.named_parameters() if is_placed(param)]
    same_everywhere(everyone, "experts", [f"{name!r}: {param.placements}" for name, param in placed])  # type: ignore[attr-defined]
    together(everyone, lambda: _check_plan(placed[0][0], plan), "check of the plan for experts", ValueError)
    named = experts.mesh_dim_names
    places = _places(everyone, ranks)
    found = _axes_of(axes, places, plan)
    me, size = everyone.rank, len(ranks)
    dim = Axis(places.coords[me], size, axes.device, timeout=everyone.timeout, name=named[0] if named else "experts")
    found.stand_beside(TensorRanks((dim,), (dim.rank,), everyone, _counted(places)))
    axes.stand_over(found)


def _check(model: nn.Module, experts: Any) -> list[int]:
    """The ranks along experts=, in the order in which they hold parts."""
    is_mesh = isinstance(experts, dist.device_mesh.DeviceMesh)
    if not is_mesh or experts.ndim != 1 or experts.get_coordinate() is None:
        raise TypeError(
            f"experts={experts!r}; give the dimension of the mesh over which the parameters of experts are DTensors, "
            "such as experts=mesh['ep']."
        )
    ranks = _line(experts)
    placed = [(name, param) for name, param in model.named_parameters() if is_placed(param)]
    if not placed:
        raise TypeError(
            "experts= was given, and no parameter of the model is a DTensor over it; cut those of experts before "
            "zeor.shard: torch.distributed.tensor.distribute_tensor(weight, mesh['ep'], [Shard(0)])."
        )
    for name, param in placed:
        _check_param(name, param, ranks)
    return ranks


def _line(mesh: Any) -> list[int]:
    found: list[int] = mesh.mesh.flatten().tolist()
    return found


def _check_param(name: str, param: Any, ranks: Sequence[int]) -> None:
    mesh = param.device_mesh
    if mesh.ndim != 1 or _line(mesh) != list(ranks):
        raise TypeError(
            f"Parameter {name!r} is a DTensor over {mesh}, and experts= holds the ranks {list(ranks)}; beside expert "
            "parallelism zeor takes DTensors over that one dimension alone, no tensor parallelism."
        )
    if not Placed(name, param).cut:
        raise TypeError(
            f"Parameter {name!r} is a DTensor that is {param.placements[0]} over experts=, so it is no expert's: its "
            "ranks see different data and have the same values; leave it a plain parameter."
        )


def _check_plan(name: str, plan: Plan) -> None:
    """ValueError where something was asked for that does not know axes of experts."""
    asked = {
        "wire=": plan.wire is not None,
        "delay=1": plan.delay > 0,
        f"moments={plan.moments!r}": plan.moments != "exact",
    }
    option = next((option for option, is_asked in asked.items() if is_asked), None)
    if option is not None:
        raise ValueError(
            f"{option} does not know lanes that stand on other ranks than the rest of the model, and {name!r} is cut "
            "over experts=; leave it out of a model with expert parallelism."
        )


# ---- which ranks have the same experts


def _places(everyone: Axis, ranks: Sequence[int]) -> Places:
    """ValueError where the ranks that zeor was given are no grid with those of experts=."""
    here = dist.get_rank() if dist.is_initialized() else 0
    rows = exchange(everyone, [here, *ranks], "exchange about the ranks of experts=")
    if everyone.fake:
        rows = _imagined(dist.get_process_group_ranks(everyone.gather), ranks)
    by_rank = {row[0]: row[1:] for row in rows}
    ours = list(by_rank)
    for rank, line in by_rank.items():
        if rank not in line or any(by_rank.get(other) != line for other in line):
            raise ValueError(
                f"experts= holds the ranks {line}, and zeor was given the ranks {ours} to shard over: all ranks "
                "of each such line must be among them, and no two lines may share one; make both from one mesh: "
                "mesh = zeor.mesh(dp=-1, ep=2), mesh=mesh['dp', 'ep'], experts=mesh['ep']."
            )
    return Places(ours, [line.index(rank) for rank, line in by_rank.items()])


def _imagined(ours: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """What the other ranks of an imagined world would tell: their lines lie as this rank's does."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    firsts = [rank - rank // stride % len(ranks) * stride for rank in ours]
    return [[rank, *(first + place * stride for place in range(len(ranks)))] for rank, first in zip(ours, firsts)]


class Same(NamedTuple):
    """The ranks with the same experts, as everyone counts them: all, those along each axis, and their coordinates."""

    ranks: list[int]
    lines: tuple[list[int], list[int]]
    members: list[tuple[int, ...]]


def same_experts(members: Sequence[tuple[int, ...]], coords: Sequence[int], me: int) -> Same:
    """`members`: the coordinates of each rank along the axes; `coords`: along experts=."""
    ranks = [rank for rank, coord in enumerate(coords) if coord == coords[me]]
    along_inside = [rank for rank in ranks if members[rank][1] == members[me][1]]
    along_across = [rank for rank in ranks if members[rank][0] == members[me][0]]
    steps = [sorted({members[rank][number] for rank in ranks}) for number in (0, 1)]
    found = [tuple(steps[number].index(members[rank][number]) for number in (0, 1)) for rank in ranks]
    return Same(ranks, (along_inside, along_across), found)


def _axes_of(axes: Axes, places: Places, plan: Plan) -> Axes:
    """What is left of each axis where only ranks with the same experts stand on it."""
    _check_grid(axes, places)
    same = same_experts(axes.members, places.coords, axes.everyone.rank)
    lines = [[places.ranks[rank] for rank in line] for line in same.lines]
    inside, across = (_part(axis, line, plan) for axis, line in zip(axes.each, lines))
    if min(inside.size, across.size) > 1:
        everyone = _part(axes.everyone, [places.ranks[rank] for rank in same.ranks], plan)
    else:
        everyone = across if across.size > 1 else inside
    everyone.observer, everyone.standing = axes.everyone.observer, axes.everyone.standing
    return Axes(inside, across, everyone, same.members)


def _part(axis: Axis, ranks: list[int], plan: Plan) -> Axis:
    """The axis itself, some ranks of it, or this one alone."""
    if len(ranks) == axis.size:
        return axis
    if len(ranks) == 1:
        return Axis(0, 1, axis.device, timeout=axis.timeout, name=axis.name)
    found = make_axis(group_of(ranks), axis.device, plan.deterministic, plan.timeout)
    found.name, found.known_as = "experts", ranks
    return found


def _check_grid(axes: Axes, places: Places) -> None:
    for coord in sorted(set(places.coords)):
        ranks = [rank for rank, found in enumerate(places.coords) if found == coord]
        inside, across = ({axes.members[rank][number] for rank in ranks} for number in (0, 1))
        if len(ranks) != len(inside) * len(across):
            raise ValueError(
                f"The ranks with the same experts, {[places.ranks[rank] for rank in ranks]}, are no grid along the "
                f"axes {axes.inside.name!r} and {axes.across.name!r}; give experts= one dimension of the mesh."
            )


def _counted(places: Places) -> tuple[tuple[int, int], ...]:
    """Of each rank: its place along experts=, and which of the ranks with the same experts it is."""
    seen: dict[int, int] = {}
    found = []
    for coord in places.coords:
        found.append((coord, seen.get(coord, 0)))
        seen[coord] = seen.get(coord, 0) + 1
    return tuple(found)
