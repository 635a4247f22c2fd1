"""An optimizer that zeor does not drive must not step on sharded parameters.

It would change this rank's copy of the weights, by this rank's gradients, past the masters: nothing would fail, and
the ranks would train different models. Parameters know that they are sharded, and torch calls one hook before every
step of every optimizer: `watch_steps` installs it, once per process.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zeor.memory.param import held_of

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
