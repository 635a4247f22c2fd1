"""What a user asked for: the options of zeor.shard as they were given, and the plan that they make.

Kept with a sharded model, so that zeor.replan can change some options and leave the others. Nothing here looks at
a model or begins a collective.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from zeor.comm.meshes import stages_of
from zeor.memory import device as devices
from zeor.plan import Plan
from zeor.planner.choose import Choice


class Where(NamedTuple):
    """Over which ranks, and on which device."""

    mesh: Any
    hierarchy: int | str | None
    device: Any
    experts: Any = None  # a dimension of the mesh


class Asked(NamedTuple):
    """`options`: all of zeor.shard's but those in `where`, and `units`."""

    where: Where
    options: dict[str, Any]
    units: Any

    def plan(self) -> Plan:
        """ValueError or TypeError where there is no such plan."""
        options = self.options
        if "across" in options:
            raise TypeError(
                "zeor has no option 'across'; give a stage for each axis: stage={'gpu': 3, 'node': 1}."
            )
        stage, across = stages_of(options["stage"], self.where.mesh, self.where.hierarchy)
        return Plan.parse({**options, "stage": stage, "across": across})

    def describe(self) -> list[str]:
        """What ranks must have asked alike, beside the plan, as text."""
        units = self.units and [getattr(unit, "__name__", type(unit).__name__) for unit in self.units]
        return [f"hierarchy={self.where.hierarchy}", f"units={units}"]

    def with_plan(self, plan: Choice | str | None, defaults: Mapping[str, Any], is_cut: bool) -> Asked:
        """What plan= names takes the place of defaults, and of nothing that was given. `is_cut`: the model has
        DTensors, which compile= and recompute="auto" do not take."""
        if plan is None:
            return self
        given = {**self.options, "hierarchy": self.where.hierarchy}
        named = [name for name, value in given.items() if value != defaults.get(name)]
        chosen = chosen_by(plan, self.where, [*named, "compile", "recompute"] if is_cut else named)
        for name, value in chosen.items():
            if given[name] not in (defaults[name], value):
                raise ValueError(
                    f"{name}={given[name]!r} was given beside plan=, which says {name}={value!r}; leave one of them "
                    "out."
                )
        hierarchy = chosen.pop("hierarchy", self.where.hierarchy)
        return self._replace(where=self.where._replace(hierarchy=hierarchy), options={**self.options, **chosen})


def chosen_by(plan: Choice | str, where: Where, given: Collection[str]) -> dict[str, Any]:
    """The options that plan= stands for. "auto" leaves alone what is `given` by name."""
    if isinstance(plan, Choice):
        return plan.options
    if plan != "auto":
        raise ValueError(f"plan={plan!r} is not known; give what zeor.choose returns, or 'auto'.")
    chosen: dict[str, Any] = {"recompute": "auto"}
    if where.mesh is None and where.experts is None:
        chosen |= {"hierarchy": "auto"}
    if torch.accelerator.is_available() and where.device != "cpu" and where.experts is None:
        chosen |= {"offload": "auto"} | ({"compile": True} if devices.compiles() else {})
    return {name: value for name, value in chosen.items() if name not in given}
