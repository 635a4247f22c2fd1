"""Step time: what a rank computes and moves, over what its machine does in a second, played as the schedule goes.

Products and attention by their operations, everything else by its bytes (work.py, machine.py); collectives by
network.py; how they overlap by timeline.py. Assumed: links carry one collective at a time; a GPU computes as fast while
messages travel; ranks are equally fast and start together. Data loading, checkpoints and compilation are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeor.optim.streaming.moments import moment_itemsize
from zeor.planner import network
from zeor.planner.coding import coding_seconds
from zeor.planner.kept import needs
from zeor.planner.machine import Along, Machine
from zeor.planner.network import Cost
from zeor.planner.peaks import Model
from zeor.planner.rests import PlannedLane
from zeor.planner.timeline import BRING, Durations, Key, Played, play
from zeor.planner.trace import Trace
from zeor.planner.work import Work
from zeor.spec.travel import legs_of
from zeor.step.schedule import Schedule, traits_of
from zeor.tiers.rest import LaneRest, Store

_STOCK_PASSES = 3.0  # an optimizer's own step reads and writes what one pass would so many times
_NORM_PASSES = 2.0


@dataclass(frozen=True)
class Pace:
    """What it runs on, and how: the machine, its links by axis (the innermost first), and the loop."""

    machine: Machine
    axes: tuple[Along, ...]
    clip: bool = True
    compiled: bool = False
    fp8: bool = False
    kept: frozenset[int] = frozenset()  # of units that the trace computes again, those that keep their activations
    products: frozenset[int] = frozenset()  # and those that keep the results of their products
    share: float = 1.0  # of a machine whose cores several ranks use


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of one rank. exposed, hidden: by (verb, axis). coding: of what travels as codes."""

    seconds: float
    forward: float
    backward: float
    update: float
    operations: float  # that the model's step takes, without what is computed again
    exposed: dict[tuple[str, str], float] = field(default_factory=dict)
    hidden: dict[tuple[str, str], float] = field(default_factory=dict)
    coding: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())

    def __str__(self) -> str:
        parts = [f"forward {self.forward:.3f}", f"backward {self.backward:.3f}", f"update {self.update:.3f}"]
        parts += [f"coding {self.coding:.3f}"] if self.coding else []
        lines = [f"{self.seconds:.3f} s a step: {', '.join(parts)}, waiting {self.exposed_seconds:.3f}"]
        for key in sorted({*self.exposed, *self.hidden}):
            name = " along ".join(filter(None, key))
            lines.append(f"  {name}: {self.exposed.get(key, 0.0):.4f} exposed, {self.hidden.get(key, 0.0):.4f} hidden")
        return "\n".join(lines)


def step_time(model: Model, pace: Pace) -> StepTime:
    """The trace must have counted what is computed."""
    durations = durations_of(model, pace)
    played = play(schedule_of(model), durations)
    operations = sum(each.operations for each in model.trace.works.forward.values())
    return _told(played, 3.0 * operations * durations.micro_batches)


def _told(played: Played, operations: float) -> StepTime:
    hidden = {key: max(0.0, busy - played.exposed[key]) for key, busy in played.busy.items()}
    exposed = {key: seconds for key, seconds in played.exposed.items() if seconds}
    hidden = {key: seconds for key, seconds in hidden.items() if seconds > 1e-12}
    computed = played.forward, played.backward, played.update
    return StepTime(played.seconds, *computed, operations, exposed, hidden, played.coding)


def schedule_of(model: Model) -> Schedule:
    """As the engine will build it, with units in the order of the traced forward."""
    store, late = Store(None, torch.device("cpu")), model.setting.plan.delay > 0
    traits = tuple(
        traits_of(unit.name, [(lane, LaneRest(lane.tiers, store, unit.name, lane.wide, late)) for lane in lanes])
        for unit, lanes in zip(model.units, model.lanes)
    )
    order = tuple(dict.fromkeys([0, *(unit for unit, _ in model.trace.entered), *range(len(traits))]))
    return Schedule(traits, order, (*order[:0:-1], 0), model.setting.plan)


def durations_of(model: Model, pace: Pace) -> Durations:
    forward, backward = _passes(model, pace)
    moves: dict[Key, Sequence[Cost]] = {}
    updates: dict[tuple[int, int | None], float] = {}
    finish: dict[tuple[int, int | None], float] = {}
    coding: dict[Key, tuple[float, float]] = {}
    grads = 0.0
    for lanes in model.lanes:
        for number, lane in enumerate(lanes):
            place = lane.unit, number
            moves.update(_moves(lane, place, pace))
            if lane.wires.any:
                coding.update(_coding(lane, place, pace))
            if lane.updates:
                updates[place] = _update_seconds(lane, pace)
                grads += lane.held("grad") * lane.key.reduce_dtype.itemsize
            if lane.key.trainable and not model.setting.native:
                finish[place] = _summing_nbytes(lane) / _rate(pace.machine.hbm, pace)
    if model.setting.accumulation > 1:  # each gradient is read and added to a sum in fp32
        summed = _summed_nbytes(model) / _rate(pace.machine.hbm, pace)
        backward = [each + summed / len(backward) for each in backward]
    clips = pace.clip and not model.setting.plan.release
    world = model.setting.world
    return Durations(
        forward, backward, moves, updates, finish, coding,
        norm=_NORM_PASSES * grads / _rate(pace.machine.hbm, pace) if clips else 0.0,
        exchange=network.small_gather(pace.axes, model.setting.native) if clips and world > 1 else 0.0,
        agreement=network.agreement(pace.axes) if world > 1 else 0.0,
        agreement_waits=model.setting.plan.paths == "dynamic",
        hides=pace.machine.hides,
        micro_batches=model.setting.accumulation,
        sums_each=model.setting.sums_each,
    )  # fmt: skip


# ---- what is computed


def _summing_nbytes(lane: PlannedLane) -> int:
    """Where the host adds up what a reduce receives: hop by hop, every member's part is read and their sum written."""
    left, found = lane.layout.numel, 0
    for hop in lane.grid.hops():
        size = lane.sizes[hop.axis]
        left //= size
        found += (size + 1) * left
    return found * lane.key.reduce_dtype.itemsize


def _summed_nbytes(model: Model) -> int:
    lanes = [lane for lane in model.flat if lane.key.trainable]
    each = model.setting.sums_each
    return sum(
        (lane.held("grad") if each else lane.layout.numel) * (8 + lane.key.reduce_dtype.itemsize)
        for lane in lanes
    )


def _passes(model: Model, pace: Pace) -> tuple[list[float], list[float]]:
    """By unit. Backward is shared out as forward is; what units that keep their activations need not compute again
    comes off first. Where the host launches slower than the device computes, the host decides."""
    works, machine = model.trace.works, pace.machine
    count = len(model.units)
    forward = [
        works.forward.get(unit, Work()).seconds(machine, pace.compiled, pace.fp8 and unit > 0) for unit in range(count)
    ]
    back = Work()
    back.add(works.backward)
    back.add(_computed_again(model, model.plain), -_share(model, pace.kept, forward))
    back.add(_computed_again(model, model.middle), -_share(model, pace.products, forward))
    behind = back.seconds(machine, pace.compiled, pace.fp8)
    total = sum(forward) or 1e-12
    backward = [behind * each / total for each in forward]
    busy = sum(forward) + behind
    launched = works.total.launched(machine, pace.compiled)
    slower = max(1.0, launched / busy if busy else 1.0) if machine.native else 1.0 + (launched / busy if busy else 0.0)
    slower /= pace.share
    return [each * slower for each in forward], [each * slower for each in backward]


def _computed_again(model: Model, less: Trace | None) -> Work:
    """Of all units together, what the other trace need not. It is less than their forwards: a recomputation ends when
    it has what backward reads."""
    found = Work()
    if less is not None:
        found.add(model.trace.works.backward)
        found.add(less.works.backward, -1.0)
    return found


def _share(model: Model, units: frozenset[int], forward: Sequence[float]) -> float:
    """Of what is computed again, by the time of forward, how much is these units'."""
    again = {unit for unit, _ in needs(model)} if units else set()
    return sum(forward[unit] for unit in again & units) / (sum(forward[unit] for unit in again) or 1.0)


def _update_seconds(lane: PlannedLane, pace: Pace) -> float:
    """One pass over what an update reads and writes, or several by the optimizer's own step."""
    setting = lane.setting
    numel = lane.held("update")
    if lane.wide and lane.streamed:
        return numel / pace.machine.host_update
    assert lane.key.master_dtype is not None
    beside = lane.beside_itemsize
    moments = setting.moments * moment_itemsize(setting.plan.moments, lane.key.master_dtype)
    nbytes = numel * (2 * lane.key.compute_dtype.itemsize + 2 * beside + 2 * moments + lane.key.reduce_dtype.itemsize)
    passes = 1.0 if setting.by_pass(lane.key) else _STOCK_PASSES
    return float(passes * nbytes / _rate(pace.machine.hbm, pace))


def _rate(rate: float, pace: Pace) -> float:
    return rate * pace.share


# ---- what moves


def _moves(lane: PlannedLane, place: tuple[int, int], pace: Pace) -> dict[Key, Sequence[Cost]]:
    found: dict[Key, Sequence[Cost]] = {}
    unit, number = place
    for verb, costs in network.moves_of(lane, pace.axes)._asdict().items():
        found[verb, unit, number] = costs
    if lane.updates and lane.streamed:
        brought, sent = _streamed(lane)
        found["fetch", unit, number] = [_tier_cost(tier, nbytes, pace) for tier, nbytes in brought.items()]
        found["spill", unit, number] = [_tier_cost(tier, nbytes, pace) for tier, nbytes in sent.items()]
    if lane.frees and lane.tiers.compute != "device":
        found[BRING, unit, number] = [_tier_cost(lane.tiers.compute, lane.compute_nbytes, pace)]
    return found


def _coding(lane: PlannedLane, place: tuple[int, int], pace: Pace) -> dict[Key, tuple[float, float]]:
    """By move."""
    legs = legs_of(lane)._asdict()
    return {(verb, *place): coding_seconds(each, pace.machine, pace.share) for verb, each in legs.items()}


def _streamed(lane: PlannedLane) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by tier that an update brings to the device, and sends back. One on the host sends gradients down and
    brings weights up."""
    numel = lane.held("update")
    if lane.wide:
        assert lane.key.master_dtype is not None
        return {"host": float(numel * lane.key.compute_dtype.itemsize)}, {
            "host": float(numel * lane.key.reduce_dtype.itemsize)
        }
    brought: dict[str, float] = {}
    for tier, nbytes in lane.parts(numel):
        brought[tier] = brought.get(tier, 0.0) + nbytes
    sent = dict(brought)
    if lane.tiers.grads != "device":  # only read
        sent[lane.tiers.grads] -= numel * lane.key.reduce_dtype.itemsize
    return brought, sent


def _tier_cost(tier: str, nbytes: float, pace: Pace) -> Cost:
    rate = pace.machine.disk if tier == "disk" else pace.machine.pcie
    return Cost(tier, nbytes, nbytes / rate)
