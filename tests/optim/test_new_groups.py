"""Groups added to a sharded optimizer: taken, or refused without a trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops

STAGES = (0, 1, 2, 3)


def values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


# ---- refused


class Choosy(torch.optim.SGD):
    """Takes groups whose "norm" is False element by element; with True it needs the norm over all of them."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr)
        self.defaults["norm"] = False
        for group in self.param_groups:
            group["norm"] = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held]).norm() if group["norm"] and held else 1.0
            for param in held:
                param.sub_(param.grad / norm, alpha=group["lr"])


def stranger(model: nn.Module) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]}


def known_twice(model: nn.Module) -> dict[str, Any]:
    return {"params": [model.scale]}


def coupled(model: nn.Module) -> dict[str, Any]:
    return {"params": list(model.head.parameters()), "norm": True}


REFUSED = {
    "stranger": (stranger, "is not in the sharded model"),
    "known_twice": (known_twice, "more than one parameter group"),
    "coupled": (coupled, "by what it finds in the others"),
}


def check_refused(name: str, stage: int) -> None:
    group, text = REFUSED[name]
    found = []
    for add in (True, False):
        model = loops.net()
        first = [param for name, param in model.named_parameters() if not name.startswith("head")]
        _, optimizer = zeor.shard(model, Choosy(first, lr=0.1), stage=stage)
        loops.train(model, optimizer, range(1), loops.own_loss)
        if add:
            before = copy.copy(optimizer.param_groups), optimizer.state_dict()
            with pytest.raises(ValueError, match=text):
                optimizer.add_param_group(group(model))
            assert optimizer.param_groups == before[0] and len(optimizer.param_groups) == 1
            optimizer.load_state_dict(before[1])
        loops.train(model, optimizer, range(1, 3), loops.own_loss)  # a KeyError before
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.3})  # a good one is taken
        loops.train(model, optimizer, range(3, 4), loops.own_loss)
        found.append(values(model))
    loops.assert_equal(*found)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_group_leaves_no_trace(ranks, name, stage):
    ranks(check_refused, 2, name, stage)


def check_refused_by_plan(options: dict[str, Any]) -> str:
    """A counter in the new group would need all parameters in one call."""
    model = loops.net()
    first = [param for name, param in model.named_parameters() if not name.startswith("head")]
    _, optimizer = zeor.shard(model, Counting(first, lr=0.1), **options)
    with pytest.raises(ValueError) as caught:
        optimizer.add_param_group({"params": list(model.head.parameters()), "counts": True})
    assert len(optimizer.param_groups) == 1
    loops.train(model, optimizer, range(2), loops.own_loss)
    return str(caught.value)


class Counting(torch.optim.SGD):
    """SGD whose rate falls by a counter of the group, in groups that want it."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr)
        self.defaults.update(counts=False, count=0)
        for group in self.param_groups:
            group.update(counts=False, count=0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += group["counts"]
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / (1 + group["count"]))


@pytest.mark.parametrize("options", [{"release": True}, {"offload": "host"}])
def test_a_group_that_the_plan_cannot_serve_is_refused_without_a_trace(ranks, options):
    for text in ranks(check_refused_by_plan, 2, options):
        assert "keeps counters for all parameters together" in text


# ---- a drop-in takes new parameters


def check_drop_in(stage: int, name: str) -> None:
    model, plain = loops.net(), loops.net()
    settings = {"lr": 0.1}
    mine = getattr(zeor.optim, name)(list(model.blocks.parameters()), stage=stage, **settings)
    theirs = getattr(torch.optim, name)(list(plain.blocks.parameters()), **settings)

    def add(optimizer: Optimizer, each: nn.Module) -> None:
        optimizer.add_param_group({"params": list(each.head.parameters()), "lr": 0.05})
        optimizer.add_param_group({"params": each.scale, "lr": 0.02})

    if dist.get_rank() == 1:
        with torch.no_grad():
            model.scale.mul_(1.0 + 1e-13)  # a new parameter starts as rank 0's
    for optimizer, each, loss in ((mine, model, loops.own_loss), (theirs, plain, loops.joint_loss)):
        loops.train(each, optimizer, range(2), loss)
        each.zero_grad()
        add(optimizer, each)
        loops.train(each, optimizer, range(2, 5), loss)
    loops.assert_close(loops.values(model), loops.values(plain))
    for step in range(5, 7):
        for optimizer, each, loss in ((mine, model, loops.own_loss), (theirs, plain, loops.joint_loss)):
            loss(each, step).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    loops.assert_close(loops.values(model), loops.values(plain))
    state = copy.deepcopy(mine.state_dict())
    mine.load_state_dict(state)
    loops.train(model, mine, range(7, 8), loops.own_loss)
    loops.train(plain, theirs, range(7, 8), loops.joint_loss)
    loops.assert_close(loops.values(model), loops.values(plain))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_drop_in_takes_new_parameters(ranks, stage, name, world):
    ranks(check_drop_in, world, stage, name)


def check_drop_in_refuses() -> str:
    model, extra = loops.net(), nn.Parameter(torch.ones(3 + dist.get_rank(), dtype=torch.float64))
    optimizer = zeor.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as caught:
        optimizer.add_param_group({"params": [extra]})
    assert len(optimizer.param_groups) == 1
    loops.train(model, optimizer, range(2), loops.own_loss)
    plain = loops.net()
    loops.train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(2))
    loops.assert_close(loops.values(model), loops.values(plain))
    return str(caught.value)


def test_a_drop_in_refuses_groups_that_differ_between_ranks(ranks):
    first, second = ranks(check_drop_in_refuses, 2)
    assert first == second and "(3,)" in first and "(4,)" in first
