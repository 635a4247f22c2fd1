"""The user's optimizer object stays theirs: some of its methods are replaced on the instance, and put back."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from zeor.optim.parts.methods import own_methods, replacements

if TYPE_CHECKING:
    from zeor.optim.stepper import Stepper

REPLACED = ("step", "state_dict", "load_state_dict", "add_param_group")


def patch(stepper: Stepper) -> Callable | None:
    """Returns the step that stood on the instance before, a scheduler's, say."""
    optimizer, before = stepper.optimizer, stepper.optimizer.__dict__.get("step")

    def step(_: Optimizer, closure: Callable | None = None) -> Any:
        if before is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return stepper.step(closure)

    if before is not None and hasattr(before, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    methods: dict[str, Callable[..., Any]] = {
        "step": step,
        "state_dict": lambda _: stepper.state_dict(),
        "load_state_dict": lambda _, state_dict: stepper.load_state_dict(state_dict),
        "add_param_group": lambda _, group: stepper.add_param_group(group),
        **replacements(stepper),
    }
    for name, method in methods.items():
        optimizer.__dict__[name] = types.MethodType(method, optimizer)
    return before


def unpatch(optimizer: Optimizer, before: Callable | None) -> None:
    for name in (*REPLACED, *own_methods(type(optimizer))):
        optimizer.__dict__.pop(name, None)
    if before is not None:
        optimizer.__dict__["step"] = before
