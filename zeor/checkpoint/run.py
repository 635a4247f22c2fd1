"""The training run that a checkpoint holds: a model, its names, its optimizers, and what the run came from."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from zeor.checkpoint.files.branches import Lineage
from zeor.checkpoint.weights.live import LiveModel
from zeor.checkpoint.weights.naming import Naming, naming_of, state_around
from zeor.step.engine import Engine

_lineages: weakref.WeakKeyDictionary[Engine, Lineage] = weakref.WeakKeyDictionary()


def carry_over(old: Engine, new: Engine) -> None:
    """The same run goes on with another engine."""
    if old in _lineages:
        _lineages[new] = _lineages[old]


class TrainingRun(LiveModel):
    def __init__(self, model: nn.Module, engine: Engine, naming: Naming, steppers: Sequence[Any]):
        super().__init__(engine, naming)
        self.steppers = steppers
        self.names, self.aliases, self.buffers = naming.params, naming.aliases, naming.buffers
        self.stage = engine.plan.stage
        self.lineage = _lineages.setdefault(engine, Lineage())
        # Beside a drop-in optimizer a model may have parameters that nobody shards.
        sharded = {id(slot.param) for slot in self.slots}
        self.plain_params = {name: param for name, param in model.named_parameters() if id(param) not in sharded}


def run_of(model: nn.Module, optimizer: Any) -> TrainingRun:
    """The run a model and its optimizers are: sharded together, or a plain model with a drop-in optimizer."""
    state = state_around(model)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    if state is not None:
        if state.shown:
            raise RuntimeError("zeor.save and zeor.load cannot run inside zeor.full_params; close that first.")
        known = {id(stepper.optimizer): stepper for stepper in state.steppers}
        for each in given:
            if id(each) not in known:
                raise ValueError(f"This {type(each).__name__} was not sharded with the model; zeor.shard both first.")
        chosen = [known[id(each)] for each in given] if given else state.steppers
        return TrainingRun(model, state.engine, naming_of(model, state), chosen)
    steppers = [getattr(each, "_zeor", None) for each in given]
    if len(steppers) != 1 or steppers[0] is None:
        raise ValueError(
            "This model is not sharded; call zeor.shard(model, optimizer) first, or give the one zeor.optim optimizer "
            "that trains it."
        )
    return TrainingRun(model, steppers[0].engine, naming_of(model, None), steppers)
