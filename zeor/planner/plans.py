"""The plans that `zeor.choose` looks at: stages by axis, and step by step what saves memory at the price of time.

A list for each choice of stages; in each, the later ones save memory where those before did not fit. Nothing is
computed here, and nothing that changes results is among them unless it is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from zeor.plan import Offload
from zeor.planner.machine import Machine
from zeor.planner.shape import Shape

FORMATS = ("bf16", "int8")
ALLOWED = (*FORMATS, "release", "delay")
AWAY, LEAST = "away", "least"  # state may rest on the host; gradients and compute too


@dataclass(frozen=True)
class Room:
    """What there is: ranks on machines; and for each of them bytes on the device, and on the host (0: none)."""

    machine: Machine
    shape: Shape
    device: int
    host: int


class Option(NamedTuple):
    """One plan to look at."""

    shape: Shape  # how ranks stand: as given, or in nodes
    nodes: bool  # by hierarchy=
    stage: Any
    recompute: Any = False
    away: str = ""  # AWAY, LEAST
    moments: str = "exact"
    release: bool = False
    delay: int = 0
    accumulation: int = 1

    @property
    def gives_up_nothing(self) -> bool:
        """No time: nothing is computed again, and nothing travels to the host."""
        return not self.recompute and not self.away

    def only_saves_beside(self, fits: Option) -> bool:
        """Whether it can only be slower than one of the same list that fits. Neither of computing again and moving
        state to the host is always the cheaper one, so both are looked at; gradients and compute go last."""
        return fits.gives_up_nothing or self.away == LEAST

    def rest(self, room: Room) -> dict[str, Any]:
        """Of the plan, beside its stages."""
        found: dict[str, Any] = {"recompute": self.recompute, "moments": self.moments, "release": self.release}
        found |= {"delay": self.delay} if self.delay else {}
        if self.away:
            more = {"grads": "host", "compute": "host"} if self.away == LEAST else {}
            budgets = {"device_budget": room.device, "host_budget": room.host}
            found["offload"] = Offload.parse({"auto": True, **budgets, **more})
        return found

    def shard(self) -> dict[str, Any]:
        """As zeor.shard takes it: offload="auto" then goes by what is free."""
        found: dict[str, Any] = {"stage": self.stage}
        found |= {"hierarchy": self.shape.sizes.inside} if self.nodes else {}
        found |= {name: getattr(self, name) for name in ("recompute", "release", "delay") if getattr(self, name)}
        found |= {"moments": self.moments} if self.moments != "exact" else {}
        if self.away:
            found["offload"] = Offload(auto=True, grads="host", compute="host") if self.away == LEAST else "auto"
        return found

    def __str__(self) -> str:
        stage = self.stage
        if isinstance(stage, dict):
            inside, across = (stage[name] for name in reversed(self.shape.mesh_dim_names))
            stage = f"{inside} inside, {across} across"
        told = [f"stage {stage}"]
        told += [f"recompute={self.recompute!r}"] if self.recompute else []
        told += ["offload='auto'" + (" with gradients and compute" if self.away == LEAST else "")] if self.away else []
        told += [f"{self.moments} moments"] if self.moments != "exact" else []
        told += ["release"] * self.release + ["delay"] * bool(self.delay)
        told += [f"{self.accumulation} micro-batches"] if self.accumulation > 1 else []
        return ", ".join(told)


def micro_batches(sequences: int | None) -> list[int]:
    """Into how many equal ones a batch can be cut by halves, the fewest first."""
    found = [1]
    while sequences is not None and sequences % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


def options_of(room: Room, allowed: Sequence[str], clip: bool, count: int) -> Iterator[list[Option]]:
    """Lists of plans: in each, those that give up the least come first."""
    places = [""] + ([AWAY, LEAST] if room.host else [])
    formats = ["exact", *(each for each in FORMATS if each in allowed)]
    releases = [False] + [True] * ("release" in allowed and not clip and count == 1)
    delays = [0] + [1] * ("delay" in allowed)
    for first, moments, release, delay in product(_staged(room), formats, releases, delays):
        if (release and delay) or (delay and not room.host):  # a delayed update hides what travels, and costs memory
            continue
        found = []
        for away, recompute in product(places, (False, "auto")):
            if away == LEAST and (not _may_leave(first) or delay):
                continue
            if delay and not away:
                continue
            option = first._replace(recompute=recompute, away=away, moments=moments, release=release, delay=delay)
            found.append(option._replace(accumulation=count))
        yield found


def _may_leave(option: Option) -> bool:
    """Whether compute and gradients can rest on the host, as plan.py checks it."""
    stages = option.stage.values() if isinstance(option.stage, dict) else (option.stage,)
    return option.stage == 3 or (set(stages) <= {0, 3} and max(stages) == 3)


def _staged(room: Room) -> Iterator[Option]:
    """Those that keep most of the model first: ranks on one axis, and in nodes where there are several."""
    shape, machine = room.shape, room.machine
    if shape.world == 1:
        yield Option(shape, False, 3)
        return
    two = len(shape.mesh_dim_names) == 2
    if not two:
        yield from (Option(shape, False, stage) for stage in range(4))
    nodes = shape if two else _in_nodes(shape, machine)
    if nodes is not None:
        pairs = [*product(range(4), range(3)), (3, 3)]
        outer, inner = nodes.mesh_dim_names
        yield from (Option(nodes, not two, {outer: across, inner: inside}) for inside, across in pairs)


def _in_nodes(shape: Shape, machine: Machine) -> Shape | None:
    if shape.world <= machine.per_host or shape.world % machine.per_host or machine.per_host == 1:
        return None
    return Shape.parse(shape.world, machine.per_host)
