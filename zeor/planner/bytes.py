"""`zeor.predict`: bytes per rank by role and tier, their peaks, and a step's time, before anything is allocated.

Uses the same unit finding, lane keys, layout and places as the engine (rests.py), on a model that may be on the meta
device. What it says of resident roles and tiers is exact; `transient` is the bound of the formula in peaks.py. Given a
batch, the model's forward and backward are run without values (trace.py), and peaks include activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from zeor.features import fp8
from zeor.features.levels import Kept, Level, largest
from zeor.features.recompute import asks_products
from zeor.memory.param import is_sharded
from zeor.memory.roles import Sizes
from zeor.model.discover import UnitSpec, find_units
from zeor.optim.streaming.moments import MOMENTS, moment_count
from zeor.plan import Offload, Plan, Precision, _nbytes, nearest
from zeor.planner import automatic
from zeor.planner.kept import keeping, needs, units_at
from zeor.planner.machine import Along, Machine
from zeor.planner.mesh_part import parts_of
from zeor.planner.peaks import (
    Model,
    accumulated_nbytes,
    buffers_nbytes,
    device_peak,
    gathered_nbytes,
    host_peak,
    transient_nbytes,
    waiting_peak,
)
from zeor.planner.rests import PlannedLane, Setting, fullest_part, plan_lanes
from zeor.planner.shape import Shape
from zeor.planner.step_time import Pace, StepTime, step_time
from zeor.planner.trace import Trace, Workload, trace
from zeor.spec.keys import small_numel
from zeor.spec.wires import check_wire

_OF_PLAN = (
    "prefetch", "offload", "moments", "release", "delay", "recompute", "kernel", "keep_whole", "compile", "wire",
)  # fmt: skip
_LOOP = ("accumulation", "sums_each", "gpu", "host", "link", "clip", "pipeline", "in_flight")
_MESH = ("pp", "tp", "cut")
_OPTIONS = (
    "units", "hierarchy", "experts", "native_reduce", "batch", "inputs", "loss", *_LOOP, *_MESH, *_OF_PLAN,
)  # fmt: skip
CONTEXT_NBYTES = 1 << 30  # of a device that is no allocator's: the driver's context, and libraries' own memory
_ENDLESS = 1 << 60
HOLES = 0.02  # of a device's memory, left for what lies between the allocator's blocks: as in features/keeping.py
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

    `accumulated`: gradients summed over micro-batches in fp32, on top of the others. `held`: full parameters that a
    stage of a pipeline keeps through a step. `residual`: at rest, what wires leave out of gradients. `kept`:
    of recompute="auto", how many of a pass's calls keep their activations; `products`: how many more keep the results
    of their products. `time`: seconds of a step, where gpu= and a batch were given.
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
    accumulated: int = 0
    kept: int = 0
    products: int = 0
    held: int = 0
    residual: int = 0
    time: StepTime | None = None

    @property
    def resident(self) -> int:
        return self.compute + self.grad + self.master + self.moments + self.residual

    def as_dict(self) -> dict[str, int]:
        """The bytes, by name."""
        counts = {name: value for name, value in vars(self).items() if name not in ("time", "kept", "products")}
        return {**counts, "resident": self.resident}


def predict(
    model: nn.Module,
    *,
    world: int | Mapping[str, int] = 1,
    stage: int | Mapping[str, int] = 3,
    precision: Precision | str | None = None,
    optimizer: str | int = "AdamW",
    **options: Any,
) -> Prediction:
    """What `shard(model, ..., stage=stage)` will hold on each of `world` ranks. Nothing is allocated.

    Ranks on two axes: world={"node": 2, "gpu": 8}, the inner one last, as a mesh has them; or world=16, hierarchy=8.
    Then `stage` may name one for each: {"gpu": 3, "node": 1}. experts=mesh["ep"], as given to shard(): parameters that
    are DTensors over it are sharded over the ranks with the same experts.

    `optimizer` is a torch.optim name or the number of tensors it keeps per parameter. `options`: units=, and as given
    to shard() prefetch=, offload=, moments=, release=, delay=, recompute=, kernel=, keep_whole=, wire=; native_reduce=
    (True for NCCL and an accelerator; without it up to a whole buffer is received).

    What a step computes, for peaks with activations: batch=(sequences, tokens) for a model of tokens, or inputs=, the
    model's arguments; loss=, a function of the model and the inputs (with batch=: tokens and targets), else the
    cross-entropy of float logits against targets, or the model's output where it is the loss itself.

    accumulation=k: a step of k micro-batches of this size, summed whole in fp32 by zeor.no_sync (4 bytes for each
    parameter on every rank), or with sums_each=True each reduced and added to slices.

    pipeline="step" or "action": the model is one stage of a pipeline, run with this keep= (zeor.pipeline); gradients
    are summed whole, unless sums_each=True stands for its reduce="action". in_flight=: how many micro-batches wait at
    most for their backward: with 1F1B this stage and those after it, with GPipe all. Without it one.

    pp=, tp=: `model` is the whole one, and world= counts the replicas of a mesh (pp, dp, tp). What the fullest stage's
    ranks hold is said. tp= cuts matrices by the model's own plan (transformers), or along cut={pattern: dimension}.
    Without batch= or inputs=: activations depend on how the model is cut. A stage that is cut already is counted as it
    is, by pipeline= and DTensors alone.

    gpu="H100", "80GiB" or a zeor.Machine says what it runs on: then recompute="auto" keeps as many activations as fit
    (else all is counted as computed again), and with a batch `time` says how long a step takes. link=: as zeor.choose
    takes it. clip=False: the loop computes no norm.

    With offload="auto" it chooses as the run will, and raises ValueError where a step does not fit into the budgets:
    those of zeor.Offload, else gpu= and host= (memory of one host, shared by its ranks), else what is free here.
    """
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"zeor.predict has no option {name!r}{nearest(name, list(_OPTIONS))}.")
    if any(options.get(name, 1) != 1 for name in ("pp", "tp")):
        settings = {"world": world, "stage": stage, "precision": precision, "optimizer": optimizer}
        return _of_fullest_stage(model, settings, options)
    check_optimizer(optimizer)
    chosen = {name: options[name] for name in _OF_PLAN if name in options}
    hierarchy = options.get("hierarchy")
    shape = Shape.parse(world, hierarchy)
    plan = Plan.parse({**shape.stages(stage, hierarchy), "precision": precision, **chosen})
    loop = Loop.of(options)
    check_wire(plan, shape.sizes)
    machine = None if options.get("gpu") is None else Machine.parse(options["gpu"])
    plan = replace(plan, offload=_with_budgets(plan.offload, machine, options.get("host"), shape.world))
    native = bool(options.get("native_reduce", machine is not None and machine.native))
    experts = None if options.get("experts") is None else shape.experts(model, options["experts"])
    known = Source(model, options).model(setting_of(plan, shape.sizes, optimizer, native, loop, experts))
    found = predicted(known, None if machine is None else limit_nbytes(machine))
    if options.get("pipeline") is not None:
        found = found._replace(prediction=_in_pipeline(found.prediction, found.model, options))
    if machine is None or not known.trace.works.forward:
        return found.prediction
    clip = bool(options.get("clip", True))
    axes = machine.links(shape.sizes, shape.mesh_dim_names, options.get("link"))
    pace = pace_of(found, machine, axes, clip)
    return replace(found.prediction, time=step_time(found.model, pace))


def _with_budgets(offload: Offload | None, machine: Machine | None, host: Any, world: int) -> Offload | None:
    """With the memory of another machine in the place of budgets that auto was not given."""
    if offload is None or not offload.auto or machine is None:
        if host is not None:
            raise ValueError(f"host={host!r} is what offload='auto' may take beside gpu=; give both, or leave it out.")
        return offload
    device, kept = offload.device_budget, offload.host_budget
    if kept is None and host is None:
        raise ValueError(
            "offload='auto' beside gpu= must know how much memory a host has, which its ranks share; give host= too, "
            "such as host='500GiB'."
        )
    if device is None:
        device = limit_nbytes(machine)
    if kept is None:
        kept = machine.host_share(_nbytes("host", host) or 0, world)
    return replace(offload, device_budget=device, host_budget=kept)


def _of_fullest_stage(model: nn.Module, settings: dict[str, Any], options: dict[str, Any]) -> Prediction:
    """Of the stages of a mesh (pp, dp, tp) the one whose ranks need most."""
    refused = next((name for name in ("batch", "inputs") if options.get(name) is not None), None)
    if refused is not None:
        raise ValueError(
            f"zeor.predict counts no activations of a model that is still to be cut; leave out {refused}=, or give a "
            "stage that is cut, without pp= and tp=."
        )
    pp, tp = options.get("pp", 1), options.get("tp", 1)
    given = {name: value for name, value in options.items() if name not in _MESH}
    if pp > 1:
        given.setdefault("pipeline", "step")
    stages = [predict(part, **settings, **given) for part in parts_of(model, pp, tp, options.get("cut"))]
    return max(stages, key=lambda each: each.device_peak)


def check_optimizer(optimizer: str | int) -> None:
    if not isinstance(optimizer, str) and (type(optimizer) is not int or optimizer < 0):
        raise TypeError(
            f"optimizer={optimizer!r}; give its name in torch.optim, such as 'AdamW', or the number of tensors it "
            "keeps per parameter."
        )
    if isinstance(optimizer, str) and optimizer not in MOMENTS:
        raise ValueError(
            f"optimizer={optimizer!r} is not known to the planner{nearest(optimizer, list(MOMENTS))}; give the number "
            "of tensors it keeps per parameter instead, such as optimizer=2."
        )


class Loop(NamedTuple):
    """How a step is cut into micro-batches."""

    accumulation: int = 1
    sums_each: bool = False

    @staticmethod
    def of(options: dict[str, Any]) -> Loop:
        count = options.get("accumulation", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"accumulation={count!r}; give how many micro-batches a step has: 1, 2, 3, ...")
        pipeline, in_flight = options.get("pipeline"), options.get("in_flight", 1)
        if not isinstance(in_flight, int) or isinstance(in_flight, bool) or in_flight < 1:
            raise ValueError(f"in_flight={in_flight!r}; give how many micro-batches wait for their backward: 1, 2, ...")
        if in_flight > 1 and pipeline is None:
            raise ValueError(f"in_flight={in_flight} says how a pipeline runs; give pipeline='step' or 'action' too.")
        if pipeline not in (None, "step", "action"):
            raise ValueError(f"pipeline={pipeline!r} is not known; give zeor.pipeline's keep=: 'step' or 'action'.")
        return Loop(count if pipeline is None else max(count, 2), bool(options.get("sums_each", False)))


def kind_of(optimizers: Sequence[Optimizer]) -> str | int:
    """By name where that says everything, else by what it keeps for each element."""
    known = [each for each in optimizers if type(each).__name__ in MOMENTS]
    name = type(known[0]).__name__ if len(known) == 1 else ""
    most = max(map(moment_count, known), default=0)
    return name if name and MOMENTS[name] == most else most


def setting_of(
    plan: Plan, sizes: Sizes, optimizer: str | int, native: bool, loop: Loop, experts: Sizes | None = None
) -> Setting:  # fmt: skip
    """`sizes`: of the axes; `experts`: of those of experts' lanes."""
    count = MOMENTS[optimizer] if isinstance(optimizer, str) else optimizer
    one_pass = optimizer in _ONE_PASS if isinstance(optimizer, str) else False
    return Setting(plan, sizes, count, native, one_pass, 0, *loop, experts)


def limit_nbytes(machine: Machine) -> int:
    """What a step may allocate: not the driver's context, nor what lies between the allocator's blocks."""
    if not machine.native:
        return machine.memory
    return max(0, int((1 - HOLES) * (machine.memory - CONTEXT_NBYTES)))


def pace_of(found: Predicted, machine: Machine, axes: Sequence[Along], clip: bool) -> Pace:
    """How fast this plan goes there. Ranks of one host share a CPU's cores."""
    setting = found.model.setting
    share = min(1.0, machine.cores / min(setting.world, machine.per_host)) if machine.cores else 1.0
    compiled = setting.plan.compile is not False and machine.native
    fp8s = computes_fp8(setting.plan)
    return Pace(machine, tuple(axes), clip, compiled, fp8s, found.kept, found.products, share)


def computes_fp8(plan: Plan) -> bool:
    """Whether products are computed in 8 bits."""
    return plan.precision.float8 is not None


class Predicted(NamedTuple):
    """With the model as it was placed, and units that keep their activations, or the results of their products, though
    others are computed again."""

    prediction: Prediction
    model: Model
    kept: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()


def predicted(known: Model, limit: int | None = None) -> Predicted:
    """Of offload="auto" and recompute="auto" what the run will choose; for the latter `limit` is needed."""
    found = _placed(known)
    if known.plain is None or limit is None:
        return found
    calls = needs(known)

    def placed(kept: Kept) -> Model:
        return replace(found.model, trace=keeping(known.units, known.trace, calls, kept))

    kept = largest(len(calls), lambda kept: device_peak(placed(kept)) <= limit)
    if not kept.products:
        return found
    model = placed(kept)
    whole, products = (units_at(calls, kept, level) for level in (Level.ALL, Level.PRODUCTS))
    told = replace(_prediction(model), kept=len(whole), products=len(products))
    return Predicted(told, model, frozenset(whole), frozenset(products) - frozenset(whole))


def _placed(known: Model) -> Predicted:
    plan = known.setting.plan
    if plan.offload is None or not plan.offload.auto:
        return Predicted(_prediction(known), known)
    begun = automatic.begun_nbytes(known)
    known = automatic.place(known)
    known = replace(known, part=fullest_part(known.flat, known.setting.parts("update")))
    found = _prediction(known)
    automatic.check_peak(known, max(found.device, found.device_peak))
    return Predicted(replace(found, host_peak=max(found.host_peak, begun)), known)


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


class Source:
    """A model and what a step of it computes. Traces are kept: plans that compute the same share them."""

    def __init__(self, model: nn.Module, options: dict[str, Any]):
        self.module, self._units = model, options.get("units")
        self._work = Workload.parse(options.get("batch"), options.get("inputs"), options.get("loss"))
        self._traces: dict[Any, tuple[Sequence[UnitSpec], Trace]] = {}
        self._found: dict[int, list[UnitSpec]] = {}
        self._buffers = buffers_nbytes(model)
        if self._work is not None and any(map(is_sharded, model.parameters())):
            raise ValueError("The model is sharded already; call zeor.predict before zeor.shard to count activations.")

    def units(self, small: int) -> list[UnitSpec]:
        if small not in self._found:
            self._found[small] = find_units(self.module, self._units, small)
        return self._found[small]

    def trace(self, plan: Plan, units: list[UnitSpec], sequences: int | None = None) -> Trace:
        if self._work is None:
            return Trace()
        key = (plan.precision, plan.recompute, sequences, id(units))
        if key not in self._traces:
            work = self._work if sequences is None else self._work.of(sequences)
            counts = self._counts(plan, units, sequences)
            self._traces[key] = units, trace(self.module, units, plan, work, counts)
        return self._traces[key][1]

    def _counts(self, plan: Plan, units: list[UnitSpec], sequences: int | None) -> list[int]:
        """By call, how many products are kept: those that a recomputation without them runs."""
        if not asks_products(plan.recompute):
            return []
        named = tuple(each for each in plan.recompute if each != "products") if plan.recompute != "products" else ()
        return self.trace(replace(plan, recompute=named or True), units, sequences).products

    def model(self, setting: Setting, sequences: int | None = None) -> Model:
        """With a micro-batch of so many sequences; None: as it was given."""
        units = self.units(small_numel(setting.plan, setting.world))
        with fp8.foreseen(self.module, setting.plan, self._units, setting.world):
            lanes, setting = plan_lanes(units, setting)
        found, plain, middle = self.trace(setting.plan, units, sequences), None, None
        if setting.plan.recompute == "auto" and self._work is not None:
            plain = self.trace(replace(setting.plan, recompute=False), units, sequences)
            if setting.plan.compile is False:
                middle = self.trace(replace(setting.plan, recompute="products"), units, sequences)
        part = fullest_part([lane for unit in lanes for lane in unit], setting.parts("update"))
        return Model(units, lanes, setting, part, found, self._buffers, plain, middle)


def _in_pipeline(found: Prediction, model: Model, options: dict[str, Any]) -> Prediction:
    """With keep="step" every unit stays gathered through a step: see rule 7 in step/residency.py."""
    held = 0
    if options["pipeline"] == "step":
        held = sum(lane.layout.numel * lane.key.compute_dtype.itemsize for lane in model.flat if lane.frees)
    beside = options.get("in_flight", 1) - 1
    most = max(found.device_peak - (gathered_nbytes(model) if held else 0), waiting_peak(model, beside))
    activations = found.activations + beside * model.trace.waiting
    return replace(found, held=held, activations=activations, device_peak=most + held)


def _prediction(model: Model) -> Prediction:
    roles, tiers = Counter[str](), Counter[str]()
    for array in model.arrays():
        roles[array.role] += array.nbytes
        tiers[array.tier] += array.nbytes
    if not any(lane.streamed for lane in model.flat):  # exact in a world of any size
        more = model.setting.moments * _updated_nbytes(model.flat, model.setting.parts("update"))
        tiers["device"] += more - roles["moments"]
        roles["moments"] = more
    return Prediction(
        roles["compute"],
        roles["grad"],
        roles["master"],
        roles["moments"],
        lagging=roles["lagging"],
        residual=roles["residual"],
        padding=sum(lane.layout.padding_numel * lane.key.compute_dtype.itemsize for lane in model.flat),
        transient=transient_nbytes(model),
        device=tiers["device"],
        host=tiers["host"],
        disk=tiers["disk"],
        window=model.window().device,
        activations=model.trace.peak,
        accumulated=accumulated_nbytes(model),
        device_peak=device_peak(model),
        host_peak=host_peak(model),
    )


def _updated_nbytes(lanes: Sequence[PlannedLane], count: int) -> int:
    """Master-sized bytes of the elements one rank updates, padding left out, of the fullest of so many parts."""
    total, lost = 0, Counter[int]()  # lost: by part, what gaps take from it
    for lane in lanes:
        if not lane.updates:
            continue
        assert lane.key.master_dtype is not None
        itemsize, numel = lane.key.master_dtype.itemsize, lane.held("update")
        total += numel * itemsize
        each = count // lane.parts_of_update  # parts of other lanes that go with one of this
        for begin, end in lane.layout.gaps():
            for part in range(begin // numel, -(-end // numel)):
                nbytes = (min(end, (part + 1) * numel) - max(begin, part * numel)) * itemsize
                lost.update(dict.fromkeys(range(part * each, (part + 1) * each), nbytes))
    return total - (min(lost.values()) if len(lost) == count else 0)
