"""What an optimizer keeps of a parameter, so that what is loaded can be doubted. Found by trying it, as in probe.py.

A copy of the optimizer takes a few steps over a toy, with the settings that are to be loaded. Where state lies, and of
which kind it is, is seen; the user's optimizer is not touched. A first gradient of zeros is tried too: some optimizers
keep something else then.

Note [What a toy shows]
~~~~~~~~~~~~~~~~~~~~~~~
The toy has the shape of what this rank steps on, so that state of a shape of its own (a row's statistics, blocks of
eight-bit numbers) can be compared exactly. What is large is tried smaller, with as many dimensions, and then only
the number of dimensions of such state is known. torch's own optimizers keep counters and tensors like the parameter,
Adafactor excepted: for them a few elements show everything, and one trial serves all shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.optim.parts.pieces import Key, put_leaf
from zeor.optim.parts.probe import state_from_constructor, states_of_steps

TRIED_NUMEL = 1 << 16
STEPS = 3
_SIDE = 256  # of a large matrix, tried smaller: see Note [The larger toy] in probe.py


@dataclass(frozen=True)
class Expected:
    """`shape`: the toy's. `seen`: by place, one value of each kind that lay there. `always`: there after every step."""

    shape: tuple[int, ...]
    is_exact: bool  # the toy's shape is that of what is stepped on
    seen: Mapping[Key, Sequence[Any]]
    always: frozenset[Key]


def is_stock(optimizer: Optimizer) -> bool:
    """torch's own, or zeor's drop-in of one: what it keeps depends on settings and shapes alone."""
    own = getattr(type(optimizer), "stock_class", type(optimizer))
    return own.__module__.startswith("torch.optim.")


def toy_shape(optimizer: Optimizer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """See Note [What a toy shows]."""
    if is_stock(optimizer) and type(optimizer).__name__ != "Adafactor":
        return tuple(min(side, 2) for side in shape)
    if torch.Size(shape).numel() <= TRIED_NUMEL:
        return shape
    if len(shape) == 1:
        return (TRIED_NUMEL,)
    smaller = [min(side, _SIDE) for side in shape]
    while torch.Size(smaller).numel() > TRIED_NUMEL:
        largest = smaller.index(max(smaller))
        smaller[largest] //= 2
    return tuple(smaller)


def expect(
    optimizer: Optimizer, group: int, settings: Mapping[str, Any], like: Tensor, device: torch.device
) -> Expected | str:
    """What the optimizer keeps of something like `like` with these settings of a group; or why it takes no step."""
    shape = toy_shape(optimizer, tuple(like.shape))
    with _generators_kept(device):
        values, *grads = (_toy(shape, like.dtype, device, seed) for seed in range(STEPS + 1))
        try:
            found = _states(optimizer, group, settings, values, grads)
        except Exception as error:  # an optimizer may raise anything
            return _words(error)
        with suppress(Exception):  # gradients of zeros are no reason to refuse anything
            found += _states(optimizer, group, settings, values, [torch.zeros_like(values), *grads[1:]])
    seen: dict[Key, list[Any]] = {}
    for places in found:
        for key, value in places:
            seen.setdefault(key, []).append(value)
    always = frozenset.intersection(*(frozenset(key for key, _ in places) for places in found))
    return Expected(shape, shape == tuple(like.shape), seen, always)


def try_step(
    optimizer: Optimizer,
    group: int,
    settings: Mapping[str, Any],
    state: Iterable[tuple[Key, Any]],
    like: Tensor,
    device: torch.device,
) -> str:
    """Why the optimizer cannot go on from this state of a toy, or nothing."""
    held: dict[str, Any] = {}
    for key, value in state:
        put_leaf(held, key, value.clone() if isinstance(value, Tensor) else value)
    shape = toy_shape(optimizer, tuple(like.shape))
    with _generators_kept(device):
        values, grad = (_toy(shape, like.dtype, device, seed) for seed in range(2))
        try:
            states_of_steps(optimizer, group, dict(settings), values, [grad], held)
        except Exception as error:  # as above
            return _words(error)
    return ""


def _states(
    optimizer: Optimizer, group: int, settings: Mapping[str, Any], values: Tensor, grads: list[Tensor]
) -> list[list[tuple[Key, Any]]]:
    try:
        return states_of_steps(optimizer, group, dict(settings), values, grads)
    except Exception as error:  # its constructor may have made what its step looks for
        own = {**optimizer.param_groups[group], **settings}
        try:
            made = state_from_constructor(optimizer, own, values)
            return states_of_steps(optimizer, group, dict(settings), values, grads, made)
        except Exception:
            raise error from None


def _toy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).sub(0.5).to(device, dtype)


def _words(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first[:200]}"


def _generators_kept(device: torch.device) -> AbstractContextManager[Any]:
    """Some optimizers draw random numbers, which the run must not miss."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
