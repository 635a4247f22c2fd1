"""The handle: what a sharded parameter and its gradient answer when the user reads, writes, freezes or scales them.

One for each parameter (`Slot.held`); the parameter's class and the gradient's view ask it (memory/param.py,
memory/view.py). It finds the bytes, tells the parts that must know of a change, or refuses in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.hooks import RemovableHandle

from zeor.comm.axes import Axes
from zeor.memory import param as parameters
from zeor.memory.view import Held, View, view_of
from zeor.step import events
from zeor.step.events import Announcer
from zeor.step.extension import Extension, overriding
from zeor.step.handed_out import HandedOut
from zeor.step.lane import Lane
from zeor.step.norms import Norms
from zeor.step.passes import Borrowed
from zeor.step.stray import StrayReads
from zeor.step.unfilled import Unfilled
from zeor.step.unit import Owner, Slot

_WRITE_ADVICE = "write to it inside `with zeor.full_params(model, write=True):`"


@dataclass
class Services:
    """What the handles of one model ask."""

    axes: Axes
    plain: bool  # a drop-in's: parameters are the user's plain tensors
    slots: list[Slot]
    announcer: Announcer
    norms: Norms
    handed_out: HandedOut
    unfilled: Unfilled
    borrowed: Borrowed
    stray: StrayReads | None = None  # once the engine is ready
    froze: list[Callable[[], None]] = field(default_factory=list)  # extensions that hear of freezing
    edited: list[Callable[[Slot, str], None]] = field(default_factory=list)  # and of changes to gradients

    def extend(self, extensions: Sequence[Extension]) -> None:
        self.froze, self.edited = overriding(extensions, "froze"), overriding(extensions, "edited")


def slots_of(params: Sequence[tuple[str, nn.Parameter, Sequence[Owner]]], services: Services) -> list[Slot]:
    """One for each parameter, with its handle."""
    made = [Slot(*each) for each in params]
    for slot in made:
        slot.held = Handle(slot, services)
    return made


class Handle(Held):
    def __init__(self, slot: Slot, services: Services):
        self.slot, self._services = slot, services
        self.name, self.dtype, self.placed = slot.name, slot.dtype, slot.placed
        self._grad_view: View | None = None
        self._viewed: Lane | None = None  # the lane it was made for

    # ---- its values

    def read(self, writes: bool = False) -> Tensor:
        """The parameter, with its bytes here; RuntimeError where that cannot be."""
        slot, services = self.slot, self._services
        if services.announcer.parked:
            services.announcer.check_here(f"Parameter {self.name!r} was read")
        services.unfilled.check_slot(slot)
        if writes and slot.lane.coded:
            raise RuntimeError(
                f"Parameter {self.name!r} rests as 8-bit codes, so only whole values can be written to it (copy_, "
                f"fill_, a load); {_WRITE_ADVICE}."
            )
        if not slot.lane.shown:
            # Inside a pass it can be brought: see Note [Stray reads] in stray.py.
            stray = services.stray
            if slot.lane.frees and not (stray is not None and stray.read(slot.unit)):
                what = _WRITE_ADVICE if writes or stray is None else stray.advice()
                raise RuntimeError(
                    f"Parameter {self.name!r} is sharded and its full value is not on this rank; {what}."
                )
            slot.lane.wait()
        return slot.lane.readable(slot.index)

    def get_data(self) -> Tensor:
        """A tensor over the same values that needs no gradient; where they are away, a view that asks when it is
        read."""
        lane, param = self.slot.lane, self.slot.param
        if lane.coded or (not lane.shown and lane.frees):
            return view_of(param, self, of_grad=False)
        self.read()
        wide = lane.master is not None and lane.master.format == "wide"
        if lane.frees or wide:
            return param.detach()  # it shares the version counter, which shows writes: Note [Written by the user]
        return parameters.plain_data(param)

    def set_data(self, value: Tensor) -> None:
        """`param.data = value`: new values in the same memory."""
        like = self.slot.param
        if value.shape != like.shape or value.dtype != like.dtype or value.device.type != like.device.type:
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
            if value is self.slot.param:
                return
            value = value._zeor_slot.read()
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype)
        shape = self.slot.whole_shape
        try:
            value = self._local(value)
        except RuntimeError:
            raise ValueError(f"{self.name!r} has shape {shape}; the value given has {tuple(value.shape)}.") from None
        self.store(value)

    def _local(self, full: Tensor) -> Tensor:
        """What lies in the lane, of a full value."""
        return (full if self.placed is None else self.placed.local_of(full)).expand(self.slot.shape)

    def store(self, value: Tensor) -> None:
        """The same, of a plain tensor of the shape that lies in the lane."""
        self._services.announcer.check_here(f"Parameter {self.name!r} was written")
        self._services.borrowed.refuse(f"Parameter {self.name!r} was written")
        self.slot.lane.store(self.slot.index, value)
        self._services.unfilled.fill(self.slot)

    def set_requires_grad(self, flag: bool) -> None:
        """See Note [Freezing and unfreezing] in freezing.py."""
        if flag and not self.dtype.is_floating_point:
            raise RuntimeError(f"Parameter {self.name!r} is {self.dtype} and cannot train; leave it frozen.")
        slot = self.slot
        slot.trains = flag
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.requires_grad_(slot.param, flag)
        if slot.lane.grads is not None:
            slot.lane.grads.expect(slot.index, flag)
        for froze in self._services.froze:
            froze()

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of the gradient's shape."""
        grads = self.slot.lane.grads
        assert grads is not None
        is_part = self.placed is not None and tuple(full.shape) == self.slot.shape  # of a DTensor, as it was handed out
        return grads.cut(self.slot.index, (full if is_part else self._local(full)).reshape(-1))

    # ---- the gradient

    def after_grad(self, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
        handle = RemovableHandle(self.slot.after_grad)
        self.slot.after_grad[handle.id] = hook
        return handle

    def grad_view(self) -> View:
        if self._grad_view is None or self._viewed is not self.slot.lane:
            self._grad_view, self._viewed = view_of(self.slot.param, self, True, self._grad_dtype), self.slot.lane
        return self._grad_view

    @property
    def _grad_dtype(self) -> torch.dtype:
        """The parameter's, as everywhere in torch; fp32 under fp16, whose gradients GradScaler refuses to unscale."""
        dtype = self.slot.param.dtype
        return torch.float32 if dtype == torch.float16 else dtype

    def get_grad(self) -> Tensor | None:
        grads = self.slot.lane.grads
        if grads is None or not grads.has[self.slot.index]:
            return None
        if TracingContext.try_get() is not None:
            return None  # torch.compile looks at a parameter's gradient, and can make nothing of a view
        return self.grad_view()

    def set_grad(self, value: Tensor | None) -> None:
        grads, services = self.slot.lane.grads, self._services
        if value is None:
            if grads is not None:
                services.handed_out.drop(self)
                grads.drop(self.slot.index)
                services.norms.forget(self.slot)
                services.announcer.edited(self, events.DROP)
        elif grads is None and services.plain:
            raise RuntimeError(
                f"Parameter {self.name!r} was frozen when the optimizer was made and has a gradient now; make the "
                "optimizer anew, or use zeor.shard, which knows of unfreezing."
            )
        elif value is not self._grad_view:
            raise RuntimeError(
                f"The gradient of {self.name!r} is sharded and cannot be replaced; change it in place, or set "
                "it to None."
            )

    def read_grad(self) -> Tensor:
        self._services.handed_out.heed()
        grads = self.slot.ready_grads()
        if self.slot.lane.spec.cut("grad"):
            raise RuntimeError(
                f"The gradient of {self.name!r} is sharded; norms, scaling and clamping work on it, its values "
                "are read inside `with zeor.full_params(model, grads=True):`."
            )
        grads.apply_scales()
        local = grads.local(self.slot.index).view(self.slot.shape)
        given = local.to(self._grad_dtype)
        return self.slot.wrap(self._services.handed_out.give(self, given, is_copy=given is not local))

    def gather_grad(self) -> Tensor:
        slot = self.slot
        self._services.announcer.announce(events.GRADS, lambda: self._services.slots.index(slot))
        grad: Tensor = slot.lane.gather_grads()[slot.index]
        return slot.wrap(grad.view(slot.shape).to(self._grad_dtype))

    def norm(self, ord: float) -> Tensor:
        return self._services.norms.of_grads([self.slot], ord)[0]

    def scale_grad(self, factor: Tensor | float) -> None:
        services = self._services
        kept = services.norms.keep_factor(factor)
        services.handed_out.heed()
        self.slot.ready_grads().scale(self.slot.index, kept)
        services.announcer.edited(self, events.SCALE, (kept,))

    def zero_unreduced(self) -> bool:
        """A gradient from inside no_sync is set to zero; False where it is an ordinary one."""
        grads = self.slot.lane.grads
        if grads is None or not grads.zero_unreduced(self.slot.index):
            return False
        self._services.norms.forget(self.slot)
        return True

    def local_grad(self) -> Tensor:
        self._services.handed_out.heed()
        grads = self.slot.ready_grads()
        grads.apply_scales()
        self._services.norms.forget(self.slot)
        return grads.local(self.slot.index)

    def edited(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tell_edit(verb)
        self._services.announcer.edited(self, verb, args, kwargs)

    def tell_edit(self, verb: str) -> None:
        """The features on this rank hear that the gradient was changed in place."""
        for edited in self._services.edited:
            edited(self.slot, verb)

    def check_and_unscale(self, helds: Sequence[Held], found_inf: Tensor, inv_scale: Tensor) -> None:
        handles = [held for held in helds if isinstance(held, Handle)]
        self._services.norms.check([handle.slot for handle in handles], found_inf)
        for handle in handles:
            handle.scale_grad(inv_scale)
