"""`zeor.predict`: bytes per rank by role and by tier, and their peaks, before anything is allocated.

Uses the same unit finding, lane keys, layout and places as the engine (rests.py), on a model that may be on the meta
device. What it says of resident roles and tiers is exact; `transient` is the bound of the formula in peaks.py. Given a
batch, the model's forward and backward are run without values (trace.py), and peaks include activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeor.memory.param import is_sharded
from zeor.memory.roles import Column, Residency
from zeor.model.discover import find_units
from zeor.optim.streaming.moments import MOMENTS
from zeor.plan import Offload, Plan, Precision, nearest
from zeor.planner import automatic
from zeor.planner.peaks import Model, buffers_nbytes, device_peak, host_peak, transient_nbytes
from zeor.planner.rests import PlannedLane, Setting, fullest_rank, plan_lanes
from zeor.planner.trace import Trace, Workload, trace
from zeor.spec.keys import small_numel

_OF_PLAN = ("prefetch", "offload", "moments", "release", "delay", "recompute", "kernel", "keep_whole")
_OPTIONS = ("units", "native_reduce", "batch", "inputs", "loss", *_OF_PLAN)
CONTEXT_NBYTES = 1 << 30  # of a device that is no allocator's: the driver's context, and libraries' own memory
_ENDLESS = 1 << 60
_ONE_PASS = ("Adam", "AdamW", "SGD")


@dataclass(frozen=True)
class Prediction:
    """Bytes on one rank.

    compute, grad, master, moments: at rest, on whatever tier. `padding` is contained in them; `transient` is what of
    zeor's own comes on top while a step runs. device, host, disk: at rest on each tier; with delay=1 the device has
    `lagging` besides. `window`: on the device, what state that rests elsewhere passes through. `activations`: the most
    the model's own computation has alive, where batch= or inputs= was given.

    `device_peak`: what torch.cuda.max_memory_allocated() will be; not the driver's context, nor what torch's allocator
    holds in reserve. `host_peak`: what the process grows by after torch was imported and the device first used, pinned
    memory and libraries that training loads included (zeor/planner/peaks.py). Both are meant never to be under.
    """

    compute: int
    grad: int
    master: int
    moments: int
    padding: int
    transient: int
    device: int = 0
    host: int = 0
    disk: int = 0
    lagging: int = 0
    window: int = 0
    activations: int = 0
    device_peak: int = 0
    host_peak: int = 0

    @property
    def resident(self) -> int:
        return self.compute + self.grad + self.master + self.moments

    def as_dict(self) -> dict[str, int]:
        return {**vars(self), "resident": self.resident}


def predict(
    model: nn.Module,
    *,
    world: int = 1,
    stage: int = 3,
    precision: Precision | str | None = None,
    optimizer: str | int = "AdamW",
    **options: Any,
) -> Prediction:
    """What `shard(model, ..., stage=stage)` will hold on each of `world` ranks. Nothing is allocated.

    `optimizer` is a torch.optim name or the number of tensors it keeps per parameter. `options`: units=, and as given
    to shard() prefetch=, offload=, moments=, release=, delay=, recompute=, kernel=, keep_whole=; native_reduce= (True
    for NCCL and an accelerator; without it up to a whole buffer is received).

    What a step computes, for peaks with activations: batch=(sequences, tokens) for a model of tokens, or inputs=, the
    model's arguments; loss=, a function of the model and the inputs (with batch=: tokens and targets), else the
    cross-entropy of float logits against targets, or the model's output where it is the loss itself.

    With offload="auto" it chooses as the run will, and raises ValueError where a step does not fit into the budgets.
    """
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"zeor.predict has no option {name!r}{nearest(name, list(_OPTIONS))}.")
    if isinstance(optimizer, str) and optimizer not in MOMENTS:
        raise ValueError(
            f"optimizer={optimizer!r} is not known to the planner{nearest(optimizer, list(MOMENTS))}; give the number "
            "of tensors it keeps per parameter instead, such as optimizer=2."
        )
    chosen = {name: options[name] for name in _OF_PLAN if name in options}
    plan = Plan.parse({"stage": stage, "precision": precision, **chosen})
    count = MOMENTS[optimizer] if isinstance(optimizer, str) else optimizer
    one_pass = optimizer in _ONE_PASS if isinstance(optimizer, str) else False
    setting = Setting(plan, world, count, bool(options.get("native_reduce", False)), one_pass)
    known = _model(model, setting, options)
    if plan.offload is not None and plan.offload.auto:
        begun = automatic.begun_nbytes(known)
        known = automatic.place(known)
        found = _prediction(replace(known, rank=fullest_rank(known.flat, world)))
        automatic.check_peak(known, max(found.device, found.device_peak))
        return replace(found, host_peak=max(found.host_peak, begun))
    return _prediction(known)


def beside(model: nn.Module, device_nbytes: int, **options: Any) -> Prediction | None:
    """What predict() says with a device of so many bytes and all the host memory that is needed; None where compute,
    gradients and activations alone do not fit. `options` are predict's, but for offload=."""
    budget = device_nbytes - CONTEXT_NBYTES
    if budget <= 0:
        return None
    # The choice is that of offload="auto" (automatic.py), with as much host memory as it takes.
    offload = Offload(auto=True, device_budget=budget, host_budget=_ENDLESS)
    try:
        return predict(model, offload=offload, **{"native_reduce": True, **options})
    except automatic.OverBudgetError:
        return None


def _model(model: nn.Module, setting: Setting, options: dict[str, Any]) -> Model:
    units = find_units(model, options.get("units"), small_numel(setting.plan, setting.world))
    lanes, setting = plan_lanes(units, setting)
    work = Workload.parse(options.get("batch"), options.get("inputs"), options.get("loss"))
    found = Trace()
    if work is not None:
        if any(map(is_sharded, model.parameters())):
            raise ValueError("The model is sharded already; call zeor.predict before zeor.shard to count activations.")
        found = trace(model, units, setting.plan, work)
    rank = fullest_rank([lane for unit in lanes for lane in unit], setting.world)
    return Model(units, lanes, setting, rank, found, buffers_nbytes(model))


def _prediction(model: Model) -> Prediction:
    roles, tiers = Counter[str](), Counter[str]()
    for array in model.arrays():
        roles[array.role] += array.nbytes
        tiers[array.tier] += array.nbytes
    if not any(lane.streamed for lane in model.flat):  # exact in a world of any size
        more = model.setting.moments * _updated_nbytes(model.flat, model.setting.column, model.setting.world)
        tiers["device"] += more - roles["moments"]
        roles["moments"] = more
    return Prediction(
        **{role: roles[role] for role in ("compute", "grad", "master", "moments", "lagging")},
        padding=sum(lane.layout.padding_numel * lane.key.compute_dtype.itemsize for lane in model.flat),
        transient=transient_nbytes(model),
        **{tier: tiers[tier] for tier in ("device", "host", "disk")},
        window=model.window().device,
        activations=model.trace.peak,
        device_peak=device_peak(model),
        host_peak=host_peak(model),
    )


def _updated_nbytes(lanes: Sequence[PlannedLane], column: Column, world: int) -> int:
    """Master-sized bytes of the elements one rank updates, padding left out, on the rank that has the most."""
    total, lost = 0, Counter[int]()  # lost: by rank, what gaps take from its slices
    for key, layout in ((lane.key, lane.layout) for lane in lanes):
        if not key.trainable or key.master_dtype is None:
            continue
        itemsize, part = key.master_dtype.itemsize, layout.slice_numel
        if column.update is Residency.FULL:
            total += sum(layout.numels) * itemsize
            continue
        total += part * itemsize
        for begin, end in layout.gaps():
            for rank in range(begin // part, -(-end // part)):
                lost[rank] += (min(end, (rank + 1) * part) - max(begin, rank * part)) * itemsize
    return total - (min(lost.values()) if len(lost) == world else 0)
