"""The public verbs, thin: each checks what it was given and hands over to the folders below."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zeor.access import full, meta, wiring
from zeor.access.blend import lerp
from zeor.access.initialise import init_parameters
from zeor.access.meta import on_meta
from zeor.access.push import push
from zeor.access.sharded import ATTRIBUTE as _ATTRIBUTE
from zeor.access.sharded import Sharded, note_stages, stage_of
from zeor.access.sharded import state_of as _state
from zeor.access.stream import iter_full
from zeor.access.trace import trace
from zeor.checkpoint.weights.export import export
from zeor.checkpoint.weights.pretrained import load_pretrained
from zeor.comm.agree import everywhere, same_everywhere
from zeor.comm.attendance import attend
from zeor.comm.axes import Axes, make_axis
from zeor.comm.launch.world import ensure_process_group
from zeor.comm.meshes import make_axes, mesh
from zeor.data.loader import follow
from zeor.features import fp8, module_buffers, plain_grads
from zeor.features.auto_wire import AutoWire
from zeor.features.build import Builder
from zeor.features.chunked_loss import chunked_cross_entropy
from zeor.features.compiling import check_options
from zeor.features.freezing import Freezing
from zeor.features.join import join
from zeor.features.mean_loss import mean_loss
from zeor.features.module_buffers import ModuleBuffers
from zeor.features.penalty import penalty
from zeor.features.pipeline import pipeline
from zeor.features.recompute import find_wanted
from zeor.features.totals import total
from zeor.memory import device as devices
from zeor.memory import param as parameters
from zeor.memory.placed import is_placed
from zeor.model.discover import find_units
from zeor.model.shareable import check_model
from zeor.model.wrapped import compile_in_place, refuse_wrapped, unwrapped
from zeor.optim.ema import ema
from zeor.optim.parts.checks import (
    check_kind,
    check_moments,
    check_parameters,
    refuse_optimizers_in_backward,
    watch_steps,
)
from zeor.optim.stepper import Stepper
from zeor.optim.whole import check_rank, full_state, iter_state, load_full_state
from zeor.parallel import partial_norms
from zeor.parallel.experts import stand_over_experts
from zeor.parallel.tensor import check_plan, check_replicas, check_ties, tensor_ranks
from zeor.plan import Offload, Plan, Precision, Wire
from zeor.planner.asked import Asked, Where
from zeor.planner.bytes import predict
from zeor.planner.choose import Choice
from zeor.planner.disk_room import check_disk
from zeor.planner.startup import make_visible, show_start
from zeor.spec.keys import kept_apart, lane_key, small_numel
from zeor.spec.wires import check_wire
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.hooks import Hooks, find_entries
from zeor.step.unit import Slot


def shard(  # noqa: PLR0913 (public: each option is a keyword)
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    plan: Choice | str | None = None,
    stage: int | Mapping[str, int] = 3,
    precision: Precision | str | None = None,
    reduction: str = "mean",
    units: Sequence[nn.Module | type] | None = None,
    mesh: Any = None,
    hierarchy: int | str | None = None,
    experts: Any = None,
    device: Any = None,
    overlap: bool = True,
    prefetch: int = 1,
    kernel: str = "auto",
    deterministic: bool = False,
    buffers: str = "mean",
    nonfinite: str = "warn",
    paths: str = "auto",
    timeout: float | None = None,
    offload: Offload | Mapping[str, Any] | str | None = None,
    moments: str = "exact",
    release: bool = False,
    delay: int = 0,
    methods: str | Sequence[str] = (),
    keep_whole: int | None = None,
    recompute: Any = False,
    compile: bool | dict[str, Any] = False,
    wire: Wire | Mapping[str, Any] | str | None = None,
    **unknown: Any,
) -> Any:
    """Shard a model and its optimizer(s) over the ranks, in place. Returns (model, optimizer), or the model
    alone when no optimizer is given; a later `shard(model, optimizer)` then adds it.

    plan=None        what zeor.choose found for a batch and this machine: all options below that it names. "auto": those
                     that decide by themselves, by what a step takes (hierarchy="auto" without a mesh; offload="auto" on
                     an accelerator; where nothing has cut the model also recompute="auto", and compile=True where
                     torch.compile has its GPU compiler).
    stage=3          0: everything full (DDP). 1: optimizer state sliced. 2: gradients too. 3: parameters too. Or one
                     for each axis of the mesh: {"gpu": 3, "node": 1} cuts parameters inside a node, and the
                     optimizer's state over all ranks.
    precision=None   "fp32", "bf16", "fp16", "fp8" or a zeor.Precision; None keeps the parameters' own dtypes. "fp8":
                     linears of blocks multiply in 8 bits, by torchao, and all else computes in bf16. The optimizer
                     always works on an fp32 (or wider) master.
    reduction="mean" gradients are averaged over ranks; "sum" adds them.
    units=None       modules or classes gathered as one; None finds them.
    mesh=None        a DeviceMesh of one dimension, or of two (the last one holds neighbours), or a process group;
                     None is every rank.
    hierarchy=None   "auto" finds which ranks are on one host, a number says how many are: the axes "node" and "gpu".
                     With it, stage=3 means {"gpu": 3, "node": 1}.
    experts=None     the dimension of the mesh over which parameters of experts are DTensors, as mesh["ep"]. Its ranks
                     see different data and hold different experts; those are sharded over the ranks that hold the same.
    device=None      where the parameters are to live. None: where they are, but a model on the CPU goes to accelerator
                     LOCAL_RANK if this host has one for each of its ranks; "cpu" says no. A model on the meta device
                     goes there too; fill it by zeor.load_pretrained or zeor.init_parameters.
    overlap=True     communicate while computing; the results are the same bits either way.
    prefetch=1       units gathered ahead.
    kernel="auto"    one-pass update on a GPU where it can do the optimizer's arithmetic; "stock" refuses it.
    deterministic=False  True sums gradients in rank order on every backend (Gloo always does).
    buffers="mean"   what becomes of buffers that training changed (BatchNorm's statistics) at each step: their mean
                     over ranks, "rank0" for rank 0's as in DDP, "local" to leave each rank its own.
    nonfinite="warn" what a step does about gradients with inf or nan: "warn", "raise", "skip" (the step, on every
                     rank), "ignore". Where the loop computes no norm, "raise" and "skip" cost a small exchange.
    paths="auto"     whether ranks may take different paths through the model. "dynamic": they agree at the end of each
                     pass. "auto": the same, until all have done the same for five steps; then nobody waits for the
                     agreement, and a rank that leaves the path raises. "static": so from the second step on.
    timeout=600      seconds a collective may take before every rank raises.
    offload=None     "host", "disk", "auto" or a zeor.Offload: where state rests for which the device has no room.
    moments="exact"  how the optimizer's state is kept: "bf16" or "int8" (in blocks) take 4 or 2 bytes in place of 8.
    release=False    True: gradients are used and freed inside backward, unit by unit, so step() finds nothing left to
                     do; no clipping then. Accumulate with zeor.accumulate.
    delay=0          1: an update is applied one step late, while the next step computes. Not equivalent.
    methods=()       methods beside forward that you call on the model, such as "encode" or "decoder.forward".
    keep_whole=1024  parameters of at most so many elements (a temperature, a bias) stay whole on every rank at stage 3
                     too, so that they can be read and written anywhere; 0: none.
    recompute=False  True: units keep only their inputs for backward, which computes the rest again (about a third more
                     time, the same bits); units of a single layer are left out. "auto": as many of them as memory has
                     room for keep what they computed, from the fourth step on. "offload": these inputs rest in host
                     memory meanwhile. Or a list of modules or classes to do so for, with "offload" among them or not.
    compile=False    True: torch.compile compiles each block, in place; what is compiled already stays. A dict gives it
                     options. Graph breaks, and graphs that are made late, are told once.
    wire=None        in which format tensors travel between ranks: "bf16", "fp8", "int8" or "int4", both ways, or a
                     zeor.Wire with one for weights, one for gradients, and others across hosts. Masters stay exact.
                     "auto": exactly, until a few steps have shown the least lossy one that hides what travels.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"zeor.shard takes a torch.nn.Module, not a {type(model).__name__}.")
    options = {"stage": stage, "precision": precision, "reduction": reduction, "overlap": overlap, "prefetch": prefetch,
               "kernel": kernel, "deterministic": deterministic, "buffers": buffers, "nonfinite": nonfinite,
               "paths": paths, "timeout": timeout, "offload": offload, "moments": moments, "release": release,
               "delay": delay, "methods": methods, "keep_whole": keep_whole, "recompute": recompute, "compile": compile,
               "wire": wire, **unknown}  # fmt: skip
    with torch.device("cpu"):  # what zeor makes has its own device, whatever default the caller has set
        asked = Asked(Where(mesh, hierarchy, device, experts), options, units)
        is_cut = any(map(is_placed, model.parameters()))
        return _shard(model, optimizer, asked.with_plan(plan, _DEFAULTS, is_cut))


def _shard(model: nn.Module, optimizer: Any, asked: Asked) -> Any:
    mesh, hierarchy, device, experts = asked.where
    optimizers = _as_list(optimizer)
    if vars(model).get(_ATTRIBUTE) is not None:
        changed = any(value != _DEFAULTS.get(name, value) for name, value in asked.options.items())
        return _add_optimizers(model, optimizer, optimizers, changed or asked.units or any(asked.where))
    plan = asked.plan()
    compile_in_place(model)
    units = asked.units and [unwrapped(unit) for unit in asked.units]
    refuse_wrapped(model, optimizers)
    _refuse_nested(model)
    refuse_optimizers_in_backward(model.named_parameters())
    find_wanted(model, plan.recompute)
    if plan.compile is not False:
        check_options(plan.compile)
    entries = find_entries(model, (*_stage_methods(model), *plan.methods))
    home = devices.home_of(model, device, getattr(mesh, "device_type", None))
    ensure_process_group(home.device, plan.timeout)
    axes = make_axes(mesh, home.device, plan.deterministic, plan.timeout, hierarchy)
    check_wire(plan, axes.sizes)
    hooked = _stand_beside(model, axes, experts, plan)
    check_model(model, axes.everyone.size)
    if axes.everyone.size > 1 and plain_grads.around(model.parameters()):
        raise RuntimeError(
            "The model is inside a DistributedDataParallel, which would reduce every gradient a second time; delete "
            "that and give zeor.shard the module alone (stage=0 does what DDP does)."
        )
    linears = fp8.convert(model, plan, units, home.device, axes.everyone.size)
    try:
        partial_norms.mark(hooked)
        engine = _build(model, plan, axes, units, optimizers, {id(p) for p in partial_norms.partial_params(hooked)})
    except BaseException:
        partial_norms.unmark(hooked)
        if linears is not None:
            linears.undo()
        raise
    if linears is not None:
        linears.bind(model, engine.slots)
        engine.add_extension(linears)
    hooks = Hooks(engine.passes, engine.forward, engine.backward, engine.extensions, entries)
    state = Sharded(engine, hooks, asked)
    engine.feature(Freezing).watch(state.hooks)
    vars(model)[_ATTRIBUTE] = state
    if isinstance(model, nn.ModuleList):
        note_stages(model)
    _add_methods(model, hooks, accumulate if plan.release else no_sync)
    watch_steps()
    for each in optimizers:
        state.steppers.append(Stepper(engine, each))
    follow(home.device)
    show_start(model, plan, axes, engine.units, optimizers, home.note)
    if linears is not None and axes.everyone.rank == 0:
        linears.tell()
    return model if optimizer is None else (model, optimizer)


def _stage_methods(model: nn.Module) -> list[str]:
    """An nn.ModuleList has no forward: its modules are stages of a pipeline, and each is called by itself."""
    return [f"{name}.forward" for name, _ in model.named_children()] if isinstance(model, nn.ModuleList) else []


def _add_methods(model: nn.Module, hooks: Hooks, waits: Any) -> None:
    """What the model answers by itself as long as it is sharded, for loops that were written without zeor."""
    if not hasattr(model, "no_sync"):  # loops made for DistributedDataParallel look for it
        hooks.put_method(model, "no_sync", functools.partial(waits, model))
    for name in _EXCHANGING:
        if callable(getattr(model, name, None)):
            hooks.put_method(model, name, functools.partial(_refuse_exchange, name))


_EXCHANGING = ("merge_and_unload", "unload")  # peft's: they put other layers in the places of the model's


def _refuse_exchange(name: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"{name}() would put other layers into a sharded model; call zeor.unshard(model) first, or do it to a copy: "
        f"`with zeor.full_params(model, to_rank=0):` and there, on rank 0, copy.deepcopy(model).{name}()."
    )


_DEFAULTS = {name: each.default for name, each in inspect.signature(shard).parameters.items()}


def _as_list(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(f"zeor.shard takes torch optimizers; it was given a {type(each).__name__}.")
    return found


def _add_optimizers(model: nn.Module, optimizer: Any, optimizers: list[Optimizer], extra: Any) -> Any:
    state = _state(model)
    if not optimizers or state.steppers or extra:
        raise ValueError(
            "This model is sharded already; zeor.shard may be called once more only to add its optimizer(s), "
            "and then with the model and the optimizer(s) alone; zeor.drop_optimizer(model) gives up those it has."
        )
    _compare_optimizers(state.engine.axes, state.engine.slots, optimizers)
    state.steppers = [Stepper(state.engine, each) for each in optimizers]
    engine = state.engine
    show_start(model, engine.plan, engine.axes, engine.units, optimizers)
    return model, optimizer


def is_sharded(model: nn.Module) -> bool:
    """Whether zeor.shard has sharded this model and zeor.unshard has not undone it."""
    return vars(unwrapped(model)).get(_ATTRIBUTE) is not None


def drop_optimizer(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> nn.Module:
    """Give up optimizers of a sharded model (None: all of them); the model stays sharded as it is. They are plain again
    and without state (zeor.full_state keeps a copy). Then zeor.shard(model, other) gives the model others, in other
    groups or of another kind: a new phase of training, or a second fit(). Every rank calls it, between steps."""
    state = _state(model)
    known = {id(stepper.optimizer): stepper for stepper in state.steppers}
    given = _as_list(optimizer) if optimizer is not None else [stepper.optimizer for stepper in state.steppers]
    for each in given:
        if id(each) not in known:
            raise ValueError(f"This {type(each).__name__} is not one of the model's; there is nothing to give up.")
    state.engine.announce(events.OTHER, "zeor.drop_optimizer")
    state.engine.drain()
    for each in given:
        stepper = known[id(each)]
        stepper.state.drain()
        stepper.unshard({})
        state.steppers.remove(stepper)
    return model


def _refuse_nested(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if parameters.is_sharded(param):
            raise ValueError(f"Parameter {name!r} belongs to a model that is sharded already; zeor.unshard that first.")
        if is_lazy(param):
            raise ValueError(
                f"Parameter {name!r} of a lazy module has no shape yet; run one forward of the model before zeor.shard."
            )


def _stand_beside(model: nn.Module, axes: Axes, experts: Any, plan: Plan) -> list[partial_norms.Hooked]:
    """The ranks along which tensor or expert parallelism has cut the model, where it has, and what is refused of it.
    Returns what transformers sums of gradients by hooks of its own."""
    if experts is not None:
        stand_over_experts(model, axes, experts, plan)
        check_plan(model, plan)
        return []
    ranks = tensor_ranks(model, axes, plan.deterministic, plan.timeout)
    if ranks is None:
        return []
    axes.stand_beside(ranks)
    check_plan(model, plan)
    hooked = partial_norms.find_hooked(model)
    check_ties(model)
    check_replicas(model, axes)
    return hooked


def _build(
    model: nn.Module, plan: Plan, axes: Axes, units: Any, optimizers: list[Optimizer], partial: set[int]
) -> Engine:
    """Find units, compare ranks, pack, and turn the user's parameters into views. `partial`: ids of plain parameters
    whose gradients tensor-parallel ranks have parts of."""
    small = small_numel(plan, axes.everyone.size)
    specs = find_units(model, units, small)
    _drop_old_graphs(model)
    engine = Engine(plan, axes)
    builder = Builder(engine)
    slots = {spec.name: builder.slots(spec.params) for spec in specs}
    for slot in (slot for spec in specs for slot in slots[spec.name]):
        slot.partial = tuple(range(len(axes.tensor_coords))) if id(slot.param) in partial else ()
        slot.experts = axes.experts is not None and slot.placed is not None
    same_everywhere(axes.whole, "plans", [f"{key}={value}" for key, value in plan.describe().items()])
    described = [
        f"{slot.name!r}: {slot.whole_shape}{slot.placed.describe() if slot.placed else ''}, {slot.param.dtype}"
        f"{'' if slot.trains else ', frozen'}, in unit {spec.name!r}"
        for spec in specs
        for slot in slots[spec.name]
    ]
    same_everywhere(axes.whole, "models", described)
    engine.slots.extend(slot for spec in specs for slot in slots[spec.name])  # as long as things are checked
    meta.settle(axes.everyone, model, engine.slots, engine.unfilled)
    meta.check_states(optimizers, engine.slots)
    check_moments(plan, engine.slots)
    for each in optimizers:
        check_parameters(each, engine.slots)
    _compare_optimizers(axes, engine.slots, optimizers)
    for each in optimizers:
        check_kind(each, engine.slots, engine.axes, engine.table)
    if axes.everyone.rank == 0:
        make_visible()
    check_disk(plan, axes, engine.places.store, engine.slots, optimizers)
    engine.slots.clear()
    sharing = axes.over(engine.table.cut("update")).size
    engine.places.expect(sum(p.numel() for spec in specs for _, p, _ in spec.params) // sharing)
    for spec in specs:
        meta.receive_values(slots[spec.name], axes.device, engine.unfilled)
        key = lambda slot: lane_key(slot.param, slot.owners, plan.precision, small, slot.partial, slot.experts)
        keys = {slot: kept_apart(key(slot), slot.param, plan) for slot in slots[spec.name]}
        engine.add_unit(spec.name, spec.module, slots[spec.name], keys.__getitem__)
    meta.place_buffers(axes.everyone, model, engine.unfilled)
    builder.finish(model)
    devices.trim_host_memory()
    return engine


def _drop_old_graphs(model: nn.Module) -> None:
    """A tensor that a module keeps from an earlier computation (the old weight_norm does) would hold parameters."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(module)[name] = value.detach()


def _compare_optimizers(axes: Axes, slots: list[Slot], optimizers: list[Optimizer]) -> None:
    names = {id(slot.param): slot.name for slot in slots}
    lines = []
    for number, optimizer in enumerate(optimizers):
        for position, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number} ({type(optimizer).__name__}), group {position}"
            given = ((k, v) for k, v in sorted(group.items()) if k != "params")
            settings = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in given}
            lines.append(f"{where}: {settings}")
            lines.extend(f"{where}: {names.get(id(p), 'a foreign parameter')!r}" for p in group["params"])
    same_everywhere(axes.whole, "optimizer groups", lines)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside keeps this rank's own gradients, summed in fp32 at full size; the next backward outside
    reduces them together with its own. For accumulation over several micro-batches."""
    backward = _state(model).engine.backward
    before, backward.sync = backward.sync, False
    try:
        yield
    finally:
        backward.sync = before


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Another backward of this step follows those inside. Every backward adds to the slices; with release=True those
    inside do so without updating, and the next one outside updates with the sum. Costs a slice of gradients, where
    no_sync keeps them whole."""
    backward = _state(model).engine.backward
    before, backward.accumulates = backward.accumulates, True
    try:
        yield
    finally:
        backward.accumulates = before


@contextmanager
def full_params(
    model: nn.Module, write: bool = False, grads: bool = False, *, to_rank: int | None = None, device: Any = None
) -> Iterator[nn.Module]:
    """Inside, the model holds plain, full parameters (and, with grads=True, their full gradients): read them,
    save them, export them, run or copy the model as a plain one. With write=True rank 0's changes reach every
    rank and the fp32 masters. Every rank of the mesh must enter; a rank's memory grows by the whole model.

    to_rank  this rank alone holds them. On the others the model stays sharded and is not to be called; their memory
             grows by 256 MiB, or by the largest parameter.
    device   where they are held; None: "cpu" with to_rank=, else where the model is."""
    state = _state(model)
    if state.shown:
        if write or grads or to_rank is not None or device is not None:
            raise RuntimeError("zeor.full_params is open already; ask for more in the outer one.")
        yield model
        return
    if to_rank is not None or device is not None:
        if write or grads:
            raise ValueError(
                "zeor.full_params(write=, grads=) needs full values on every rank, where the model is; leave to_rank= "
                "and device= out."
            )
        with _full_at(state, model, to_rank, "cpu" if device is None else device):
            yield model
        return
    engine = state.engine
    if engine.announcer.block is None:
        attend(engine.axes.whole, "zeor.full_params")
    if write:
        engine.announce(events.OTHER, "zeor.full_params(write=True)", meets=False)
    else:
        engine.announce(events.FULL, {"grads": grads}, meets=False)
    values = full.all_values(engine.units, engine.unfilled, blank=write)
    found = full.all_grads(engine.units, engine.handed_out) if grads else {}
    written: dict[Slot, Tensor] = {}
    with _shown(state, values, found, write):
        yield model
        if write:
            full.check_unchanged(engine.axes.everyone, unwrapped(model), values)
            written = full.spread(values)
    full.write_back(engine.unfilled, written)
    if written:
        engine.publish_anew("after full_params")


@contextmanager
def _shown(state: Sharded, values: dict[Slot, Tensor], grads: dict[Slot, Tensor], write: bool) -> Iterator[None]:
    """Inside, the parameters are plain ones with these values."""
    state.hooks.pause()
    shown, state.shown = full.Shown(values, grads), True
    try:
        yield
    finally:
        state.shown = False
        changed = shown.hide()
        state.hooks.resume()
    if changed and not write:
        raise RuntimeError(
            f"Parameter {changed[0]!r} was written inside zeor.full_params, and the change is lost; write inside "
            "`with zeor.full_params(model, write=True):`."
        )


@contextmanager
def _full_at(state: Sharded, model: nn.Module, to_rank: int | None, device: Any) -> Iterator[None]:
    """zeor.full_params on one rank, or on a device of the caller's."""
    engine = state.engine
    axis, what = engine.axes.everyone, "zeor.full_params"
    check_rank(what, "to_rank", to_rank, axis.size)
    engine.refuse_divided(f"{what}(to_rank=) knows no tensor parallelism yet; leave it out, or use zeor.iter_full.")
    if engine.announcer.block is None:
        attend(axis, what)
    engine.announce(events.OTHER, what, meets=False)
    values = full.values_for(engine, to_rank, device)
    if to_rank in (None, axis.rank):
        with _shown(state, values, {}, write=False):
            yield
        return
    assert to_rank is not None
    handle, state.shown = full.refuse_forward(model, to_rank), True
    try:
        yield
    finally:
        state.shown = False
        handle.remove()


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their joint norm is at most max_norm; returns the norm before. The same on
    every rank and, in bits, at every stage. torch.nn.utils.clip_grad_norm_ works too.

    Of a stage of a pipeline: the norm of all stages, and all stages of this rank are scaled. (Stock clipping would take
    each stage's own norm.)"""
    state = stage_of(model)[0]
    engine, pipes = state.engine, state.pipeline
    slots = [s for s in engine.slots if s.lane.grads is not None and s.lane.grads.has[s.index]]
    if pipes is not None:
        slots = pipes.slots()
    total = engine.norms.total(slots, float(norm_type)) if pipes is None else pipes.norm(float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is not finite, so they cannot be clipped; pass "
            "error_if_nonfinite=False to scale them all the same."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for slot in slots:
        slot.held.scale_grad(factor)
    return total


def unshard(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> Any:
    """Give back a plain model and plain optimizer(s): full parameters and full state on every rank."""
    state = _state(model)
    engine = state.engine
    engine.announce(events.OTHER, "zeor.unshard")
    values = full.all_values(engine.units, engine.unfilled)
    states = [stepper.state.whole() for stepper in state.steppers]  # all of them before any is changed: one may refuse
    for stepper, whole in zip(state.steppers, states):
        stepper.unshard(whole)
    state.hooks.remove()
    partial_norms.unmark(partial_norms.find_hooked(model))
    if (linears := engine.find(fp8.Float8Linears)) is not None:
        linears.undo()
    for slot, value in values.items():
        slot.unbind(value)
        slot.give_back_hooks()
        torch.autograd.graph.increment_version(slot.param)
    del vars(model)[_ATTRIBUTE]
    return model if optimizer is None else (model, optimizer)


def sync_buffers(model: nn.Module, how: str = "mean", mesh: Any = None) -> None:
    """Make the persistent buffers of a model, sharded or plain, the same on every rank now: the mean of floating ones
    and rank 0's of others, or with how="rank0" rank 0's of all. Every rank calls it, before an evaluation or a save.
    A sharded model's own steps do this already (buffers=); a drop-in optimizer does not know the model."""
    state = vars(model).get(_ATTRIBUTE)
    if state is not None:
        state.engine.announce(events.OTHER, "zeor.sync_buffers")
        axis = state.engine.axes.everyone
    else:
        place, plan = devices.device_of(model), Plan()
        ensure_process_group(place, plan.timeout)
        axis = make_axis(mesh, place, plan.deterministic, plan.timeout)
    module_buffers.sync_now(axis, model, how)
    if state is not None and (buffers := state.engine.find(ModuleBuffers)) is not None:
        buffers.all_same()


def set_wire(model: nn.Module, wire: Wire | Mapping[str, Any] | str) -> None:
    """Tensors travel by another wire (see zeor.shard) from here on; every rank calls it, between two steps. Weights may
    begin to travel as codes at stage 3, and at stages 1 and 2 where the run began with a wire for weights, or with
    "auto". In such a run "auto" measures and chooses anew; any other wire ends the choosing."""
    state = _state(model)
    engine, everyone = state.engine, state.engine.axes.everyone
    auto = engine.find(AutoWire)
    if engine.announcer.block is not None:  # a rank that is out of data cannot come here: all hear so
        engine.announce(events.OTHER, "zeor.set_wire")
    attend(everyone, "zeor.set_wire")
    check = lambda: _wire_for(state, wire)
    chosen: Wire = everywhere(everyone, check, "check of what zeor.set_wire was given", ValueError)
    if chosen.auto and auto is not None:
        auto.choose_anew(chosen)
    else:
        wiring.set_wire(engine, chosen)
        if auto is not None:
            auto.leave(chosen)
    if state.asked is not None:  # a later zeor.replan goes on by it
        state.asked = state.asked._replace(options={**state.asked.options, "wire": chosen})


def _wire_for(state: Sharded, wire: Wire | Mapping[str, Any] | str) -> Wire:
    """What zeor.set_wire was given; ValueError where this model cannot go on by it."""
    chosen, engine = Wire.parse(wire), state.engine
    if chosen.auto and engine.find(AutoWire) is None:
        raise ValueError(
            "zeor.set_wire(model, 'auto') is for runs that began with wire='auto'; give zeor.shard that, or name a "
            "format here."
        )
    if engine.axes.experts is not None:
        raise ValueError("zeor.set_wire does not know expert parallelism yet: leave it out of a model with experts=.")
    if state.pipeline is not None and state.pipeline.tied and not chosen.is_exact:
        raise ValueError(
            "zeor.set_wire was given a stage of a pipeline with tied= parameters, whose copies would be rounded apart; "
            "they travel exactly."
        )
    if engine.axes.tensor is not None and engine.plan.wire is None:
        raise ValueError(
            "zeor.set_wire: tensor parallelism has cut the model, and a run that began without a wire keeps what is "
            "cut beside what is not; give zeor.shard a wire (zeor.Wire() is exact), which may be changed later."
        )
    return chosen


def traffic(model: nn.Module) -> dict[str, Any]:
    """Bytes this rank sent and collectives it took part in since shard(), by verb, and by axis of the mesh and verb:
    in all, and of the `last_step`. `seconds_by_axis`, of what zeor.trace or a profiler has listened to: how long they
    were under way, hidden by computation, and exposed (this rank stood still), by the host's clock. With a wire also
    `compression` (times as many bytes without it), `coding_seconds`, spent on encoding and decoding, and both of the
    last step: `last_step_codes`. On an accelerator these seconds are those that zeor.trace has listened to."""
    return _state(model).engine.axes.everyone.traffic.summary()


def report(model: nn.Module) -> dict[str, int]:
    """Bytes held on this rank now, by role, as allocated; transient_peak is the most that was alive on top. With a wire
    that keeps what it does not send also `residual`. Of a stage of a pipeline also the most of what a step keeps at
    full size: partial gradients that wait for their reduce, and parameters that are held. Of a parked model (zeor.park)
    also how much of it is `parked` in host memory, and how much is still `on_device`."""
    state = _state(model, parked=True) if is_sharded(model) else stage_of(model)[0]
    engine = state.engine
    padding = sum(
        lane.layout.padding_numel * lane.key.compute_dtype.itemsize for unit in engine.units for lane in unit.lanes
    )
    roles = state.nbytes()
    if state.pipeline is not None:
        peaks = engine.ledger.peaks
        roles = {**roles, "partial": peaks.get("partial", 0), "held": peaks.get("compute", 0)}
    if state.parking is not None:
        roles = {**roles, "parked": state.parking.host_nbytes, "on_device": state.parking.device_nbytes}
    return {**roles, "padding": padding, "transient_peak": engine.ledger.peak_nbytes}


__all__ = [
    "accumulate", "chunked_cross_entropy", "clip_grad_norm_", "drop_optimizer", "ema", "export", "full_params",
    "full_state", "init_parameters", "is_sharded", "iter_full", "iter_state", "join", "lerp", "load_full_state",
    "load_pretrained", "mean_loss", "mesh", "no_sync", "on_meta", "penalty", "pipeline", "predict", "push", "report",
    "set_wire", "shard", "sync_buffers", "total", "trace", "traffic", "unshard",
]  # fmt: skip
