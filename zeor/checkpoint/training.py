"""`zeor.save` and `zeor.load`: a training run, as one folder that any number of ranks can load.

Thin: they find out what belongs to the run and hand over to save.py and load.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeor.checkpoint import load as loading
from zeor.checkpoint import save as saving
from zeor.checkpoint.load import Loaded
from zeor.checkpoint.save import Run
from zeor.runtime.sharded import ATTRIBUTE


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    keep: int | None = 3,
) -> Path:
    """Write a checkpoint of a sharded run into `folder`; every rank calls it. Returns where it is.

    It appears as `folder/step-...` at once and whole, or not at all: a rank that dies, a full disk or a lost mount
    leaves what was there before, and raises zeor.CheckpointError on every other rank. No pickle is written.

    step    of the run; the latest checkpoint of a folder is the one with the largest.
    extra   numbers, strings, lists, dicts, tensors, or objects with a state_dict() (schedulers, scalers, zeor.ema):
            rank 0's.
    data    a loader with a state_dict(): each rank's position.
    keep    how many checkpoints stay in the folder; None: all.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"zeor.save(step={step!r}): give the number of steps taken, 0 or more.")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"zeor.save(keep={keep!r}): give how many checkpoints stay, at least 1, or None for all.")
    run = run_of(model, optimizer)
    return saving.write(run, saving.collect(run, extra, data), Path(folder), step, keep)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    strict: bool = True,
) -> Loaded:
    """Load the latest checkpoint of `folder`, or the one it is, into a sharded run of any world, stage and precision.

    Parameters, masters, optimizer state, groups and buffers come back in every bit; random generators too where the
    world is the same. `extra` and `data`: objects to load what was saved under the same names into. Everything is
    verified before anything changes; what is wrong raises zeor.CheckpointError on every rank. strict=False loads what
    fits and lists the rest.
    """
    return loading.load(run_of(model, optimizer), Path(folder), extra, data, strict)


def run_of(model: nn.Module, optimizer: Any) -> Run:
    """The run a model and its optimizers are: sharded together, or a plain model with a drop-in optimizer."""
    state = vars(model).get(ATTRIBUTE)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    if state is not None:
        if state.shown:
            raise RuntimeError("zeor.save and zeor.load cannot run inside zeor.full_params; close that first.")
        known = {id(stepper.optimizer): stepper for stepper in state.steppers}
        for each in given:
            if id(each) not in known:
                raise ValueError(f"This {type(each).__name__} was not sharded with the model; zeor.shard both first.")
        return Run(model, state.engine, [known[id(each)] for each in given] if given else state.steppers)
    steppers = [getattr(each, "_zeor", None) for each in given]
    if len(steppers) != 1 or steppers[0] is None:
        raise ValueError(
            "This model is not sharded; call zeor.shard(model, optimizer) first, or give the one zeor.optim optimizer "
            "that trains it."
        )
    return Run(model, steppers[0].engine, steppers)
