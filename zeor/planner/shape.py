"""How ranks that are not here stand on axes: from what `zeor.predict` is told (`world=`, `hierarchy=`, `stage=`).

    world=16                            one axis
    world={"node": 2, "gpu": 8}         two, as a DeviceMesh of these names: the last one holds neighbours
    world=16, hierarchy=8               the same two; stage=3 then means {"gpu": 3, "node": 1}, as for zeor.shard

No rank is asked anything; what real ranks are told is read in comm/meshes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from zeor.comm.meshes import GPU, NODE, stages_of
from zeor.memory.placed import is_placed
from zeor.memory.roles import Sizes

ONE = ("ranks",)


class Shape(NamedTuple):
    """As a mesh: `mesh_dim_names` are the names of its axes, outermost first."""

    sizes: Sizes
    mesh_dim_names: tuple[str, ...] = ONE

    @property
    def world(self) -> int:
        return self.sizes.inside * self.sizes.across

    def __str__(self) -> str:
        if self.mesh_dim_names == ONE:
            return f"{self.world} rank{'s' if self.world > 1 else ''}"
        told = dict(zip(reversed(self.mesh_dim_names), self.sizes))
        return " x ".join(f"{size} {name}" for name, size in reversed(told.items()))

    @staticmethod
    def parse(world: Any, hierarchy: int | None = None) -> Shape:
        if isinstance(world, Shape):
            return world
        if isinstance(world, Mapping):
            if hierarchy is not None:
                raise ValueError(f"world={dict(world)!r} names the axes already; leave out hierarchy=.")
            if not 1 <= len(world) <= 2:
                raise ValueError(f"world={dict(world)!r}: {len(world)} axes; give one or two, the inner one last.")
            counts = [_count(f"world[{name!r}]", size) for name, size in world.items()]
            return Shape(Sizes(*reversed(counts)), tuple(map(str, world)))
        count = _count("world", world)
        if hierarchy is None:
            return Shape(Sizes(count))
        if not isinstance(hierarchy, int):
            raise ValueError(
                f"hierarchy={hierarchy!r}: hosts that are elsewhere cannot be asked; give how many ranks each has."
            )
        inside = _count("hierarchy", hierarchy)
        if count % inside:
            raise ValueError(f"hierarchy={inside} ranks per node do not divide the {count} ranks there are.")
        hosts = count // inside
        return Shape(Sizes(inside, hosts), (NODE, GPU)) if hosts > 1 and inside > 1 else Shape(Sizes(count))

    def stages(self, stage: Any, hierarchy: int | None = None) -> dict[str, Any]:
        """Of the plan: `stage` and `across`, as shard() would read them on such ranks."""
        inside, across = stages_of(stage, self if self.mesh_dim_names != ONE else None, hierarchy)
        return {"stage": inside, "across": across}


    def experts(self, model: nn.Module, dim: Any) -> Sizes:
        """Ranks with the same experts, along each axis. `dim`: the DeviceMesh that zeor.shard is given as experts=."""
        if not any(map(is_placed, model.parameters())):
            raise ValueError("experts= was given, and no parameter of the model is a DTensor over it.")
        count, names = dim.size(), tuple(reversed(self.mesh_dim_names))
        along = names.index(dim.mesh_dim_names[0]) if (dim.mesh_dim_names or (None,))[0] in names else 0
        if self.sizes[along] % count:
            raise ValueError(f"experts= has {count} ranks, which do not divide the {self.sizes[along]} of {self}.")
        left = [size // count if axis == along else size for axis, size in enumerate(self.sizes)]
        return Sizes(*left)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}; give how many ranks there are: 1, 2, 3, ...")
    return value
