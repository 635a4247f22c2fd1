"""`zeor.optim.NAME` against zeor.shard in bits and against plain PyTorch in float64 within 1e-10.

The two cut the model into other units, so a parameter lies in other slices; sums of gradients and
element-wise updates do not depend on that, so without clipping they are the same bits. A norm is summed slice by
slice, so with clipping they agree to rounding. Loops and models are those of the other parity tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests.parity import test_plain as plain
from tests.parity.models import (
    MAX_NORM,
    SELECTIONS,
    Odd,
    Run,
    Setting,
    build_model,
    joint_batches,
    largest,
    loss_of,
    net,
    part,
    product,
    reference,
    same_bits,
    train,
)

WORLDS = (1, 2, 3, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05},
}
FACTORS: dict[str, tuple] = {
    "stage": (1, 2),
    "micro": ("1", "3"),
    "clip": ("none", "stock"),
    "checkpoint": ("none", "plain", "reentrant"),
    "optimizer": tuple(OPTIONS),
}
ZERO: dict[str, Callable[[nn.Module, Any], None]] = {
    "to None": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "by the model to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


def drop_in(name: str, params: Any, stage: int) -> torch.optim.Optimizer:
    return getattr(zeor.optim, name)(params, **OPTIONS[name], stage=stage)


def train_drop_in(setting: Setting, zero: str, build: Callable = net) -> Run:
    """The loop of models.train in a script that has no other line of zeor."""
    model = build_model(setting, build)
    optimizer = drop_in(setting.optimizer, model.parameters(), setting.stage)
    losses, norms = [], []
    for batches in joint_batches(dist.get_world_size(), int(setting.micro[0])):
        for tokens, targets in batches:
            loss = loss_of(model, part(tokens), part(targets))
            loss.backward()
            losses.append(loss.item())
        if setting.clip != "none":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        ZERO[zero](model, optimizer)
    return Run({name: p.detach().clone() for name, p in model.named_parameters()}, losses, norms)


def compare_with_shard(settings: list[Setting], zero: str) -> None:
    for setting in settings:
        got, want = train_drop_in(setting, zero), train(setting)
        if setting.clip == "none":
            assert not same_bits(got, want), f"{setting}, zero {zero}: {same_bits(got, want)}"
        else:
            assert largest(got, want) <= 1e-6, f"{setting}, zero {zero}: off by {largest(got, want):.2e}"


@pytest.mark.parametrize("zero", ZERO)
def test_same_bits_as_shard(ranks, zero):
    # Optimizers that divide by the gradient blow up a last bit of the norm, so with those nothing is clipped.
    settings = product(stage=(1, 2), micro=("1", "3"), clip=("none", "stock"), optimizer=("SGD",))
    if zero == "to None":
        settings += product(stage=(1, 2), micro=("1", "3"), optimizer=("AdamW", "Adagrad"))
    ranks(compare_with_shard, 2, settings, zero)


def odd(setting: Setting) -> nn.Module:
    return Odd(dist.get_world_size())


def compare_with_plain(settings: list[Setting], build: Callable) -> None:
    zeros = list(ZERO)
    for number, setting in enumerate(settings):
        zero = zeros[number % len(zeros)]
        got, want = train_drop_in(setting, zero, build), reference(setting, dist.get_world_size(), build)
        assert largest(got, want) <= 1e-10, f"{setting}, zero {zero}: off by {largest(got, want):.2e}"


@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_plain_pytorch(ranks, world, select):
    # Adagrad divides by the gradient itself: it blows up the rounding of gradients that are zero, as key biases' are.
    factors = {**FACTORS, "optimizer": ("AdamW", "SGD"), "precision": ("fp64",)}
    ranks(compare_with_plain, world, select(world, WORLDS, **factors), net)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_odd_sizes(ranks, world):
    settings = product(stage=(1, 2), micro=("1", "3"), optimizer=("SGD", "AdamW"), clip=("stock",), precision=("fp64",))
    ranks(compare_with_plain, world, settings, odd)


# ---- the loops of test_plain


def run_loop(loop: plain.Loop, build: Callable[[], nn.Module], stage: int) -> Run:
    torch.manual_seed(11)
    model = build().double()
    optimizer = zeor.optim.AdamW(model.parameters(), lr=0.02, stage=stage)
    seen = []
    for step in range(4):
        seen.append(loop(model, optimizer, [plain.parts_of(step, dist.get_world_size())[dist.get_rank()]]))
    return Run({name: p.detach().clone() for name, p in model.named_parameters()}, seen, [])


def compare_loop(loop: plain.Loop, build: Callable[[], nn.Module] = plain.Mlp) -> None:
    want = plain.run_loop(loop, build, None)
    for stage in (1, 2):
        got = run_loop(loop, build, stage)
        assert largest(got, want) <= 1e-10, f"stage {stage}: off by {largest(got, want):.2e}"
        if any(seen is not None for seen in want.losses):
            assert got.losses == want.losses, f"stage {stage}: saw {got.losses}, plain {want.losses}"


def step_without_gradients(model: nn.Module, optimizer: Any, parts: plain.Parts) -> None:
    """After zero_grad, by whoever, a step changes nothing, not even by weight decay."""
    plain.mse(model, parts).backward()
    optimizer.step()
    model.zero_grad()
    optimizer.step()
    plain.mse(model, parts).backward()
    for param in model.parameters():
        param.grad = None
    optimizer.step()


@pytest.mark.parametrize("loop", [*plain.LOOPS, step_without_gradients], ids=lambda loop: loop.__name__)
def test_loop(ranks, loop):
    ranks(compare_loop, 2, loop, timeout=60)


@pytest.mark.parametrize("name", plain.MODELS)
def test_model(ranks, name):
    ranks(compare_loop, 2, plain.plain_step, plain.MODELS[name], timeout=60)


@pytest.mark.parametrize("name", plain.PATHS)
def test_ranks_take_different_paths(ranks, name):
    ranks(plain.impatiently, 2, compare_loop, plain.along(plain.PATHS[name]), plain.Path, timeout=60)
