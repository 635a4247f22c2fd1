"""Every hook zeor puts on a user's objects, and nothing else does.

Module hooks tell the engine when a unit is entered and left in forward; tensor hooks on a unit's
outputs and inputs tell when its backward begins and is over; parameter hooks hand over gradients.
A method beside forward that a model is used by (`zeor.shard(..., methods=("encode", "decoder.forward"))`) is an entry:
it begins a pass of its own, like the model's forward. The root's parameters are gathered, inputs are cast, ranks agree
at the end, and the order of units is learned for it. Called while another pass is under way it is simply part of that.

Note [When a unit's backward is over]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every call of a unit is a `Call`. It opens in backward when the first gradient of its outputs arrives
and closes when the gradients of all its inputs are computed. A unit may be freed when no call is open:
freeing earlier, when all its trainable parameters have their gradients, would pull frozen weights from
under the rest of its backward. A call none of whose inputs needs a gradient never closes; there the
trainable parameters are the ends of every path, so their completion is the end.
A call is handed aliases of its inputs and listens to those. The inputs themselves may be read by others
(every block of a decoder reads its encoder's output): their gradients are complete long after this call's
part is, and often only after the unit before has begun its own backward and gathered the one before that.
Under non-re-entrant checkpointing the forward that backward computes again may stop early, so its
post-forward hook is never counted on, and it opens no call: the original one is open. Under re-entrant
checkpointing the original forward ran without gradients; the one inside backward is the real call.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from zeor.memory.param import ShardedParam, when_accumulated
from zeor.memory.placed import is_placed
from zeor.memory.view import Args, Func, Kwargs
from zeor.model.shareable import ignore, watch
from zeor.plan import nearest
from zeor.step import saved
from zeor.step.backward import Backward
from zeor.step.casts import Casts
from zeor.step.extension import Extension, overriding
from zeor.step.forward import Forward
from zeor.step.passes import Passes, inside_backward
from zeor.step.unit import Slot, Unit


class Call:
    """One call of a unit in forward, as backward sees it.

    Note [What a hook on a graph may hold]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Python's collector does not see through autograd's nodes: what reaches its own node again is never freed.
    1. No model: it may keep a tensor of the graph itself (an auxiliary loss as attribute). So a call knows its unit and
       the backward by weak references.
    2. No node that is computed from its own. So the hooks on inputs count and hold no node. How many of them this
       backward will reach is asked by the hooks on outputs, which hold the inputs' nodes: the way the graph goes
       anyway. (torch.autograd.graph.register_multi_grad_hook holds all nodes from each.)
    """

    def __init__(self, backward: Backward, unit: Unit, inputs: int):
        self._backward, self._unit = weakref.ref(backward), weakref.ref(unit)
        self._is_open, self._closes = False, inputs > 0
        self.inputs: set[int] = set()  # ids of the tensors whose memory it was handed
        self._expected, self._arrived = inputs, 0  # inputs whose gradients this backward computes; those that came

    def hear(self, inputs: list[Tensor]) -> None:
        """Close when the gradients of the inputs are there."""
        for tensor in inputs:
            tensor.register_hook(lambda grad: self.arrive())

    def listen(self, output: Tensor, ends: list[Any]) -> None:
        """Open when the gradient of an output arrives; `ends` are the nodes of the inputs. What changes an output that
        is a view in place (a ReLU behind a Linear over sequences) cuts its hook off, but not that of the tensor it is a
        view of."""
        output.register_hook(lambda grad: self.open(ends))
        base = output._base
        if base is not None and base.requires_grad and id(base) not in self.inputs:
            base.register_hook(lambda grad: None if self._is_open else self.open(ends))

    def open(self, ends: Sequence[Any] = ()) -> None:
        backward, unit = self._backward(), self._unit()
        if backward is None or unit is None:
            return
        if not self._is_open:
            self._is_open, self._arrived = True, 0
            if len(ends) > 1:
                self._expected = sum(map(torch._C._will_engine_execute_node, ends))
                self._closes = self._expected > 0
            unit.open_calls += self._closes
            unit.endless_calls += not self._closes
        backward.enter(unit)

    def arrive(self) -> None:
        """The gradient of an input is there."""
        self._arrived += 1
        backward, unit = self._backward(), self._unit()
        if self._arrived < self._expected or backward is None or unit is None:
            return
        if self._is_open:
            self._is_open = False
            unit.open_calls -= self._closes
        backward.exit(unit)


_Begun = tuple[Call, list[Any]]  # and the nodes of its inputs


class Hooks:
    """All hooks of one model; `remove()` takes them off again. Between `pause()` and `resume()` its modules have
    none, so that they run, copy and pickle as plain ones."""

    def __init__(
        self, passes: Passes, forward: Forward, backward: Backward, extensions: Sequence[Extension],
        entries: Sequence[Entry] = (),
    ):  # fmt: skip
        self._forward, self._backward, self._passes = forward, backward, passes
        self._units, self._axes, self._plan = passes.units, passes.axes, passes.plan
        self._slots = [slot for unit in passes.units for slot in unit.slots]
        self._handles: list[Any] = []
        self._calls: list[_Begun | None] = []  # of the units whose forward is running; None: without gradients
        self._warned_autocast = False
        self._paused: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        self._methods: list[tuple[dict[str, Any], str]] = []  # where a method of the user's was put behind another
        self._entry: Entry | None = None  # the method beside forward that is running
        for unit in self._units:
            self._add_module_hooks(unit)
        for entry in entries:
            self._add_entry(entry)
        watch(self._model)
        self._guard_conversions()
        self._pauses, self._resumes = overriding(extensions, "pause"), overriding(extensions, "resume")
        self._param_handles = [collect_from(slot, self._backward) for slot in self._slots if slot.lane.grads]
        self._casts: list[Casts] = []  # of the model's forwards that are running
        self._saving: Unit | None = None  # the unit in whose forward our hooks for saved tensors are on
        for module in dict.fromkeys(module for slot in self._slots for module, _ in slot.owners):
            self._handles.append(module.register_load_state_dict_pre_hook(self._begin_load))
            if isinstance(module, nn.RNNBase):  # recurrent layers would lay their weights into memory of their own
                self.put_method(module, "flatten_parameters", lambda: None)

    def remove(self) -> None:
        ignore(self._model)
        for pause in self._pauses:
            pause()
        for handle in (*self._handles, *self._param_handles):
            handle.remove()
        for names, name in self._methods:
            names.pop(name, None)

    def thawed(self, slots: Sequence[Slot]) -> None:
        """These parameters begin to train: see freezing.py."""
        self._param_handles += [collect_from(slot, self._backward) for slot in slots]

    def pause(self) -> None:
        ignore(self._model)
        for pause in self._pauses:
            pause()
        for handle in self._handles:
            for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                hooks = ref()
                if hooks is not None and handle.id in hooks:
                    self._paused.append((hooks, handle.id, hooks.pop(handle.id)))
        for names, name in self._methods:
            self._paused.append((names, name, names.pop(name)))

    def resume(self) -> None:
        # The same hooks under the same keys: code that was compiled with them stays valid.
        for hooks, key, hook in self._paused:
            hooks[key] = hook
            if isinstance(hooks, OrderedDict) and getattr(hook, "zeor_first", False):
                hooks.move_to_end(key, last=False)
        self._paused.clear()
        for resume in self._resumes:
            resume()
        watch(self._model)

    def _add_module_hooks(self, unit: Unit) -> None:
        assert unit.module is not None

        def before(module: nn.Module, args: Args, kwargs: Kwargs) -> Args | None:
            return self._before_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Args, output: Any) -> Any:
            return self._after_forward(unit, output)

        def always(module: nn.Module, args: Args, output: Any) -> None:
            if unit.is_root and self._entry is None:
                self._recover()
            self._stop_saving(unit)

        self._put_hooks(unit.module, before, after, always if unit.is_root or unit.frees else None)

    def _put_hooks(self, module: nn.Module, before: Func, after: Func, always: Func | None) -> None:
        """Outside any compiled graph: a compiled unit sees only its plain parameters and its own forward."""
        first = torch._dynamo.disable(before)
        first.zeor_first = True
        self._handles.append(module.register_forward_pre_hook(first, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(torch._dynamo.disable(after)))
        if always is not None:
            self._handles.append(module.register_forward_hook(torch._dynamo.disable(always), always_call=True))

    # ---- what autograd saves: see saved.py

    def _start_saving(self, unit: Unit) -> None:
        if self._saving is None and torch.is_grad_enabled() and self._passes.gathers.frees and saved.begin():
            self._saving = unit

    def _stop_saving(self, unit: Unit) -> None:
        if self._saving is unit:
            self._saving = None
            saved.end()

    @property
    def _model(self) -> nn.Module:
        model = self._units[0].module
        assert model is not None
        return model

    # ---- methods that would move parameters

    def put_method(self, module: nn.Module, name: str, method: Func) -> None:
        """A method on this one object, until `remove`; none while hooks are paused."""
        vars(module)[name] = method
        self._methods.append((vars(module), name))

    def _guard_conversions(self) -> None:
        """model.to(), .cuda(), .float() and kin: what changes nothing does nothing; what would change a parameter is
        refused before a single buffer is touched."""
        model = self._model
        plain = model._apply

        def apply(fn: Func, recurse: bool = True) -> nn.Module:
            for slot in self._slots:
                like = torch.empty(0, dtype=slot.param.dtype, device=slot.param.device)
                made = fn(like)
                if made.dtype != like.dtype or made.device != like.device:
                    raise RuntimeError(
                        f"Parameter {slot.name!r} is sharded as {like.dtype} on {like.device}; it cannot be moved "
                        f"to {made.dtype} on {made.device}. Choose precision= and device= in zeor.shard, or call "
                        "zeor.unshard(model) first; for another copy use zeor.export."
                    )
            moved: nn.Module = plain(fn, recurse)
            return moved

        self.put_method(model, "_apply", apply)

    # ---- entries beside forward

    def _add_entry(self, entry: Entry) -> None:
        if entry.method == "forward":
            self._add_entry_hooks(entry)
            return
        original = getattr(entry.module, entry.method)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            prepared = self._open_entry(entry, args, kwargs)
            if prepared is None:
                return original(*args, **kwargs)
            try:
                return self._close_entry(original(*prepared[0], **prepared[1]))
            finally:
                self._leave_entry()

        self.put_method(entry.module, entry.method, method)

    def _add_entry_hooks(self, entry: Entry) -> None:
        def before(module: nn.Module, args: Args, kwargs: Kwargs) -> Args | None:
            return self._open_entry(entry, args, kwargs)

        def after(module: nn.Module, args: Args, output: Any) -> Any:
            return self._close_entry(output) if self._entry is entry else None

        def always(module: nn.Module, args: Args, output: Any) -> None:
            if self._entry is entry:
                self._leave_entry()

        self._put_hooks(entry.module, before, after, always)

    def _open_entry(self, entry: Entry, args: Args, kwargs: Kwargs) -> Args | None:
        """Begin a pass; nothing where one is under way, of which the entry is then a part."""
        if inside_backward() or self._entry is not None or self._forward.walk is not None:
            return None
        prepared = self._before_forward(self._units[0], args, kwargs, entry.name)
        self._entry = entry
        return prepared

    def _close_entry(self, output: Any) -> Any:
        self._entry = None
        return self._after_forward(self._units[0], output)

    def _leave_entry(self) -> None:
        self._entry = None
        self._stop_saving(self._units[0])
        self._recover()

    # ---- forward

    def _before_forward(self, unit: Unit, args: Args, kwargs: Kwargs, entry: str = "") -> Args | None:
        if unit.is_root and self._entry is not None:
            return None  # forward called by another entry: part of that one's pass
        if inside_backward():
            self._before_recompute(unit, args, kwargs)
            return self._prepare_root(args, kwargs) if unit.is_root else None
        grad = torch.is_grad_enabled()
        if self._axes.everyone.size > 1 and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"Unit {unit.name!r} was called inside a transform of torch.func (grad, vmap, jacrev, ...), where "
                "ranks cannot exchange parameters; use `with zeor.full_params(model):` around it, or torch.autograd."
            )
        wrapper = DistributedDataParallel._active_ddp_module
        if unit.is_root and wrapper is not None and wrapper.module is self._model:
            raise RuntimeError(
                "The model is sharded by zeor and wrapped in DistributedDataParallel: it is data-parallel already, and "
                "gradients would be reduced twice; drop DistributedDataParallel."
            )
        if unit.is_root and grad:
            self._forward.saw_input((args, kwargs))
        self._forward.enter(unit, grad, entry)
        aliases: list[Tensor] = []
        if unit.is_root:
            args, kwargs = self._prepare_root(args, kwargs)
        elif grad:
            args, kwargs, aliases = _aliased(args, kwargs)
        self._calls.append(self._begin_call(unit, aliases, _needing_grad((args, kwargs))) if grad else None)
        self._start_saving(unit)
        return args, kwargs

    def _begin_call(self, unit: Unit, aliases: list[Tensor], inputs: list[Tensor]) -> _Begun:
        unit.hooked_calls += 1
        call = Call(self._backward, unit, len(aliases))
        call.inputs = {id(tensor if tensor._base is None else tensor._base) for tensor in inputs}
        call.hear(aliases)
        return call, [tensor.grad_fn for tensor in aliases]

    def _after_forward(self, unit: Unit, output: Any) -> Any:
        if unit.is_root and self._entry is not None:
            return output
        self._stop_saving(unit)
        if unit.is_root and self._casts:
            self._casts.pop().give_back()
        if inside_backward():
            return output
        begun = self._calls.pop() if self._calls else None
        if unit.is_root and unit.frees:
            output = _readable(output)
        self._forward.exit(unit)
        if begun is not None:
            call, ends = begun
            for tensor in _needing_grad(output):
                call.listen(tensor, ends)
        return output

    def _recover(self) -> None:
        """The root's forward has ended: where it raised, the hooks after the units' forwards did not run."""
        self._calls.clear()
        self._casts.clear()
        self._forward.recover()

    def _before_recompute(self, unit: Unit, args: Args, kwargs: Kwargs) -> None:
        """See Note [When a unit's backward is over]."""
        self._backward.enter(unit)
        if unit.hooked_calls == 0 and not unit.is_root and torch.is_grad_enabled():
            inputs = _needing_grad((args, kwargs))
            call = Call(self._backward, unit, len(inputs))
            call.hear(inputs)
            call.open()

    # ---- the root

    def _prepare_root(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self._warn_autocast()
        compute, device = self._plan.precision.compute, self._axes.device
        if compute is None and device.type == "cpu":
            return args, kwargs
        casts = Casts(compute, device)
        self._casts.append(casts)
        return casts.cast(args), casts.cast(kwargs)

    def _warn_autocast(self) -> None:
        is_on = torch.is_autocast_enabled(self._axes.device.type)
        if self._warned_autocast or not is_on or not any(unit.frees for unit in self._units):
            return
        self._warned_autocast = True
        warnings.warn(
            "torch.autocast is on around a model whose parameters are sharded: autocast keeps low-precision "
            "copies of all weights for backward and undoes the sharding; use zeor.shard(..., precision='bf16') "
            "instead of autocast.",
            stacklevel=2,
        )

    # ---- loading

    def _begin_load(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would put other parameters in the place of sharded ones; "
                "leave assign=True out: values are copied into this rank's part."
            )


def collect_from(slot: Slot, backward: Backward) -> Any:
    """Hand every gradient autograd accumulates into the parameter to `backward`, unless the parameter is shown as a
    plain one."""
    # Weak: autograd's hooks are not seen by Python's collector, and a slot reaches its own parameter.
    ref, backward_ref = weakref.ref(slot), weakref.ref(backward)

    def hook(param: Tensor) -> None:
        owner, taker = ref(), backward_ref()
        if owner is not None and taker is not None and owner.bound:
            taker.collect(owner)

    return when_accumulated(slot.param, hook)


def _aliased(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, list[Tensor]]:
    """The same arguments with an alias for each tensor that needs a gradient, and these aliases; what was one object
    stays one. Nothing but the moment of freeing hangs on an alias, so what is in a list, a dict or an object is handed
    on as it is: the object is the caller's, and the unit may put something in. Nor is it listened to: a cache of keys
    and values holds those of every unit before, whose gradients come last."""
    aliases: dict[int, Tensor] = {}
    args, kwargs = _alias(args, aliases), {name: _alias(value, aliases) for name, value in kwargs.items()}
    return args, kwargs, list(aliases.values())


def _alias(value: Any, aliases: dict[int, Tensor]) -> Any:
    # No inner function: one that calls itself holds itself, and the tensors with it, until Python's collector comes.
    if type(value) is tuple:
        return tuple(_alias(item, aliases) for item in value)
    if not (type(value) is Tensor or is_placed(value)) or value.layout is not torch.strided or not value.requires_grad:
        return value
    return aliases.setdefault(id(value), value.view_as(value))


def _readable(output: Any) -> Any:
    """The model's output with a tensor in the place of each parameter: the parameter itself cannot be read outside,
    where its memory is given back, and a tensor over it holds the memory."""
    if not any(isinstance(leaf, ShardedParam) for leaf in tree_leaves(output)):
        return output
    return tree_map_only(nn.Parameter, lambda param: param.view_as(param), output)


def _needing_grad(value: Any) -> list[Tensor]:
    found = dict.fromkeys(t for t in _tensors(value, 0) if t.requires_grad)
    return list(found)


def _tensors(value: Any, depth: int) -> list[Tensor]:
    """Tensors in nested containers, dataclasses and plain objects that hold results."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                found.extend(_tensors(getattr(leaf, field.name), depth + 1))
        elif depth < 3 and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            for inner in vars(leaf).values():
                found.extend(_tensors(inner, depth + 1))
    return found


# ---- methods beside forward


class Entry(NamedTuple):
    """`name` is dotted, as seen from the model; its last part is the method."""

    name: str
    module: nn.Module
    method: str


def find_entries(model: nn.Module, methods: Sequence[str]) -> list[Entry]:
    """The methods named, each checked."""
    modules = dict(model.named_modules())
    return [_find(modules, name) for name in dict.fromkeys(methods)]


def _find(modules: dict[str, nn.Module], name: str) -> Entry:
    owner, _, method = name.rpartition(".")
    if name == "forward":
        raise ValueError("methods= names 'forward', which is an entry already; name the other methods you call.")
    if owner not in modules:
        raise ValueError(f"methods= names {name!r}; the model has no module {owner!r}{nearest(owner, list(modules))}.")
    module = modules[owner]
    if isinstance(modules.get(name), nn.Module):
        raise ValueError(f"methods= names {name!r}, which is a module; to call it by itself name '{name}.forward'.")
    found = getattr(module, method, None)
    if not callable(found):
        known = [key for key in dir(type(module)) if not key.startswith("_") and key not in dir(nn.Module)]
        kind = type(module).__name__
        raise ValueError(f"methods= names {name!r}; {kind} has no method {method!r}{nearest(method, known)}.")
    if inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        raise ValueError(
            f"methods= names {name!r}, a generator or coroutine: it returns before it has run; name the methods "
            "it calls instead."
        )
    return Entry(name, module, method)
