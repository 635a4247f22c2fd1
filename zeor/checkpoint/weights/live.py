"""A sharded model, as files see it: the ranks that hold it, its parameters and its units.

Only this module and the public verbs know the engine; every other function is given what it needs of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeor.checkpoint.files.plain import dtype_name
from zeor.checkpoint.weights.naming import Named, Naming
from zeor.comm.axes import Axis
from zeor.features.auto_wire import AutoWire
from zeor.features.mean_loss import Counts
from zeor.plan import Wire
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.lane import Lane
from zeor.step.unit import Unit, publish_written


class LiveModel:
    """`naming`: what its tensors are called; of stages of a pipeline with what the other stages have."""

    def __init__(self, engine: Engine, naming: Naming | None = None) -> None:
        engine.announcer.check_here("A checkpoint or an export was asked for")
        self.engine, self.naming = engine, naming or Naming()
        self.slots, self.units, self.unfilled = engine.slots, engine.units, engine.unfilled

    @property
    def everyone(self) -> Axis:
        """The ranks that hold it, or a part of it along any dimension; of a pipeline those of all stages."""
        return self.holders if self.naming.pipeline is None else self.naming.pipeline.everyone

    @property
    def holders(self) -> Axis:
        """Those of them that hold parts of the same stages as this rank."""
        return self.engine.axes.whole

    def learn_names(self) -> None:
        """Every rank comes here, before names of other stages are needed: see naming.py."""
        if self.naming.pipeline is None:
            return
        mine = {}
        for slot in self.slots:
            if id(slot.param) not in self.naming.copies:
                name, trains = self.naming.params[id(slot.param)], slot.param.requires_grad
                mine[name] = Named(slot.whole_shape, dtype_name(slot.dtype), trains, False)
        for name, buffer in self.naming.buffers.items():
            mine[name] = Named(tuple(buffer.shape), dtype_name(buffer.dtype), False, True)
        self.naming.learn(self.everyone, self.holders.rank == 0, mine)

    @property
    def shards(self) -> Axis:
        """The ranks that have the same part along mesh dimensions that are not ours; they divide the data."""
        return self.engine.axes.everyone

    @property
    def tensor_coords(self) -> tuple[int, ...]:
        """This rank's place along those dimensions."""
        return self.engine.axes.tensor_coords

    @property
    def reads_data(self) -> bool:
        """Whether this rank says for its replica which data it reads: all parts and stages of one read the same."""
        pipes = self.naming.pipeline
        return not any(self.tensor_coords) and (pipes is None or pipes.axis.rank == 0)

    @property
    def stages(self) -> list[int]:
        """How many ranks a pipeline has in a row, and how many stages; nothing where there is none."""
        pipes = self.naming.pipeline
        return [] if pipes is None else [pipes.axis.size, pipes.stages[0].num_stages]

    @property
    def divided(self) -> list[int]:
        """The sizes of ours and of those dimensions; nothing where there are none."""
        ranks = self.engine.axes.tensor
        return [] if ranks is None else [self.shards.size, *(axis.size for axis in ranks.dims)]

    @property
    def averaged_over(self) -> int:
        """By what a sum of gradients over ranks is divided."""
        return self.shards.size if self.engine.plan.reduction == "mean" else 1

    @property
    def counts_items(self) -> bool:
        """Gradients are divided by the number of items, see features/mean_loss.py, however many ranks there are."""
        return self.engine.feature(Counts).mean

    def forget_residuals(self) -> None:
        """Nothing is left of gradients of before."""
        for unit in self.units:
            for lane in unit.lanes:
                if lane.grads is not None:
                    lane.grads.begin_anew()

    def drain(self) -> None:
        """Wait for the updates and gathers that are under way."""
        self.engine.drain()

    def begin_anew(self, step: int) -> None:
        """A checkpoint of this step is written: from here on this run and one that resumes from it do the same. So
        nothing may be left that it does not hold; every rank calls it."""
        self.engine.publish_anew("at a save")
        self.engine.flush_residuals("at a save")
        self.everyone.standing.seed_noise(step)

    def chosen_wire(self) -> dict[str, Any] | None:
        """By wire="auto", for a checkpoint; None before it has chosen, and in runs without."""
        auto = self.engine.find(AutoWire)
        return None if auto is None else auto.saved()

    def wire_of(self, state: Mapping[str, Any]) -> Wire | None:
        """What a checkpoint says was chosen, where that is for this run; stages of a pipeline choose for themselves."""
        auto, saved = self.engine.find(AutoWire), state.get("wire")
        if "wires" in state:
            wires, alike = state["wires"], state.get("stages") == self.stages
            saved = wires.get(str(self.naming.first_stage)) if alike and isinstance(wires, Mapping) else None
        return None if auto is None else auto.taken(saved)

    def take_wire(self, wire: Wire) -> None:
        """Every rank calls it."""
        self.engine.feature(AutoWire).go_on(wire)

    def announce_if_joining(self, what: str) -> None:
        """Inside zeor.join a rank that is out of data cannot come to `what`: all ranks hear so before any waits."""
        announcer = self.engine.announcer
        if announcer.block is not None:
            announcer.announce(events.OTHER, what)

    def publish(self, unit: Unit, lane: Lane) -> None:
        """Where ranks keep more of compute than they update, each gets what the others have loaded."""
        publish_written(unit, lane)
