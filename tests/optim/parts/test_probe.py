"""What an optimizer is, found by trying it: every class of torch.optim, and hand-written ones torch does not have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zeor
from tests import loops
from zeor.optim import _known
from zeor.optim.parts.probe import Kind, probe, probe_groups

ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
WHOLE = {"Adafactor", "Muon"}  # a row's or a matrix's update depends on all of it
CANNOT = {"LBFGS": "closure", "SparseAdam": "dense gradients"}


class CountingSGD(Optimizer):
    """SGD whose rate falls with a counter that lives in the group, so one call is not two."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["count"])


class NormedSGD(Optimizer):
    """Divides by the gradient's norm: not element-wise."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad / param.grad.norm(), alpha=-group["lr"])


def kind_of(make: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Kind:
    optimizer = make([nn.Parameter(torch.rand(4, 4))], **settings)
    return probe(optimizer, torch.device("cpu"), dtype)


def test_every_optimizer_of_torch_is_expected_here():
    assert set(_known()) == ELEMENTWISE | WHOLE | set(CANNOT)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise_optimizers_are_found(name):
    assert kind_of(getattr(torch.optim, name)) == Kind(True, True)
    assert kind_of(getattr(torch.optim, name), torch.float64, lr=0.01, foreach=True) == Kind(True, True)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "fused": True}),
        ("AdamW", {"fused": True}),
        ("Adam", {"amsgrad": True, "fused": True}),
        ("Adagrad", {"fused": True}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Adam", {"lr": torch.tensor(0.1)}),
    ],
)
def test_settings_do_not_change_what_an_optimizer_is(name, settings):
    assert kind_of(getattr(torch.optim, name), **settings) == Kind(True, True)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_optimizers_that_need_whole_matrices_are_found(name):
    kind = kind_of(getattr(torch.optim, name))
    assert not kind.elementwise and kind.failed is None


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_optimizers_that_cannot_be_tried_say_why(name):
    kind = kind_of(getattr(torch.optim, name))
    assert not kind.elementwise and kind.failed is not None and CANNOT[name] in kind.failed


def test_hand_written_optimizers_are_found():
    assert kind_of(CountingSGD) == Kind(elementwise=True, separable=False)
    assert kind_of(NormedSGD) == Kind(elementwise=False, separable=True)


def test_the_users_optimizer_is_not_touched():
    params = [nn.Parameter(torch.rand(3, 2)), nn.Parameter(torch.rand(2))]
    optimizer = torch.optim.Adam(params, lr=torch.tensor(0.1))
    params[0].grad = torch.ones(3, 2)
    optimizer.step()
    values, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    probe(optimizer, torch.device("cpu"), torch.float32)
    counter = CountingSGD(params)
    probe(counter, torch.device("cpu"), torch.float32)
    assert counter.param_groups[0]["count"] == 0
    assert all(torch.equal(a, b) for a, b in zip(values, params, strict=True))
    assert optimizer.param_groups[0]["params"][0] is params[0]
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"] and list(now["state"]) == list(state["state"])
    assert all(torch.equal(v, now["state"][0][k]) for k, v in state["state"][0].items())


# ---- what shard() does with each kind


def check_exact(make: Any, stage: int) -> None:
    plain, model = loops.net(), loops.net()
    theirs, mine = make(plain.parameters()), make(model.parameters())
    zeor.shard(model, mine, stage=stage)
    loops.train(plain, theirs, range(4))
    loops.train(model, mine, range(4), loops.own_loss)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain))
    assert mine.param_groups[0].get("count") == theirs.param_groups[0].get("count")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_counter_in_the_group_counts_once_per_step(ranks, stage):
    ranks(check_exact, 2, CountingSGD, stage)


def test_a_world_of_one_runs_whole_matrix_optimizers_at_every_stage():
    for stage in (0, 1, 2, 3):
        check_exact(NormedSGD, stage)
        check_exact(torch.optim.Adafactor, stage)


# ---- what a small toy of one group would not show


class BlockScaledSGD(Optimizer):
    """Scales large matrices by their rows, and small ones not at all."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                scale = param.grad.norm(dim=1, keepdim=True) if param.dim() > 1 and min(param.shape) >= 128 else 1.0
                param.add_(param.grad / scale, alpha=-group["lr"])


class Switched(NormedSGD):
    """Normed or plain by a setting of its group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                scale = param.grad.norm() if group["normed"] else 1.0
                param.add_(param.grad / scale, alpha=-group["lr"])


def test_what_looks_at_rows_of_large_matrices_only_is_found():
    assert kind_of(BlockScaledSGD) == Kind(elementwise=False, separable=True)


def test_a_learning_rate_of_zero_hides_nothing():
    assert not kind_of(NormedSGD, lr=0.0).elementwise
    assert not kind_of(torch.optim.Adafactor, lr=torch.tensor(0.0)).elementwise


def test_each_group_is_tried_for_itself():
    groups = [{"params": [nn.Parameter(torch.rand(3, 3))], "normed": on} for on in (False, True, False)]
    kinds = probe_groups(Switched(groups), torch.device("cpu"), torch.float32)
    assert [kind.elementwise for kind in kinds] == [True, False, True]


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "Adagrad", "NAdam"])
def test_a_trained_optimizer_can_be_tried_whatever_its_state(name):
    param = nn.Parameter(torch.rand(3, 2))
    optimizer = getattr(torch.optim, name)([param])
    param.grad = torch.rand(3, 2)
    optimizer.step()
    kind = probe(optimizer, torch.device("cpu"), torch.float32)
    assert kind.failed is None and kind.elementwise == (name in ELEMENTWISE)
