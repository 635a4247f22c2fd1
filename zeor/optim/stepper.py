"""step(): one event for the user, unit by unit inside.

The user's optimizer object stays theirs; four of its methods are replaced on the instance. step() runs
the step hooks once, the closure once, then for each unit: gradients to segments, the stock update or
the one-pass kernel, compute from master, publish. A published unit travels while the next is updated.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from zeor.memory.device import trim_host_memory
from zeor.memory.roles import Residency
from zeor.optim.one_pass import OnePass
from zeor.optim.probe import Kind, probe, raw_step
from zeor.optim.segments import Segments
from zeor.runtime.engine import Engine
from zeor.runtime.lane import Lane
from zeor.runtime.unit import Slot, Unit

_REPLACED = ("step", "state_dict", "load_state_dict", "add_param_group")
_COUNTERS = ("step", "eta", "mu")  # state of one number per parameter, whatever its shape


class Stepper:
    """Drives one optimizer over the segments of one engine."""

    def __init__(self, engine: Engine, optimizer: Optimizer):
        self.engine, self.optimizer = engine, optimizer
        check_parameters(engine, optimizer)
        self.kind = check_kind(engine, optimizer)
        self.segments = Segments(engine, optimizer)
        self._raw_step = raw_step(optimizer)
        self.one_pass = OnePass.for_optimizer(engine, optimizer, self.segments)
        self._first = True
        self._patch()

    # ---- the user's object

    def _patch(self) -> None:
        optimizer, before = self.optimizer, self.optimizer.__dict__.get("step")

        def step(_: Optimizer, closure: Callable | None = None) -> Any:
            if before is not None:
                optimizer._opt_called = True  # type: ignore[attr-defined]
            return self.step(closure)

        if before is not None and hasattr(before, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._instance_step = before
        methods: dict[str, Callable[..., Any]] = {
            "step": step,
            "state_dict": lambda _: self.state_dict(),
            "load_state_dict": lambda _, state_dict: self.load_state_dict(state_dict),
            "add_param_group": lambda _, group: self.add_param_group(group),
        }
        for name, method in methods.items():
            optimizer.__dict__[name] = types.MethodType(method, optimizer)

    def unpatch(self) -> None:
        for name in _REPLACED:
            self.optimizer.__dict__.pop(name, None)
        if self._instance_step is not None:
            self.optimizer.__dict__["step"] = self._instance_step

    # ---- step

    def step(self, closure: Callable | None) -> Any:
        loss = None
        self._run_hooks("pre")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.backward.recover()
        self._check_reduced()
        if self.engine.plain:
            self.engine.heed_plain_grads()
        with torch.no_grad(), torch.profiler.record_function(f"Optimizer.step#{type(self.optimizer).__name__}.step"):
            if self.kind.separable:
                for unit in self.engine.step_order():
                    self._update([unit])
            else:
                self._update(self.engine.step_order())
        self.engine.end_step()
        if self._first:
            self._first = False
            trim_host_memory()
        if self.engine.plain:
            self.engine.drain()  # nothing waits for a publish in a forward without hooks
        self._run_hooks("post")
        return loss

    def _check_reduced(self) -> None:
        for slot in self.segments.slots.values():
            grads = slot.lane.grads
            if grads is not None and grads.unreduced:
                raise RuntimeError(
                    "step() was called after a backward inside zeor.no_sync whose gradients are not reduced yet; "
                    "run the last backward of each accumulation outside no_sync."
                )

    def _run_hooks(self, when: str) -> None:
        """The user's step hooks, once per step, with the user's own parameters in the groups."""
        everyone = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks")
        own = getattr(self.optimizer, f"_optimizer_step_{when}_hooks")
        for hook in (*everyone.values(), *own.values()):
            hook(self.optimizer, (), {})

    def _update(self, units: list[Unit]) -> None:
        """Gradients in, compute out, for these units."""
        groups = self.optimizer.param_groups
        members = {id(slot.user): slot for unit in units for slot in unit.slots}
        work: list[list[Tensor]] = []
        for group in groups:
            mine = [p for p in group["params"] if id(p) in members and members[id(p)].lane.grads is not None]
            work.append([p for p in mine if members[id(p)].lane.grads.has[members[id(p)].index]])  # type: ignore[union-attr]
        if not any(work):
            return
        lanes = list(dict.fromkeys(members[id(p)].lane for params in work for p in params))
        for lane in lanes:
            lane.wait()  # an earlier publish nobody waited for (its reader) -> this update (the writer)
        if self.one_pass is not None and self.one_pass.takes(lanes):
            self.one_pass.update(work, lanes)
        else:
            self._stock_update(work, lanes)
        for unit in units:
            if any(lane in lanes for lane in unit.lanes):
                self.engine.publish(unit)

    def _stock_update(self, work: list[list[Tensor]], lanes: list[Lane]) -> None:
        """The optimizer's own step over segments, with the groups showing only these."""
        for lane in lanes:
            _settle_scales(lane)
            lane.master.fetch()  # type: ignore[union-attr]
        widened_nbytes = 0
        groups, kept = self.optimizer.param_groups, [group["params"] for group in self.optimizer.param_groups]
        given: list[torch.nn.Parameter] = []
        try:
            for group, params in zip(groups, work):
                group["params"] = []
                for param in params:
                    segment = self.segments.of(param)
                    if segment is not None:
                        slot = self.segments.slots[id(param)]
                        segment.grad = _master_gradient(slot, segment)
                        widened_nbytes += segment.grad.nbytes if slot.lane.grads.dtype != segment.dtype else 0  # type: ignore[union-attr]
                        group["params"].append(segment)
                        given.append(segment)
            if self.kind.separable:  # an optimizer with counters in its groups must see them all
                self.optimizer.param_groups = [group for group in groups if group["params"]]
            self.engine.ledger.add("update", widened_nbytes)
            if given or not self.kind.separable:
                self._raw_step(self.optimizer)
        finally:
            self.optimizer.param_groups = groups
            for group, params in zip(groups, kept):
                group["params"] = params
            for segment in given:
                segment.grad = None
            for lane in lanes:
                lane.master.spill()  # type: ignore[union-attr]
            self.engine.ledger.drop("update", widened_nbytes)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The stock state dict over this rank's segments: it loads on the same world."""
        self.engine.drain()
        with self.segments.in_groups():
            return type(self.optimizer).state_dict(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state dict made by `state_dict` on this rank, or a plain one of whole parameters."""
        order = [param for group in self.optimizer.param_groups for param in group["params"]]
        state = {
            key: {name: self.segments.cut(order[key], v) for name, v in value.items()}
            if isinstance(key, int) and self.segments.of(order[key]) is not None
            else value
            for key, value in state_dict["state"].items()
        }
        state = {k: v for k, v in state.items() if not isinstance(k, int) or self.segments.of(order[k]) is not None}
        with self.segments.in_groups():
            # The stock method makes new groups; the parameters in them become the user's own again.
            kept = [group["params"] for group in self.optimizer.param_groups]
            type(self.optimizer).load_state_dict(self.optimizer, {**state_dict, "state": state})
            for group, params in zip(self.optimizer.param_groups, kept):
                group["params"] = params
        owner = {id(self.segments.of(param)): param for param in order}
        for group in self.optimizer.param_groups:
            group["params"] = [owner.get(id(param), param) for param in group["params"]]
        if self.one_pass is not None:
            self.one_pass.forget_state()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """A new group of the model's own parameters."""
        type(self.optimizer).add_param_group(self.optimizer, group)
        check_parameters(self.engine, self.optimizer)
        for param in self.optimizer.param_groups[-1]["params"]:
            self.segments._make(param)
        if self.one_pass is not None:
            self.one_pass = OnePass.for_optimizer(self.engine, self.optimizer, self.segments)

    def moments_nbytes(self) -> int:
        """Bytes of element-wise state as allocated; step counters are not counted."""
        storages = {}
        for segment in self.segments._of.values():
            for name, value in self.optimizer.state.get(segment, {}).items():
                if isinstance(value, Tensor) and value.shape == segment.shape and name not in _COUNTERS:
                    storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return sum(storages.values())


def _settle_scales(lane: Lane) -> None:
    """Remembered factors are multiplied into the sum where it is as wide as the master, so that the user sees
    what was used; else into the wide copy that is made of each part."""
    grads = lane.grads
    assert grads is not None and lane.master is not None
    if grads.dtype == lane.master.dtype:
        grads.apply_scales()


def _master_gradient(slot: Slot, segment: torch.nn.Parameter) -> Tensor:
    """One segment's gradient in the master's dtype and the segment's shape."""
    grads = slot.lane.grads
    assert grads is not None
    part, factor = grads.local(slot.index), grads.scales[slot.index]
    if part.dtype != segment.dtype:
        part = part.to(segment.dtype)
        if factor is not None:
            part.mul_(factor)
    return part.view(segment.shape)


def check_kind(engine: Engine, optimizer: Optimizer) -> Kind:
    """What kind of optimizer it is; ValueError where it cannot work at this stage. Touches nothing."""
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    kind, name = probe(optimizer, engine.mesh.device, dtype), type(optimizer).__name__
    if kind.failed is not None:
        raise ValueError(
            f"{name} could not take a plain step on its own ({kind.failed}), so zeor cannot drive it; "
            "use an optimizer whose step() needs no closure and dense gradients, such as AdamW."
        )
    if not kind.elementwise and engine.mesh.world > 1 and engine.column.update is not Residency.FULL:
        raise ValueError(
            f"{name} is not element-wise (cutting a matrix changes its update), so it cannot work on slices; use "
            "zeor.shard(..., stage=0), where every rank updates whole parameters, or an element-wise optimizer "
            "such as AdamW."
        )
    return kind


def check_parameters(engine: Engine, optimizer: Optimizer) -> None:
    """Every parameter of the optimizer must be one of the model's."""
    known = {id(slot.user): slot for slot in engine.slots}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} (group {number}, "
                    f"position {position}) that is not in the sharded model; make the optimizer from this model's "
                    "parameters()."
                )
