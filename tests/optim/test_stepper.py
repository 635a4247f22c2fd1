"""step() is one event for the user: hooks and closure once, schedulers, GradScaler, state in and out of sharding.

The reference is plain PyTorch in one process on the joint batch, in float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "foreach Adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True, amsgrad=True),
}


def adamw(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **settings})


def full_values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


# ---- hooks and closures


def check_hooks(stage: int) -> None:
    model = loops.net()
    optimizer, params = adamw(model), list(model.parameters())
    seen: list[str] = []

    def hook(when: str) -> Callable:
        def note(given: Optimizer, args: Any, kwargs: Any) -> None:
            assert given is optimizer
            mine = [param for group in given.param_groups for param in group["params"]]
            assert all(a is b for a, b in zip(mine, params, strict=True)), "the user's own parameters"
            seen.append(when)

        return note

    optimizer.register_step_pre_hook(hook("pre before shard"))
    zeor.shard(model, optimizer, stage=stage)
    optimizer.register_step_post_hook(hook("post"))
    handle = register_optimizer_step_post_hook(hook("post of all"))
    loops.train(model, optimizer, range(1), loops.own_loss)
    handle.remove()
    assert seen == ["pre before shard", "post", "post of all"] or seen == ["pre before shard", "post of all", "post"]
    seen.clear()
    loops.train(model, optimizer, range(3), loops.own_loss)
    assert seen == ["pre before shard", "post"] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_step_hooks_run_once_with_the_users_parameters(ranks, stage):
    ranks(check_hooks, 2, stage)


def check_closure(stage: int) -> None:
    plain, model = loops.net(), loops.net()
    optimizers = [adamw(plain), adamw(model)]
    zeor.shard(model, optimizers[1], stage=stage)
    order: list[str] = []
    optimizers[1].register_step_pre_hook(lambda *_: order.append("pre"))
    for each, optimizer, loss_of in ((plain, optimizers[0], loops.joint_loss), (model, optimizers[1], loops.own_loss)):

        def closure(each=each, optimizer=optimizer, loss_of=loss_of):
            order.append("closure")
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = loss_of(each, 0)
            loss.backward()
            return loss

        order.clear()
        assert optimizer.step(closure).item() > 0
    assert order == ["pre", "closure"], "as in torch: the hooks run before the closure"
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_a_closure_runs_once(ranks, stage):
    ranks(check_closure, 2, stage)


# ---- schedulers and learning rates


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "Cosine": lambda optimizer: CosineAnnealingLR(optimizer, 4),
    "OneCycle": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=6),
}


def check_scheduler(stage: int, before: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in SCHEDULERS:
            check_one_scheduler(stage, before, name)


def check_one_scheduler(stage: int, before: bool, name: str) -> None:
    make = SCHEDULERS[name]
    plain, model = loops.net(), loops.net()
    theirs, mine = adamw(plain), adamw(model)
    their_scheduler = make(theirs)
    my_scheduler = make(mine) if before else None
    zeor.shard(model, mine, stage=stage)
    my_scheduler = my_scheduler or make(mine)
    for step in range(4):
        for each, optimizer, scheduler, loss in (
            (plain, theirs, their_scheduler, loops.joint_loss),
            (model, mine, my_scheduler, loops.own_loss),
        ):
            loss(each, step).backward()
            optimizer.step()
            scheduler.step()  # right after: what step() already decided must not change
            optimizer.zero_grad()
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"], name
    loops.assert_close(full_values(model), loops.values(plain))
    zeor.unshard(model, mine)
    loops.joint_loss(model, 4).backward()
    mine.step()
    my_scheduler.step()


@pytest.mark.parametrize("before", [True, False], ids=["before shard", "after shard"])
@pytest.mark.parametrize("stage", [1, 3])
def test_schedulers_work_and_nothing_warns(ranks, stage, before):
    ranks(check_scheduler, 2, stage, before)


def check_tensor_lr(stage: int) -> None:
    plain, model = loops.net(), loops.net()
    theirs, mine = (adamw(each, lr=torch.tensor(0.01, dtype=torch.float64)) for each in (plain, model))
    zeor.shard(model, mine, stage=stage)
    for step in range(3):
        loops.train(model, mine, range(step, step + 1), loops.own_loss)
        loops.train(plain, theirs, range(step, step + 1))
        for optimizer in (theirs, mine):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_a_tensor_learning_rate_moved_right_after_step(ranks, stage):
    ranks(check_tensor_lr, 2, stage)


# ---- GradScaler


def scaled_run(stage: int, scale: float, spoil: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Three steps in fp16 with a scaler; at step `spoil` rank 1 alone gets an infinite loss."""
    model = loops.net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **settings)
    zeor.shard(model, optimizer, stage=stage, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
    scales, kept = [], []
    for step in range(3):
        loss = loops.own_loss(model, step, torch.float32).float()
        if step == spoil and dist.get_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        kept.append(full_values(model)["head.weight"])
    return {"scales": scales, "kept": kept, "dtypes": {p.dtype for p in model.parameters()}}


@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_infinity_on_one_rank_makes_all_ranks_skip(ranks, stage, settings):
    first, second = ranks(scaled_run, 2, stage, 1024.0, 1, settings)
    assert first["scales"] == second["scales"] == [1024.0, 512.0, 512.0]
    before, spoiled, after = first["kept"]
    assert torch.equal(before, spoiled) and not torch.equal(spoiled, after)
    assert all(torch.equal(a, b) for a, b in zip(first["kept"], second["kept"], strict=True))
    assert first["dtypes"] == {torch.float16}, "parameters have the dtype that they compute in"


@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_finite_scale_changes_nothing(ranks, stage, settings):
    scaled = ranks(scaled_run, 2, stage, 256.0, None, settings)[0]["kept"]
    unscaled = ranks(scaled_run, 2, stage, 1.0, None, settings)[0]["kept"]
    for a, b in zip(scaled, unscaled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)  # fp16's subnormals round differently when scaled
    plain = loops.net(torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        loops.joint_loss(plain, step, torch.float32).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(scaled[-1], plain.head.weight.detach(), rtol=0, atol=0.01)


def check_fused_scaler(stage: int) -> None:
    """Without unscale_, a fused optimizer is handed the scale itself."""
    plain, model = loops.net(torch.float32), loops.net(torch.float32)
    theirs, mine = (torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in (plain, model))
    zeor.shard(model, mine, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        loops.joint_loss(plain, step, torch.float32).backward()
        theirs.step()
        theirs.zero_grad()
        scaler.scale(loops.own_loss(model, step, torch.float32)).backward()
        scaler.step(mine)
        scaler.update()
        mine.zero_grad()
    loops.assert_close(full_values(model), loops.values(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_fused_optimizer_unscales_by_itself(ranks, stage):
    ranks(check_fused_scaler, 2, stage)


# ---- state


def check_state_round_trip(stage: int, name: str) -> None:
    make = OPTIMIZERS[name]
    model = loops.net()
    _, optimizer = zeor.shard(model, make(model.parameters()), stage=stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    state, weights = copy.deepcopy(optimizer.state_dict()), full_values(model)
    assert state["param_groups"][0]["params"][: len(weights)] == list(range(len(weights)))
    loops.train(model, optimizer, range(2, 5), loops.own_loss)
    wanted = full_values(model)

    other = loops.net(seed=99)
    _, resumed = zeor.shard(other, make(other.parameters()), stage=stage)
    loops.train(other, resumed, range(7, 8), loops.own_loss)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    own = [param for group in resumed.param_groups for param in group["params"]]
    assert all(a is b for a, b in zip(own, other.parameters(), strict=True))
    loops.train(other, resumed, range(2, 5), loops.own_loss)
    loops.assert_equal(full_values(other), wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_state_dicts_round_trip_in_bits(ranks, stage, name):
    ranks(check_state_round_trip, 2, stage, name)


def check_plain_state(stage: int, name: str) -> None:
    make = OPTIMIZERS[name]
    plain = loops.net()
    theirs = make(plain.parameters())
    loops.train(plain, theirs, range(2))
    weights, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(theirs.state_dict())

    model = loops.net(seed=99)
    _, mine = zeor.shard(model, make(model.parameters()), stage=stage)
    model.load_state_dict(weights)
    mine.load_state_dict(state)
    loops.train(plain, theirs, range(2, 4))
    loops.train(model, mine, range(2, 4), loops.own_loss)
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_optimizers_state_dict_is_cut(ranks, stage, name):
    ranks(check_plain_state, 2, stage, name)


def check_there_and_back(stage: int, name: str) -> None:
    """Two plain steps, two sharded, two plain again: equal to six plain ones."""
    make = OPTIMIZERS[name]
    plain, model = loops.net(), loops.net()
    theirs, mine = make(plain.parameters()), make(model.parameters())
    params = list(model.parameters())
    loops.train(plain, theirs, range(6))
    loops.train(model, mine, range(2))
    zeor.shard(model, mine, stage=stage)
    loops.train(model, mine, range(2, 4), loops.own_loss)
    back = zeor.unshard(model, mine)
    assert back == (model, mine) and all(type(p) is nn.Parameter for p in model.parameters())
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert not any(name in vars(mine) for name in ("step", "state_dict", "load_state_dict", "add_param_group"))
    assert "_zeor" not in repr(vars(model).keys())
    for param in model.parameters():
        found, wanted = mine.state[param], theirs.state[dict(zip(params, plain.parameters()))[param]]
        assert {k: v.shape for k, v in found.items() if isinstance(v, Tensor)} == {
            k: v.shape for k, v in wanted.items() if isinstance(v, Tensor)
        }
    loops.train(model, mine, range(4, 6))
    loops.assert_close(loops.values(model), loops.values(plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_state_is_cut_at_shard_and_whole_after_unshard(ranks, stage, name):
    ranks(check_there_and_back, 2, stage, name)


def check_made_after(stage: int, name: str) -> None:
    """An optimizer made from the views themselves, Adagrad's constructor state included."""
    make = OPTIMIZERS[name]
    plain, model = loops.net(), loops.net()
    theirs = make(plain.parameters())
    zeor.shard(model, stage=stage)
    _, mine = zeor.shard(model, make(model.parameters()))
    loops.train(plain, theirs, range(3))
    loops.train(model, mine, range(3), loops.own_loss)
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_made_after_sharding(ranks, stage, name):
    ranks(check_made_after, 2, stage, name)


def check_narrow_state(stage: int) -> None:
    """State made for bf16 parameters is kept as wide as the master."""
    model = loops.net(torch.bfloat16)
    _, optimizer = zeor.shard(model, torch.optim.Adagrad(model.parameters(), lr=0.1), stage=stage)
    loops.train(model, optimizer, range(2), lambda m, s: loops.own_loss(m, s, torch.bfloat16))
    kept = [value for state in optimizer.state.values() for key, value in state.items() if key == "sum"]
    assert kept and all(value.dtype == torch.float32 for value in kept)


@pytest.mark.parametrize("stage", [0, 3])
def test_state_of_bf16_parameters_is_kept_in_fp32(ranks, stage):
    ranks(check_narrow_state, 2, stage)


# ---- groups


def check_groups(stage: int) -> None:
    plain, model = loops.net(), loops.net()
    theirs, mine = (torch.optim.AdamW(each.blocks.parameters(), lr=0.01) for each in (plain, model))
    zeor.shard(model, mine, stage=stage)
    loops.train(plain, theirs, range(2))
    loops.train(model, mine, range(2), loops.own_loss)
    for each, optimizer in ((plain, theirs), (model, mine)):
        each.zero_grad()
        optimizer.add_param_group({"params": each.head.parameters(), "lr": 0.05})
    assert mine.param_groups[1]["params"][0] is model.head.weight
    loops.train(plain, theirs, range(2, 4))
    loops.train(model, mine, range(2, 4), loops.own_loss)
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_added_later(ranks, stage):
    ranks(check_groups, 2, stage)


def check_two_optimizers(stage: int) -> None:
    plain, model = loops.net(), loops.net()

    def make(each: nn.Module) -> list[Optimizer]:
        return [
            torch.optim.SGD(each.blocks.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([{"params": [each.scale]}, {"params": each.head.parameters(), "lr": 0.02}], lr=0.01),
        ]

    theirs, mine = make(plain), make(model)
    _, back = zeor.shard(model, mine, stage=stage)
    assert back is mine
    for step in range(3):
        for each, optimizers, loss in ((plain, theirs, loops.joint_loss), (model, mine, loops.own_loss)):
            loss(each, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            each.zero_grad()
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_a_list_of_optimizers_with_groups(ranks, stage):
    ranks(check_two_optimizers, 2, stage)
