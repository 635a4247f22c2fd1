"""Optimizers of others that keep numbers in their groups, or sums over all parameters: pytorch_optimizer, prodigyopt.

Numbers in the groups move on once per step and alike on every rank, whoever owns what. An optimizer whose step size
comes from sums over all parameters runs where every rank updates everything, and is refused elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops
from tests.optim import stages

STEPS, D0 = 5, 1e-3


def make(name: str, model: nn.Module) -> Optimizer:
    package, _, name = name.partition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(__import__(package), name)
        if name == "Shampoo":
            return found(model.parameters(), lr=0.05, momentum=0.5)
        if name in ("Prodigy", "DAdaptAdam", "DAdaptLion"):
            return found(model.parameters(), d0=D0)
        return found(model.parameters(), lr=0.05)


def numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if type(v) in (int, bool)} for group in optimizer.param_groups]


def train(model: nn.Module, optimizer: Optimizer, steps: int, loss: Callable) -> list[Any]:
    """The groups' numbers after each step."""
    seen = []
    for step in range(steps):
        loops.train(model, optimizer, range(step, step + 1), loss)
        seen.append(numbers(optimizer))
    return seen


# ---- counters in groups


def two_groups(name: str, model: nn.Module) -> Optimizer:
    """The second group is so small that most ranks own nothing of it."""
    optimizer = make(name, model)
    (group,) = optimizer.param_groups
    last = group["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.02})
    return optimizer


def check_counters(name: str, build: Callable) -> None:
    plain = loops.net()
    theirs = build(name, plain)
    wanted = train(plain, theirs, STEPS, loops.joint_loss)
    assert any("step" in group or "k" in group for group in wanted[-1]), "it counts in its groups"
    found = {}
    for stage in stages.STAGES:
        model = loops.net()
        optimizer = build(name, model)
        zeor.shard(model, optimizer, stage=stage)
        assert train(model, optimizer, STEPS, loops.own_loss) == wanted
        assert len(optimizer.state) <= len(theirs.state), "toys leave nothing behind"
        with zeor.full_params(model):
            found[stage] = loops.values(model)
        loops.assert_close(found[stage], loops.values(plain), rtol=1e-6, atol=1e-8)
        loops.assert_equal(found[stage], found[0])


COUNTING = ["Shampoo", "CAME", "Lion", "Adan", "Lamb", "NovoGrad"]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", COUNTING)
def test_counters_move_once_per_step_on_every_rank(ranks, name, world):
    ranks(check_counters, world, f"pytorch_optimizer.{name}", make)


@pytest.mark.parametrize("name", ["Shampoo", "Lion", "Adan"])
def test_counters_of_a_group_that_one_rank_owns_alone(ranks, name):
    ranks(check_counters, 3, f"pytorch_optimizer.{name}", two_groups)


def check_options(options: dict[str, Any]) -> list[Any]:
    model = loops.net(torch.float32)
    optimizer = make("pytorch_optimizer.Lion", model)
    zeor.shard(model, optimizer, **options)
    seen = train(model, optimizer, 3, lambda m, s: loops.own_loss(m, s, torch.float32))
    return [group["step"] for groups in seen for group in groups]


@pytest.mark.parametrize("options", [{"release": True}, {"offload": "host"}, {"moments": "bf16"}, {}])
def test_counters_move_whatever_drives_the_step(ranks, options):
    for steps in ranks(check_options, 2, options):
        assert steps == [1, 2, 3]


def check_nothing_to_update(name: str) -> None:
    """As in plain PyTorch, a step without gradients counts, or not."""
    plain, model = loops.net(), loops.net()
    theirs, mine = make(name, plain), make(name, model)
    zeor.shard(model, mine, stage=2)
    for optimizer in (theirs, mine):
        optimizer.step()
    assert numbers(mine) == numbers(theirs)


@pytest.mark.parametrize("name", ["Shampoo", "Lion", "Adan"])
def test_a_step_without_gradients_counts_as_plain_pytorch_counts(ranks, name):
    ranks(check_nothing_to_update, 2, f"pytorch_optimizer.{name}")


# ---- sums over all parameters

SUMS = [
    "prodigyopt.Prodigy", "dadaptation.DAdaptAdam", "dadaptation.DAdaptLion", "pytorch_optimizer.Prodigy",
    "pytorch_optimizer.DAdaptAdam",
]  # fmt: skip


def sharded(name: str, stage: int) -> dict[str, Tensor]:
    model = loops.net()
    optimizer = make(name, model)
    zeor.shard(model, optimizer, stage=stage)
    train(model, optimizer, 12, lambda m, _: loops.own_loss(m, 0))
    with zeor.full_params(model):
        return loops.values(model)


def check_sums(name: str, stages: tuple[int, ...]) -> None:
    plain = loops.net()
    theirs = make(name, plain)
    train(plain, theirs, 12, lambda m, _: loops.joint_loss(m, 0))  # one direction: the step size grows
    assert theirs.param_groups[0]["d"] != D0, "the step size has moved"
    for stage in stages:
        loops.assert_close(sharded(name, stage), loops.values(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_all_parameters_where_every_rank_updates_everything(ranks, name):
    ranks(check_sums, 1, name, (0, 1, 2, 3))
    ranks(check_sums, 2, name, (0,))


def check_refused(name: str, stage: int) -> str:
    model = loops.net()
    optimizer = make(name, model)
    with pytest.raises(ValueError) as caught:
        zeor.shard(model, optimizer, stage=stage)
    train(model, optimizer, 1, loops.own_loss)  # model and optimizer are plain
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_all_parameters_are_refused_where_updates_are_cut(ranks, name, stage):
    first, second = ranks(check_refused, 2, name, stage)
    assert first == second
    assert first.startswith(name.partition(".")[2]) and "by what it finds in the others" in first and "stage=0" in first


# ---- looks at matrices only now and then


def check_adamp() -> None:
    stages.check(lambda model: make("pytorch_optimizer.AdamP", model), steps=STEPS)


def test_what_looks_at_matrices_only_at_some_gradients_is_found(ranks):
    ranks(check_adamp, 2)
