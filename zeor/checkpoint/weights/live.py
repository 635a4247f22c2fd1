"""A sharded model, as files see it: the ranks that hold it, its parameters and its units.

Only this module and the public verbs know the engine; every other function is given what it needs of these.
"""

from __future__ import annotations

from zeor.comm.axes import Axis
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.lane import Lane
from zeor.step.unit import Unit, publish_written


class LiveModel:
    def __init__(self, engine: Engine) -> None:
        engine.announcer.check_here("A checkpoint or an export was asked for")
        self.engine = engine
        self.slots, self.units, self.unfilled = engine.slots, engine.units, engine.unfilled

    @property
    def everyone(self) -> Axis:
        """The ranks that hold it, or a part of it along any dimension."""
        return self.engine.axes.whole

    @property
    def shards(self) -> Axis:
        """The ranks that have the same part along mesh dimensions that are not ours; they divide the data."""
        return self.engine.axes.everyone

    @property
    def tensor_coords(self) -> tuple[int, ...]:
        """This rank's place along those dimensions."""
        return self.engine.axes.tensor_coords

    @property
    def divided(self) -> list[int]:
        """The sizes of ours and of those dimensions; nothing where there are none."""
        ranks = self.engine.axes.tensor
        return [] if ranks is None else [self.shards.size, *(axis.size for axis in ranks.dims)]

    def drain(self) -> None:
        """Wait for the updates and gathers that are under way."""
        self.engine.drain()

    def begin_anew(self, step: int) -> None:
        """A checkpoint of this step is written: from here on this run and one that resumes from it do the same. So
        nothing may be left that it does not hold; every rank calls it."""
        self.engine.publish_anew("at a save")
        self.everyone.standing.seed_noise(step)

    def announce_if_joining(self, what: str) -> None:
        """Inside zeor.join a rank that is out of data cannot come to `what`: all ranks hear so before any waits."""
        announcer = self.engine.announcer
        if announcer.block is not None:
            announcer.announce(events.OTHER, what)

    def publish(self, unit: Unit, lane: Lane) -> None:
        """Where ranks keep more of compute than they update, each gets what the others have loaded."""
        publish_written(unit, lane)
