"""The unit: one module's parameters, gathered, freed, reduced and updated together.

A unit owns lanes and slots. A slot is one parameter of the user's: it knows its lane and its modules. A unit carries
out what it is told (gather, wait, free) and keeps no order; the engine does. When it may be freed: residency.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeor.comm.observe import Place
from zeor.layout.boxes import Box, boxes_of_range
from zeor.memory import param as parameters
from zeor.memory.placed import Placed, held_shape, is_placed, local_tensor
from zeor.memory.view import Held
from zeor.step.grads import USABLE, GradLane, State
from zeor.step.lane import Lane

Owner = tuple[nn.Module, str]


class Slot:
    """One parameter of the user's: where it lies and who uses it. What it answers when it is asked: see handle.py."""

    def __init__(self, name: str, param: nn.Parameter, owners: Sequence[Owner]):
        if param.requires_grad and not param.dtype.is_floating_point:
            raise ValueError(
                f"Parameter {name!r} is {param.dtype} and trains; keep it as torch.view_as_real(...) of itself, and "
                "make it complex where it is used."
            )
        self.name, self.owners = name, tuple(owners)
        self.placed = Placed(name, param) if is_placed(param) else None  # of a DTensor
        self.shape, self.dtype = tuple(held_shape(param)), param.dtype  # of what lies here; as the user gave it
        self.whole_shape = tuple(param.shape)  # of a DTensor the global one
        # Mesh dimensions, of those that are not ours, along which the gradient of a plain parameter is partial: see
        # Note [Partial gradients] in memory/placed.py.
        self.partial: tuple[int, ...] = ()
        self.experts = False  # it lies in a lane with the axes of experts: Note [Axes] in comm/axes.py
        self.param: nn.Parameter = param  # the user's own object
        self.held: Held  # what the parameter and its gradient ask
        self.unit: Unit
        self.lane: Lane
        self.index = -1  # in its lane
        self.trains = param.requires_grad and param.dtype.is_floating_point  # as the user wants it
        self.kind = type(param)  # its class while it is a plain parameter
        self.after_grad: dict[int, Callable[..., Any]] = OrderedDict()  # the user's hooks for a reduced gradient

    def settle(self, unit: Unit, lane: Lane, index: int) -> None:
        self.unit, self.lane, self.index = unit, lane, index

    # ---- a DTensor: its local tensor is what lies in a lane

    @property
    def value(self) -> Tensor:
        """What lies in a lane, of a parameter that is not there yet."""
        return self.param if self.placed is None else local_tensor(self.param)

    def wrap(self, local: Tensor) -> Tensor:
        """A tensor of the local shape as one of the parameter's own kind."""
        return local if self.placed is None else self.placed.wrap(local)

    def whole(self, local: Tensor) -> Tensor:
        """The whole value as a plain tensor, of what the lane has; of a DTensor by a collective of torch's."""
        return local if self.placed is None else self.placed.wrap(local).full_tensor()

    def boxes(self, start: int, stop: int) -> list[Box]:
        """Elements [start, stop) of what its lane has, flattened, as boxes of the whole parameter, in order."""
        return boxes_of_range(self.shape, start, stop) if self.placed is None else self.placed.boxes(start, stop)

    def part_of(self, grad: Tensor, coords: Sequence[int]) -> Tensor:
        """What this rank adds of a gradient that autograd made. `coords`: its place along the mesh dimensions that are
        not ours. See Note [Partial gradients]."""
        local, partial = (grad, self.partial) if self.placed is None else self.placed.take(grad)
        sums = self.lane.key.sums
        if any(coords[dim] for dim in sums if dim not in partial):
            return torch.zeros_like(local)
        return local

    def counts_on(self, coords: Sequence[int]) -> bool:
        """Whether this rank is the first of those along such dimensions that have the same elements."""
        cut = () if self.placed is None else self.placed.cut
        return not any(place for dim, place in enumerate(coords) if dim not in cut)

    # ---- the parameter as an object

    def bind(self) -> None:
        """From now on the user's parameter asks `held`: see Note [One object] in memory/param.py."""
        hooks = self.param._post_accumulate_grad_hooks
        if hooks:
            # Kept as the very dictionary, so that the user's handles still remove them.
            self.after_grad, self.param._post_accumulate_grad_hooks = hooks, OrderedDict()
        parameters.hand_to(self.param, self.held)
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
        parameters.hand_to(self.param, self.held)

    def give_back_hooks(self) -> None:
        """The parameter is plain for good: its hooks are torch's business again."""
        if self.after_grad:
            self.param._post_accumulate_grad_hooks = self.after_grad

    @property
    def bound(self) -> bool:
        return parameters.held_of(self.param) is self.held

    # ---- the gradient

    def ready_grads(self) -> GradLane:
        """The lane's gradients, once they are reduced."""
        grads = self.lane.grads
        assert grads is not None
        state = grads.use()
        if state is State.RELEASED:
            raise RuntimeError(
                f"The gradient of {self.name!r} was used and freed inside backward, as release=True asks for, so it "
                "cannot be clipped, scaled or read; leave release= out for that (zeor.Offload(grads='host') keeps "
                "gradients off the device)."
            )
        if state not in USABLE:
            raise RuntimeError(
                f"The gradient of {self.name!r} was computed inside zeor.no_sync and is not reduced yet; "
                "run the last backward of the accumulation outside no_sync first."
            )
        return grads

    def grad_is_there(self) -> None:
        """A backward has reduced it."""
        for hook in list(self.after_grad.values()):
            hook(self.param)


class Unit:
    def __init__(self, index: int, name: str, module: nn.Module | None, slots: Sequence[Slot]):
        self.index, self.name, self.module, self.slots = index, name, module, list(slots)
        self.place = Place(name, index)
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
    def present(self) -> bool:
        """Gathered or on its way."""
        return all(lane.full.inflated for lane in self.lanes)

    def place_lanes(self) -> None:
        """Its lanes have changed: each knows which it is."""
        for number, lane in enumerate(self.lanes):
            lane.place = Place(self.name, self.index, number)

    def members(self, lane: Lane) -> list[Slot]:
        """The parameters in one of its lanes, in their order there."""
        return [slot for slot in self.slots if slot.lane is lane]

    def start_gather(self) -> None:
        """Of what is freed between uses; the rest is here, or on its way since the step that changed it."""
        for lane in self.lanes:
            if lane.frees:
                lane.start_gather(lane.place.gather)

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


def gather_values(lane: Lane, slots: list[Slot]) -> dict[Slot, Tensor]:
    """The full values of a lane's parameters, in memory of their own, each in its own dtype."""
    lane.settle()
    lane.keep_writes()
    rounded = lane.lags or lane.parted or any(slot.dtype != lane.key.compute_dtype for slot in slots)
    if lane.master is not None and rounded:
        # Compute is only a cast of what the user gave, or an image of that: the master is exact.
        whole = lane.gather_master()
    else:
        whole = lane.full.flat if not lane.frees else lane.gather_compute()
    return {s: lane.part(whole, s.index).view(s.shape).to(s.dtype, copy=True) for s in slots}


def publish_written(unit: Unit, lane: Lane) -> None:
    """Each rank has written what it updates of a lane, past the optimizer: where ranks keep more of compute than that,
    each gets what the others have. A collective; frozen lanes too."""
    lane.recode()
    if lane.spec.widening("update", "compute"):
        lane.publish_anew(f"gather of unit {unit.name!r} after a write")
