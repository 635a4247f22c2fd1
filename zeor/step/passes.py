"""What the passes of one step share: the agreed orders, the schedule, and which units must stay.

A pass is one walk of the model: a forward (forward.py) or a backward (backward.py). Both look an event up
in the schedule and do its actions on units; this module carries those out and remembers, between passes and
until the step, which units were entered and which are entered more than once.
It knows neither hooks nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zeor.comm.mesh import Mesh
from zeor.memory.buffers import Ledger
from zeor.plan import Plan
from zeor.step import order as orders
from zeor.step.gathers import Gathers
from zeor.step.order import Orders, Walk
from zeor.step.residency import FORWARD_EXIT, Residents
from zeor.step.schedule import Action, Schedule, traits_of
from zeor.step.unit import Unit

Record = Callable[[str, int], None]


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Borrowed:
    """Something has put other values in the weights' place for a while (`by`: what)."""

    def __init__(self) -> None:
        self.by: str | None = None

    def refuse(self, what: str) -> None:
        if self.by is not None:
            raise RuntimeError(f"{what} inside {self.by}, where the weights are an average; do it outside.")


class Passes:
    """`record(verb, unit)` hears of each action; `under_way` says what else is waited for."""

    def __init__(
        self, plan: Plan, mesh: Mesh, units: list[Unit], ledger: Ledger, record: Record, under_way: Callable[[], str]
    ):
        self.plan, self.mesh, self.units, self.ledger, self.record = plan, mesh, units, ledger, record
        self.forward_walk: Walk | None = None  # while the model's forward runs
        self.orders = Orders(self.mesh, len(self.units))
        self.gathers = Gathers(self.mesh, self.units, self.plan.overlap, self.record, under_way)
        self.residents = Residents()
        self.lone: list[Unit] = []  # read inside a unit that was called outside the model's forward
        self.used: set[int] = set()  # units entered since the last step
        self.diverged = False  # ranks have taken different paths in a forward since the last step
        self.plan_step()

    def plan_step(self) -> None:
        """The schedule of a step along the orders as they are agreed now."""
        traits = tuple(traits_of(unit.name, [lane.spec for lane in unit.lanes]) for unit in self.units)
        overlap = self.plan.overlap
        prefetch = self.plan.prefetch if overlap else 0
        backward = tuple(self.orders[orders.BACKWARD])

        def plan(kind: str) -> Schedule:
            behind = backward if kind.startswith(orders.TRAIN) else ()
            return Schedule(traits, tuple(self.orders[kind]), behind, prefetch, overlap)

        self._plan = plan
        self._planned: dict[str, Schedule] = {}
        self.schedule = self.schedule_of(orders.TRAIN)

    def schedule_of(self, kind: str) -> Schedule:
        """Of a step whose forward is of this kind."""
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind)
        return self._planned[kind]

    def learn(self, kinds: dict[str, Sequence[int]]) -> None:
        """Agree on the orders a pass showed, and plan anew."""
        self.orders.learn(kinds)
        self.plan_step()

    def extend(self, kind: str, extra: Sequence[int]) -> None:
        """Units a pass needed beside its order are in it from now on."""
        if self.orders.extend(kind, extra):
            self.plan_step()

    # ---- actions

    def do(self, actions: Sequence[Action], walk: Walk | None) -> None:
        for action in actions:
            unit = self.units[action.unit]
            if action.verb == "gather":
                self.gathers.ahead(unit, walk)
            elif action.verb == "wait":
                self.gathers.arrive(unit, walk)
            elif action.verb == "free":
                self.free(unit)
            else:
                raise AssertionError(f"{action} is no action of a pass")

    def free(self, unit: Unit, when: int = FORWARD_EXIT) -> bool:
        """Whether it went, or stays: see residency.py."""
        if not self.residents.may_free(unit, when):
            return False
        if unit.index not in self.residents.repeated:
            self.record("free", unit.index)
        unit.free()
        return True

    def free_lone(self) -> None:
        """A unit called outside the model's forward is left."""
        for unit in self.lone:
            self.free(unit)
        self.lone.clear()

    def put_back(self) -> None:
        """After an exception: nothing is gathered."""
        self.residents.open.clear()
        self.residents.last = None
        for unit in self.units:
            if unit.frees:
                unit.free()

    def forget_gathered(self) -> None:
        """No unit is in place, and no rank may count on one."""
        self.residents.last = None

    def end_step(self) -> None:
        self.used.clear()
        self.residents.last = None
        self.diverged = False
