"""`zeor.replan`: another plan for a running job, in memory.

1. Every rank is there, and what was asked can be done, or all refuse.    2. All tell what they have (contents.py).
3. The model's objects are taken off the old engine, and a new one is built under them, without values (switch.py).
4. All tell what they lack; it travels in messages of bounded length (moving.py); compute follows the masters.
5. All agree that nothing went wrong, and only then the old engine goes. Until here everything of it is as it was.

Note [Two plans at once]
~~~~~~~~~~~~~~~~~~~~~~~~
Parameters, masters and averages exist twice until step 5: as slices of the old plan and of the new one. State that a
rank keeps in the very same cut, and in the optimizer under both plans, is not copied: the new entry is the old memory,
which nothing writes before step 5. So a rank holds at most what it keeps under both plans, and what Note [What a move
takes] in moving.py says. That is the price of a run that is whole whatever fails.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zeor.access.sharded import Sharded, state_of
from zeor.checkpoint.run import carry_over as carry_lineage
from zeor.checkpoint.saver import carry_over as carry_saver
from zeor.checkpoint.weights.live import LiveModel
from zeor.comm.agree import everywhere, same_everywhere
from zeor.comm.attendance import attend
from zeor.comm.axes import Axes, Axis
from zeor.comm.meshes import make_axes, ranks_of
from zeor.features.freezing import Freezing
from zeor.memory.device import trim_host_memory
from zeor.model.wrapped import unwrapped
from zeor.plan import Plan, nearest
from zeor.planner.asked import Asked, chosen_by
from zeor.planner.startup import show_start
from zeor.replan.contents import Everything, Had, Wants, to_be_moved
from zeor.replan.moment import check_moment, check_optimizers, check_outside_accumulation, optimizers_of
from zeor.replan.moving import Mover
from zeor.replan.switch import Switch
from zeor.step.engine import Engine

log = logging.getLogger("zeor")

_WHERE = ("mesh", "hierarchy")


def replan(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, **options: Any) -> Any:
    """Change the plan of a sharded model while it trains; returns what zeor.shard does, the same objects.

        zeor.replan(model, optimizer, stage=3, offload="host")     # from here on; all else stays as it is

    Every rank calls it, between optimizer.zero_grad() and the next backward, with all optimizers of the model. The next
    steps have the bits of a job that was started so from a checkpoint of this moment.

    options  any of zeor.shard's but device=; those that are not given stay. mesh= takes the place of hierarchy=, and
             the other way round; None for both is one axis again. The ranks must be those that there are.

    Kept: parameters and their exact masters, the state of optimizers, their groups and hooks, schedulers, averages
    (zeor.ema), buffers, frozen parameters, random generators, where loaders stand, what zeor.traffic has counted.
    Gradients that exist are refused: drop them by zero_grad() first. So is a call inside a pass, a step, zeor.no_sync,
    zeor.join, zeor.full_params, zeor.trace or an average's applied().

    What cannot be done is one sentence, on every rank, and so is what fails on the way: the run then goes on as it was.
    While it runs a rank holds what it keeps under both plans, at most 256 MiB more, or one tensor of its part where
    that is larger, and two buffers of 32 MiB: nothing is ever gathered whole.
    """
    state = state_of(model)
    if state.pipeline is not None:
        raise ValueError(
            "zeor.replan was given a stage of a pipeline, whose schedule drives it as it is; save, and shard it anew."
        )
    old = state.engine
    LiveModel(old).announce_if_joining("zeor.replan")
    attend(old.axes.everyone, "zeor.replan")
    with torch.device("cpu"):
        try:
            steps = _replan(model, state, optimizers_of(optimizer), options)
        finally:
            del old
            gc.collect()  # engines are rings, and the memory of one of them is wanted at once
            trim_host_memory()
    engine = state.engine
    show_start(
        unwrapped(model), engine.plan, engine.axes, engine.units, [each.optimizer for each in state.steppers],
        f"another plan after {steps} steps",
    )  # fmt: skip
    return model if optimizer is None else (model, optimizer)


def _replan(model: nn.Module, state: Sharded, optimizers: list[Any], options: dict[str, Any]) -> int:
    """Returns the number of steps so far."""
    old, everyone = state.engine, state.engine.axes.everyone
    root = unwrapped(model)

    def check() -> tuple[Asked, Plan]:
        check_outside_accumulation(state, "zeor.replan")
        check_moment(state, "zeor.replan")
        old.refuse_divided("zeor.replan moves whole parameters; save, shard with the other plan, and zeor.load.")
        check_optimizers(state, optimizers, "zeor.replan")
        _check_model(root, old)
        asked = merged(state.asked, options)
        _check_ranks(asked.where.mesh, everyone)
        return asked, asked.plan()

    asked, plan = everywhere(everyone, check, "check of what zeor.replan was given", ValueError)
    lines = [f"{key}={value}" for key, value in plan.describe().items()]
    same_everywhere(everyone, "plans", [*lines, *asked.describe()])
    old.feature(Freezing).settle()
    old.drain()
    old.flush_residuals("before another plan")  # as good as before, if this fails
    if state.averages:
        gc.collect()  # those that nobody holds any more
    averages = sorted((average.number, average.updates) for average in state.averages)
    told = [f"average {number} after {updates} updates" for number, updates in averages]
    same_everywhere(everyone, "averages", told)
    axes = _axes(asked, plan, old)
    switch = Switch(root, state, plan, axes, asked)
    had = everywhere(
        everyone, lambda: Had(old, state.steppers, switch.averages), "check of what can be moved", ValueError
    )
    known = Everything(everyone, had)
    try:
        _move(switch, state, had, known)
    except BaseException:
        switch.undo()
        raise
    carry_lineage(old, switch.engine)
    carry_saver(old, switch.engine)
    switch.commit()
    return everyone.steps


def _move(switch: Switch, state: Sharded, had: Had, known: Everything) -> None:
    """Steps 3 and 4. Changes nothing that `undo` does not put back."""
    everyone = state.engine.axes.everyone

    def agreed(do: Callable[[], Any], label: str) -> Any:
        return everywhere(everyone, do, label, RuntimeError)

    switch.take_off()
    everywhere(everyone, switch.describe, "check of another plan", ValueError)
    switch.check_room()
    agreed(switch.build, "making of room for another plan")
    engine = switch.engine
    wants, mover = agreed(lambda: (_wanted(switch, state, known), Mover(everyone)), "check of what is wanted")
    mover.move(to_be_moved(everyone, known, had, wants), wants.put)

    def filled() -> None:
        if mover.problem is not None:
            raise mover.problem

    agreed(filled, "moving of state to another plan")
    publish(engine)
    agreed(engine.drain, "end of a change of plan")


def _wanted(switch: Switch, state: Sharded, known: Everything) -> Wants:
    wants = Wants(known)
    wants.parameters(switch.engine)
    wants.residuals(switch.engine)
    for number, stepper in enumerate(state.steppers):
        wants.state(number, stepper)
    for average in switch.averages:
        wants.average(average)
    return wants


@torch.no_grad()
def publish(engine: Engine) -> None:
    """Compute of every lane follows what its ranks were given."""
    live = LiveModel(engine)
    for unit in engine.units:
        for lane in unit.lanes:
            live.publish(unit, lane)
            lane.changed()  # a graph made before is stale


# ---- what can be asked


def merged(asked: Asked, options: dict[str, Any]) -> Asked:
    """What was asked before, but for what is asked now."""
    given = dict(options)
    if given.get("plan") is not None:
        where = asked.where._replace(mesh=given.get("mesh", asked.where.mesh))
        for name, value in chosen_by(given["plan"], where, list(given)).items():
            if given.setdefault(name, value) != value:
                raise ValueError(f"{name}={given[name]!r} was given beside plan=, which says {value!r}; leave one out.")
    given.pop("plan", None)
    known = [*asked.options, *_WHERE, "units"]
    for name in given:
        if name == "device":
            raise ValueError(
                "zeor.replan cannot move a running job to another device; save it, and load the checkpoint into a "
                "model that was sharded there."
            )
        if name not in known:
            raise TypeError(f"zeor.replan has no option {name!r}{nearest(name, known)}.")
    where = asked.where
    if "mesh" in given or "hierarchy" in given:
        where = where._replace(mesh=given.get("mesh"), hierarchy=given.get("hierarchy"))
    chosen = {name: value for name, value in given.items() if name not in (*_WHERE, "units")}
    return Asked(where, {**asked.options, **chosen}, given.get("units", asked.units))


def _check_model(model: nn.Module, engine: Engine) -> None:
    """Its parameters are those that were sharded."""
    for unit in engine.units:
        unit.check_places()
    known = {id(slot.param) for slot in engine.slots}
    for name, param in model.named_parameters():
        if id(param) not in known:
            raise ValueError(f"Parameter {name!r} is not one of those that were sharded; zeor.unshard, and shard anew.")


def _check_ranks(mesh: Any, everyone: Axis) -> None:
    now = [0] if everyone.control is None else dist.get_process_group_ranks(everyone.control)
    wanted = ranks_of(mesh)
    if wanted != now:
        raise ValueError(
            f"mesh= holds the ranks {wanted}, and the job runs on {now}; zeor.replan keeps the ranks. To change them, "
            "save, and load on the others."
        )


def _axes(asked: Asked, plan: Plan, old: Engine) -> Axes:
    """New axes of the same ranks, which go on counting."""
    before = old.axes.everyone
    where = asked.where
    axes = make_axes(where.mesh, before.device, plan.deterministic, plan.timeout, where.hierarchy)
    for axis in (axes.everyone, *axes.each):
        axis.observer = before.observer
    axes.everyone.standing.go_on(before.standing)
    return axes
