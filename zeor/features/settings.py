"""The settings of optimizer groups (learning rates and the like): the same on all ranks, or a sentence says where not.

Ranks whose settings drift apart (a scheduler driven by a local loss) update their slices by different rules, and
nothing shows it. Nor does it where a rank has skipped a step or taken one more. So a fingerprint of the settings and of
how often step() was called travels with the exchange that ends every backward; where it differs, the ranks send what it
was made of. Only numbers are looked at. This module also writes settings as JSON and takes them over, for `join`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.comm.agree import exchange, first_difference
from zeor.comm.axes import Axes
from zeor.step.extension import COMPARED, Extension
from zeor.step.order import NOTHING


class Settings(Extension):
    """The settings of all optimizers of one engine."""

    riding = COMPARED

    def __init__(self, axes: Axes, optimizers: list[Optimizer]):
        self._axes, self._optimizers = axes, optimizers
        self.silent = False  # this rank only follows the others: what it has does not count
        self._differ = False

    @property
    def told_count(self) -> int:
        return 2 if self._axes.everyone.size > 1 else 0

    def told(self) -> list[int]:
        if self._axes.everyone.size == 1:
            return []
        number = NOTHING if self.silent else fingerprint(self._optimizers, self._axes.everyone.steps)
        return [number, number if self.silent else -number]

    def heard(self, largest: Sequence[int]) -> None:
        self._differ = bool(largest) and largest[0] != -largest[1] and not self._axes.everyone.fake

    def end_backward(self) -> None:
        """After `heard`, on every rank: raise where they differ."""
        if not self._differ:
            return
        self._differ = False
        mine = None if self.silent else [str(self._axes.everyone.steps), *describe(self._optimizers)]
        everyone = exchange(self._axes.everyone, mine, "comparison of the ranks' optimizer settings")
        told = [rank for rank, lines in enumerate(everyone) if lines is not None]
        odd = next((rank for rank in told if everyone[rank] != everyone[told[0]]), None)
        if odd is not None:
            first, (steps, *_), (its_steps, *_) = told[0], everyone[told[0]], everyone[odd]
            if steps != its_steps:
                raise RuntimeError(
                    f"Rank {first} has called step() {steps} times and rank {odd} {its_steps} times, so their parts of "
                    "the weights are of different steps; load the last checkpoint, and skip a step on every rank or on "
                    "none (nonfinite='skip' does so for gradients that are not finite)."
                )
            found = first_difference(everyone[first], everyone[odd], odd, first)
            raise ValueError(
                f"The ranks' optimizer settings differ: {found}; each rank updates its part of every parameter, so "
                "set the same on all (drive a scheduler by a number that all ranks share, such as zeor.total gives)."
            )


def fingerprint(optimizers: Sequence[Optimizer], steps: int = 0) -> int:
    """31 bits; numbers hash alike in every process, text would not."""
    found: list[Any] = [steps]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += [value for value in group.values() if type(value) in _PLAIN]
            found += [n for name, value in group.items() if type(value) not in _SEEN for n in _number(name, value)]
    return hash(tuple(found)) & 0x7FFFFFFF


def describe(optimizers: Sequence[Optimizer]) -> list[str]:
    return [
        f"{name}={number} in group {position} of optimizer {which} ({type(optimizer).__name__})"
        for which, optimizer in enumerate(optimizers)
        for position, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        for number in ([value] if type(value) in _PLAIN else _number(name, value))
    ]


_PLAIN = frozenset((float, int, bool))
_SEEN = _PLAIN | {str, type(None)}  # text and None are no numbers


def _number(name: str, value: Any) -> list[Any]:
    """What there is to compare of a setting that is no plain number: at most one thing."""
    if isinstance(value, (tuple, list)) and name != "params":
        return [tuple(value)] if all(type(entry) in _PLAIN for entry in value) else []
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return [value.item()]  # one on an accelerator would have to be waited for
    return []


# ---- as JSON


def encode(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every setting of an optimizer's groups that JSON can hold, but for the parameters."""
    return [{name: _encode(v) for name, v in group.items() if _can_travel(name, v)} for group in groups]


def _can_travel(name: str, value: Any) -> bool:
    if name == "params":
        return False
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (tuple, list)):
        return all(_can_travel(name, entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"number": value.item()}
    return [_encode(entry) for entry in value] if isinstance(value, (tuple, list)) else value


@torch.no_grad()
def take_over(groups: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]]) -> None:
    """Make the groups' settings those another rank encoded."""
    for group, wanted in zip(groups, settings):
        for name, value in wanted.items():
            group[name] = _decode(value, group.get(name))


def _decode(value: Any, before: Any) -> Any:
    if isinstance(value, dict):
        if isinstance(before, Tensor):
            before.fill_(value["number"])
            return before
        return value["number"]
    if isinstance(value, list):
        known = before if isinstance(before, (tuple, list)) and len(before) == len(value) else [None] * len(value)
        entries = [_decode(entry, was) for entry, was in zip(value, known)]
        return tuple(entries) if isinstance(before, tuple) else entries
    return value
