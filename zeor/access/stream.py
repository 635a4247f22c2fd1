"""iter_full: every parameter whole, one after the other, under a cap on the memory that takes.

Small parameters that lie side by side travel together; a large one goes by itself, straight into the tensor that is
handed out. A part travels by a broadcast from the rank that holds it, so nothing is received twice. The value is the
master's, in the parameter's own dtype or the one asked for.

Note [A stream that is left]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before each group of parameters the ranks agree whether anyone still listens. A rank that leaves its loop early plays on
without yielding until all have left or the stream is over, so the collectives of all ranks stay in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeor.access.sharded import state_of
from zeor.comm import verbs
from zeor.comm.attendance import attend
from zeor.layout import Segment
from zeor.memory.buffers import Ledger
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.lane import Lane
from zeor.step.unit import Slot, Unit

DEFAULT_NBYTES = 256 << 20
STAGING_NBYTES = 1 << 20  # where a dtype changes on the way; smaller where the cap asks for it
_LEAST_STAGING_NBYTES = 1 << 12


Wanted = Callable[[Slot], torch.dtype]  # the dtype a parameter is handed out in


class Group(NamedTuple):
    """Parameters of one lane that travel together: elements [begin, end) of the lane."""

    lane: Lane
    slots: list[Slot]
    begin: int
    end: int


def iter_full(
    model: nn.Module, max_bytes: int | None = None, dtype: torch.dtype | None = None, buffers: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(name, full plain tensor) for every parameter, one after the other, without ever holding the model: the tensor
    handed out and what is gathered around it take at most max_bytes together (None: 256 MiB, or what the largest
    parameter needs). A tensor that is kept past its turn is the caller's own memory.

    Values are the masters', in the parameter's own dtype or `dtype`; tied parameters come once, under their first
    name; buffers=True adds the buffers. Every rank of the mesh must iterate; one that leaves its loop early takes
    part in the rest in silence."""
    engine = state_of(model).engine
    engine.unfilled.check()
    wanted: Wanted = lambda slot: dtype or slot.dtype
    units = engine.units
    largest = max((slot for unit in units for slot in unit.slots), key=lambda slot: _needed_nbytes(slot, wanted))
    needed = _needed_nbytes(largest, wanted)
    cap = max(DEFAULT_NBYTES, needed) if max_bytes is None else max_bytes
    if needed > cap:
        raise ValueError(
            f"zeor.iter_full cannot stay under max_bytes={cap}: parameter {largest.name!r} alone takes {needed}; "
            "give at least that."
        )
    announcer = engine.announcer
    if announcer.block is None:
        attend(engine.axes.whole, "zeor.iter_full")
    announcer.announce(events.OTHER, "zeor.iter_full", meets=False)
    groups = plan_groups(units, cap, wanted)
    return _stream(engine, groups, cap, wanted, list(model.named_buffers()) if buffers else [])


def iter_slots(
    engine: Engine, slots: Collection[Slot], max_nbytes: int, wanted: Wanted
) -> Iterator[tuple[str, Tensor]]:
    """The same for some parameters, each in a dtype of its own; the cap is raised to what the largest of them needs."""
    engine.unfilled.check()
    cap = max([max_nbytes, *(_needed_nbytes(slot, wanted) for slot in slots)])
    return _stream(engine, plan_groups(engine.units, cap, wanted, set(slots)), cap, wanted, [])


def _stream(
    engine: Engine, groups: list[Group], max_nbytes: int, wanted: Wanted, buffers: list[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """See Note [A stream that is left]."""
    engine.drain()
    ledger, listening = engine.ledger, True
    for number, group in enumerate(groups):
        axis, anyone = group.lane.axes.whole, listening
        if axis.size > 1 and not axis.fake:
            label = f"agreement in zeor.iter_full ({number})"
            anyone = bool(verbs.agree_max(axis, torch.tensor([int(listening)]), label))
        if not anyone:
            return
        for slot, value in _values(ledger, group, wanted, max_nbytes):
            value = slot.whole(value)
            if listening:
                try:
                    yield slot.name, value
                except GeneratorExit:
                    listening = False
            del value  # the caller's alone from here on
    if listening:
        yield from ((name, buffer.detach().clone()) for name, buffer in buffers)


# ---- planning


def plan_groups(
    units: Iterable[Unit], max_nbytes: int, wanted: Wanted, only: Collection[Slot] | None = None
) -> list[Group]:
    """Groups in the order of the units, each as large as the cap allows; of some parameters, or of all."""
    groups: list[Group] = []
    for unit in units:
        for lane in unit.lanes:
            members = sorted((slot for slot in unit.slots if slot.lane is lane), key=lambda slot: slot.index)
            for slot in members if only is None else [slot for slot in members if slot in only]:
                begin = lane.layout.offsets[slot.index]
                end = begin + lane.layout.numels[slot.index]
                last = groups[-1] if groups and groups[-1].lane is lane else None
                alone = lane.axes.tensor is not None  # ranks with other lanes come to each parameter together
                if last is not None and not alone and _fits([*last.slots, slot], end - last.begin, max_nbytes, wanted):
                    groups[-1] = Group(lane, [*last.slots, slot], last.begin, end)
                else:
                    groups.append(Group(lane, [slot], begin, end))
    return groups


def _nbytes(slot: Slot, wanted: Wanted) -> int:
    """Of the tensor that is handed out, and of this rank's part of a DTensor."""
    numel = math.prod(slot.whole_shape) + (0 if slot.placed is None else 2 * math.prod(slot.shape))
    return numel * wanted(slot).itemsize


def _needed_nbytes(slot: Slot, wanted: Wanted) -> int:
    changes = _source_dtype(slot.lane, [slot], wanted) != wanted(slot)
    return _nbytes(slot, wanted) + (_LEAST_STAGING_NBYTES if changes else 0)


def _fits(slots: Sequence[Slot], span_numel: int, max_nbytes: int, wanted: Wanted) -> bool:
    """The group's buffer and the largest tensor cut out of it."""
    source = _source_dtype(slots[0].lane, slots, wanted)
    return span_numel * source.itemsize + max(_nbytes(slot, wanted) for slot in slots) <= max_nbytes


def _source_dtype(lane: Lane, slots: Sequence[Slot], wanted: Wanted) -> torch.dtype:
    """What travels: compute where it is exact, else the master, of which compute is only a cast."""
    exact = lane.key.compute_dtype
    rounded = lane.lags or lane.parted or any(slot.dtype != exact or wanted(slot) != exact for slot in slots)
    if lane.master is not None and rounded:
        return lane.master.dtype
    return lane.key.compute_dtype


# ---- carrying out


@torch.no_grad()
def _values(ledger: Ledger, group: Group, wanted: Wanted, max_nbytes: int) -> Iterator[tuple[Slot, Tensor]]:
    lane, device = group.lane, group.lane.axes.device
    lane.wait()
    source = _source_dtype(lane, group.slots, wanted)
    if len(group.slots) == 1:
        slot = group.slots[0]
        out = torch.empty(slot.shape, dtype=wanted(slot), device=device)
        ledger.add("full", out.nbytes)
        staged = out.nbytes if out.dtype == source else min(STAGING_NBYTES, max_nbytes - out.nbytes)
        _fill(ledger, group, source, out.view(-1), int(staged))
        yield slot, out
        ledger.drop("full", out.nbytes)
        return
    flat = torch.empty(group.end - group.begin, dtype=source, device=device)
    ledger.add("full", flat.nbytes)
    _fill(ledger, group, source, flat, flat.nbytes)
    for slot in group.slots:
        begin = lane.layout.offsets[slot.index] - group.begin
        part = flat[begin : begin + lane.layout.numels[slot.index]]
        out = part.view(slot.shape).to(wanted(slot), copy=True)
        ledger.add("full", out.nbytes)
        yield slot, out
        ledger.drop("full", out.nbytes)
    ledger.drop("full", flat.nbytes)


def _fill(ledger: Ledger, group: Group, source: torch.dtype, out: Tensor, staged_nbytes: int) -> None:
    """Elements [begin, end) of the lane into `out`; by way of a staging buffer where the dtype changes."""
    direct = out.dtype == source
    most = max(1, out.numel() if direct else min(out.numel(), staged_nbytes // source.itemsize))
    staging = torch.empty(0 if direct else most, dtype=source, device=out.device)
    ledger.add("full", staging.nbytes)
    lane, label = group.lane, f"zeor.iter_full of {group.slots[0].name!r}"
    cut = lane.spec.table.cut("compute" if _is_compute(lane, source) else "update")
    part = lane.spec.held("compute" if _is_compute(lane, source) else "update")
    for number, begin, end in _pieces(group, source, most):
        target = out[begin - group.begin : end - group.begin]
        piece = target if direct else staging[: end - begin]
        axis = lane.axes.over(cut)
        holder = None if number is None else lane.axes.holder(lane.spec.grid, cut, number)
        if holder in (None, axis.rank):
            first = 0 if number is None else number * part
            _read(lane, source, begin - first, piece, whole=number is None)
        if holder is not None:
            verbs.broadcast(axis, piece, label, holder)
        if not direct:
            target.copy_(piece)
    ledger.drop("full", staging.nbytes)


def _pieces(group: Group, source: torch.dtype, most: int) -> Iterator[tuple[int | None, int, int]]:
    """(which of the stretches that ranks hold, or None where every rank has all; begin; end), in elements."""
    lane, role = group.lane, "compute" if _is_compute(group.lane, source) else "update"
    here = not lane.frees if role == "compute" else not lane.spec.cut("update")
    part, begin = lane.spec.held(role), group.begin
    while begin < group.end:
        number = None if here else begin // part
        end = min(group.end, begin + most, group.end if number is None else (number + 1) * part)
        yield number, begin, end
        begin = end


def _is_compute(lane: Lane, source: torch.dtype) -> bool:
    """Whether what forward reads is exact; else the master is."""
    return source == lane.key.compute_dtype and not lane.lags and not lane.parted


def _read(lane: Lane, source: torch.dtype, begin: int, into: Tensor, whole: bool) -> None:
    """What this rank holds, from element `begin` of the whole lane or of its slice on."""
    if _is_compute(lane, source):
        held = lane.full.flat if whole else lane.mine
        into.copy_(held[begin : begin + into.numel()])
    else:
        lane.read_master(Segment(-1, 0, into.numel(), begin), into)
