"""Numbers that an optimizer keeps in its groups and moves on by itself: a count of steps, a sum of weights.

A step of the user's may be several calls of the optimizer's own step, and none on a rank that owns nothing of a
call. The numbers must move on once per step all the same, and alike on every rank. So, where the probe has seen a
group's numbers move:

- Several calls per step: each begins with the numbers as they were (`held`), and one more call, over a toy in
  every group, moves them on.
- One call per step: where this rank has nothing in a group, a toy stands in.

A toy has a gradient where some parameter of the group has one, so that an optimizer which passes over groups without
gradients passes over this one too. Its state is thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOY_SHAPE = (6, 8)  # a matrix, as the probe's: any optimizer that could be tried takes it


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group as they are now: plain ones, tuples and lists of them, and tensors of one element."""
    found = {name: value for name, value in group.items() if name != "params" and _is_number(value)}
    return {name: v.detach().clone() if isinstance(v, Tensor) else copy.copy(v) for name, v in found.items()}


def same_numbers(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(_same(some[name], others[name]) for name in some)


@contextmanager
def held(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Whatever happens to the numbers of these groups inside is undone."""
    before = [numbers(group) for group in groups]
    try:
        yield
    finally:
        for group, kept in zip(groups, before):
            _put_back(group, kept)


@torch.no_grad()
def _put_back(group: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in numbers(group).keys() - kept.keys():
        del group[name]
    for name, value in kept.items():
        now = group.get(name)
        if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
            now.copy_(value)  # the user's own object, which a scheduler may write to
        elif not _same(now, value):
            group[name] = value


def toy(like: Tensor, has_gradient: bool) -> nn.Parameter:
    """A small parameter of the dtype and on the device of another."""
    made = nn.Parameter(torch.ones(TOY_SHAPE, dtype=like.dtype, device=like.device))
    if has_gradient:
        made.grad = torch.ones_like(made)
    return made


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (tuple, list)):
        return all(isinstance(entry, (bool, int, float)) for entry in value)
    return isinstance(value, (bool, int, float))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))
