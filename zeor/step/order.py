"""Orders that ranks agree on, and the walk along them.

Collectives pair up by position: the n-th gather of one rank meets the n-th gather of every other. So
each pass (forward, forward without gradients, backward) walks one agreed order of units, and a rank
that skips a unit still takes part in its gather. Orders start as registration order, are learned from
the first pass of their kind, and are agreed once (rank 0's, then what only other ranks saw).

Note [Rounds]
~~~~~~~~~~~~~
Ranks may take different paths (experts, data-dependent branches, an expert nobody used before). A pass is
a number of rounds. The first is one gather of every unit of the order, by every rank, wanted or not. A
rank that needs a unit the round has passed, or that is in no order, takes part in the rest of the round and
then asks; a rank that is through asks for nothing. Asking is an exchange of all ranks: either everybody
is through and the pass is over, or everybody plays another round (where a unit of the order was
asked for: what comes next is probably its successors) or gathers just the units asked for.
Nobody waits for anything but gathers and that exchange, so divergence costs rounds, never a hang.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from zeor.comm.agree import exchange, is_same
from zeor.comm.axes import Axes

TRAIN, EVAL, BACKWARD, REDUCE = "train", "eval", "backward", "reduce"
FIRST = "as registered"  # of a kind that was not seen yet
NOTHING = -(2**31) + 1  # what a rank tells that has nothing to say: the least that travels


def kind_of(train: bool, entry: str) -> str:
    """The kind of a forward: with gradients or without, through the model's forward or a method beside it."""
    kind = TRAIN if train else EVAL
    return f"{kind} {entry}" if entry else kind


def backward_of(kind: str) -> str | None:
    """The kind of the backward of one entry alone, as a pipeline runs it; None after an evaluation."""
    return kind.replace(TRAIN, BACKWARD, 1) if kind.startswith(TRAIN) else None


class Orders:
    """One order per kind of pass."""

    def __init__(self, axes: Axes, count: int):
        self._axes = axes
        forward = list(range(count))
        self._orders = {FIRST: forward, BACKWARD: forward[::-1], REDUCE: forward[::-1]}
        self.learned: set[str] = set()

    def __getitem__(self, kind: str) -> list[int]:
        return self._orders.get(kind, self._orders[FIRST])

    def behind(self, kind: str) -> list[int]:
        """The order of the backward that comes after a forward of this kind; nothing after an evaluation."""
        own = backward_of(kind)
        if own is None:
            return []
        return self[own if own in self.learned else BACKWARD]

    def learn(self, kinds: dict[str, Sequence[int]]) -> None:
        """Agree on what this pass showed. Every rank calls it at the same place, once per kind."""
        mine = {kind: list(dict.fromkeys(order)) for kind, order in kinds.items()}
        axis, label = self._axes.everyone, f"agreement on the order of units in {', '.join(kinds)}"
        same = is_same(axis, json.dumps(mine).encode(), label)
        seen = [mine] if same else exchange(axis, mine, label)
        for kind in kinds:
            merged = dict.fromkeys(unit for rank in seen for unit in rank[kind])
            self._orders[kind] = list(merged)
            self.learned.add(kind)

    def extend(self, kind: str, units: Sequence[int]) -> bool:
        """Units that a pass needed beside its order, as every rank knows: from now on they are in it."""
        new = [unit for unit in dict.fromkeys(units) if unit not in self[kind]]
        self._orders[kind] = [*self[kind], *new]
        return bool(new)

    def insert(self, kind: str, units: Sequence[int]) -> None:
        """Units that were in no order of a backward's, each before those that registration order puts behind it."""
        order = list(self._orders[kind])
        for unit in units:
            if unit not in order:
                place = next((at for at, other in enumerate(order) if other < unit), len(order))
                order.insert(place, unit)
        self._orders[kind] = order


class Asked(NamedTuple):
    """One exchange of a pass: what this rank asks for, or, as the answer, what any rank did."""

    again: bool  # another round
    units: list[int]  # units that are in no order
    told: list[int]  # numbers that travel along; the answer is the largest of each


class Gatherer(Protocol):
    """What a walk needs of the engine."""

    def take_part(self, unit: int) -> None:
        """Start the gather of a unit; it may be here already."""

    def drop(self, unit: int) -> None:
        """This rank had no use for it."""

    def has(self, unit: int) -> bool:
        """Here, or on its way."""

    def ask(self, asked: Asked, needs: bool) -> Asked:
        """Exchange with all ranks. `needs`: this rank needs something that its order does not give it."""


class Walk:
    """One pass of gathers along an agreed order; see Note [Rounds].

    In a pass whose order is not learned yet, skipped units are kept until the end: they will probably be
    entered later. `told_count` numbers travel with each exchange, so that the end of backward needs no second;
    `before_ask` is called before each.
    """

    def __init__(
        self, gatherer: Gatherer, order: Sequence[int], keep_skipped: bool, told_count: int = 0,
        before_ask: Callable[[], None] | None = None,
    ):  # fmt: skip
        self._gatherer, self._keep_skipped, self._told_count = gatherer, keep_skipped, told_count
        self._before_ask = before_ask
        self._order = list(order)
        self._position = {unit: position for position, unit in enumerate(self._order)}
        self._next = 0
        self.entered: list[int] = []
        self.extra: list[int] = []  # units any rank asked for that are in no order

    def ahead(self, unit: int) -> None:
        """A unit will probably be needed soon: gather it, if its turn in this round is still to come."""
        if self._position.get(unit, -1) >= self._next:
            self._in_turn(unit)

    def gather(self, unit: int) -> None:
        """A unit is needed now and is not here."""
        if self._position.get(unit, -1) < self._next:
            self._skip_to(len(self._order))
            again = unit in self._position
            self._play(self._ask(again, [] if again else [unit], [0] * self._told_count, True), wanted=unit)
        if not self._gatherer.has(unit):
            self._in_turn(unit)

    def pass_by(self, unit: int) -> None:
        """This rank will not need the unit in this round."""
        if unit in self._position:
            self._skip_to(self._position[unit] + 1)

    def pass_by_all(self) -> None:
        """This rank will need no more of this round."""
        self._skip_to(len(self._order))

    def finish(self, told: Sequence[int] = ()) -> list[int]:
        """The pass ends: play on until nobody needs anything. Returns the largest of what the ranks told."""
        while True:
            answer = self.agree(told)
            if answer is not None:
                return answer

    def agree(self, told: Sequence[int] = ()) -> list[int] | None:
        """One exchange of a rank that needs nothing. None where somebody does: it is being played."""
        assert len(told) == self._told_count
        self._skip_to(len(self._order))
        answer = self._ask(False, [], list(told), False)
        if not answer.again and not answer.units:
            return answer.told
        self._play(answer, wanted=None)
        return None

    # ---- rounds

    def _ask(self, again: bool, units: list[int], told: list[int], needs: bool) -> Asked:
        if self._before_ask is not None:
            self._before_ask()
        # In a pass whose order is not learned yet, every rank may need something.
        return self._gatherer.ask(Asked(again, units, told), needs and not self._keep_skipped)

    def _play(self, answer: Asked, wanted: int | None) -> None:
        """What was asked for: single units at once, another round in its own time."""
        for unit in answer.units:
            self._take_part(unit, keep=unit == wanted)
        self.extra.extend(answer.units)
        if answer.again:
            self._next = 0

    def _in_turn(self, unit: int) -> None:
        self._skip_to(self._position[unit])
        self._gatherer.take_part(unit)
        self._next = self._position[unit] + 1

    def _skip_to(self, position: int) -> None:
        for skipped in self._order[self._next : position]:
            self._take_part(skipped, keep=self._keep_skipped)
        self._next = max(self._next, position)

    def _take_part(self, unit: int, keep: bool) -> None:
        """A unit that is here already (kept for a second use) is gathered again, as the others need it, and stays."""
        keep = keep or self._gatherer.has(unit)
        self._gatherer.take_part(unit)
        if not keep:
            self._gatherer.drop(unit)
