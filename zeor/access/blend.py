"""lerp: one sharded model drawn towards another, each rank on its own slices; no message but the publish.

For targets that follow a policy (a reference model in preference training, a momentum encoder, a target network): both
models are sharded alike, so the part of a parameter that a rank updates is the same in both, and nothing is gathered.
The exact values (masters) are blended; compute follows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zeor.access.sharded import state_of
from zeor.comm.agree import together
from zeor.comm.attendance import attend
from zeor.layout import Segment
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.lane import Lane
from zeor.step.unit import Slot, publish_written

Part = tuple[Slot, Segment]


@torch.no_grad()
def lerp(target: nn.Module, source: nn.Module, alpha: float) -> None:
    """Set each parameter of `target` to target + alpha * (source - target), on slices: torch.lerp of the exact values.

    Both models are sharded, over the same ranks and at the same stage, with parameters of the same names and shapes;
    what does not fit raises on every rank before anything changes. alpha=1 copies. Buffers stay. Every rank calls it,
    between steps."""
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"zeor.lerp(alpha={alpha!r}): give how far the target moves, between 0 and 1.")
    engines = [state_of(model).engine for model in (target, source)]
    axis = engines[0].axes.everyone
    if engines[0].announcer.block is None:
        attend(axis, "zeor.lerp")
    engines[0].announce(events.OTHER, "zeor.lerp", meets=False)
    pairs = together(axis, lambda: _pairs(*engines), "agreement of zeor.lerp", ValueError)
    for engine in engines:
        engine.drain()
    for (slot, where), (other, its) in pairs:
        mine, towards = _read(slot.lane, where), _read(other.lane, its)
        wide = torch.promote_types(mine.dtype, towards.dtype)
        slot.lane.store_part(where.offset, torch.lerp(mine.to(wide), towards.to(wide), alpha))
    for unit in engines[0].units:
        for lane in unit.lanes:
            publish_written(unit, lane)
            lane.changed()  # a graph made before is stale
    engines[0].forget_gathered()


def _pairs(target: Engine, source: Engine) -> list[tuple[Part, Part]]:
    """The parts that this rank updates of each parameter, in both models."""
    for engine in (target, source):
        engine.check_weights("zeor.lerp was called")
    theirs = {slot.name: slot for slot in source.slots}
    found = []
    for slot in target.slots:
        other = theirs.pop(slot.name, None)
        if other is None or other.shape != slot.shape:
            what = "has no parameter of that name" if other is None else f"has it in shape {other.shape}"
            raise ValueError(f"zeor.lerp: the source {what}: {slot.name!r} of shape {slot.shape}; give models alike.")
        if not slot.dtype.is_floating_point:
            continue  # codes of a quantised weight, say: there is nothing between two of them
        mine, its = list(_parts(slot)), list(_parts(other))
        if [(part.start, part.numel) for part in mine] != [(part.start, part.numel) for part in its]:
            raise ValueError(
                f"zeor.lerp: the models are cut differently, first at {slot.name!r}; shard both over the same ranks, "
                "with the same stage and units, and freeze the same parameters of both before that."
            )
        found += [((slot, part), (other, where)) for part, where in zip(mine, its)]
    if theirs:
        raise ValueError(f"zeor.lerp: the target has no parameter {next(iter(theirs))!r}; give models alike.")
    return found


def _parts(slot: Slot) -> Iterator[Segment]:
    return (segment for segment in slot.lane.segments if segment.param == slot.index)


def _read(lane: Lane, where: Segment) -> Tensor:
    """This rank's exact values of one part, in memory of their own."""
    lane.keep_writes()
    if lane.master is None:
        begin = where.offset + lane.updated.within(lane.kept).begin
        return lane.read_mine(begin, begin + where.numel).to(lane.axes.device, copy=True)
    values = torch.empty(where.numel, dtype=lane.master.dtype, device=lane.axes.device)
    lane.read_master(where, values)
    return values
