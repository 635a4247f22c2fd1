"""Pipelines: stages that zeor has sharded, run by the schedules of torch.distributed.pipelining.

`zeor.pipeline(schedule)` is called once, when the schedule is built. What happens at each action is in stages.py, tied
parameters are in ties.py; this file checks what it was given, on every rank of the pipeline together, drives a step of
the schedule as a whole, and knows the norm over all stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeor.access.sharded import Sharded, stage_of
from zeor.comm import verbs
from zeor.comm.agree import exchange, same_everywhere, together
from zeor.comm.axes import Axes, Axis, group_of, make_axis
from zeor.comm.meshes import ranks_on
from zeor.features.stages import KEEPS, Local, bind
from zeor.features.ties import Ties, places_of, rounds
from zeor.step.unit import Slot

_INITIALIZERS = ("_initialize_stage", "_initialize_stages")  # where torch finds shapes, by the kind of schedule


def pipeline(
    schedule: Any, keep: str = "step", *, reduce: str = "step", tied: Sequence[Any] | None = None,
    names: Callable[[int, str], str] | None = None,
) -> Any:  # fmt: skip
    """Run the stages of a schedule of torch.distributed.pipelining with their parameters, gradients and optimizer state
    sharded. Each was given to `zeor.shard(stage, optimizer, mesh=mesh["dp"])` before; several on one rank together, as
    an nn.ModuleList, so that they have one optimizer. Returns the schedule; every rank calls it, once.

    keep="step"      full parameters stay from a stage's first computation of a step to its last: one gather and one
                     reduce for each unit and step. "action": they are given back after every forward, backward or
                     half of one, and gathered again for the next.
    reduce="step"    gradients are summed at full size on each rank and reduced once per step. "action": once for each
                     micro-batch, so that no gradient of full size stays.
    tied=None        parameters of two stages that are one: ("embed.weight", "head.weight") for the first and the last
                     stage, or ((0, "embed.weight"), (3, "head.weight")). None: an embedding that holds the same values
                     as a parameter of another stage is refused; [] says that there are none.
    names=None       what a parameter or buffer of a stage is called in the whole model: `names(stage, name)`. None: as
                     in its stage. zeor.save, zeor.load, zeor.export and zeor.load_pretrained are of all stages
                     together, by these names; every rank of all stages calls them.

    Then `schedule.step(...)`, `zeor.clip_grad_norm_(stages, 1.0)` (the norm over all stages), `optimizer.step()` and
    `optimizer.zero_grad()` as ever. Gradients are divided by the number of micro-batches where the schedule was made
    with scale_grads=True, its default.
    """
    return Pipeline(schedule, keep, reduce, tied, names).schedule


class Pipeline:
    """What one rank runs of a pipeline."""

    def __init__(
        self, schedule: Any, keep: str, reduce: str, tied: Sequence[Any] | None, names: Callable[[int, str], str] | None
    ):
        _check_options(schedule, keep, reduce)
        self.schedule, self._names = schedule, names
        self.stages = _stages_of(schedule)
        first = self.stages[0]
        self.axis: Axis = make_axis(first.group, torch.device(first.device), False, 600.0)
        self.axis.name = "stages"
        states, places = together(self.axis, lambda: self._check(tied, reduce), "checks of a pipeline", ValueError)
        divisor = schedule._n_microbatches if schedule.scale_grads else 1
        self.locals: list[Local] = []
        by_stage = {}
        for stage, (state, entry) in zip(self.stages, states):
            local = next((each for each in self.locals if each.state is state), None)
            if local is None:
                local = Local(state, keep, reduce, divisor)
                self.locals.append(local)
            local.add(stage.stage_index, entry)
            by_stage[stage.stage_index] = local
        self.everyone = _everyone(self.axis, self.locals[0].engine.axes)  # the ranks of all stages
        said = [f"keep={keep!r}", f"reduce={reduce!r}", f"tied={tied!r}"]
        same_everywhere(self.everyone, "arguments of zeor.pipeline", said)
        self.tied = bool(places)  # of all stages, those of other ranks too
        self.ties = Ties(self.stages, by_stage, places, self.axis)
        self.ties.check(undeclared=tied is None)
        for stage in self.stages:
            bind(stage, by_stage[stage.stage_index])
        for local in self.locals:
            local.state.pipeline, local.engine.norms.of_a_stage = self, True
        self._put_steps()

    def _check(self, tied: Sequence[Any] | None, reduce: str) -> tuple[list[tuple[Sharded, str]], list[Any]]:
        places = places_of(tied or (), self.stages[0].num_stages)
        if places and reduce == "action":
            raise ValueError(
                "tied= needs reduce='step': gradients of tied parameters are added up before they are reduced."
            )
        found = [_state_of(stage) for stage in self.stages]
        for stage, (state, _) in zip(self.stages, found):
            where = f"Stage {stage.stage_index} of the pipeline"
            _check_plan(where, state)
            option = rounds(state.engine.plan)
            if places and option:
                raise ValueError(
                    f"{where} was sharded with {option}, which rounds a parameter beside its neighbours, and those "
                    "that tied= names have others in each stage, so they would no longer be the same; leave one out."
                )
            if state.engine.plan.compile is not False and _cuts_backwards(self.schedule):
                raise ValueError(
                    f"Stage {stage.stage_index} of the pipeline was sharded with compile=, and "
                    f"{type(self.schedule).__name__} computes half a backward from a graph that it keeps, which "
                    "compiled modules refuse; leave compile= out, or use a 1F1B schedule."
                )
        return found, places

    # ---- the stages as one model

    @property
    def indices(self) -> list[int]:
        """The numbers of this rank's stages, ascending."""
        return sorted(stage.stage_index for stage in self.stages)

    def modules(self) -> list[tuple[int, nn.Module]]:
        """This rank's stages in the order of the model."""
        by_index = {stage.stage_index: stage.submod for stage in self.stages}
        return [(index, by_index[index]) for index in self.indices]

    def name(self, stage: int, name: str) -> str:
        """What a parameter or buffer of a stage is called in the whole model."""
        if self._names is None:
            return name
        found = self._names(stage, name)
        if not isinstance(found, str) or not found:
            raise TypeError(f"names({stage}, {name!r}) of zeor.pipeline gave {found!r}; it must give a name.")
        return found

    # ---- the schedule's own methods

    def _put_steps(self) -> None:
        schedule = self.schedule
        step = schedule.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            with self._stepping():
                return step(*args, **kwargs)

        schedule.step = stepped
        for name in _INITIALIZERS:
            if hasattr(schedule, name):
                setattr(schedule, name, self._quietly(getattr(schedule, name)))
        if hasattr(schedule, "register_custom_function"):
            _gather_early(schedule, {stage.stage_index: local for stage, local in self._pairs()})

    def _pairs(self) -> Iterator[tuple[Any, Local]]:
        for stage in self.stages:
            state = stage_of(stage.submod)[0]
            yield stage, next(local for local in self.locals if local.state is state)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        for local in self.locals:
            local.begin(self.schedule._has_backward)
        try:
            yield
            self.ties.exchange()
            for local in self.locals:
                local.finish()
        except BaseException:
            self.schedule._internal_losses.clear()  # torch would add the next step's to them
            for local in self.locals:
                local.fail()
            raise
        finally:
            for local in self.locals:
                local.let_go()

    def _quietly(self, initialize: Callable[..., Any]) -> Callable[..., Any]:
        def initialized(*args: Any, **kwargs: Any) -> Any:
            if not _finds_shapes(self.schedule):
                return initialize(*args, **kwargs)
            with ExitStack() as stack:
                for local in self.locals:
                    modules = [stage.submod for stage, its in self._pairs() if its is local]
                    stack.enter_context(local.quiet(modules))
                return initialize(*args, **kwargs)

        return initialized

    # ---- gradients of all stages

    def slots(self) -> list[Slot]:
        """The parameters of this rank's stages that have a gradient."""
        slots = [slot for local in self.locals for slot in local.engine.slots]
        return [slot for slot in slots if slot.lane.grads is not None and slot.lane.grads.has[slot.index]]

    @torch.no_grad()
    def norm(self, ord: float) -> Tensor:
        """Of all gradients of all stages; tied parameters count once."""
        norms = []
        for local in self.locals:
            own = [slot for slot in self.slots() if slot in local.slots and slot not in self.ties.copies]
            norms += local.engine.norms.of_grads(own, ord) if own else []
        none = math.inf if ord < 0 else 0.0
        wide = torch.stack([norm.double() for norm in norms]) if norms else torch.full((1,), none, dtype=torch.float64)
        here = torch.linalg.vector_norm(wide.to(self.axis.device), ord).reshape(1)
        rows = verbs.gather_vector(self.axis, here, "norm over the stages of a pipeline").flatten()
        total: Tensor = rows.sum() if ord == 0 else torch.linalg.vector_norm(rows, ord)
        return total.to(norms[0].dtype if norms else torch.float32)


def _everyone(stages: Axis, axes: Axes) -> Axis:
    """The ranks of all stages: along the pipeline each rank speaks for those that hold the same stage."""
    own = axes.whole
    if stages.size == 1 or stages.fake:
        return own
    told = exchange(stages, ranks_on(own), "exchange about the ranks of a pipeline's stages")
    ranks = sorted({rank for each in told for rank in each})
    found = make_axis(group_of(ranks), axes.device, False, own.timeout)
    found.name = f"{stages.name} x {own.name}"
    found.observer, found.standing = axes.everyone.observer, axes.everyone.standing
    return found


def _gather_early(schedule: Any, locals_: dict[int, Local]) -> None:
    """The schedule says before a stage's first computation that it is needed: its gathers begin then."""
    from torch.distributed.pipelining import schedules

    schedule.register_custom_function(
        schedules.UNSHARD, lambda action, context: locals_[action.stage_index].gather_early()
    )


def _cuts_backwards(schedule: Any) -> bool:
    """Whether it computes gradients of inputs and of parameters apart: a zero-bubble schedule."""
    order = getattr(schedule, "pipeline_order", None) or {}
    actions = [action for actions in order.values() for action in actions if action is not None]
    inner = [each for action in actions for each in (getattr(action, "sub_actions", None) or ())]
    return any(action.computation_type.name == "BACKWARD_INPUT" for action in (*actions, *inner))


def _finds_shapes(schedule: Any) -> bool:
    """Whether torch is about to run the stages for their shapes. Where it has other names for that: perhaps."""
    for name in ("_stage", "_stages"):
        forward = getattr(schedule, f"{name}_forward_initialized", None)
        backward = getattr(schedule, f"{name}_backward_initialized", None)
        if forward is not None and backward is not None:
            return not forward or schedule._has_backward != backward
    return True


# ---- checks


def _check_options(schedule: Any, keep: str, reduce: str) -> None:
    from torch.distributed.pipelining import schedules  # takes a second, and few need it

    for name, value in (("keep", keep), ("reduce", reduce)):
        if value not in KEEPS:
            raise ValueError(f"{name}={value!r} is not known; use 'step' or 'action'.")
    if not isinstance(schedule, (schedules.PipelineScheduleSingle, schedules._PipelineScheduleRuntime)):
        raise TypeError(
            f"zeor.pipeline cannot drive a {type(schedule).__name__}; give it one of torch.distributed.pipelining's "
            "ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble, "
            "ScheduleZBVZeroBubble or ScheduleDualPipeV, or one that derives from them."
        )


def _stages_of(schedule: Any) -> list[Any]:
    stages = getattr(schedule, "_stages", None)
    return list(stages) if stages is not None else [schedule._stage]


def _state_of(stage: Any) -> tuple[Sharded, str]:
    """The state behind a stage's module, or a ValueError."""
    where, module = f"Stage {stage.stage_index} of the pipeline", stage.submod
    if isinstance(module, DistributedDataParallel):
        raise ValueError(f"{where} is wrapped in DistributedDataParallel; give zeor.shard its module alone.")
    if getattr(stage, "dw_builder", None) is not None:
        raise ValueError(
            f"{where} has a dw_builder, by which it computes gradients of its parameters itself; leave it out, and "
            "torch and zeor do that."
        )
    try:
        state, entry = stage_of(module)
    except ValueError:
        raise ValueError(
            f"{where} is not sharded; call zeor.shard(stage, optimizer, mesh=mesh['dp']) before zeor.pipeline."
        ) from None
    return state, entry


def _check_plan(where: str, state: Sharded) -> None:
    plan = state.engine.plan
    if state.pipeline is not None:
        raise ValueError(f"{where} is in a pipeline already; make one schedule for each set of stages.")
    if plan.release:
        raise ValueError(
            f"{where} was sharded with release=True, which updates before all stages have their gradients; leave it "
            "out."
        )
    if state.engine.axes.experts is not None:
        raise ValueError(
            f"{where} was sharded with experts=, and zeor does not know expert parallelism in a pipeline yet; leave "
            "one of them out."
        )
    if plan.recompute == "auto":
        raise ValueError(
            f"{where} was sharded with recompute='auto', which measures one forward and its backward at a time; in a "
            "pipeline give True, or the modules to be computed again."
        )
    if plan.nonfinite in ("raise", "skip"):
        raise ValueError(
            f"{where} was sharded with nonfinite={plan.nonfinite!r}, which would leave a step out on this stage alone; "
            "look at the norm that zeor.clip_grad_norm_ returns: it is of all stages."
        )
