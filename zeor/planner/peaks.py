"""Peaks: what the engine holds at each moment of a step, added to what the model's computation has alive then.

    device_peak   what max_memory_allocated will show: arrays at rest, gradients as they arrive, activations (trace.py),
                  windows, gathered units, cuBLAS's workspaces; rounded as torch's allocator rounds. Not the driver's
                  context, not what the allocator holds in reserve, not a model that lay on the device in fp32 before.
    host_peak     what the process grows by after torch was imported and the device first used: arrays on the host
                  tier, staging memory, pages of files that are mapped, inputs that recompute="offload" keeps, and
                  libraries that are loaded while training. Not data, and not what is "on the device" where the device
                  is the host itself.

Both are meant never to be under.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
from torch import nn

from zeor.memory.lowrank import LowRank
from zeor.memory.pages import PAGE_NBYTES
from zeor.model.discover import UnitSpec
from zeor.optim.streaming.streaming import IN_FLIGHT
from zeor.planner import rests
from zeor.planner.computed_again import shelf_nbytes
from zeor.planner.rests import Array, PlannedLane, Setting, Window, rounded_nbytes, window_of
from zeor.planner.trace import Trace
from zeor.spec.keys import lane_key
from zeor.spec.lane_spec import RESIDUAL

_MIB = 1 << 20
# cuBLAS takes 32 MiB on Hopper for each thread that calls it, the loop's and autograd's; norms, factors and counters.
WORKSPACE_NBYTES = 2 * 32 * _MIB + 16 * _MIB
THREADS_NBYTES = 128 * _MIB  # stacks, and what the allocator keeps for each thread: of updates on the host, of files
LIBRARIES_NBYTES = 768 * _MIB  # cuBLAS's and Triton's code, kernels, staging of batches; up to 720 MiB were seen


@dataclass(frozen=True)
class Model:
    """Everything that is known before the run."""

    units: Sequence[UnitSpec]
    lanes: Sequence[Sequence[PlannedLane]]  # by unit
    setting: Setting
    part: int  # of those that updates are cut into, the one that is counted
    trace: Trace
    buffers_nbytes: int
    plain: Trace | None = None  # of recompute="auto": where nothing is computed again
    middle: Trace | None = None  # and where products are not, unless a compiler sees to that

    @property
    def flat(self) -> list[PlannedLane]:
        return [lane for unit in self.lanes for lane in unit]

    def arrays(self) -> list[Array]:
        return [array for lane in self.flat for array in lane.arrays(self.part)]

    def window(self) -> Window:
        return window_of(self.flat, self.part)


# ---- the device


def device_peak(model: Model) -> int:
    """The most of setting up, forward and backward, and step."""
    window = model.window().device
    rest = resting_nbytes(model) + gathered_nbytes(model)
    rest += WORKSPACE_NBYTES if model.setting.native else 0
    stepping = rest + window + model.trace.left + all_grads_nbytes(model) + update_nbytes(model.flat)
    stepping += publishing_nbytes(model)
    stepping = max(stepping, rest + forward_nbytes(model, window))  # updates go on under the next forward
    stepping += accumulated_nbytes(model) if model.setting.sums_each else 0
    computing = rest + computing_nbytes(model) + accumulated_nbytes(model)
    if windows_stay(model):
        computing += window + waiting_grads_nbytes(model)
    elif model.setting.plan.release:
        computing = max(computing, rest + window + computing_nbytes(model, first_update(model) or 0))
    return max(computing, stepping, setup_nbytes(model))


def waiting_peak(model: Model, others: int) -> int:
    """In a stage of a pipeline, with so many other micro-batches between their forward and their backward: gradients
    go into the sum as they come, and nothing is reduced before the last backward. Without what `held` counts."""
    rest = resting_nbytes(model) + accumulated_nbytes(model) + (WORKSPACE_NBYTES if model.setting.native else 0)
    arriving = _unit_nbytes(model, of_grads=True)
    return rest + model.trace.beside(others).peak + arriving[0] + 2 * max(arriving[1:], default=0)


def accumulated_nbytes(model: Model) -> int:
    """Of gradients that are summed over micro-batches, in fp32: whole on every rank inside no_sync (4 bytes for each
    parameter), slices where each micro-batch is reduced. On top of those of the last one. Of sums that rest elsewhere
    those of the root and of two units, which come and go."""
    if model.setting.accumulation == 1:
        return 0

    def nbytes(lane: PlannedLane) -> int:
        numel = lane.held("grad") if model.setting.sums_each else lane.layout.numel
        return rests.device_nbytes(numel * max(4, lane.key.reduce_dtype.itemsize))

    units = [[lane for lane in lanes if lane.key.trainable] for lanes in model.lanes]
    away = [sum(nbytes(lane) for lane in lanes if lane.sums_rest) for lanes in units]
    stays = sum(nbytes(lane) for lanes in units for lane in lanes if not lane.sums_rest)
    return stays + away[0] + sum(sorted(away[1:])[-2:])


def windows_stay(model: Model) -> bool:
    """Between steps: those that a thread works with which waits for files, and those of updates nobody waits for."""
    streamed = [lane for lane in model.flat if lane.streamed]
    return any("disk" in lane.tiers for lane in streamed) or (model.setting.plan.delay > 0 and bool(streamed))


def resting_nbytes(model: Model) -> int:
    """On the device from step to step: all but gradients that come and go, and windows."""
    stays = [a for a in model.arrays() if a.tier == "device" and (a.role != "grad" or model.setting.grad_buffer)]
    return rounded_nbytes(stays) + model.buffers_nbytes


def forward_nbytes(model: Model, window: int) -> int:
    """Activations; gradients that updates of units forward has not come to yet still read, see Note [Gradients until
    they are used] in optim/streaming/streaming.py; and windows, until it comes to the last of them."""
    plan = model.setting.plan
    if plan.release:  # what backward updated last forward comes to first
        return window
    kept: dict[int, int] = Counter()
    for lane in (lane for lane in model.flat if lane.streamed):
        here = lane.tiers.grads == "device" and not model.setting.grad_buffer and not plan.delay
        kept[lane.unit] += lane.held("grad") * lane.key.reduce_dtype.itemsize if here else 0
    most = 0
    for unit, peak in model.trace.entered:
        kept.pop(unit, None)
        most = max(most, peak + sum(kept.values()) + (window if kept else 0))
    return most


def computing_nbytes(model: Model, begin: int = 0, end: int | None = None) -> int:
    """Activations and gradients at the worst moment of forward and backward, while from `begin` to before `end`
    gradients have arrived."""
    grads = grads_by_arrival(model)
    if model.setting.accumulation > 1 and model.setting.adopts:  # each goes into the sum as it comes
        sizes = _unit_nbytes(model, of_grads=True)
        grads = [min(held, sizes[0] + 2 * max(sizes[1:], default=0)) for held in grads]
    both = [peak + held for peak, held in zip(model.trace.peaks, grads)]
    return max(both[begin:end], default=0)


def grads_by_arrival(model: Model) -> list[int]:
    """Bytes of gradients the engine holds on the device when so many have arrived."""
    setting, arrived = model.setting, model.trace.arrived
    if setting.grad_buffer:  # they rest in what is there anyway; in a world of more than one they are sent
        return [_receive_nbytes(model)] * (len(arrived) + 1)
    sizes = _grads_of_params(model)
    leaves = setting.plan.release and not spreads(model)
    # Sums that are still to be spread leave when backward is over.
    away = set() if spreads(model) else {lane.unit for lane in model.flat if lane.tiers.grads != "device"}
    if not arrived:  # nothing was traced: all that there will be
        return [all_grads_nbytes(model) + (_travelling_nbytes(model) if setting.world > 1 else 0)]
    if setting.world > 1:  # slices that stay, and whole gradients that are being sent; none before the first arrives
        stay = [0 if leaves or sizes[id(param)][0] in away else sizes[id(param)][1] for param in arrived]
        travelling, parts = _travelling_nbytes(model), setting.parts("grad")
        return [0, *(travelling - (-held // parts) for held in accumulate(stay))]
    # A unit's gradients leave when the next unit has all of its own; those that an update beside reads, after that.
    beside = any(lane.streamed for lane in model.flat) and leaves
    lag = 1 + (IN_FLIGHT if beside else 0)
    missing = Counter(sizes[id(param)][0] for param in arrived)
    held, found, leaving = 0, [0], deque[int]()
    by_unit: Counter[int] = Counter()
    for param in arrived:
        unit, nbytes = sizes[id(param)]
        held, missing[unit] = held + nbytes, missing[unit] - 1
        by_unit[unit] += nbytes
        found.append(held)
        if not missing[unit] and (leaves or unit in away) and unit:  # the root's stay to the end of backward
            leaving.append(by_unit[unit])
            if len(leaving) > lag:
                held -= leaving.popleft()
    return found


def first_update(model: Model) -> int | None:
    """With release=True, how many gradients have arrived when the first unit is updated: the second has all of its."""
    if not model.setting.plan.release or not model.setting.adopts:
        return None
    sizes = _grads_of_params(model)
    missing = Counter(sizes[id(param)][0] for param in model.trace.arrived)
    whole = 0
    for number, param in enumerate(model.trace.arrived):
        unit, _ = sizes[id(param)]
        missing[unit] -= 1
        whole += unit > 0 and not missing[unit]
        if whole == 2:
            return number + 1
    return None


def _grads_of_params(model: Model) -> dict[int, tuple[int, int]]:
    """By parameter: its unit, and what its gradient takes of the allocator."""
    precision, found = model.setting.plan.precision, {}
    for number, unit in enumerate(model.units):
        for _, param, owners in unit.params:
            itemsize = lane_key(param, owners, precision).reduce_dtype.itemsize
            found[id(param)] = (number, rests.reused_nbytes(param.numel() * itemsize))
    return found


def all_grads_nbytes(model: Model) -> int:
    """When backward is over, where they come and go; of those that leave inside it the last."""
    if model.setting.grad_buffer:
        return 0
    if model.setting.adopts and model.trace.arrived:
        return grads_by_arrival(model)[-1]
    if model.setting.plan.release:
        grads = _unit_nbytes(model, of_grads=True)
        if not model.setting.adopts:  # those that rest on more ranks than one wait for the end of backward
            return -(-sum(grads) // model.setting.parts("grad")) if spreads(model) else 0
        return grads[0] + 2 * max(grads[1:], default=0)
    stay = [a for a in model.arrays() if a.role == "grad" and (a.tier == "device" or spreads(model))]
    return rounded_nbytes(stay)


def spreads(model: Model) -> bool:
    """Sums are gathered after they are reduced, as they are cut along fewer axes than there are."""
    return any(lane.spreads for lane in model.flat)


def _unit_nbytes(model: Model, of_grads: bool) -> list[int]:
    def nbytes(lane: PlannedLane) -> int:
        if of_grads:
            return lane.layout.numel * lane.key.reduce_dtype.itemsize if lane.key.trainable else 0
        return lane.layout.numel * lane.key.compute_dtype.itemsize + lane.codes_nbytes("compute") if lane.frees else 0

    return [sum(map(nbytes, unit)) for unit in model.lanes]


def gathered_nbytes(model: Model) -> int:
    """Compute of the root and of the largest units, while they are used; where it rests whole it is counted there."""
    compute = _unit_nbytes(model, of_grads=False)
    return compute[0] + sum(sorted(compute[1:], reverse=True)[: 1 + model.setting.plan.prefetch])


def _receive_nbytes(model: Model) -> int:
    """What a reduce has beside the buffer it sends and the sum it leaves. Of two hops the last one of a unit goes on
    while the next unit's first does, or its last one begins: see Note [Two hops] in step/reduces.py."""
    if model.setting.world == 1:
        return 0
    hops = [[_hops_nbytes(lane) for lane in lanes if lane.key.trainable] for lanes in model.lanes]
    units = [list(map(sum, zip_longest(*lanes, fillvalue=0))) for lanes in hops if lanes]  # experts have fewer
    most: list[int] = [max(hop) for hop in zip_longest(*units, fillvalue=0)] or [0]
    found = most[0] if len(most) == 1 else most[1] + max(most)
    fine = [sum(lane.layout.slice_numel * lane.key.reduce_dtype.itemsize for lane in lanes) for lanes in model.lanes]
    found += sum(lane.codes_nbytes("fine", "grad") for lane in model.flat if lane.spreads and lane.key.trainable)
    found += sum(lane.factors_nbytes for lane in model.flat)  # they wait for the end of backward
    return found + (max(fine) if spreads(model) and not model.setting.grad_buffer else 0)


def _hops_nbytes(lane: PlannedLane) -> list[int]:
    """By hop: where it receives, the sum on the way that it leaves, and the one it sends. As comm/along.Reduces."""
    left, sent, found = lane.layout.numel, 0, []
    hops = list(lane.grid.hops())
    for hop in hops:
        part, codec = left // lane.sizes[hop.axis], lane.wires.reduce[hop.axis]
        native = lane.setting.native and codec is None
        leaves = 0 if native or hop is hops[-1] else part
        receives = 0 if codec is not None else part if native else left
        # Those that are sent, and those that come; factors are counted for all units.
        codes = 0 if isinstance(codec, LowRank) else 2 * lane.travels_nbytes(codec, left)
        if lane.wires.keeps[hop.axis]:  # all that is left out is flushed exactly, now and then, and reduces warm up
            codes = max(codes, (2 * left + part) * RESIDUAL.itemsize)
        found.append((receives + leaves + sent) * lane.key.reduce_dtype.itemsize + codes)
        left = sent = part
    return found


def _travelling_nbytes(model: Model) -> int:
    """Gradients that are being sent: the root's, of two units, and where they are received."""
    grads = _unit_nbytes(model, of_grads=True)
    return _receive_nbytes(model) + grads[0] + 2 * max(grads[1:], default=0)


def waiting_grads_nbytes(model: Model) -> int:
    """The thread that waits for files lets go of the last chunk's gradient only some time after it is used. With
    delay=1 it may not have come to any."""
    if not model.setting.adopts:
        return 0
    streams = [lane for lane in model.flat if lane.streamed and "disk" in lane.tiers and lane.tiers.grads == "device"]
    sizes = [numel * lane.key.reduce_dtype.itemsize for lane in streams for numel in lane.layout.numels]
    return sum(sizes) if model.setting.plan.delay else max(sizes, default=0)


def update_nbytes(lanes: Sequence[PlannedLane]) -> int:
    """What the update needs beside what rests and the window: nothing for the one-pass kernel."""
    by_unit: Counter[int] = Counter()
    chunked = 0
    for lane in lanes:
        if not lane.updates or lane.setting.by_pass(lane.key):
            continue
        assert lane.key.master_dtype is not None
        itemsize = lane.key.master_dtype.itemsize
        if lane.streamed:  # values and gradient of a chunk as wide as the master, moments decoded, the step's own
            decoded = lane.setting.moments if lane.setting.plan.moments != "exact" else 0
            numel = min(lane.setting.chunk, lane.held("update"))
            chunked = max(chunked, numel * itemsize * (4 + decoded) if not lane.wide else 0)
        else:  # see tiers/master.py
            fetched = lane.beside_itemsize not in (0, itemsize)
            widened = lane.key.reduce_dtype != lane.key.master_dtype
            by_unit[lane.unit] += lane.held("update") * itemsize * (fetched + widened)
    return max([chunked, *by_unit.values()])


def setup_nbytes(model: Model) -> int:
    """A model from the meta device is made lane by lane: values as wide as the master, and their two halves."""
    stays = [array for array in model.arrays() if array.role in ("compute", "master", "lagging")]
    held = rounded_nbytes([array for array in stays if array.tier == "device"]) + model.buffers_nbytes
    made = [lane for lane in model.flat if lane.key.master_dtype not in (None, lane.key.compute_dtype)]
    return held + max((8 * lane.held("update") for lane in made), default=0)


def transient_nbytes(model: Model) -> int:
    """What of zeor's own comes and goes: the most of backward and step, as they do not meet.

    Backward: (1 + prefetch) x compute + 2 x gradient + what a reduce has of the largest units + what the root keeps.
    The root's compute stays from the beginning of forward to the end of backward, and its gradients arrive until then.
    Where compute rests whole, or the gradient's buffer stays, that term is resident instead. Step: see update_nbytes.
    """
    travelling = _receive_nbytes(model) if model.setting.grad_buffer else _travelling_nbytes(model)
    backward = gathered_nbytes(model) + (travelling if model.setting.world > 1 else 0)
    return max(backward, update_nbytes(model.flat) + publishing_nbytes(model))


def publishing_nbytes(model: Model) -> int:
    """Codes of new values: a step begins to send those of all lanes, and the next forward waits for them one by one."""
    return sum(lane.codes_nbytes("update", "compute") for lane in model.flat if lane.parted)


# ---- the host


def host_peak(model: Model) -> int:
    """The most of setting up and training."""
    arrays = model.arrays()
    resting = sum(-(-piece // PAGE_NBYTES) * PAGE_NBYTES for a in arrays if a.tier == "host" for piece in a.pieces)
    training = model.window().host + shelf_nbytes(model.trace.sent)
    if model.setting.native:
        training += _brought_nbytes(model)
    # What rests on disk is first written through a map of its file, whose pages go on to count; so are moments that
    # the optimizer's own step begins.
    begun = ("compute", "master") if model.setting.native else ("compute", "master", "moments")
    mapped = sum(a.nbytes for a in arrays if a.tier == "disk" and a.role in begun)
    beside = any(lane.wide for lane in model.flat if lane.streamed) or any(a.tier == "disk" for a in arrays)
    threads = THREADS_NBYTES if beside else 0
    return resting + training + mapped + threads + (LIBRARIES_NBYTES if model.setting.native else 0)


def _brought_nbytes(model: Model) -> int:
    """Compute that rests on disk is read into pinned memory, unit by unit."""
    units = [
        sum(rests.pinned_nbytes(lane.held("compute") * lane.key.compute_dtype.itemsize) for lane in unit
            if lane.frees and lane.tiers.compute == "disk")
        for unit in model.lanes
    ]  # fmt: skip
    return units[0] + sum(sorted(units[1:], reverse=True)[: 1 + model.setting.plan.prefetch])


def buffers_nbytes(module: nn.Module) -> int:
    return sum(rests.device_nbytes(buffer.nbytes) for buffer in module.buffers() if buffer.layout is torch.strided)
