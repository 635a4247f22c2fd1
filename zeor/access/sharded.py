"""What belongs to one sharded model, and how every public verb finds it: an attribute of the model's own.

The steppers in it are optim's; this file only keeps them together with the engine and the hooks.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeor.model.wrapped import unwrapped
from zeor.step.engine import Engine
from zeor.step.hooks import Hooks


class Sharded:
    """What belongs to one sharded model: its engine, its hooks, its optimizers."""

    def __init__(self, engine: Engine, hooks: Hooks, asked: Any = None):
        self.engine, self.hooks = engine, hooks
        self.asked = asked  # what the user gave zeor.shard: see planner/asked.py
        self.steppers: list[Any] = []
        self.shown = False  # inside full_params
        self.pipeline: Any = None  # the one its stages are in: see features/pipeline.py
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()  # see optim/ema.py
        self.averages_made = 0
        self.parking: Any = None  # what has moved off the device, and how to bring it back: see replan/park.py
        self.host: Any = None  # the host memory that an earlier one took
        self.held_before: dict[str, int] | None = None  # what `nbytes` said then

    def nbytes(self) -> dict[str, int]:
        """Resident bytes by role, as allocated, on whatever tier; of a parked model as it was."""
        if self.held_before is not None:
            return self.held_before
        measured = self.engine.nbytes()
        roles = {role: measured.get(role, 0) for role in ("compute", "grad", "master")}
        if measured.get("residual"):
            roles["residual"] = measured["residual"]
        if self.averages:
            roles["ema"] = sum(average.nbytes() for average in self.averages)
        return {**roles, "moments": sum(stepper.state.moments_nbytes() for stepper in self.steppers)}

    # A model copied or pickled inside full_params is a plain one.
    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


# Kept on the model itself, so that model and engine go together when the user lets go of them.
ATTRIBUTE = "_zeor_sharded"


# Stages of a pipeline that were sharded together, as an nn.ModuleList: each with the list.
_lists: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def note_stages(model: nn.Module) -> None:
    """The modules of an nn.ModuleList that has just been sharded: each is used by itself."""
    for stage in model.children():
        _lists[stage] = weakref.ref(model)


def stage_of(module: nn.Module) -> tuple[Sharded, str]:
    """The state behind a stage of a pipeline, and the name of its entry: "" where it was sharded by itself."""
    if vars(module).get(ATTRIBUTE) is None and module in _lists:
        model = _lists[module]()
        state = None if model is None else vars(model).get(ATTRIBUTE)
        names = [] if model is None else [name for name, child in model.named_children() if child is module]
        if state is not None and names:
            return state, f"{names[0]}.forward"
    return state_of(module), ""


def state_of(model: nn.Module, parked: bool = False) -> Sharded:
    """`parked`: the caller needs none of its bytes."""
    state: Sharded | None = vars(model).get(ATTRIBUTE) or vars(unwrapped(model)).get(ATTRIBUTE)
    if state is None:
        raise ValueError("This model is not sharded; call zeor.shard(model, optimizer) first.")
    if not parked:
        state.engine.announcer.check_here("A verb of zeor was called")
    return state


def engine_of(model: Any) -> Engine:
    """Of a sharded model, or of a `zeor.optim` optimizer, which is its own."""
    if isinstance(model, Optimizer):
        stepper = getattr(model, "_zeor", None)
        if stepper is None:
            raise ValueError(
                f"{type(model).__name__} is a torch optimizer; give the sharded model, or make it by zeor.optim."
            )
        engine: Engine = stepper.engine
        return engine
    return state_of(model).engine
