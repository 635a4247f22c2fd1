"""Methods of an optimizer beside step(): those that write parameters work on masters, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops
from zeor.optim.parts.methods import find_writers, own_methods

STAGES = (0, 1, 2, 3)
STEPS = 8  # RAdam's first five move nothing


def make(name: str, model: nn.Module, **settings: Any) -> Optimizer:
    import schedulefree

    return getattr(schedulefree, name)(model.parameters(), lr=0.05, **settings)


def evaluate(model: nn.Module, dtype: torch.dtype) -> float:
    with torch.no_grad():
        return float(loops.joint_loss(model, 50, dtype))


def train(model: nn.Module, optimizer: Any, loss: Callable, dtype: torch.dtype) -> list[float]:
    """Losses of the averaged weights as training goes on, and at the end."""
    found = []
    for step in range(STEPS):
        optimizer.train()
        loops.train(model, optimizer, range(step, step + 1), lambda m, s: loss(m, s, dtype))
        optimizer.eval()
        found.append(evaluate(model, dtype))
    return found


NAMES = ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"]


def plain_run(name: str, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    model = loops.net(dtype)
    found = train(model, make(name, model), loops.joint_loss, dtype)
    return found, loops.values(model)


def check_schedulefree(name: str, stage: int, when: str) -> None:
    wanted, weights = plain_run(name, torch.float64)
    model = loops.net()
    optimizer = make(name, model)
    if when == "in train mode":
        optimizer.train()
    zeor.shard(model, optimizer, stage=stage)
    found = train(model, optimizer, loops.own_loss, torch.float64)
    assert found == pytest.approx(wanted, rel=1e-9)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), weights)
    optimizer.train()
    with zeor.full_params(model):
        moved = max(float((a - b).abs().max()) for a, b in zip(loops.values(model).values(), weights.values()))
    assert moved > 1e-4, "train() has changed the weights"
    optimizer.eval()
    zeor.unshard(model, optimizer)
    loops.assert_close(loops.values(model), weights)
    assert "eval" not in vars(optimizer) and "train" not in vars(optimizer)
    optimizer.train()
    optimizer.eval()
    loops.assert_close(loops.values(model), weights)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NAMES)
def test_schedulefree_equals_one_process(ranks, name, stage, world):
    ranks(check_schedulefree, world, name, stage, "in train mode" if stage % 2 else "as made")


def check_narrow(name: str, stage: int) -> list[float]:
    model = loops.net(torch.float32)
    optimizer = make(name, model)
    zeor.shard(model, optimizer, stage=stage, precision="bf16")
    return train(model, optimizer, loops.own_loss, torch.float32)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "RAdamScheduleFree"])
def test_schedulefree_in_bf16_stays_near_fp32(ranks, name, stage, world):
    wanted, _ = plain_run(name, torch.float32)
    for found in ranks(check_narrow, world, name, stage):
        assert found == pytest.approx(wanted, rel=2e-2)


def check_swaps_are_exact(stage: int) -> None:
    """eval() and train() many times: the masters, not rounded weights, are what is swapped."""
    model = loops.net(torch.float32)
    optimizer = make("AdamWScheduleFree", model)
    zeor.shard(model, optimizer, stage=stage, precision="bf16")
    train(model, optimizer, loops.own_loss, torch.float32)
    with zeor.full_params(model):
        before = loops.values(model)
    for _ in range(20):
        optimizer.train()
        optimizer.eval()
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_swaps_do_not_wear_the_weights(ranks, stage):
    ranks(check_swaps_are_exact, 2, stage)


def check_resumes(stage: int) -> None:
    """Saved and loaded: the mode is in the groups, the rest in the state."""
    model = loops.net()
    optimizer = make("AdamWScheduleFree", model)
    zeor.shard(model, optimizer, stage=stage)
    train(model, optimizer, loops.own_loss, torch.float64)
    state = copy.deepcopy(optimizer.state_dict())
    with zeor.full_params(model):
        weights = loops.values(model)
    other = loops.net()
    other.load_state_dict(weights)
    resumed = make("AdamWScheduleFree", other)
    zeor.shard(other, resumed, stage=stage)
    resumed.load_state_dict(state)
    for each, its in ((model, optimizer), (other, resumed)):
        train(each, its, loops.own_loss, torch.float64)
    with zeor.full_params(model), zeor.full_params(other):
        loops.assert_equal(loops.values(other), loops.values(model))


@pytest.mark.parametrize("stage", [1, 3])
def test_schedulefree_resumes_in_bits(ranks, stage):
    ranks(check_resumes, 2, stage)


# ---- what is refused, what is left alone


class Handy(torch.optim.SGD):
    """With methods of all sorts."""

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """Needs an argument, so nobody can try it beforehand."""
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(factor)

    @torch.no_grad()
    def halve(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)

    def rate(self) -> float:
        return self.param_groups[0]["lr"]

    def set_rate(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def largest(self) -> float:
        return max(float(p.grad.norm()) for group in self.param_groups for p in group["params"])


class HandyWhole(Handy):
    """Normalises whole matrices."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (param.grad.norm() + 1), alpha=group["lr"])


def test_methods_are_found_and_writers_by_trying():
    optimizer = Handy([nn.Parameter(torch.ones(3))], lr=0.1)
    assert set(own_methods(Handy)) == {"shrink", "halve", "rate", "set_rate", "largest"}
    assert find_writers(optimizer, torch.device("cpu")) == {"halve"}
    assert not own_methods(torch.optim.AdamW)
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3)), "the user's own is not touched"


def check_handy(kind: type[Handy], stage: int) -> None:
    model, plain = loops.net(), loops.net()
    optimizer, theirs = kind(model.parameters(), lr=0.1), kind(plain.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage)
    whole = kind is HandyWhole and stage > 0 and torch.distributed.get_world_size() > 1
    for each, its, loss in ((model, optimizer, loops.own_loss), (plain, theirs, loops.joint_loss)):
        loops.train(each, its, range(1), loss)
        assert its.rate() == 0.1
        its.set_rate(0.2)
        if its is optimizer and whole:
            with pytest.raises(RuntimeError, match=r"HandyWhole.halve\(\) writes parameters that are updated whole"):
                its.halve()
        elif not whole:
            its.halve()
        loops.train(each, its, range(1, 3), loss)
        loss(each, 3).backward()
    assert optimizer.largest() == pytest.approx(theirs.largest(), rel=1e-9)
    with pytest.raises(RuntimeError):  # views refuse by themselves, native parameters are watched
        optimizer.shrink(0.5)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Handy, HandyWhole])
def test_methods_of_all_sorts(ranks, kind, stage, world):
    ranks(check_handy, world, kind, stage)


def check_drop_in() -> str:
    """Its parameters are plain, so that a write would be taken."""
    from zeor.optim.drop_in import drop_in

    model, plain = loops.net(), loops.net()
    optimizer, theirs = drop_in(Handy)(model.parameters(), lr=0.1), Handy(plain.parameters(), lr=0.1)
    for each, its, loss in ((model, optimizer, loops.own_loss), (plain, theirs, loops.joint_loss)):
        loops.train(each, its, range(1), loss)
        its.halve()
    loops.assert_close(loops.values(model), loops.values(plain))
    with pytest.raises(RuntimeError) as caught:
        optimizer.shrink(0.5)
    loops.assert_close(loops.values(model), loops.values(plain))
    return str(caught.value)


def test_a_write_that_could_not_be_foreseen_is_stopped_before_it_happens(ranks):
    for text in ranks(check_drop_in, 2):
        assert "Handy.shrink() writes into the weights of a sharded model" in text and "write=True" in text
