"""Optimizers that zeor does not drive, on parameters of a sharded model: told so before anything is changed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import zeor
from tests import loops
from tests.optim.test_drop_in import ELEMENTWISE
from zeor.optim.parts import checks
from zeor.optim.parts.checks import refuse_optimizers_in_backward

STAGES = (0, 1, 2, 3)


def check_stranger(name: str, stage: int) -> str:
    model = loops.net()
    zeor.shard(model, stage=stage)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    loops.own_loss(model, 0).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    with zeor.full_params(model):
        loops.assert_equal(loops.values(model), loops.values(loops.net()))
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_an_optimizer_that_was_never_given_is_told_to_be(ranks, name, stage):
    for text in ranks(check_stranger, 2, name, stage):
        assert text.startswith(f"{name}.step() was called on parameter 'scale' of a sharded model")
        assert "give it to zeor.shard(model, optimizer)" in text


def check_known(stage: int) -> None:
    model, plain = loops.net(), loops.net()
    zeor.shard(model, stage=stage)
    _, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    loops.train(model, optimizer, range(2), loops.own_loss)
    loops.train(plain, theirs, range(2))  # a plain model beside it is nobody's business
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain))
    loops.own_loss(model, 2).backward()
    with pytest.raises(RuntimeError, match="never given to zeor"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer.step()
    loops.train(plain, theirs, range(2, 3))
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_known_optimizers_and_plain_models_step_on(ranks, stage):
    ranks(check_known, 2, stage)


def test_a_known_optimizer_pays_nothing():
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(1000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks.driven.add(optimizer)
    begin = time.perf_counter()
    for _ in range(1000):
        checks._before_step(optimizer, (), {})
    assert time.perf_counter() - begin < 0.1, "microseconds, whatever it holds"


# ---- _apply_optimizer_in_backward


def test_optimizers_in_backward_are_refused_by_name():
    from torch.distributed.optim import _apply_optimizer_in_backward  # seconds, and warnings

    model = loops.net()
    refuse_optimizers_in_backward(model.named_parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, list(model.head.parameters()), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'head.weight' has an optimizer of its own .* release=True"):
        refuse_optimizers_in_backward(model.named_parameters())


def test_a_drop_in_refuses_optimizers_in_backward():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = loops.net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="_apply_optimizer_in_backward"):
        zeor.optim.SGD(model.parameters(), lr=0.1)
