"""The whole state of an optimizer: what a plain optimizer has after the same steps, and back into a sharded one."""

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

STEPS = range(3)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if p.dim() > 1]},
        {"params": [p for name, p in named if p.dim() <= 1], "lr": 0.05, "weight_decay": 0.0},
    ]


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    if name == "Muon":
        return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(groups_of(model), lr=0.1, **options)


def plain(name: str) -> tuple[nn.Module, Optimizer]:
    model = loops.net()
    optimizer = optimizer_of(name, model)
    loops.train(model, optimizer, STEPS)
    return model, optimizer


def sharded(name: str, stage: int, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = loops.net()
    model, optimizer = zeor.shard(model, optimizer_of(name, model), stage=stage, **options)
    loops.train(model, optimizer, STEPS, loops.own_loss)
    return model, optimizer


def assert_alike(found: dict[str, Any], wanted: dict[str, Any], **tolerance: float) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert list(found["state"]) == list(wanted["state"])
    for index, state in wanted["state"].items():
        assert set(found["state"][index]) == set(state)
        for key, value in state.items():
            mine = found["state"][index][key]
            if isinstance(value, Tensor):
                assert type(mine) is Tensor and mine.device.type == "cpu" and mine.shape == value.shape
                torch.testing.assert_close(mine, value, **(tolerance or {"rtol": 1e-7, "atol": 1e-9}))
            else:
                assert mine == value


def check_equals_plain(name: str, stage: int, options: dict[str, Any]) -> None:
    model, optimizer = sharded(name, stage, **options)
    wanted = plain(name)[1].state_dict()
    found = zeor.full_state(model, optimizer, to_rank=1)
    assert_alike(found or wanted, wanted)
    assert bool(found) == (dist.get_rank() == 1)
    everywhere = zeor.full_state(model, optimizer, to_rank=None)
    assert_alike(everywhere, wanted)
    named = dict(model.named_parameters())
    order = [p for group in optimizer.param_groups for p in group["params"]]
    streamed = dict(zeor.iter_state(model, optimizer))
    assert [id(named[key]) for key in streamed] == [id(p) for p in order]
    for state, want in zip(streamed.values(), everywhere["state"].values(), strict=True):
        assert {key: torch.as_tensor(value).tolist() for key, value in state.items()} == {
            key: torch.as_tensor(value).tolist() for key, value in want.items()
        }


@pytest.mark.parametrize(("name", "stage"), [("AdamW", 0), ("AdamW", 1), ("AdamW", 3), ("SGD", 2), ("Muon", 3)])
def test_it_is_the_state_of_a_plain_optimizer(ranks, name, stage):
    ranks(check_equals_plain, 2, name, stage, {})


def test_also_where_it_rests_on_the_host_over_three_ranks(ranks):
    ranks(check_equals_plain, 3, "AdamW", 3, {"offload": "host"})


def check_there_and_back(name: str, stage: int, options: dict[str, Any]) -> None:
    """A plain run's state and weights go on sharded, and a sharded run's go on plain, as one run would."""
    whole, its = plain(name)
    saved = copy.deepcopy(its.state_dict())
    model = loops.net()
    model.load_state_dict(whole.state_dict())
    model, optimizer = zeor.shard(model, optimizer_of(name, model), stage=stage, **options)
    optimizer.param_groups[0]["lr"] = 7.0  # the state dict says another
    zeor.load_full_state(model, optimizer, saved if dist.get_rank() == 0 else {})
    assert optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]
    assert type(optimizer.param_groups[0].get("betas", ())) is tuple
    loops.train(model, optimizer, range(3, 5), loops.own_loss)
    loops.train(whole, its, range(3, 5))
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(whole), rtol=1e-7, atol=1e-9)
    found = zeor.full_state(model, optimizer, to_rank=None)
    again = loops.net()
    other = optimizer_of(name, again)
    other.load_state_dict(found)
    assert_alike(other.state_dict(), its.state_dict())


@pytest.mark.parametrize(("name", "stage"), [("AdamW", 1), ("AdamW", 3), ("Muon", 3)])
def test_a_plain_state_loads_from_one_rank(ranks, name, stage):
    ranks(check_there_and_back, 2, name, stage, {})


@pytest.mark.whole
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{"offload": "host"}, {"release": True}, {"hierarchy": 2}])
def test_a_plain_state_loads_from_one_rank_whatever_the_plan(ranks, stage, options):
    ranks(check_there_and_back, 4, "AdamW", stage, options)


def check_drop_in() -> None:
    model = loops.net()
    optimizer = zeor.optim.AdamW(model.parameters(), lr=0.1)
    loops.train(model, optimizer, STEPS, loops.own_loss)
    other = loops.net()
    its = torch.optim.AdamW(other.parameters(), lr=0.1)
    loops.train(other, its, STEPS)
    assert_alike(zeor.full_state(model, optimizer, to_rank=None), its.state_dict())


def test_a_drop_in_too(ranks):
    ranks(check_drop_in, 2)


def check_refused() -> list[str]:
    model, optimizer = sharded("AdamW", 3)
    before = zeor.full_state(model, optimizer, to_rank=None)
    part, whole = optimizer.state_dict(), copy.deepcopy(before)
    fewer = {**whole, "param_groups": whole["param_groups"][:1]}
    bent = copy.deepcopy(whole)
    bent["state"][0]["exp_avg"] = torch.zeros(5)
    odd = copy.deepcopy(whole)
    odd["state"][0]["note"] = object()
    found = []
    for given in (part, fewer, bent, odd, {}, {"state": {99: {}}, "param_groups": whole["param_groups"]}):
        with pytest.raises(ValueError) as caught:
            zeor.load_full_state(model, optimizer, given if dist.get_rank() == 0 else {})
        found.append(str(caught.value))
    for call in (zeor.full_state, zeor.iter_state):
        with pytest.raises(ValueError) as caught:
            call(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
        found.append(str(caught.value))
    with pytest.raises(ValueError, match=r"to_rank=5\): give a rank, 0 to 1"):
        zeor.full_state(model, optimizer, to_rank=5)
    assert_alike(zeor.full_state(model, optimizer, to_rank=None), before, rtol=0.0, atol=0.0)
    return found


def test_what_does_not_fit_is_one_sentence_on_every_rank_and_changes_nothing(ranks):
    first, second = ranks(check_refused, 2)
    assert first == second
    assert "this is one rank's part of a sharded optimizer's state" in first[0]
    assert "the state dict has groups of [5] parameters, and the AdamW groups of [5, 10]" in first[1]
    assert "'exp_avg'" in first[2] and "cannot" in first[2]
    assert "'note' is a object, which cannot travel" in first[3]
    assert "this is no state_dict() of an optimizer (KeyError" in first[4]
    assert "the state dict has state for 99" in first[5]
    assert first[6] == first[7] == (
        "This SGD was not sharded with the model; give zeor.shard the model and it first."
    )  # fmt: skip


# ---- exchanging optimizers


def check_exchange(stage: int, options: dict[str, Any]) -> None:
    """A second phase with another optimizer, beside plain PyTorch."""
    model = loops.net()
    model, first = zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage, **options)
    other = loops.net()
    its = torch.optim.AdamW(other.parameters(), lr=0.01)
    loops.train(model, first, range(2), loops.own_loss)
    loops.train(other, its, range(2))
    with pytest.raises(ValueError, match=r"zeor.drop_optimizer\(model\) gives up those it has"):
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert zeor.drop_optimizer(model) is model
    assert len(first.state) == 0 and "step" not in vars(first) and zeor.report(model)["moments"] == 0
    for kind, settings in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.02})):
        second, its = kind(model.parameters(), **settings), kind(other.parameters(), **settings)
        zeor.shard(model, second)
        loops.train(model, second, range(2, 5), loops.own_loss)
        loops.train(other, its, range(2, 5))
        zeor.drop_optimizer(model, second)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(other), rtol=1e-7, atol=1e-9)
    loops.own_loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"zeor\.shard"):
        first.step()
    with pytest.raises(ValueError, match="is not one of the model's"):
        zeor.drop_optimizer(model, first)


@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (3, {}), (3, {"offload": "host"}), (2, {"release": True}), (3, {"moments": "int8"})],
)
def test_another_optimizer_on_a_sharded_model(ranks, stage, options):
    if "moments" in options:
        ranks(check_exchange_of_moments, 2)
    else:
        ranks(check_exchange, 2, stage, options)


def check_exchange_of_moments() -> None:
    model = loops.net(torch.float32)
    model, first = zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), moments="int8")
    loss = lambda m, step: loops.own_loss(m, step, torch.float32)
    loops.train(model, first, range(2), loss)
    zeor.drop_optimizer(model)
    assert zeor.report(model)["moments"] == 0
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, second)
    loops.train(model, second, range(2), loss)
    assert zeor.report(model)["moments"] > 0


# ---- weights alone from a checkpoint


def check_weights_alone(folder: str, stage: int) -> None:
    model, optimizer = sharded("AdamW", stage)
    zeor.save(folder, model, optimizer, step=3, extra={"note": 1})
    with zeor.full_params(model):
        wanted = loops.values(model)
    other = loops.net(seed=9)
    other, its = zeor.shard(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), stage=3 - stage)
    loops.train(other, its, range(1), loops.own_loss)
    before, generator = zeor.full_state(other, its, to_rank=None), torch.get_rng_state()
    loaded = zeor.load(folder, other, only="weights")
    assert loaded.step == 3 and loaded.missing == [] and torch.equal(torch.get_rng_state(), generator)
    with zeor.full_params(other):
        loops.assert_equal(loops.values(other), wanted)
    assert_alike(zeor.full_state(other, its, to_rank=None), before, rtol=0.0, atol=0.0)
    loops.train(other, its, range(1), loops.own_loss)
    with pytest.raises(ValueError, match="give 'weights'"):
        zeor.load(folder, other, only="all")
    with pytest.raises(ValueError, match="loads no optimizer="):
        zeor.load(folder, other, only="weights", extra={})


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_alone_from_a_checkpoint(ranks, tmp_path, stage):
    ranks(check_weights_alone, 2, str(tmp_path), stage)


# ---- model.no_sync


def check_no_sync(options: dict[str, Any]) -> None:
    """A loop made for DDP: `with model.no_sync()` for all but the last micro-batch."""
    model, other = loops.net(), loops.net()
    model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    its = torch.optim.SGD(other.parameters(), lr=0.1)
    with model.no_sync():
        loops.own_loss(model, 0).backward()
    loops.own_loss(model, 1).backward()
    optimizer.step()
    for step in range(2):
        loops.joint_loss(other, step).backward()
    its.step()
    with zeor.full_params(model):
        assert not hasattr(model, "no_sync")
        loops.assert_close(loops.values(model), loops.values(other))
    assert callable(model.no_sync)
    zeor.unshard(model, optimizer)
    assert not hasattr(model, "no_sync")


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "release": True}])
def test_a_sharded_model_has_a_method_no_sync(ranks, options):
    ranks(check_no_sync, 2, options)


class WithItsOwn(nn.Linear):
    def no_sync(self) -> str:
        return "mine"


def check_own_no_sync() -> None:
    assert zeor.shard(WithItsOwn(2, 2)).no_sync() == "mine"


def test_a_models_own_method_stays(ranks):
    ranks(check_own_no_sync, 1)
