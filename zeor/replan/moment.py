"""Whether this is a moment at which everything of a run may be moved: between two steps, with all its optimizers."""

from __future__ import annotations

from typing import Any

from zeor.access.sharded import Sharded
from zeor.step.grads import State
from zeor.step.passes import inside_backward


def optimizers_of(optimizer: Any) -> list[Any]:
    """What a verb was given, as a list."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def check_moment(state: Sharded, who: str) -> None:
    """RuntimeError where something is under way. `who`: the verb that was called."""
    engine = state.engine
    if state.shown:
        raise RuntimeError(f"{who} was called inside zeor.full_params; call it outside.")
    engine.borrowed.refuse(f"{who} was called")
    if engine.observer.records is not None:
        raise RuntimeError(f"{who} was called inside zeor.trace; leave it first.")
    if engine.forward.walk is not None or inside_backward() or any(each.running for each in state.steppers):
        raise RuntimeError(
            f"{who} was called inside a forward, a backward or a step; call it between steps, after "
            "optimizer.zero_grad()."
        )
    engine.backward.recover()
    for slot in engine.slots:
        grads = slot.lane.grads
        if grads is not None and (grads.has[slot.index] or grads.state is not State.EMPTY):
            raise RuntimeError(
                f"Parameter {slot.name!r} has a gradient, which {who} does not move; call it after "
                "optimizer.step() and optimizer.zero_grad()."
            )


def check_outside_accumulation(state: Sharded, who: str) -> None:
    """RuntimeError inside zeor.no_sync and zeor.accumulate, for what makes another engine: they are the old one's."""
    backward = state.engine.backward
    if not backward.sync or backward.accumulates:
        raise RuntimeError(f"{who} was called inside zeor.no_sync or zeor.accumulate; call it outside.")


def check_optimizers(state: Sharded, given: list[Any], who: str) -> None:
    """ValueError where these are not all of the model's optimizers."""
    known = {id(stepper.optimizer): stepper.optimizer for stepper in state.steppers}
    for each in given:
        if id(each) not in known:
            raise ValueError(f"This {type(each).__name__} was not sharded with the model; give those that were.")
    missing = [type(each).__name__ for key, each in known.items() if key not in {id(one) for one in given}]
    if missing:
        raise ValueError(
            f"The model was sharded with {len(known)} optimizer(s), and {who} was not given its {missing[0]}; "
            "give all of them, as their state moves too."
        )
