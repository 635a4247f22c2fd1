"""A running job whose plan is changed goes on in the bits of one that was started so from a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests import offloads
from tests.offloads import CHUNK
from tests.parity.models import Setting, placed
from zeor import Offload

MORE = 2


def at(stage: tuple[int, int]) -> dict[str, Any]:
    return placed(Setting(stage, shape=(2, 2)))


# On four ranks.
PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "0": lambda: {"stage": 0, "mesh": None},
    "1": lambda: {"stage": 1, "mesh": None},
    "2": lambda: {"stage": 2, "mesh": None},
    "3": lambda: {"stage": 3, "mesh": None},
    "3 inside, 1 across": lambda: at((3, 1)),
    "0 inside, 2 across": lambda: at((0, 2)),
    "host": lambda: {"stage": 3, "mesh": None, "offload": Offload(chunk=CHUNK)},
    "bf16": lambda: {"stage": 3, "mesh": None, "precision": "bf16"},
    "small moments": lambda: {"stage": 2, "mesh": None, "precision": "bf16", "moments": "bf16"},
    "int8 moments": lambda: {**at((3, 1)), "moments": "int8"},
}
REST = {"offload": None, "precision": "fp32", "moments": "exact"}


def chosen(name: str) -> dict[str, Any]:
    return {**REST, **PLANS[name]()}


def taken(model: nn.Module, optimizers: list[torch.optim.Optimizer], first: int, count: int) -> list[float]:
    return [offloads.one_step(model, optimizers, step, "clip") for step in range(first, first + count)]


def at_rest(model: nn.Module) -> dict[str, int]:
    return {role: nbytes for role, nbytes in zeor.report(model).items() if role != "transient_peak"}


def both(folder: str, old: str, new: str, make: Callable = offloads.adamw) -> None:
    model, optimizers = offloads.made(make, **chosen(old))
    taken(model, optimizers, 0, 3)
    zeor.save(folder, model, optimizers, step=3, keep=1)
    params = dict(model.named_parameters())
    zeor.replan(model, optimizers, **chosen(new))
    assert all(param is params[name] for name, param in model.named_parameters())
    found = offloads.left(model)
    losses = taken(model, optimizers, 3, MORE)

    other, others = offloads.made(make, **chosen(new))
    taken(other, others, 100, 1)
    zeor.load(folder, other, others)
    offloads.same(found, offloads.left(other), (old, new, "at once"))
    assert losses == taken(other, others, 3, MORE), (old, new)
    offloads.same(offloads.left(model), offloads.left(other), (old, new, "later"))
    assert at_rest(model) == at_rest(other), (old, new)


def each_pair(folder: str, pairs: list[tuple[str, str]]) -> None:
    for old, new in pairs:
        both(folder, old, new)


PAIRS = list(itertools.permutations(PLANS, 2))


@pytest.mark.long
def test_between_two_plans(ranks: Callable, tmp_path: Path) -> None:
    """Each plan is left once and taken up once."""
    names = list(PLANS)
    ranks(each_pair, 4, str(tmp_path), list(zip(names, [*names[3:], *names[:3]])), timeout=240)


@pytest.mark.whole
@pytest.mark.parametrize("old", PLANS)
def test_between_any_two_plans(ranks: Callable, tmp_path: Path, old: str) -> None:
    ranks(each_pair, 4, str(tmp_path), [pair for pair in PAIRS if pair[0] == old], timeout=280)
