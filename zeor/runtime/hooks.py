"""Every hook zeor puts on a user's objects, and nothing else does.

Module hooks tell the engine when a unit is entered and left in forward; tensor hooks on a unit's
outputs and inputs tell when its backward begins and is over; parameter hooks hand over gradients.

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
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zeor.memory.device import autocast_on
from zeor.runtime.engine import Engine
from zeor.runtime.entries import Entry
from zeor.runtime.outside import inside_backward
from zeor.runtime.recompute import Recompute
from zeor.runtime.unit import Slot, Unit


class Call:
    """One call of a unit in forward, as backward sees it."""

    def __init__(self, unit: Unit, closes: bool):
        self.unit, self.closes, self.is_open = unit, closes, False
        self.inputs: set[int] = set()  # ids of the tensors whose memory it was handed

    def listen(self, output: Tensor, engine: Engine) -> None:
        """Open when the gradient of an output arrives. What changes an output that is a view in place (a ReLU
        behind a Linear over sequences) cuts its hook off, but not that of the tensor it is a view of."""
        output.register_hook(lambda grad: self.open(engine))
        base = output._base
        if base is not None and base.requires_grad and id(base) not in self.inputs:
            base.register_hook(lambda grad: None if self.is_open else self.open(engine))

    def open(self, engine: Engine) -> None:
        if not self.is_open:
            self.is_open = True
            self.unit.open_calls += self.closes
            self.unit.endless_calls += not self.closes
        engine.backward.enter(self.unit)

    def close(self, engine: Engine) -> None:
        if self.is_open:
            self.is_open = False
            self.unit.open_calls -= 1
        engine.backward.exit(self.unit)


class Hooks:
    """All hooks of one model; `remove()` takes them off again. Between `pause()` and `resume()` its modules have
    none, so that they run, copy and pickle as plain ones."""

    def __init__(self, engine: Engine, entries: Sequence[Entry] = ()):
        self._engine, self._handles = engine, []
        self._calls: list[Call | None] = []
        self._warned_autocast = False
        self._paused: list[tuple[MutableMapping, Any, Any]] = []
        self._methods: list[tuple[dict[str, Any], str]] = []  # where a method of the user's was put behind another
        self._entry: Entry | None = None  # the method beside forward that is running
        for unit in engine.units:
            self._add_module_hooks(unit)
        for entry in entries:
            self._add_entry(entry)
        self.recompute = Recompute(engine.units, engine.plan.recompute, engine.mesh.device)
        self._param_handles = [collect_from(s.full, s) for s in engine.slots if s.lane.grads is not None]
        engine.freezing.watch(self)
        holders = {module for slot in engine.slots for module, _ in slot.owners}
        for module in holders:
            self._handles.append(module.register_load_state_dict_pre_hook(self._begin_load))
            self._handles.append(module.register_load_state_dict_post_hook(self._end_load))

    def remove(self) -> None:
        self.recompute.take_off()
        for handle in (*self._handles, *self._param_handles):
            handle.remove()
        for names, name in self._methods:
            names.pop(name, None)

    def thawed(self, slots: Sequence[Slot]) -> None:
        """These parameters begin to train: see freezing.py."""
        self._param_handles += [collect_from(slot.full, slot) for slot in slots]

    def pause(self) -> None:
        self.recompute.take_off()
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
        self.recompute.put()

    def _add_module_hooks(self, unit: Unit) -> None:
        module = unit.module
        assert module is not None

        # Outside any compiled graph: a compiled unit sees only its plain parameters and its own forward.
        @torch._dynamo.disable
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
            return self._before_forward(unit, args, kwargs)

        @torch._dynamo.disable
        def after(module: nn.Module, args: tuple, output: Any) -> Any:
            return self._after_forward(unit, output)

        before.zeor_first = True  # type: ignore[attr-defined]
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))
        if unit.is_root:

            @torch._dynamo.disable
            def always(module: nn.Module, args: tuple, output: Any) -> None:
                if self._entry is None:
                    self._engine.forward.recover()  # where forward raised, `after` did not run

            self._handles.append(module.register_forward_hook(always, always_call=True))

    # ---- entries beside forward

    def _add_entry(self, entry: Entry) -> None:
        if entry.is_forward:
            self._add_entry_hooks(entry)
            return
        original = entry.original

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            prepared = self._open_entry(entry, args, kwargs)
            if prepared is None:
                return original(*args, **kwargs)
            try:
                return self._close_entry(original(*prepared[0], **prepared[1]))
            finally:
                self._leave_entry()

        vars(entry.module)[entry.method] = method
        self._methods.append((vars(entry.module), entry.method))

    def _add_entry_hooks(self, entry: Entry) -> None:
        @torch._dynamo.disable
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
            return self._open_entry(entry, args, kwargs)

        @torch._dynamo.disable
        def after(module: nn.Module, args: tuple, output: Any) -> Any:
            return self._close_entry(output) if self._entry is entry else None

        @torch._dynamo.disable
        def always(module: nn.Module, args: tuple, output: Any) -> None:
            if self._entry is entry:
                self._leave_entry()

        before.zeor_first = True  # type: ignore[attr-defined]
        self._handles.append(entry.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(entry.module.register_forward_hook(after))
        self._handles.append(entry.module.register_forward_hook(always, always_call=True))

    def _open_entry(self, entry: Entry, args: tuple, kwargs: dict) -> tuple | None:
        """Begin a pass; nothing where one is under way, of which the entry is then a part."""
        if inside_backward() or self._entry is not None or self._engine.forward.walk is not None:
            return None
        prepared = self._before_forward(self._engine.units[0], args, kwargs, entry.name)
        self._entry = entry
        return prepared

    def _close_entry(self, output: Any) -> Any:
        self._entry = None
        return self._after_forward(self._engine.units[0], output)

    def _leave_entry(self) -> None:
        self._entry = None
        self._engine.forward.recover()  # nothing to do unless the method raised

    # ---- forward

    def _before_forward(self, unit: Unit, args: tuple, kwargs: dict, entry: str = "") -> tuple | None:
        engine = self._engine
        if unit.is_root and self._entry is not None:
            return None  # forward called by another entry: part of that one's pass
        if inside_backward():
            self._before_recompute(unit, args, kwargs)
            return None
        grad = torch.is_grad_enabled()
        if engine.mesh.world > 1 and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"Unit {unit.name!r} was called inside a transform of torch.func (grad, vmap, jacrev, ...), where "
                "ranks cannot exchange parameters; use `with zeor.full_params(model):` around it, or torch.autograd."
            )
        if unit.is_root:
            self._calls.clear()  # an earlier forward may have raised half-way
            if grad:
                engine.first_batch.note((args, kwargs))
        engine.forward.enter(unit, grad, entry)
        if unit.is_root:
            args, kwargs = self._prepare_root(args, kwargs)
        elif grad:
            args, kwargs = _aliased((args, kwargs))
        inputs = _needing_grad((args, kwargs)) if grad else []
        call = Call(unit, closes=bool(inputs) and not unit.is_root) if grad else None
        self._calls.append(call)
        if call is not None:
            unit.hooked_calls += 1
            call.inputs = {id(tensor if tensor._base is None else tensor._base) for tensor in inputs}
            if call.closes:
                _when_all(inputs, lambda: call.close(engine))
        return args, kwargs

    def _after_forward(self, unit: Unit, output: Any) -> Any:
        if inside_backward() or (unit.is_root and self._entry is not None):
            return output
        engine = self._engine
        call = self._calls.pop() if self._calls else None
        output = _not_ours(output, engine.units if unit.is_root else [unit])
        engine.forward.exit(unit)
        if call is not None:
            for tensor in _needing_grad(output):
                call.listen(tensor, engine)
        return output

    def _before_recompute(self, unit: Unit, args: tuple, kwargs: dict) -> None:
        """See Note [When a unit's backward is over]."""
        engine = self._engine
        engine.backward.enter(unit)
        if unit.hooked_calls == 0 and not unit.is_root and torch.is_grad_enabled():
            inputs = _needing_grad((args, kwargs))
            call = Call(unit, closes=bool(inputs))
            if inputs:
                _when_all(inputs, lambda: call.close(engine))
            call.open(engine)

    # ---- the root

    def _prepare_root(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        engine = self._engine
        self._warn_autocast()
        compute = engine.plan.precision.compute
        if compute is None:
            return args, kwargs

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(compute) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, (args, kwargs))

    def _warn_autocast(self) -> None:
        engine = self._engine
        if self._warned_autocast or not autocast_on(engine.mesh.device) or not any(u.frees for u in engine.units):
            return
        self._warned_autocast = True
        warnings.warn(
            "torch.autocast is on around a model whose parameters are sharded: autocast keeps low-precision "
            "copies of all weights for backward and undoes the sharding; use zeor.shard(..., precision='bf16') "
            "instead of autocast.",
            stacklevel=2,
        )

    # ---- loading

    def _begin_load(self, module: nn.Module, state_dict: Any, prefix: str, metadata: dict, *args: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would put other parameters in the place of sharded ones; "
                "leave assign=True out: values are copied into this rank's part."
            )
        self._engine.writing = True

    def _end_load(self, module: nn.Module, incompatible: Any) -> None:
        self._engine.writing = False


def collect_from(full: nn.Parameter, slot: Slot) -> Any:
    """Hand every gradient autograd accumulates into `full` to the engine."""
    # Weak: autograd's hooks are not seen by Python's collector, and a slot reaches its own parameter.
    ref = weakref.ref(slot)

    def hook(param: Tensor) -> None:
        owner = ref()
        if owner is not None and not owner.engine.is_given:
            owner.engine.backward.collect(owner)

    return full.register_post_accumulate_grad_hook(hook)


def take_off_before_backward(param: nn.Parameter, slot: Slot) -> None:
    """Before autograd accumulates into a plain parameter, its sharded gradient must be out of the way."""
    ref = weakref.ref(slot)

    def hook(grad: Tensor) -> None:
        owner = ref()
        if owner is not None and not owner.engine.is_given:
            owner.engine.backward.begin()

    param.register_hook(hook)


def _when_all(tensors: list[Tensor], then: Callable[[], None]) -> None:
    """Call once the gradients of all these tensors that this backward computes are there."""
    if len(tensors) == 1:
        tensors[0].register_hook(lambda grad: then())
    else:
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda grads: then())


def _aliased(value: Any) -> Any:
    """The same arguments with an alias for each tensor that needs a gradient; what was one object stays one."""
    aliases: dict[int, Tensor] = {}

    def alias(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.requires_grad:
            return tensor
        return aliases.setdefault(id(tensor), tensor.view_as(tensor))

    return tree_map_only(Tensor, alias, value)


def _not_ours(output: Any, units: Sequence[Unit]) -> Any:
    """An output with copies in the place of tensors over memory that is about to be freed: a module may well return
    its own weight, or a part of it."""
    freed = {lane.full.flat.untyped_storage()._cdata for unit in units for lane in unit.lanes if lane.frees}
    if not freed:
        return output

    def ours(tensor: Tensor) -> bool:
        has_storage = torch._C._has_storage(tensor) and tensor.layout is torch.strided
        return has_storage and tensor.untyped_storage()._cdata in freed

    if not any(isinstance(leaf, Tensor) and ours(leaf) for leaf in tree_leaves(output)):
        return output
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if ours(tensor) else tensor, output)


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
