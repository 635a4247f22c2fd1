"""Gathers and reduces along several axes, one after another.

    gather   what a rank holds -> along the outermost axis that divides it -> ... -> everything
    reduce   everything -> along the innermost axis: the node's sum of a part -> along the next: the sum of all

Each leg is one exact verb (verbs.py) over what the leg before it left. The first is issued at once. A gather's next one
follows by itself: another rank may need it while this one waits for something else (a join, a meeting). A reduce's next
one is begun when somebody looks whether the one before it is over: `advance`, or `wait`. Along one axis this is the
verb itself; where a leg or a hop has a codec it is the verb's counterpart of wires.py. This module knows flat tensors,
the grid and axes; whose they are it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.comm import lowrank, verbs, wires
from zeor.comm.axes import Axes, Axis
from zeor.layout import Cut, Grid, LaneLayout, Span
from zeor.layout.grid import Hop
from zeor.memory.buffers import Ledger

WHOLE: Cut = frozenset()
ByAxis = tuple[wires.Coded | None, wires.Coded | None]
HowReduced = tuple[wires.Coded | lowrank.Factored | None, wires.Coded | lowrank.Factored | None]
EXACTLY: ByAxis = (None, None)


class Leg(NamedTuple):
    """One gather of a path: every rank of the axis has `source`, and gets `target`."""

    axis: int  # by number: other groups may take its place
    source: Span
    target: Span
    coded: wires.Coded | None = None  # how it travels, if not exactly


def coded(legs: Sequence[Leg], how: ByAxis) -> list[Leg]:
    """The same legs, by codes along the axes that have a codec. Differences are sent by the first alone."""
    return [leg._replace(coded=how[leg.axis]) for leg in legs]


def path(axes: Axes, grid: Grid, layout: LaneLayout, cut: Cut, to: Cut = WHOLE) -> list[Leg]:
    """From what is cut along some axes to what is cut along fewer."""
    legs: list[Leg] = []
    source = layout.span(grid.stretch(axes.coords, cut))
    for number in grid.widening(cut, to):
        cut = cut - {number}
        target = layout.span(grid.stretch(axes.coords, cut))
        legs.append(Leg(number, source, target))
        source = target
    return legs


def parts_of(axes: Axes, legs: Sequence[Leg], flat: Tensor, begin: int = 0) -> list[verbs.Parts]:
    """What the legs hand to the backend, of a tensor that begins with this element of the lane."""
    spans = [(axes.each[leg.axis], leg.target.begin - begin, leg.target.end - begin) for leg in legs]
    return [verbs.Parts.of(axis, flat[first:last]) for axis, first, last in spans]


class Gathers:
    """Gathers one after another into one tensor, each begun when the one before it is over. As a verbs.Move."""

    def __init__(self, axes: Axes, legs: Sequence[Leg], parts: Sequence[verbs.Parts], mine: Tensor, label: str):
        (first, brought), *later = zip(legs, parts)
        move, dtype = _start(axes, first, brought, mine, label), mine.dtype
        self._last: Callable[[], verbs.Waited] = lambda: move  # waits until it has begun
        for leg, whole in later:
            source, brought, axis = brought.whole, whole, axes.each[leg.axis]
            if leg.coded is None:
                self._last = verbs.gather_after(self._last, axis, whole.whole, source, label, whole)
            else:
                coded = wires.Gather(axis, whole.whole.view(dtype), source.view(dtype), label, leg.coded)
                self._last = coded.start_after(self._last).itself

    def wait(self) -> Tensor:
        return self._last().wait()


Gathering = verbs.Move | wires.Gather | Gathers


def start_gather(
    axes: Axes, legs: Sequence[Leg], parts: Sequence[verbs.Parts], mine: Tensor, label: str
) -> Gathering | None:
    """None: there is nothing to gather, as this rank has it all."""
    if not legs:
        return None
    if len(legs) == 1:
        return _start(axes, legs[0], parts[0], mine, label)
    return Gathers(axes, legs, parts, mine, label)


def _start(axes: Axes, leg: Leg, parts: verbs.Parts, mine: Tensor, label: str) -> verbs.Move | wires.Gather:
    axis = axes.each[leg.axis]
    if leg.coded is None:
        return verbs.gather(axis, parts.whole, mine, label, parts)
    return wires.Gather(axis, parts.whole.view(mine.dtype), mine, label, leg.coded).start()


def gather_into(axes: Axes, legs: Sequence[Leg], flat: Tensor, label: str, begin: int = 0) -> Tensor:
    """At once; `flat` holds what the first leg starts from, at its place, and begins with this element of the lane."""
    for leg in legs:
        source = flat[leg.source.begin - begin : leg.source.end - begin]
        target = flat[leg.target.begin - begin : leg.target.end - begin]
        verbs.gather(axes.each[leg.axis], target, source, label).wait()
    return flat


class Reduces:
    """PARTIAL -> this rank's fine slice. `into` gives the memory for the last sum, as in verbs.reduce. Buffers for what
    is received, and for sums on the way, are the ledger's."""

    def __init__(self, axes: Axes, grid: Grid, ledger: Ledger, into: Callable[[], Tensor]):
        self._axes, self._ledger, self._into = axes, ledger, into
        self._left: list[Hop] = list(grid.hops())
        self._taken: list[tuple[str, Tensor]] = []  # in use by what is under way
        self._moves: list[verbs.Move | wires.Reduce | lowrank.Reduce] = []
        self._found: Callable[[], Tensor]

    def start(self, full: Tensor, factor: float, label: str, coded: HowReduced = EXACTLY) -> None:
        """`coded`: by axis, how it travels."""
        self._factor, self._label, self._coded = factor, label, coded
        self._begin(full)

    def _begin(self, full: Tensor) -> None:
        """One hop over `full`, block by block; the factor belongs to the last."""
        hop = self._left.pop(0) if self._left else None
        axis, blocks = (self._axes.over(WHOLE), 1) if hop is None else (self._axes.each[hop.axis], hop.blocks)
        numel, coded = full.numel() // blocks, None if hop is None else self._coded[hop.axis]
        factor, into = (1.0, None) if self._left else (self._factor, self._into)
        native = axis.native_reduce and axis.size > 1 and coded is None
        if into is None and not native:
            sums = self._take("partial sum", full.numel() // axis.size, full)
            into = lambda: sums
        if isinstance(coded, lowrank.Factored):
            assert into is not None
            self._moves = [lowrank.Reduce(axis, full, coded, factor, into, blocks).start(self._label)]
            self._found = self._moves[0].wait
            read = [each for each in self._taken if each[1].data_ptr() == full.data_ptr()]
            self._taken = [each for each in self._taken if each[1].data_ptr() != full.data_ptr()]
            return self._give(read)
        if coded is not None:
            assert into is not None
            return self._begin_coded(axis, full.view(blocks, -1), coded, factor, into)
        received = self._take("receive", blocks * verbs.reduce_receives(axis, numel), full)
        if blocks == 1:
            self._moves = [verbs.reduce(axis, full, received, factor, self._label, into)]
            self._found = self._moves[0].wait
            return
        pieces, out = received.view(blocks, -1), None if into is None else into().view(blocks, -1)
        self._moves = []
        for number, (part, piece) in enumerate(zip(full.view(blocks, -1), pieces)):
            one = None if out is None else (lambda row=out[number]: row)
            self._moves.append(verbs.reduce(axis, part, piece, factor, self._label, one))
        self._found = lambda: received if native or out is None else out.view(-1)

    def _begin_coded(
        self, axis: Axis, rows: Tensor, coded: wires.Coded, factor: float, into: Callable[[], Tensor]
    ) -> None:
        """A row is a block of the hop. The memory for the sum of one block is asked for when it is there."""
        if len(rows) == 1:
            self._moves = [wires.Reduce(axis, rows[0], coded, factor, into).start(self._label)]
            self._found = self._moves[0].wait
            return
        out = into()
        self._moves = [
            wires.Reduce(axis, row, coded, factor, one.detach, n * row.numel()).start(self._label)
            for n, (row, one) in enumerate(zip(rows, out.view(len(rows), -1)))
        ]
        self._found = lambda: out

    def _take(self, kind: str, numel: int, like: Tensor) -> Tensor:
        taken = self._ledger.take(kind, numel, like.dtype, like.device)
        self._taken.append((kind, taken))
        return taken

    @property
    def on_last_hop(self) -> bool:
        return not self._left

    @property
    def has_read(self) -> bool:
        """What it was given is read no longer, though it has but one hop."""
        return any(isinstance(move, lowrank.Reduce) for move in self._moves)

    def to_last_hop(self) -> None:
        """Wait for all hops but the last, and begin that."""
        while self._left:
            self._next()

    def next_leg(self) -> None:
        """Where the last hop has several legs (lowrank.py): wait for the one under way, and begin the next."""
        for move in self._moves:
            if isinstance(move, lowrank.Reduce):
                move.go_on()

    def advance(self, seconds: float) -> bool:
        """Begin the last hop, where those before it end within so many seconds. Whether it has begun. A hop of several
        legs is not gone beyond: ranks begin those in one order, for which `to_last_hop` is called."""
        while self._left:
            if self.has_read or not all(move.arrives_within(seconds) for move in self._moves):
                return False
            self._next()
        return True

    def _next(self) -> None:
        for move in self._moves:
            move.wait()
        found, before = self._found(), self._taken
        self._taken = [(kind, taken) for kind, taken in before if taken.data_ptr() == found.data_ptr()]
        self._give([each for each in before if each[1].data_ptr() != found.data_ptr()])
        self._begin(found)

    def arrives_within(self, seconds: float) -> bool:
        return self.advance(seconds) and all(move.arrives_within(seconds) for move in self._moves)

    def wait(self) -> Tensor:
        """The sum. In memory that `into` gave, in `full` itself where this rank is alone, or new."""
        self.to_last_hop()
        for move in self._moves:
            move.wait()
        found = self._found()
        mine = any(taken.data_ptr() == found.data_ptr() for _, taken in self._taken)
        if mine and found.device.type == "cpu" and found.numel():
            found = found.clone()  # its block goes back to the ledger
        self._give(self._taken)
        self._taken = []
        return found

    def _give(self, taken: Sequence[tuple[str, Tensor]]) -> None:
        for kind, each in taken:
            self._ledger.give(kind, each)


def reduce_hop(axes: Axes, hop: Hop, flat: Tensor, ledger: Ledger, label: str) -> Tensor:
    """One hop of a reduce at once, exactly, in memory of its own; `flat` is what the hop is given, in fp32 or wider."""
    axis, rows = axes.each[hop.axis], flat.view(hop.blocks, -1)
    found = torch.empty(hop.blocks, rows.shape[1] // axis.size, dtype=flat.dtype, device=flat.device)
    received = ledger.take("receive", verbs.reduce_receives(axis, rows.shape[1]), flat.dtype, flat.device)
    for row, into in zip(rows, found):
        summed = verbs.reduce(axis, row, received, 1.0, label, into.detach).wait()
        if summed.data_ptr() != into.data_ptr():
            into.copy_(summed)
    ledger.give("receive", received)
    return found.view(-1)


def all_of(axes: Axes, legs: Sequence[Leg], layout: LaneLayout, mine: Tensor, label: str) -> Tensor:
    """Everything, in memory of its own, from what each rank holds."""
    flat = torch.empty(layout.numel, dtype=mine.dtype, device=axes.device)
    if not legs:
        return flat.copy_(mine)
    flat[legs[0].source.begin : legs[0].source.end].copy_(mine)
    return gather_into(axes, legs, flat, label)
