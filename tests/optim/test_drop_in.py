"""`zeor.optim.NAME`: torch's optimizer of that name, sharded, in a script with no other line of zeor in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zeor
from tests import loops
from tests.optim.parts.test_probe import CANNOT, ELEMENTWISE, WHOLE

SETTINGS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}}


def drop_in(name: str) -> Any:
    return getattr(zeor.optim, name)


def check_steps(name: str, stage: int) -> None:
    plain, model = loops.net(), loops.net()
    settings = SETTINGS.get(name, {})
    theirs = getattr(torch.optim, name)(plain.parameters(), **settings)
    mine = drop_in(name)(model.parameters(), **settings, stage=stage)
    assert isinstance(mine, getattr(torch.optim, name)) and type(mine).__name__ == name
    loops.train(plain, theirs, range(3))
    loops.train(model, mine, range(3), loops.own_loss)
    loops.assert_close(loops.values(model), loops.values(plain))
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | WHOLE - {"Muon"}))  # Muon: tests/optim/owners/test_owners.py
@pytest.mark.parametrize("stage", [1, 2])
def test_every_optimizer_equals_plain_pytorch(ranks, stage, name):
    ranks(check_steps, 2, name, stage)


@pytest.mark.parametrize("world", [1, 3])
def test_other_world_sizes(ranks, world):
    ranks(check_steps, world, "AdamW", 1)
    ranks(check_steps, world, "SGD", 2)


def test_without_a_process_group():
    for name in ("SGD", "AdamW"):
        check_steps(name, 1)
        check_steps(name, 2)


# ---- the rest of a script


def check_script(stage: int) -> None:
    """Clipping, a scheduler, groups, zeros instead of None: the stock calls."""
    plain, model = loops.net(), loops.net()

    def groups(each: nn.Module) -> list[dict[str, Any]]:
        return [{"params": each.blocks.parameters()}, {"params": [*each.head.parameters(), each.scale], "lr": 0.05}]

    theirs = torch.optim.AdamW(groups(plain), lr=0.01)
    mine = zeor.optim.AdamW(groups(model), lr=0.01, stage=stage)
    schedulers = [StepLR(optimizer, 1, gamma=0.7) for optimizer in (theirs, mine)]
    for step in range(4):
        norms = []
        for each, optimizer, loss in ((plain, theirs, loops.joint_loss), (model, mine, loops.own_loss)):
            loss(each, step).backward()
            loss(each, step + 10).backward()  # accumulation
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.testing.assert_close(*norms, **loops.TIGHT)
        for scheduler in schedulers:
            scheduler.step()
    loops.assert_close(loops.values(model), loops.values(plain))
    fresh = loops.net()
    fresh.load_state_dict(model.state_dict())  # published before step() returned: the plain state dict
    loops.assert_close(loops.values(fresh), loops.values(plain))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_whole_script(ranks, stage):
    ranks(check_script, 2, stage)


def _grads_to_none(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


DROPS: dict[str, Callable[[nn.Module, Any], None]] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "p.grad = None": _grads_to_none,
    "part": lambda model, optimizer: model.head.zero_grad(),
}


def check_drop(stage: int) -> None:
    """A gradient that was set to None takes part neither in the next step nor in the next sum."""
    for name, drop in DROPS.items():
        plain, model = loops.net(), loops.net()
        theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
        mine = zeor.optim.SGD(model.parameters(), lr=0.5, stage=stage)
        for each, optimizer, loss in ((plain, theirs, loops.joint_loss), (model, mine, loops.own_loss)):
            loss(each, 0).backward()
            drop(each, optimizer)
            optimizer.step()
            loss(each, 1).backward()
            drop(each, optimizer)
            loss(each, 2).backward()
            optimizer.step()
        try:
            loops.assert_close(loops.values(model), loops.values(plain))
        except AssertionError as error:
            raise AssertionError(f"after {name}") from error


@pytest.mark.parametrize("stage", [1, 2])
def test_dropped_gradients_are_dropped(ranks, stage):
    ranks(check_drop, 2, stage)


def check_rank_0_values() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Linear(3, 2)
    zeor.optim.SGD(model.parameters(), lr=0.1)
    return model.weight.flatten().tolist()


def test_parameters_start_as_rank_0s(ranks):
    first, second = ranks(check_rank_0_values, 2)
    torch.manual_seed(0)
    assert first == second == nn.Linear(3, 2).weight.flatten().tolist()


def check_teardown() -> None:
    gc.collect()
    model = loops.net()
    optimizer = zeor.optim.AdamW(model.parameters(), lr=0.01)
    loops.train(model, optimizer, range(2), loops.own_loss)
    gone = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._zeor.engine)]
    gone += [weakref.ref(param) for param in model.parameters()]
    del model, optimizer
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * len(gone)


def test_deleting_model_and_optimizer_frees_everything(ranks):
    ranks(check_teardown, 2)


# ---- refusals


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(AttributeError, match=r"torch.optim has no optimizer 'AdmaW' \(did you mean 'AdamW'\?\)"):
        zeor.optim.AdmaW  # noqa: B018
    with pytest.raises(AttributeError, match="'Nothing'"):
        zeor.optim.Nothing  # noqa: B018
    assert set(dir(zeor.optim)) >= ELEMENTWISE and not hasattr(zeor.optim, "__wrapped__")


@pytest.mark.parametrize("stage", [0, 3, "1"])
def test_other_stages_are_refused(stage):
    with pytest.raises(ValueError, match=r"knows stages 1 and 2; for 0 and 3 use zeor.shard"):
        zeor.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, stage=stage)


def check_refused(name: str) -> str:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError) as caught:
        drop_in(name)(model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_optimizers_that_cannot_be_driven_get_one_sentence(ranks, name):
    texts = ranks(check_refused, 2, name)
    assert texts[0] == texts[1] and texts[0].startswith(name) and CANNOT[name] in texts[0]


def check_differing_ranks() -> str:
    model = nn.Linear(4, 3 + torch.distributed.get_rank())
    with pytest.raises(ValueError) as caught:
        zeor.optim.SGD(model.named_parameters(), lr=0.1)
    return str(caught.value)


def test_ranks_that_differ_are_told_where(ranks):
    first, second = ranks(check_differing_ranks, 2)
    assert first == second
    assert "rank 0 has weight: (3, 4)" in first and "rank 1 has weight: (4, 4)" in first
