"""`zeor.optim.SGD(model.parameters(), lr=0.1)`: any torch optimizer by name, sharded, with nothing else to write.

Parameters stay plain tensors of the user's and no module is hooked; gradients are reduced as they
arrive in backward, and new values are published before step() returns. Otherwise it is the same engine:
stage 1 slices the optimizer's state, stage 2 the gradients too.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeor.comm.agree import same_everywhere
from zeor.comm.axes import Axes
from zeor.comm.launch.world import ensure_process_group
from zeor.comm.meshes import make_axes
from zeor.data.loader import follow
from zeor.features.build import Builder
from zeor.features.freezing import Freezing
from zeor.features.plain_grads import watch
from zeor.memory.device import idle_accelerator, one_device
from zeor.memory.roles import table_of
from zeor.model.wrapped import refuse_sharded
from zeor.optim.parts.checks import check_kind, refuse_optimizers_in_backward
from zeor.optim.stepper import Stepper
from zeor.plan import Plan
from zeor.spec.keys import lane_key
from zeor.step.engine import Engine
from zeor.step.unit import Slot

log = logging.getLogger("zeor")

# Parameters are grouped into units of this part of the model: enough of them to overlap, none tiny.
UNITS = 16


@functools.cache
def drop_in(base: type[Optimizer]) -> type[Optimizer]:
    """The sharded class of the same name for a torch optimizer class."""

    def __init__(  # noqa: N807 (the class is made below)
        self: Any, params: Any, *args: Any, stage: int = 1, mesh: Any = None, nonfinite: str = "warn", **kwargs: Any
    ) -> None:
        base.__init__(self, params, *args, **kwargs)
        if stage not in (1, 2):
            raise ValueError(
                f"zeor.optim.{base.__name__}(stage={stage!r}): a drop-in optimizer knows stages 1 and 2; for 0 and 3 "
                "use zeor.shard(model, optimizer, stage=...)."
            )
        self._zeor = _attach(self, Plan(stage=stage, nonfinite=nonfinite), mesh)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        base.zero_grad(self, set_to_none)
        if set_to_none:
            self._zeor.engine.drop_grads()

    doc = f"torch.optim.{base.__name__}, sharded: the same arguments, plus stage=1|2, mesh= and nonfinite=."
    methods = {"__init__": __init__, "zero_grad": zero_grad, "__doc__": doc, "stock_class": base}
    return type(base.__name__, (base,), {**methods, "__module__": "zeor.optim"})


def _attach(optimizer: Optimizer, plan: Plan, mesh: Any) -> Stepper:
    params = list(_named(optimizer.param_groups))
    refuse_sharded(params)
    refuse_optimizers_in_backward(params)
    device = one_device((name, param) for name, param in params)
    if device.type == "cpu" and (idle := idle_accelerator()):
        name = f"zeor.optim.{type(optimizer).__name__}"
        log.info("zeor: the parameters are on the CPU; to train on %s, write model.to(%r) before %s", idle, idle, name)
    follow(device)
    ensure_process_group(device, plan.timeout)
    axes = make_axes(mesh, device, plan.deterministic, plan.timeout)
    _compare(axes, params)
    engine = Engine(plan, axes, plain=True)
    check_kind(optimizer, (), axes, table_of(plan.stages))
    builder = Builder(engine)
    _pack(builder, params)
    stepper = Stepper(engine, optimizer)
    stepper.enrol = functools.partial(_enrol, weakref.ref(stepper), builder)
    return stepper


def _compare(axes: Axes, params: Sequence[tuple[str, nn.Parameter]]) -> None:
    described = [f"{name}: {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}" for name, p in params]
    same_everywhere(axes.everyone, "optimizers", described)


def _pack(builder: Builder, params: Sequence[tuple[str, nn.Parameter]]) -> list[Slot]:
    """Parameters into units; their memory, and their gradients, are the lanes' from here on. Orders of passes are
    learned anew."""
    engine, made = builder.engine, []
    for chunk in _chunks(params):
        slots = builder.slots([(name, param, ()) for name, param in chunk])
        keys = {slot: lane_key(slot.param, (), engine.plan.precision) for slot in slots}
        engine.add_unit(f"parameters {len(engine.units)}", None, slots, keys.__getitem__)
        for slot in slots:
            if slot.lane.grads is not None:
                watch(slot, engine)
        made += slots
    builder.finish()
    return made


def _enrol(ref: weakref.ref[Stepper], builder: Builder, groups: list[dict[str, Any]]) -> None:
    """Parameters of new groups that the engine does not know join it; every rank must add them. Everything that may
    be refused is, before anything is changed."""
    stepper = ref()
    assert stepper is not None
    slots, first = stepper.segments.slots, len(stepper.optimizer.param_groups) - len(groups)
    new = [(name, param) for name, param in _named(groups, first) if id(param) not in slots]
    if not new:
        return
    refuse_sharded(new)
    refuse_optimizers_in_backward(new)
    one_device([*((slot.name, slot.param) for slot in list(slots.values())[:1]), *new])
    _compare(stepper.axes, new)
    stepper.check_kind()
    stepper.state.drain()
    slots.update({id(slot.param): slot for slot in _pack(builder, new)})
    stepper.engine.feature(Freezing).watch(stepper)


def _named(groups: Sequence[dict[str, Any]], first: int = 0) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of groups with names; `first`: the number of the first of these groups."""
    for number, group in enumerate(groups, first):
        names = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
        yield from zip(names, group["params"])


def _chunks(params: Sequence[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    limit = max(1, sum(param.numel() for _, param in params) // UNITS)
    chunk: list[tuple[str, nn.Parameter]] = []
    for item in params:
        chunk.append(item)
        if sum(param.numel() for _, param in chunk) >= limit:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
