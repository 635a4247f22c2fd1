"""The unit: one module's parameters, gathered, freed, reduced and updated together.

A unit owns lanes and slots. A slot is one parameter of the user's: it knows its lane and stands
behind the user's view (`Held`). A unit carries out what it is told (gather, wait, swap, free) and
keeps no order; the engine does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeor.memory.roles import Residency
from zeor.memory.view import Held, View
from zeor.runtime import edits, events
from zeor.runtime.lane import Lane

if TYPE_CHECKING:
    from zeor.runtime.engine import Engine

Owner = tuple[nn.Module, str]


class Slot(Held):
    """One parameter: where it lies, who uses it, and the answers its views give."""

    def __init__(self, engine: Engine, name: str, param: nn.Parameter, owners: Sequence[Owner]):
        if param.requires_grad and not param.dtype.is_floating_point:
            raise ValueError(
                f"Parameter {name!r} is {param.dtype} and trains; keep it as torch.view_as_real(...) of itself, and "
                "make it complex where it is used."
            )
        self.engine, self.name, self.owners = engine, name, tuple(owners)
        self.shape, self.dtype = tuple(param.shape), param.dtype
        self.user: nn.Parameter = param  # the user's own object; a View once packed, plain for a drop-in
        self.unit: Unit
        self.lane: Lane
        self.index = -1  # in its lane
        self.trains = param.requires_grad and param.dtype.is_floating_point  # as the user wants it
        self._class, self._attributes = type(param), dict(vars(param))
        self._grad_view: View | None = None
        self._after_grad: OrderedDict[int, Callable] = OrderedDict()

    def settle(self, unit: Unit, lane: Lane, index: int) -> None:
        self.unit, self.lane, self.index = unit, lane, index
        self.dress(self.full)

    def dress(self, param: nn.Parameter) -> nn.Parameter:
        """A full parameter is of the class, and has the attributes, of the one the user gave: a quantised one knows
        how to be read."""
        if type(param) is not self._class:
            param.__class__ = self._class
        vars(param).update(self._attributes)
        return param

    @property
    def full(self) -> nn.Parameter:
        return self.lane.full_params[self.index]

    def make_view(self, of_grad: bool) -> View:
        # A wrapper has no memory of its own: one element describes any shape.
        like = torch.empty((), dtype=self.dtype, device=self.engine.mesh.device).expand(self.shape)
        if not of_grad and self.lane.key.trainable:
            like.requires_grad_()
        view = View(like, self, of_grad)
        if not of_grad:
            vars(view).update({**self._attributes, **vars(view)})
        return view

    # ---- the parameter

    def read(self) -> Tensor:
        self.engine.unfilled.check_slot(self)
        # Inside a pass it can be brought: see Note [Read outside] in outside.py.
        outside = self.engine.passes.outside
        if self.lane.frees and not self.unit.swapped and not outside.read(self.unit):
            what = outside.advice()
            raise RuntimeError(f"Parameter {self.name!r} is sharded and its full value is not on this rank; {what}.")
        self.unit.wait()
        return self.full

    def load(self, value: Tensor) -> None:
        """This rank's part of a full value, into master and compute."""
        if not self.engine.writing:
            raise RuntimeError(
                f"copy_ would write to parameter {self.name!r}, of which this rank holds a part; "
                "write inside `with zeor.full_params(model, write=True):`, or use model.load_state_dict."
            )
        if isinstance(value, View):
            if value._held is self:
                return
            value = value._held.read()
        if tuple(value.shape) != self.shape:
            raise ValueError(f"{self.name!r} has shape {self.shape}; the value given has {tuple(value.shape)}.")
        self.store(value)
        self.lane.wait()

    def store(self, value: Tensor) -> None:
        """A full value, the same on every rank, into master and compute."""
        self.engine.refuse_if_lent(f"Parameter {self.name!r} was written")
        self.lane.store(self.index, value)
        self.engine.unfilled.slots.pop(self, None)

    def set_requires_grad(self, flag: bool) -> None:
        """See Note [Freezing and unfreezing] in freezing.py."""
        if flag and not self.dtype.is_floating_point:
            raise RuntimeError(f"Parameter {self.name!r} is {self.dtype} and cannot train; leave it frozen.")
        self.trains = flag
        if self.lane.grads is not None:
            self.full.requires_grad_(flag)
            self.lane.grads.expects[self.index] = flag
        self.engine.freezing.change()

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of the gradient's shape."""
        assert self.lane.grads is not None
        segment = self.lane.grads._where.get(self.index)
        flat = full.expand(self.shape).reshape(-1)
        return flat[:0] if segment is None else flat[segment.start : segment.start + segment.numel]

    # ---- the gradient

    def leaf(self) -> Tensor:
        return self.full

    def after_grad(self, hook: Callable) -> RemovableHandle:
        handle = RemovableHandle(self._after_grad)
        self._after_grad[handle.id] = hook
        return handle

    def grad_is_there(self) -> None:
        """A backward has reduced it."""
        for hook in list(self._after_grad.values()):
            hook(self.user)

    def grad_view(self) -> View:
        if self._grad_view is None:
            self._grad_view = self.make_view(of_grad=True)
        return self._grad_view

    def get_grad(self) -> Tensor | None:
        grads = self.lane.grads
        return self.grad_view() if grads is not None and grads.has[self.index] else None

    def set_grad(self, value: Tensor | None) -> None:
        grads = self.lane.grads
        if value is None:
            if grads is not None:
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
        return grads.local(self.index).view(self.shape).to(self.dtype)

    def gather_grad(self) -> Tensor:
        self.engine.announce(events.GRADS, lambda: self.engine.slots.index(self))
        return self.lane.gather_grads()[self.index].view(self.shape).to(self.dtype)

    def norm(self, ord: float, of_grad: bool) -> Tensor:
        if of_grad:
            return self.engine.norms.of_grad(self, ord)
        return torch.linalg.vector_norm(self.read().detach(), ord)

    def scale_grad(self, factor: Tensor | float) -> None:
        kept = self.engine.norms.keep_factor(factor)
        self.ready_grads().scale(self.index, kept)
        self.engine.edited(self, edits.SCALE, (kept,))

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
        self.swapped = False
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

    def start_gather(self, only_trainable: bool = False) -> None:
        for number, lane in enumerate(self.lanes):
            if lane.key.trainable or not only_trainable:
                lane.start_gather(f"gather of unit {self.name!r}" + (f", lane {number}" if number else ""))

    def wait(self) -> None:
        for lane in self.lanes:
            lane.wait()

    def free(self) -> None:
        for lane in self.lanes:
            lane.free()

    def swap_in(self) -> None:
        """The full parameters into their modules: from here on forward sees plain parameters."""
        if not self.swapped:
            self._check_places()
            self._put([slot.full for _, _, slot in self._places])
            self.swapped = True

    def swap_out(self) -> None:
        """The user's own objects back."""
        if self.swapped:
            self._put([slot.user for _, _, slot in self._places])
            self.swapped = False

    def _check_places(self) -> None:
        """What somebody else put in a parameter's place must not be passed over."""
        for module, attr, slot in self._places:
            if module._parameters.get(attr) is not slot.user:
                raise RuntimeError(
                    f"Something else is in the place of parameter {slot.name!r} (by torch.func.functional_call, "
                    "pruning, or an assignment); do that inside `with zeor.full_params(model):`, or before zeor.shard."
                )

    def put(self, params: dict[Slot, nn.Parameter]) -> None:
        """Any objects into the modules; see full_params."""
        self._put([params[slot] for _, _, slot in self._places])

    def _put(self, params: Sequence[nn.Parameter]) -> None:
        for (module, attr, _), param in zip(self._places, params):
            module._parameters[attr] = param
            if isinstance(module, nn.RNNBase):
                # RNNs read a list of their own; it must follow.
                module._flat_weights = [module._parameters.get(n) for n in module._flat_weights_names]  # type: ignore[misc]
                module._flat_weight_refs = [None] * len(module._flat_weights)  # weak ones would forbid swap_tensors
