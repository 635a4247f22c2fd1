"""Every class of torch.optim at every stage: bits between stages, 1e-10 of one process; and those that cannot say why.

Also closures, and an optimizer made before or after shard() with its groups intact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zeor
from tests import loops
from tests.optim import stages
from zeor.optim import _known

# Class, settings: each class in every way it can compute. lr is given where the default moves too little to show.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ASGD": ("ASGD", {"lr": 0.1, "t0": 1}),
    "ASGD foreach": ("ASGD", {"lr": 0.1, "t0": 1, "foreach": True}),
    "Adadelta": ("Adadelta", {"weight_decay": 0.1}),
    "Adadelta foreach": ("Adadelta", {"foreach": True}),
    "Adafactor": ("Adafactor", {"lr": 0.1, "weight_decay": 0.1}),
    "Adafactor foreach": ("Adafactor", {"lr": 0.1, "foreach": True}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adagrad foreach": ("Adagrad", {"lr": 0.1, "foreach": True}),
    "Adagrad fused": ("Adagrad", {"lr": 0.1, "fused": True}),
    "Adam amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "Adam foreach": ("Adam", {"lr": 0.01, "foreach": True, "maximize": True}),
    "Adam fused": ("Adam", {"lr": 0.01, "fused": True, "amsgrad": True}),
    "Adam tensor lr": ("Adam", {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW amsgrad foreach": ("AdamW", {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "AdamW fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "Adamax": ("Adamax", {"lr": 0.01}),
    "Adamax foreach": ("Adamax", {"lr": 0.01, "foreach": True}),
    "NAdam": ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "NAdam foreach": ("NAdam", {"lr": 0.01, "foreach": True}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "RAdam foreach": ("RAdam", {"lr": 0.01, "foreach": True}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "RMSprop foreach": ("RMSprop", {"foreach": True}),
    "Rprop": ("Rprop", {}),
    "Rprop foreach": ("Rprop", {"foreach": True}),
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": True}),
    "SGD fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
}
MATRICES_ONLY = {"Muon"}  # tests/optim/owners/test_owners.py
CANNOT = {
    "LBFGS": "LBFGS could not take a plain step on its own (TypeError: LBFGS.step() missing 1 required positional "
    "argument: 'closure'), so zeor cannot drive it; use an optimizer whose step() needs no closure and dense "
    "gradients, such as AdamW.",
    "SparseAdam": "SparseAdam could not take a plain step on its own (RuntimeError: SparseAdam does not support dense "
    "gradients, please consider Adam instead), so zeor cannot drive it; use an optimizer whose step() needs no closure "
    "and dense gradients, such as AdamW.",
}


def make_by_name(name: str, model: nn.Module) -> Optimizer:
    cls, settings = SETTINGS[name]
    copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
    return getattr(torch.optim, cls)(model.parameters(), **copied)


def test_every_optimizer_of_torch_is_here():
    assert set(_known()) == {cls for cls, _ in SETTINGS.values()} | MATRICES_ONLY | set(CANNOT)


def check_all(name: str) -> None:
    stages.check(lambda model: make_by_name(name, model), 4)


@pytest.mark.parametrize("name", SETTINGS)
def test_it_equals_one_process_at_every_stage(ranks, name):
    ranks(check_all, 2, name)


def check_refused(name: str, stage: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError) as caught:
        zeor.shard(model, getattr(torch.optim, name)(model.parameters()), stage=stage)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_driven_says_why_and_what_to_do(ranks, name, stage):
    assert ranks(check_refused, 2, name, stage) == [CANNOT[name]] * 2


# ---- closures


def check_closure(make: Callable[[nn.Module], Optimizer]) -> None:
    plain_model = loops.net()
    models = [(plain_model, make(plain_model), loops.joint_loss)]
    for stage in stages.STAGES:
        model = loops.net()
        models.append((*zeor.shard(model, make(model), stage=stage), loops.own_loss))
    for model, optimizer, loss_of in models:
        for step in range(3):
            calls = []

            def closure(model=model, optimizer=optimizer, loss_of=loss_of, step=step, calls=calls):
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0 and calls == [step]
    for model, _, _ in models[1:]:
        with zeor.full_params(model):
            loops.assert_close(loops.values(model), loops.values(plain_model))


@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "Adafactor"])
def test_a_closure_runs_once_and_gives_the_loss(ranks, name):
    ranks(check_closure, 2, lambda model: make_by_name(name, model))


# ---- made before or after shard


def with_groups(model: nn.Module) -> Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2, "tag": "decayed"}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}],
        lr=0.01,
    )


def muon_with_groups(model: nn.Module) -> Optimizer:
    found = stages.matrices(model)
    return torch.optim.Muon([{"params": found[:2], "lr": 0.05}, {"params": found[2:], "lr": 0.02}], lr=0.1)


def check_before_or_after(make: Callable[[nn.Module], Optimizer], stage: int) -> None:
    plain_model = loops.net()
    theirs = make(plain_model)
    loops.train(plain_model, theirs, range(3))
    found = []
    for before in (True, False):
        model = loops.net()
        optimizer = make(model) if before else None
        zeor.shard(model, optimizer, stage=stage)
        if optimizer is None:
            _, optimizer = zeor.shard(model, make(model))
        loops.train(model, optimizer, range(3), loops.own_loss)
        names = {id(param): name for name, param in model.named_parameters()}
        wanted = {id(param): name for name, param in plain_model.named_parameters()}
        for mine, group in zip(optimizer.param_groups, theirs.param_groups, strict=True):
            assert [names[id(p)] for p in mine["params"]] == [wanted[id(p)] for p in group["params"]]
            assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in group.items() if k != "params"}
        with zeor.full_params(model):
            found.append(loops.values(model))
            loops.assert_close(found[-1], loops.values(plain_model))
    loops.assert_equal(found[0], found[1])


@pytest.mark.parametrize("make", [with_groups, muon_with_groups])
@pytest.mark.parametrize("stage", stages.STAGES)
def test_an_optimizer_made_before_or_after_shard_keeps_its_groups_and_trains(ranks, stage, make):
    ranks(check_before_or_after, 2, make, stage)
