"""What a walk needs to go by: starting gathers, dropping units, and the exchange that ends a round.

The walk (order.py) decides which unit is gathered when and knows no tensor; this module carries that out
for the units of one engine. See Note [Rounds] in order.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from zeor.comm import verbs
from zeor.comm.mesh import Mesh
from zeor.step.order import NOTHING, Asked, Walk
from zeor.step.unit import Unit


class Gathers:
    """The gathers of one engine's units."""

    def __init__(self, mesh: Mesh, units: Sequence[Unit], overlap: bool, record: Callable, under_way: Callable):
        self._mesh, self._units, self._overlap, self._record = mesh, units, overlap, record
        self._under_way = under_way  # says what else is waited for, for the label of an exchange
        self.frees = any(unit.frees for unit in units)

    def ahead(self, unit: Unit, walk: Walk | None) -> None:
        """A unit will probably be needed soon."""
        if unit.frees and not unit.present and walk is not None:
            walk.ahead(unit.index)

    def arrive(self, unit: Unit, walk: Walk | None) -> None:
        """The unit's full parameters are there; gathered now if nobody thought of it before."""
        if unit.frees and not unit.present:
            if walk is not None:
                walk.gather(unit.index)
            else:
                self.take_part(unit.index)  # called outside the model's forward: every rank does the same
        self._record("wait", unit.index)
        unit.wait()

    # ---- a forward's walk

    def forward_walk(self, order: Sequence[int], keep_skipped: bool) -> Walk:
        """What it tells at its end is a fingerprint of this rank's path and its kind; nothing where nothing is
        gathered."""
        return Walk(self, self.freed(order), keep_skipped, told_count=4 if self.frees else 0)

    def end_forward(self, walk: Walk, kind: str, playing: bool) -> bool:
        """Ends a forward: whether ranks have taken different paths through the units. A rank that only plays has taken
        none."""
        if not self.frees:
            walk.finish()
            return False
        path = hash(tuple(walk.entered)) & 0x7FFFFFFF
        told = [NOTHING, NOTHING] if playing else [path, -path]
        kinds = [number := zlib.crc32(kind.encode()) & 0x7FFFFFFF, -number]
        largest, least, most, fewest = walk.finish([*told, *kinds])
        if most != -fewest:
            raise RuntimeError(
                f"Rank {self._mesh.rank} of {self._mesh.world} ran a forward of kind {kind!r} while another rank ran "
                "one of another kind (one evaluates and one trains?); where parameters are sliced every rank must take "
                "part: evaluate on every rank, or one rank alone at stages 0 to 2."
            )
        return largest != -least

    def freed(self, order: Sequence[int], kept: Sequence[int | None] = ()) -> list[int]:
        """The units of an order that are freed between uses, less those that every rank keeps from the last pass."""
        return [unit for unit in order if self._units[unit].frees and unit not in kept]

    # ---- see Gatherer in order.py

    def take_part(self, unit: int) -> None:
        self._record("gather", unit)
        self._units[unit].start_gather()
        if not self._overlap:
            self._units[unit].wait()

    def drop(self, unit: int) -> None:
        self._units[unit].free()

    def has(self, unit: int) -> bool:
        return self._units[unit].present

    def ask(self, asked: Asked) -> Asked:
        """Nothing is exchanged where nothing can be asked for: no unit is freed, and nothing is told."""
        if self._mesh.world == 1 or self._mesh.fake or not (asked.told or self.frees):
            return asked
        count = len(self._units)
        values = torch.tensor([asked.again, *(i in asked.units for i in range(count)), *asked.told], dtype=torch.int32)
        label = f"agreement at the end of a pass{self._under_way()}"
        again, *rest = verbs.agree_max(self._mesh, values, label).tolist()
        return Asked(bool(again), [i for i in range(count) if rest[i]], rest[count:])
