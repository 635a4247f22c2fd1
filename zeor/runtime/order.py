"""Orders that ranks agree on, and the walk along them.

Collectives pair up by position: the n-th gather of one rank meets the n-th gather of every other. So
each pass (forward, forward without gradients, backward) walks one agreed order of units, and a rank
that skips a unit still takes part in its gather. Orders start as registration order, are learned from
the first pass of their kind, and are agreed once (rank 0's, then what only other ranks saw).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeor.comm.agree import exchange
from zeor.comm.mesh import Mesh

TRAIN, EVAL, BACKWARD, REDUCE = "train", "eval", "backward", "reduce"


class Orders:
    """One order per kind of pass."""

    def __init__(self, mesh: Mesh, count: int):
        self._mesh = mesh
        forward = list(range(count))
        self._orders = {TRAIN: forward, EVAL: forward, BACKWARD: forward[::-1], REDUCE: forward[::-1]}
        self.learned: set[str] = set()

    def __getitem__(self, kind: str) -> list[int]:
        return self._orders[kind]

    def learn(self, kinds: dict[str, Sequence[int]]) -> None:
        """Agree on what this pass showed. Every rank calls it at the same place, once per kind."""
        seen = [{kind: list(dict.fromkeys(order)) for kind, order in kinds.items()}]
        if not self._mesh.fake:
            seen = exchange(self._mesh, seen[0])
        for kind in kinds:
            merged = dict.fromkeys(unit for rank in seen for unit in rank[kind])
            self._orders[kind] = list(merged)
            self.learned.add(kind)


class Walk:
    """One pass of gathers along an agreed order.

    `issue(unit)` starts a gather; `drop(unit)` frees a unit this rank did not want. In a pass whose
    order is not learned yet, skipped units are kept until the end: they will probably be entered later.
    """

    def __init__(self, order: Sequence[int], resident: set[int], keep_skipped: bool):
        self._order = [unit for unit in order if unit not in resident]
        self._position = {unit: position for position, unit in enumerate(self._order)}
        self._next = 0
        self._keep_skipped = keep_skipped
        self.entered: list[int] = []

    def gather(self, unit: int, issue: Callable[[int], None], drop: Callable[[int], None]) -> None:
        """Gather a unit, and take part in the gathers of those before it that this rank skipped."""
        position = self._position.get(unit, -1)
        if position < self._next:
            # Entered again, or not expected at all: every rank is assumed to do the same.
            issue(unit)
            return
        self._skip_to(position, issue, drop)
        issue(unit)
        self._next = position + 1

    def finish(self, issue: Callable[[int], None], drop: Callable[[int], None]) -> None:
        """The pass ends: take part in the gathers this rank had no use for."""
        self._skip_to(len(self._order), issue, drop)

    def _skip_to(self, position: int, issue: Callable[[int], None], drop: Callable[[int], None]) -> None:
        for skipped in self._order[self._next : position]:
            issue(skipped)
            if not self._keep_skipped:
                drop(skipped)
        self._next = max(self._next, position)
