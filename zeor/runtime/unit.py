"""The unit: one module's parameters, gathered, freed, reduced and updated together.

A unit owns lanes and slots. A slot is one parameter of the user's: it knows its lane and stands
behind the user's parameter (`Held`). A unit carries out what it is told (gather, wait, free) and
keeps no order; the engine does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.hooks import RemovableHandle

from zeor.memory import param as parameters
from zeor.memory.roles import Residency
from zeor.memory.view import Held, View
from zeor.runtime import edits, events
from zeor.runtime.lane import Lane

if TYPE_CHECKING:
    from zeor.runtime.engine import Engine

Owner = tuple[nn.Module, str]
_WRITE_ADVICE = "write to it inside `with zeor.full_params(model, write=True):`"


class Slot(Held):
    """One parameter of the user's: where it lies, who uses it, and what it answers when it is asked."""

    def __init__(self, engine: Engine, name: str, param: nn.Parameter, owners: Sequence[Owner]):
        if param.requires_grad and not param.dtype.is_floating_point:
            raise ValueError(
                f"Parameter {name!r} is {param.dtype} and trains; keep it as torch.view_as_real(...) of itself, and "
                "make it complex where it is used."
            )
        self.engine, self.name, self.owners = engine, name, tuple(owners)
        self.shape, self.dtype = tuple(param.shape), param.dtype  # dtype: as the user gave it, not that of compute
        self.param: nn.Parameter = param  # the user's own object
        self.unit: Unit
        self.lane: Lane
        self.index = -1  # in its lane
        self.trains = param.requires_grad and param.dtype.is_floating_point  # as the user wants it
        self.kind = type(param)  # its class while it is a plain parameter
        self._grad_view: View | None = None
        self._after_grad: dict[int, Callable] = OrderedDict()

    def settle(self, unit: Unit, lane: Lane, index: int) -> None:
        self.unit, self.lane, self.index = unit, lane, index
        self._grad_view = None

    # ---- the parameter as an object

    def bind(self) -> None:
        """From now on the user's parameter asks this slot: see Note [One object] in memory/param.py."""
        hooks = self.param._post_accumulate_grad_hooks
        if hooks:
            # Kept as the very dictionary, so that the user's handles still remove them.
            self._after_grad, self.param._post_accumulate_grad_hooks = hooks, OrderedDict()
        parameters.hand_to(self.param, self)
        for module, _ in self.owners:
            if isinstance(module, nn.RNNBase):  # its weak references would forbid to give a meta parameter memory
                module._flat_weight_refs = [None] * len(module._flat_weights_names)

    def unbind(self, value: Tensor) -> None:
        """A plain parameter with this value, for a while or for good."""
        self.param.__class__ = self.kind
        parameters.hand_to(self.param, None)
        parameters.lay(self.param, value)

    def bind_again(self) -> None:
        """After `unbind`: over the lane's memory; the lane gives it its class."""
        parameters.lay(self.param, self.lane.parts[self.index])
        parameters.take_grad(self.param)
        parameters.hand_to(self.param, self)

    def give_back_hooks(self) -> None:
        """The parameter is plain for good: its hooks are torch's business again."""
        if self._after_grad:
            self.param._post_accumulate_grad_hooks = self._after_grad  # type: ignore[assignment]

    @property
    def collects(self) -> bool:
        """What autograd accumulates is the engine's: not where another reduces it, nor while the parameter is shown as
        a plain one."""
        return (self.engine.plain and not self.engine.is_given) or self.bound

    @property
    def blank(self) -> bool:
        """It has no values yet: see meta.py."""
        return self in self.engine.unfilled.slots

    @property
    def bound(self) -> bool:
        return parameters.held_of(self.param) is self

    # ---- its values

    def read(self, writes: bool = False) -> Tensor:
        """The parameter, with its bytes here; RuntimeError where that cannot be."""
        self.engine.unfilled.check_slot(self)
        if not self.lane.shown:
            stray = self.engine.passes.stray
            # Inside a pass it can be brought: see Note [Stray reads] in stray.py.
            if self.lane.frees and not stray.read(self.unit):
                what = _WRITE_ADVICE if writes else stray.advice()
                raise RuntimeError(
                    f"Parameter {self.name!r} is sharded and its full value is not on this rank; {what}."
                )
            self.lane.wait()
        return self.param

    def get_data(self) -> Tensor:
        """A tensor over the same values that needs no gradient; where they are away, a view that asks when it is
        read."""
        if not self.lane.shown and self.lane.frees:
            return View(self.param, self, of_grad=False)
        self.read()
        wide = self.lane.master is not None and self.lane.master.format == "wide"
        if self.lane.frees or wide:
            return self.param.detach()  # it shares the version counter, which shows writes: Note [Written by the user]
        return parameters.plain_data(self.param)

    def set_data(self, value: Tensor) -> None:
        """`param.data = value`: new values in the same memory."""
        like = self.param
        if tuple(value.shape) != self.shape or value.dtype != like.dtype or value.device.type != like.device.type:
            raise RuntimeError(
                f"Parameter {self.name!r} is sharded as {tuple(like.shape)}, {like.dtype}, on {like.device}; it was "
                f"given data of {tuple(value.shape)}, {value.dtype}, on {value.device}. Choose shape, dtype and device "
                "before zeor.shard (precision=, device=), or call zeor.unshard(model) first."
            )
        self.load(value)

    def load(self, value: Any) -> None:
        """A full value, the same on every rank, into master and compute."""
        if isinstance(value, View) and value._held is self and not value._of_grad:
            return
        if isinstance(value, View):
            value = value.value()
        elif parameters.is_sharded(value):
            if value is self.param:
                return
            value = value._zeor_slot.read()
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype)
        try:
            value = value.expand(self.shape)
        except RuntimeError:
            raise ValueError(
                f"{self.name!r} has shape {self.shape}; the value given has {tuple(value.shape)}."
            ) from None
        self.store(value)

    def store(self, value: Tensor) -> None:
        """The same, of a plain tensor of the parameter's own shape."""
        self.engine.refuse_if_borrowed(f"Parameter {self.name!r} was written")
        self.lane.store(self.index, value)
        self.engine.unfilled.fill(self)

    def set_requires_grad(self, flag: bool) -> None:
        """See Note [Freezing and unfreezing] in freezing.py."""
        if flag and not self.dtype.is_floating_point:
            raise RuntimeError(f"Parameter {self.name!r} is {self.dtype} and cannot train; leave it frozen.")
        self.trains = flag
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.requires_grad_(self.param, flag)
        if self.lane.grads is not None:
            self.lane.grads.expects[self.index] = flag
        self.engine.freezing.change()

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of the gradient's shape."""
        assert self.lane.grads is not None
        segment = self.lane.grads._where.get(self.index)
        flat = full.expand(self.shape).reshape(-1)
        return flat[:0] if segment is None else flat[segment.start : segment.start + segment.numel]

    # ---- the gradient

    def after_grad(self, hook: Callable) -> RemovableHandle:
        handle = RemovableHandle(self._after_grad)
        self._after_grad[handle.id] = hook
        return handle

    def grad_is_there(self) -> None:
        """A backward has reduced it."""
        for hook in list(self._after_grad.values()):
            hook(self.param)

    def grad_view(self) -> View:
        if self._grad_view is None:
            self._grad_view = View(self.param, self, True, self._grad_dtype)
        return self._grad_view

    @property
    def _grad_dtype(self) -> torch.dtype:
        """The parameter's, as everywhere in torch; fp32 under fp16, whose gradients GradScaler refuses to unscale."""
        return torch.float32 if self.param.dtype == torch.float16 else self.param.dtype

    def get_grad(self) -> Tensor | None:
        grads = self.lane.grads
        if grads is None or not grads.has[self.index]:
            return None
        view = self.grad_view()
        if view.dtype != self.param.dtype and TracingContext.try_get() is not None:
            return None  # torch.compile looks at a parameter's gradient, and wants one of the same dtype
        return view

    def set_grad(self, value: Tensor | None) -> None:
        grads = self.lane.grads
        if value is None:
            if grads is not None:
                self.engine.handed_out.drop(self)
                grads.drop(self.index)
                self.engine.norms.forget(self)
                self.engine.edited(self, edits.DROP)
        elif grads is None and self.engine.plain:
            raise RuntimeError(
                f"Parameter {self.name!r} was frozen when the optimizer was made and has a gradient now; make the "
                "optimizer anew, or use zeor.shard, which knows of unfreezing."
            )
        elif value is not self._grad_view:
            raise RuntimeError(
                f"The gradient of {self.name!r} is sharded and cannot be replaced; change it in place, or set "
                "it to None."
            )

    def ready_grads(self):
        """The lane's gradients, once they are reduced."""
        self.engine.handed_out.heed()
        grads = self.lane.grads
        assert grads is not None
        if grads.released:
            raise RuntimeError(
                f"The gradient of {self.name!r} was used and freed inside backward, as release=True asks for, so it "
                "cannot be clipped, scaled or read; leave release= out for that (zeor.Offload(grads='host') keeps "
                "gradients off the device)."
            )
        if not grads.reduced:
            raise RuntimeError(
                f"The gradient of {self.name!r} was computed inside zeor.no_sync and is not reduced yet; "
                "run the last backward of the accumulation outside no_sync first."
            )
        grads.settle_reader()
        return grads

    def read_grad(self) -> Tensor:
        grads = self.ready_grads()
        if grads.column.grad is not Residency.FULL and self.engine.mesh.world > 1:
            raise RuntimeError(
                f"The gradient of {self.name!r} is sharded; norms, scaling and clamping work on it, its values "
                "are read inside `with zeor.full_params(model, grads=True):`."
            )
        grads.apply_scales()
        local = grads.local(self.index).view(self.shape)
        given = local.to(self._grad_dtype)
        return self.engine.handed_out.give(self, given, is_copy=given is not local)

    def gather_grad(self) -> Tensor:
        self.engine.announce(events.GRADS, lambda: self.engine.slots.index(self))
        return self.lane.gather_grads()[self.index].view(self.shape).to(self._grad_dtype)

    def norm(self, ord: float) -> Tensor:
        return self.engine.norms.of_grad(self, ord)

    def scale_grad(self, factor: Tensor | float) -> None:
        kept = self.engine.norms.keep_factor(factor)
        self.ready_grads().scale(self.index, kept)
        self.engine.edited(self, edits.SCALE, (kept,))

    def zero_unreduced(self) -> bool:
        """A gradient from inside no_sync is set to zero; False where it is an ordinary one."""
        grads = self.lane.grads
        if grads is None or grads.partial is None:
            return False
        grads.zero(self.index)
        self.engine.norms.forget(self)
        return True

    def local_grad(self) -> Tensor:
        grads = self.ready_grads()
        grads.apply_scales()
        self.engine.norms.forget(self)
        return grads.local(self.index)

    def edited(self, verb: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.engine.counts.edited(self, verb)
        self.engine.edited(self, verb, args, kwargs)

    def check_and_unscale(self, helds: Sequence[Held], found_inf: Tensor, inv_scale: Tensor) -> None:
        self.engine.norms.check_and_unscale([h for h in helds if isinstance(h, Slot)], found_inf, inv_scale)


class Unit:
    def __init__(self, index: int, name: str, module: nn.Module | None, slots: Sequence[Slot]):
        self.index, self.name, self.module, self.slots = index, name, module, list(slots)
        self.lanes: list[Lane] = []
        self.is_root = False
        # See Note [When a unit's backward is over] in hooks.py.
        self.open_calls = self.endless_calls = self.hooked_calls = 0
        self._places = [(module, attr, slot) for slot in slots for module, attr in slot.owners]

    def __repr__(self) -> str:
        return f"Unit({self.name})"

    @property
    def frees(self) -> bool:
        return any(lane.frees for lane in self.lanes)

    @property
    def publishes(self) -> bool:
        """Its update leaves the other ranks' full parameters stale until slices are gathered."""
        return any(not lane.frees and lane.key.trainable and not lane.updates_whole for lane in self.lanes)

    @property
    def present(self) -> bool:
        """Gathered or on its way."""
        return all(lane.full.inflated for lane in self.lanes)

    def start_gather(self) -> None:
        """Of what is freed between uses; the rest is here, or on its way since the step that changed it."""
        for number, lane in enumerate(self.lanes):
            if lane.frees:
                lane.start_gather(f"gather of unit {self.name!r}" + (f", lane {number}" if number else ""))

    def wait(self) -> None:
        for lane in self.lanes:
            lane.wait()

    def free(self) -> None:
        for lane in self.lanes:
            if lane.frees:
                lane.free()

    def check_places(self) -> None:
        """What somebody else put in a parameter's place must not be passed over."""
        for module, attr, slot in self._places:
            if module._parameters.get(attr) is not slot.param or not slot.bound:
                raise RuntimeError(
                    f"Something else is in the place of parameter {slot.name!r} (by torch.func.functional_call, "
                    "swap_tensors, pruning, or an assignment); do that inside `with zeor.full_params(model):`, or "
                    "before zeor.shard."
                )
