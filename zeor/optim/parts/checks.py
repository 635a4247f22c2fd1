"""What zeor.shard asks of an optimizer before anything is changed: its parameters, its kind, its state.

Each refusal is one sentence that names what was found and what to do, and leaves model and optimizer as they were.
An optimizer that zeor does not drive must not step on sharded parameters. It would change this rank's copy of the
weights, by this rank's gradients, past the masters: nothing would fail, and the ranks would train different models.
Parameters know that they are sharded, and torch calls one hook before every step of every optimizer: `watch_steps`
installs it, once per process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zeor.comm.axes import Axes
from zeor.memory.param import held_of
from zeor.memory.roles import Table
from zeor.optim.owners.owners import updates_are_cut
from zeor.optim.parts.probe import Kind, probe_groups
from zeor.optim.parts.segments import check_cuttable, local_state
from zeor.plan import Plan
from zeor.step.unit import Slot


def check_kind(optimizer: Optimizer, slots: Iterable[Slot], axes: Axes, table: Table) -> list[Kind]:
    """What kind of optimizer it is, by group; ValueError where it cannot work at this stage. Touches nothing."""
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    kinds, name = probe_groups(optimizer, axes.device, dtype), type(optimizer).__name__
    cut, slots = updates_are_cut(axes, table), list(slots)
    for kind in kinds:
        if kind.failed is not None:
            raise ValueError(
                f"{name} could not take a plain step on its own ({kind.failed}), so zeor cannot drive it; "
                "use an optimizer whose step() needs no closure and dense gradients, such as AdamW."
            )
        if kind.coupled and cut:
            raise ValueError(
                f"{name} updates each parameter by what it finds in the others (one call over two differs from two "
                "calls), so no rank could compute its part alone; use zeor.shard(..., stage=0), where every rank "
                "updates the whole model, or an optimizer such as AdamW."
            )
    beside = axes.tensor if axes.experts is None else axes.experts.tensor
    if beside is not None:
        _check_divided(optimizer, kinds, slots, [axis.name for axis in beside.dims])
    if cut:
        known = {id(slot.param): slot for slot in slots}
        for kind, group in zip(kinds, optimizer.param_groups):
            for param in group["params"] if kind.elementwise else ():
                state = dict.get(optimizer.state, param) or {}  # of the whole parameter: nothing is cut yet
                if (slot := known.get(id(param))) is not None:
                    check_cuttable(slot.name, slot.shape, local_state(slot, state))
    return kinds


def _check_divided(optimizer: Optimizer, kinds: Sequence[Kind], slots: Iterable[Slot], dims: Sequence[str]) -> None:
    """ValueError where the optimizer would look at what lies on ranks that have other parts of a parameter."""
    name, by_param = type(optimizer).__name__, {id(slot.param): slot for slot in slots}
    for kind, group in zip(kinds, optimizer.param_groups):
        if kind.coupled:
            raise ValueError(
                f"{name} updates each parameter by what it finds in the others, and ranks along mesh dimension "
                f"{dims[0]!r} have other parts of the model; use an optimizer such as AdamW."
            )
        for param in () if kind.elementwise else group["params"]:
            slot = by_param.get(id(param))
            if slot is not None and slot.placed is not None and slot.placed.cut:
                cut = slot.placed.dim_name(min(slot.placed.cut))
                raise ValueError(
                    f"{name} computes on whole matrices, and {slot.name!r} is cut over mesh dimension {cut!r}; give "
                    "that parameter to an element-wise optimizer such as AdamW, and zeor.shard a list of both."
                )


def check_separable(optimizer: Optimizer, kinds: Sequence[Kind], plan: Plan) -> None:
    """ValueError where the plan calls the optimizer several times in a step and it must not be."""
    if all(kind.separable for kind in kinds):
        return
    name = type(optimizer).__name__
    if plan.streams:
        raise ValueError(
            f"{name} keeps counters for all parameters together, so it cannot be called for some of them at a time, as "
            "offload=, moments= and delay= need; leave those out."
        )
    if plan.release:
        raise ValueError(
            f"{name} keeps counters for all parameters together, so it cannot update unit by unit inside backward; "
            "leave out release=True."
        )


def check_moments(plan: Plan, slots: Iterable[Slot]) -> None:
    """ValueError where state is to be kept in a small format and cannot be."""
    if plan.moments == "exact":
        return
    for slot in slots:
        if slot.trains and slot.dtype == torch.float64:
            raise ValueError(
                f"moments={plan.moments!r} keeps the optimizer's state of float32 masters, and parameter {slot.name!r} "
                "is float64; use moments='exact', or a float32 model."
            )


def check_parameters(optimizer: Optimizer, slots: Iterable[Slot]) -> None:
    """Every parameter of the optimizer must be one of the model's."""
    known = {id(slot.param) for slot in slots}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} (group {number}, "
                    f"position {position}) that is not in the sharded model; make the optimizer from this model's "
                    "parameters()."
                )


def refuse_optimizers_in_backward(named: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError where torch's _apply_optimizer_in_backward has given a parameter an optimizer of its own: that steps
    on the gradient of this rank alone, or, where zeor takes gradients away as they arrive, never."""
    for name, param in named:
        if getattr(param, "_in_backward_optimizers", None):
            raise ValueError(
                f"Parameter {name!r} has an optimizer of its own that steps inside backward (torch's "
                "_apply_optimizer_in_backward), on gradients that ranks have not added up; leave that out, and give "
                "one optimizer over all parameters to zeor.shard(model, optimizer, release=True), which updates inside "
                "backward too."
            )


# ---- optimizers that zeor does not drive


driven: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that a stepper drives
_watching: list[RemovableHandle] = []


def watch_steps() -> None:
    """From here on every optimizer of this process is looked at before it steps."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in driven:
        refuse_stranger(optimizer)


def refuse_stranger(optimizer: Optimizer) -> None:
    """RuntimeError where an optimizer that no stepper drives holds parameters of a sharded model."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            held = held_of(param)
            if held is not None:
                name = type(optimizer).__name__
                raise RuntimeError(
                    f"{name}.step() was called on parameter {held.name!r} of a sharded model, but this {name} was "
                    "never given to zeor: it would change one rank's copy; give it to zeor.shard(model, optimizer)."
                )
