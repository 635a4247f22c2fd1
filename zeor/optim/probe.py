"""What kind of optimizer is this? Found by trying it, not by its name.

A copy of the optimizer, with the user's settings but toy parameters, takes two steps in different
ways. Cut in two or whole, the same bits: it is element-wise and may work on slices. One call or two,
the same bits: it is separable and may step unit by unit. The user's optimizer is not touched.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = 2


@dataclass(frozen=True)
class Kind:
    """elementwise: an element's update depends on that element's gradient alone. separable: one call over
    all parameters equals one call for each. failed: why it could not be tried at all."""

    elementwise: bool
    separable: bool
    failed: str | None = None


def raw_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's own step, without the wrapper that runs the user's step hooks."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def probe(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> Kind:
    generator = torch.Generator().manual_seed(0)

    def toy(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).sub(0.5).to(device, dtype)

    values, grads = toy(6, 8), [toy(6, 8) for _ in range(STEPS)]
    try:
        whole = _run(optimizer, [values], [[g] for g in grads], together=True)[0]
        # Two parameters of the same kind as the user's: whole ones, so that a matrix optimizer can be tried.
        two, two_grads = [values, values.flip(0)], [[g, g.flip(1)] for g in grads]
        once = _run(optimizer, two, two_grads, together=True)
        twice = _run(optimizer, two, two_grads, together=False)
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return Kind(False, False, f"{type(error).__name__}: {first}")
    try:
        cut = torch.cat(_run(optimizer, _cut(values), [_cut(g) for g in grads], together=True))
        elementwise = torch.equal(whole.reshape(-1), cut)
    except Exception:  # Muon takes matrices only
        elementwise = False
    return Kind(elementwise, separable=all(torch.equal(a, b) for a, b in zip(once, twice)))


def _cut(tensor: Tensor) -> list[Tensor]:
    flat = tensor.reshape(-1)
    return [flat[:19], flat[19:]]


def _run(optimizer: Optimizer, values: list[Tensor], grads: list[list[Tensor]], together: bool) -> list[Tensor]:
    """Step a copy of the optimizer over copies of these values; the results."""
    params = [torch.nn.Parameter(value.clone()) for value in values]
    trial = _copy_of(optimizer)
    for param in params:
        trial.state[param] = _state_like(optimizer, param)
    group = trial.param_groups[0]
    step = raw_step(optimizer)
    for step_grads in grads:
        for param, grad in zip(params, step_grads):
            param.grad = grad.clone()
        for batch in [params] if together else [[param] for param in params]:
            group["params"] = batch
            step(trial)
    return [param.detach() for param in params]


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """The same class and settings, no parameters, no state; the original shares nothing that a step changes."""
    trial = object.__new__(type(optimizer))
    trial.__dict__.update({name: copy.copy(value) for name, value in vars(optimizer).items() if name != "step"})
    trial.state = defaultdict(dict)
    first = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    copied = {key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in first.items()}
    trial.param_groups = [{"params": [], **copied}]
    return trial


def _state_like(optimizer: Optimizer, toy: Tensor) -> dict[str, Any]:
    """What the optimizer's constructor would have made for a toy (Adagrad makes its state there on some versions of
    torch), modelled on the state of a parameter of more than one element, where one can tell sizes apart."""
    for param, state in optimizer.state.items():
        if isinstance(param, Tensor) and state and param.numel() > 1:
            return {key: _like(value, param, toy) for key, value in state.items()}
    return {}


def _like(value: Any, param: Tensor, toy: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    if value.shape == param.shape and value.dim() > 0 and value.numel() > 0:
        return torch.full_like(toy, float(value.reshape(-1)[0]))
    return value.clone()
