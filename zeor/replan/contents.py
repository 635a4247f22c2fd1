"""What of a run moves to another plan: what this rank has of it, told to all, and what it wants then.

    param        the exact values of every parameter: each rank has what it updates
    state.N.K    entry K of the state of optimizer N, where it is as long as the parameter, or whole on an owner
    ema.N        an average of the weights
    residual     what reduces have left out, which was flushed before (Note [Residuals] in step/grad_wires.py)

Counters and other small values of an optimizer's state travel as JSON, as in a checkpoint. What the optimizer is to
keep under the new plan is decided by the same checks as when a checkpoint is loaded. Which elements each rank has to
send is told by fine slices, so that each has one sender; what a rank has beyond that it need not be sent.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.checkpoint.files import plain
from zeor.checkpoint.state_checks import States, UnreadTensor
from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.layout import Segment
from zeor.optim.ema import EMA
from zeor.optim.parts.pieces import Key, Piece
from zeor.optim.state import KeptOf
from zeor.optim.stepper import Stepper
from zeor.replan.moving import Moved, Wanted
from zeor.replan.ranges import Range, Ranges, common, without
from zeor.spec.lane_spec import RESIDUAL as KEPT_DTYPE
from zeor.step.engine import Engine
from zeor.step.grads import GradLane
from zeor.step.lane import Lane
from zeor.step.unit import Slot

What = tuple[str, str]  # (role, the parameter's name)
PARAM, RESIDUAL = "param", "residual"
WHO = "zeor.replan"  # in what the checks of an optimizer's state say


class Have(NamedTuple):
    """Of one tensor, this rank's. `sends`: of `own`, what it sends to whoever wants it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sends: Ranges
    own: Ranges
    read: Callable[[int, int], Tensor]


class Had:
    """What this rank has under the old plan. Nothing is read before it is asked for."""

    def __init__(self, engine: Engine, steppers: Sequence[Stepper], averages: Sequence[EMA]):
        self.tensors: dict[What, Have] = {}
        self.small: list[list[Any]] = []  # [optimizer, parameter, key, value] of what travels as JSON
        self.cached: tuple[KeptOf, dict[Key, Piece]] | None = None
        for slot in engine.slots:
            if slot not in engine.unfilled.slots:
                self._add_param(slot)
            if slot.lane.grads is not None and slot.lane.grads.keeps:
                self._add_residual(slot, slot.lane.grads)
        for number, stepper in enumerate(steppers):
            owned = stepper.owners.owned if stepper.owners.cut else {}
            for kept in stepper.state.by_param():
                self._add_state(number, kept, id(kept.slot.param) in owned)
        for average in averages:
            self._add_average(average)

    def _add_param(self, slot: Slot) -> None:
        lane = slot.lane
        dtype = lane.key.master_dtype or lane.key.compute_dtype
        for segment in lane.segments:
            if segment.param == slot.index:
                own = [Range(segment.start, segment.start + segment.numel)]
                read = functools.partial(_exact, lane, segment)
                self.tensors[PARAM, slot.name] = Have(dtype, slot.shape, _fine(slot, own), own, read)

    def _add_residual(self, slot: Slot, grads: GradLane) -> None:
        for segment in slot.lane.layout.segments_in(slot.lane.fine):
            if segment.param == slot.index:
                own = [Range(segment.start, segment.start + segment.numel)]
                read = functools.partial(_flushed, grads, segment)
                self.tensors[RESIDUAL, slot.name] = Have(KEPT_DTYPE, slot.shape, own, own, read)

    def _add_state(self, number: int, kept: KeptOf, owned: bool) -> None:
        """`owned`: one rank of those that share the update keeps all of it."""
        slot = kept.slot
        for piece in kept.pieces():
            value, what = piece.value, (_role(number, piece.key), slot.name)
            if piece.begin is not None:
                own = [Range(piece.begin, piece.begin + value.numel())]
                read = functools.partial(self._of_state, kept, piece.key, piece.begin)
                sends = _whole(slot, own) if owned else _fine(slot, own)
                self.tensors[what] = Have(value.dtype, slot.shape, sends, own, read)
            elif isinstance(value, Tensor) and value.dim() > 0:
                own = [Range(0, value.numel())]
                read = functools.partial(self._of_state, kept, piece.key, 0)
                self.tensors[what] = Have(value.dtype, tuple(value.shape), _whole(slot, own), own, read)
            else:
                small = plain.encode(value, f"{piece.key} of {slot.name!r}")
                self.small.append([number, slot.name, list(piece.key), small])

    def _of_state(self, kept: KeptOf, key: Key, first: int, begin: int, end: int) -> Tensor:
        """Elements of an entry. Those of one parameter are asked for one after another, and some are decoded for it."""
        if self.cached is None or self.cached[0] is not kept:
            self.cached = kept, {piece.key: piece for piece in kept.pieces()}
        piece = self.cached[1][key]
        if piece.read is not None:
            return piece.read(begin - first, end - first)
        part: Tensor = piece.value.detach().reshape(-1)[begin - first : end - first]
        return part.clone() if kept.rests else part  # memory of a tier goes with the old plan

    def _add_average(self, average: EMA) -> None:
        for piece in average.pieces():
            assert piece.begin is not None
            value, own = piece.value, [Range(piece.begin, piece.begin + piece.value.numel())]
            read = lambda begin, end, value=value, first=piece.begin: value[begin - first : end - first]
            self.tensors[_ema(average), piece.name] = Have(value.dtype, (), own, own, read)


def _role(number: int, key: Key) -> str:
    return f"state.{number}.{json.dumps(list(key))}"


def _ema(average: EMA) -> str:
    return f"ema.{average.number}"


def _fine(slot: Slot, own: Ranges) -> Ranges:
    """What of it no other rank sends."""
    lane = slot.lane
    segments = [s for s in lane.layout.segments_in(lane.fine) if s.param == slot.index]
    return common(own, [Range(s.start, s.start + s.numel) for s in segments])


def _whole(slot: Slot, own: Ranges) -> Ranges:
    """All of it, if this rank is the first of those that keep the same."""
    cut = slot.lane.spec.table.cut("update")
    return own if all(axis in cut or place == 0 for axis, place in enumerate(slot.lane.axes.coords)) else []


def _flushed(grads: GradLane, segment: Segment, begin: int, end: int) -> Tensor:
    return grads.flushed(segment)[begin - segment.start : end - segment.start]


def _exact(lane: Lane, segment: Segment, begin: int, end: int) -> Tensor:
    """Exact values of elements of a parameter, in a segment of what this rank updates: the memory itself, or a
    temporary."""
    first = segment.offset + begin - segment.start
    last = first + end - begin
    if lane.master is None:
        at = lane.updated.within(lane.kept).begin
        return lane.read_mine(at + first, at + last)
    own = lane.master.own
    if own is not None and not own.away:
        return own.tensor[first:last]
    into = torch.empty(end - begin, dtype=lane.master.dtype, device=lane.axes.device)
    lane.master.read(first, into)
    return into


# ---- what all ranks have


class Told(NamedTuple):
    """Of one tensor, as all ranks know it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    has: list[Ranges]  # by rank, what it sends


class Everything:
    """What all ranks have, in an order that is the same on each."""

    def __init__(self, axis: Axis, had: Had):
        mine = [[*what, plain.dtype_name(h.dtype), list(h.shape), h.sends] for what, h in had.tensors.items()]
        rows = exchange(axis, [mine, had.small], "exchange about what ranks have of a run")
        first = axis.rank if axis.fake else 0
        found: dict[What, Told] = {}
        self.small: dict[tuple[int, str], dict[Key, Any]] = {}
        for rank, (tensors, small) in enumerate(rows, first):
            for role, name, dtype, shape, sends in tensors:
                told = found.setdefault((role, name), Told(plain.DTYPES[dtype], tuple(shape), [()] * axis.size))
                told.has[rank] = [Range(*each) for each in sends]
            for number, name, key, value in small:
                self.small.setdefault((number, name), {})[tuple(key)] = value
        self.tensors = dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))

    def of_state(self, number: int, name: str) -> dict[Key, Any]:
        """The state of one parameter: a tensor as UnreadTensor, anything else by its value."""
        found: dict[Key, Any] = {}
        prefix = f"state.{number}."
        for role in self.roles_of(name):
            if role.startswith(prefix):
                told = self.tensors[role, name]
                found[tuple(json.loads(role.removeprefix(prefix)))] = UnreadTensor(told.shape, told.dtype)
        for key, value in self.small.get((number, name), {}).items():
            found[key] = plain.decode(value, _no_tensor)
        return found

    def roles_of(self, name: str) -> list[str]:
        return self._by_name.get(name, [])

    @functools.cached_property
    def _by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for role, name in self.tensors:
            found.setdefault(name, []).append(role)
        return found


def _no_tensor(name: str) -> Tensor:
    raise ValueError(f"{WHO}: {name} was told as a tensor in a file.")


# ---- what this rank wants


class Wants:
    """What this rank wants under the new plan, and where it goes. Pieces of optimizers' state wait in `pieces` until
    `put`, as putting them one by one would look for each parameter anew."""

    def __init__(self, known: Everything):
        self._known = known
        self.wanted: dict[What, list[Wanted]] = {}
        self._puts: list[tuple[Stepper, list[Piece]]] = []

    def _add(self, what: What, wanted: Wanted) -> None:
        self.wanted.setdefault(what, []).append(wanted)

    def parameters(self, engine: Engine) -> None:
        for slot in engine.slots:
            for segment in slot.lane.segments if (PARAM, slot.name) in self._known.tensors else ():
                if segment.param == slot.index:
                    take = functools.partial(slot.lane.store_part, segment.offset)
                    elements = Range(segment.start, segment.start + segment.numel)
                    self._add((PARAM, slot.name), Wanted(elements, engine.axes.device, take))

    def residuals(self, engine: Engine) -> None:
        for slot in engine.slots:
            lane, grads = slot.lane, slot.lane.grads
            if grads is None or (RESIDUAL, slot.name) not in self._known.tensors:
                continue
            grads.put_flushed(0, torch.empty(0))  # on every rank, or a later save would miss parts of it
            for segment in lane.layout.segments_in(lane.fine):
                if segment.param == slot.index:
                    take = functools.partial(grads.put_flushed, segment.offset)
                    elements = Range(segment.start, segment.start + segment.numel)
                    self._add((RESIDUAL, slot.name), Wanted(elements, engine.axes.device, take))

    def state(self, number: int, stepper: Stepper) -> None:
        optimizer, segments = stepper.optimizer, stepper.segments
        groups = optimizer.param_groups
        pieces: list[Piece] = []
        self._puts.append((stepper, pieces))
        states = States(WHO, optimizer, [{}] * len(groups), stepper.axes.device)
        for group, members in enumerate(groups):
            for param in members["params"]:
                mine, slot = segments.of(param), segments.slots[id(param)]
                known = {} if mine is None else self._known.of_state(number, slot.name)
                if mine is not None and known:
                    found = states.check(group, slot.name, slot.shape, mine, known)
                    self._state_of(number, slot, (mine, segments.at(param)), found, pieces)

    def _state_of(
        self, number: int, slot: Slot, mine: tuple[Tensor, Segment], found: Mapping[Key, Any], pieces: list[Piece]
    ) -> None:
        """Of one parameter. `mine`: what this rank steps on, and which elements that is."""
        (part, where), name = mine, slot.name
        for key, value in found.items():
            if not isinstance(value, UnreadTensor):
                pieces.append(Piece(name, key, None, value))
                continue
            elements, begin, shape = Range(0, torch.Size(value.shape).numel()), None, value.shape
            if value.shape == slot.shape:
                elements, begin = Range(where.start, where.start + where.numel), where.start
                shape = (where.numel,)
            take = functools.partial(_to_piece, pieces, (name, key, begin), shape)
            self._add((_role(number, key), name), Wanted(elements, part.device, take, value.dtype))

    def average(self, average: EMA) -> None:
        for piece in average.pieces():
            if (_ema(average), piece.name) in self._known.tensors:
                assert piece.begin is not None
                elements = Range(piece.begin, piece.begin + piece.value.numel())
                wanted = Wanted(elements, piece.value.device, piece.value.copy_)
                self._add((_ema(average), piece.name), wanted)

    def put(self) -> None:
        for stepper, pieces in self._puts:
            if pieces:
                stepper.state.put(pieces, adopt=True)  # just received, or the very memory of before
                pieces.clear()


def _to_piece(
    pieces: list[Piece], about: tuple[str, Key, int | None], shape: tuple[int, ...], values: Tensor
) -> None:
    pieces.append(Piece(*about, values.view(shape)))


def to_be_moved(axis: Axis, known: Everything, had: Had, wants: Wants) -> list[Moved]:
    """Every tensor, in one order, with what each rank lacks of it and how much it wants."""
    numbers = {what: number for number, what in enumerate(known.tensors)}
    mine = []
    for what, wanted in wants.wanted.items():
        ranges = [each.range for each in wanted]
        own = had.tensors[what].own if what in had.tensors else ()
        mine.append([numbers[what], sum(each.numel for each in ranges), without(ranges, own)])
    rows = exchange(axis, mine, "exchange about what ranks want of a run")
    first = axis.rank if axis.fake else 0
    moved = []
    for what, told in known.tensors.items():
        have = had.tensors.get(what)
        own, read = (have.own, have.read) if have else ((), None)
        moved.append(Moved(told.dtype, told.has, [()] * axis.size, 0, own, read, wants.wanted.get(what, [])))
    for rank, row in enumerate(rows, first):
        for number, numel, ranges in row:
            moved[number].wants[rank] = [Range(*each) for each in ranges]
            moved[number].most_numel = max(moved[number].most_numel, numel)
    return moved
