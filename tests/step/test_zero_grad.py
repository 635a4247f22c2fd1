"""zero_grad(set_to_none=False) after a backward inside no_sync: gradients are zero, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests import loops


def run(model: nn.Module, optimizer: Any, loss: Callable, no_sync: Callable, how: str, step: bool) -> None:
    """A step, gradients inside no_sync that are set to zero, and two more steps."""
    loops.train(model, optimizer, range(1), loss)
    if how == "kept":
        loss(model, 1).backward()
    with no_sync(model):
        loss(model, 2).backward()
    (model if how == "model" else optimizer).zero_grad(set_to_none=False)
    if step:
        optimizer.step()
    with no_sync(model):
        loss(model, 3).backward()
    loss(model, 4).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def check(stage: int, how: str, step: bool) -> None:
    model, plain = loops.net(), loops.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage)
    run(model, optimizer, loops.own_loss, zeor.no_sync, how, step)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    run(plain, other, loops.joint_loss, lambda model: nullcontext(), how, step)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_from_inside_no_sync_can_be_set_to_zero(ranks, world, stage):
    for how in ("optimizer", "model", "kept"):
        for step in (True, False):
            ranks(check, world, stage, how, step)
