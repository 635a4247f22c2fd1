"""Matrix optimizers by owners: who owns what, Muon and mixed set-ups, a Shampoo and an Adafactor-like written here.

The reference is plain PyTorch in one process on the joint batch, in float64; stages are equal in bits.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops
from tests.optim import stages
from zeor.optim.owners.owners import assign, cost, in_rounds

# ---- who owns what


@given(st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=6), min_size=1, max_size=20), st.integers(1, 9))
def test_rounds_keep_the_order_of_units_and_hold_work_for_every_rank(units, world):
    rounds = in_rounds(units, world)
    assert [unit for each in rounds for unit in each] == list(range(len(units)))
    for each in rounds[:-1]:
        costs = [c for unit in each for c in units[unit]]
        assert sum(costs) >= world * max(costs)
        before_last = [c for unit in each[:-1] for c in units[unit]]
        assert not before_last or sum(before_last) < world * max(before_last), "and no more than it takes"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_one_parameter(costs, world):
    loads = [0] * world
    owners = assign(costs, loads)
    assert loads == [sum(c for c, owner in zip(costs, owners) if owner == rank) for rank in range(world)]
    assert max(loads) <= sum(costs) / world + max(costs)
    assert owners == assign(costs, [0] * world), "a pure function"


def test_a_transformer_is_balanced_over_the_whole_model():
    block = [(768, 768)] * 4 + [(3072, 768), (768, 3072)]
    costs = [[cost(shape) for shape in block] for _ in range(12)]
    for world in (2, 3, 4, 8, 16):
        loads = [0] * world
        for each in in_rounds(costs, world):
            assign([c for unit in each for c in costs[unit]], loads)
        assert max(loads) <= 1.2 * sum(map(sum, costs)) / world, world


def test_cost_is_that_of_a_product_with_itself():
    assert cost((4, 6)) == cost((6, 4)) == 96
    assert cost((5,)) == 5 and cost(()) == 1 and cost((2, 3, 4)) == 24 * 4


# ---- Muon, and Muon beside AdamW


def muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon(stages.matrices(model), lr=0.05)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    return [muon(model), torch.optim.AdamW(stages.others(model), lr=0.01)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_muon_equals_one_process_at_every_stage(ranks, world):
    ranks(stages.check, world, muon)


@pytest.mark.parametrize("world", [2, 3])
def test_muon_beside_adamw_equals_one_process_at_every_stage(ranks, world):
    ranks(stages.check, world, muon_and_adamw, 4, 0.05)


def check_overlap(make: Any) -> None:
    with_overlap = stages.sharded(make, 3, 3)
    loops.assert_equal(stages.sharded(make, 3, 3, overlap=False), with_overlap)


def test_overlap_changes_no_bit_of_muon(ranks):
    ranks(check_overlap, 3, muon_and_adamw)


def check_precision(precision: str, dtype: torch.dtype) -> None:
    found = stages.check_bits(muon_and_adamw, 3, precision=precision, dtype=dtype, clip=0.1)
    exact = stages.sharded(muon_and_adamw, 0, 3, 0.1, dtype=torch.float32)
    for name in exact:
        assert found[name].dtype == dtype
        # A Newton-Schulz step of a rounded gradient moves singular values near zero: lr times a part of one.
        torch.testing.assert_close(found[name].float(), exact[name], rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_split_master_travels_whole(ranks, dtype):
    ranks(check_precision, 2, "bf16", dtype)


def test_an_fp16_master_of_its_own_travels_too(ranks):
    ranks(check_precision, 2, "fp16", torch.float32)


def check_drop_in(stage: int) -> dict[str, Tensor]:
    plain_model, model = loops.net(), loops.net()
    theirs = muon_and_adamw(plain_model)
    mine = [
        zeor.optim.Muon(stages.matrices(model), lr=0.05, stage=stage),
        zeor.optim.AdamW(stages.others(model), lr=0.01, stage=stage),
    ]
    for step in range(3):
        for each, optimizers, loss in ((plain_model, theirs, loops.joint_loss), (model, mine, loops.own_loss)):
            loss(each, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    loops.assert_close(loops.values(model), loops.values(plain_model))
    return loops.values(model)


def test_the_drop_in_muon_equals_one_process(ranks):
    one, two = (ranks(check_drop_in, 2, stage)[0] for stage in (1, 2))
    loops.assert_equal(one, two)


def check_warm_up() -> None:
    """A learning rate that begins at zero hides nothing from the trial at shard()."""

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.0)

    model = loops.net()
    _, optimizer = zeor.shard(model, make(model), stage=3)
    plain_model = loops.net()
    theirs = make(plain_model)
    for step in range(3):
        for each in (optimizer, theirs):
            each.param_groups[0]["lr"] = 0.02 * step
        loops.train(model, optimizer, range(step, step + 1), loops.own_loss)
        loops.train(plain_model, theirs, range(step, step + 1))
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain_model))


def test_a_warm_up_from_zero_hides_nothing(ranks):
    ranks(check_warm_up, 2)


# ---- what an owner keeps, and what moves


def check_state_lives_on_owners(stage: int) -> tuple[set[str], int]:
    model = loops.net()
    optimizer = muon(model)
    names = {id(param): name for name, param in model.named_parameters()}
    zeor.shard(model, optimizer, stage=stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    held = {names[id(p)] for i, p in enumerate(stages.matrices(model)) if i in optimizer.state_dict()["state"]}
    shapes = {tuple(state["momentum_buffer"].shape) for state in optimizer.state.values()}
    assert shapes <= {tuple(p.shape) for p in stages.matrices(model)}, "whole"
    return held, zeor.report(model)["moments"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_matrix_has_its_state_whole_on_one_rank(ranks, stage):
    found = ranks(check_state_lives_on_owners, 3, stage)
    wanted = [name for name, p in loops.net().named_parameters() if p.dim() == 2]
    assert sorted(name for held, _ in found for name in held) == sorted(wanted)
    sizes = {name: p.nbytes for name, p in loops.net().named_parameters()}
    for held, moments_nbytes in found:
        assert moments_nbytes == sum(sizes[name] for name in held)


def check_traffic() -> tuple[int, dict[str, int]]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    _, optimizer = zeor.shard(model, torch.optim.Muon(model.parameters(), lr=0.1), stage=3, units=[nn.Linear])
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    before = zeor.traffic(model)
    peak_before = zeor.report(model)["transient_peak"]
    optimizer.step()
    after = zeor.traffic(model)
    sent = after["bytes_by_verb"]["all_to_all"] - before["bytes_by_verb"].get("all_to_all", 0)
    calls = {verb: n - before["calls"].get(verb, 0) for verb, n in after["calls"].items()}
    assert zeor.report(model)["transient_peak"] <= max(peak_before, 16 * 64 * 64 * 4), "bounded by a few matrices"
    return sent, {verb: n for verb, n in calls.items() if n}


def test_a_step_moves_three_slices_and_two_exchanges_a_round(ranks):
    found = ranks(check_traffic, 2)
    whole_nbytes = 6 * 64 * 64 * 4
    # Gradient and master there, master back: of each matrix the half that is not the owner's.
    assert sum(sent for sent, _ in found) == 3 * whole_nbytes // 2
    for _, calls in found:
        assert calls == {"all_to_all": 2 * 3, "agree": 1}, "six units of one matrix: three rounds for two ranks"


def check_unequal_gradients() -> str:
    model = loops.net()
    _, optimizer = zeor.shard(model, muon(model), stage=3)
    loops.own_loss(model, 0).backward()
    if torch.distributed.get_rank() == 1:
        model.head.weight.grad = None
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    return str(caught.value)


def test_ranks_with_different_gradients_are_told_so(ranks):
    texts = ranks(check_unequal_gradients, 2)
    wanted = "The ranks' parameters with a gradient differ: rank 0 has head.weight, rank 1 has nothing there."
    assert texts == [wanted, wanted]


def check_some_without_gradient() -> None:
    """Parameters nobody used keep value and state; a later step takes them up again."""
    plain_model, model = loops.net(), loops.net()
    theirs, mine = muon(plain_model), muon(model)
    zeor.shard(model, mine, stage=3)
    for step in range(4):
        for each, optimizer, loss in ((plain_model, theirs, loops.joint_loss), (model, mine, loops.own_loss)):
            loss(each, step).backward()
            if step in (0, 2):
                each.blocks[1].up.weight.grad = None
            if step == 3:
                each.zero_grad()
            optimizer.step()
            each.zero_grad()
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain_model))


def test_parameters_without_gradient_stay_as_they_are(ranks):
    ranks(check_some_without_gradient, 2)


# ---- state in and out


def adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def check_state_round_trip(make: Any, stage: int) -> None:
    model = loops.net()
    _, optimizer = zeor.shard(model, make(model), stage=stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    state = copy.deepcopy(optimizer.state_dict())
    with zeor.full_params(model):
        weights = loops.values(model)
    loops.train(model, optimizer, range(2, 4), loops.own_loss)
    with zeor.full_params(model):
        wanted = loops.values(model)
    other = loops.net(seed=99)
    _, resumed = zeor.shard(other, make(other), stage=stage)
    loops.train(other, resumed, range(7, 8), loops.own_loss)
    other.load_state_dict(weights, strict=True)
    resumed.load_state_dict(state)
    loops.train(other, resumed, range(2, 4), loops.own_loss)
    with zeor.full_params(other):
        loops.assert_equal(loops.values(other), wanted)


def check_there_and_back(make: Any, stage: int) -> None:
    """Two plain steps, two sharded, two plain again: equal to six plain ones."""
    plain_model, model = loops.net(), loops.net()
    theirs, mine = make(plain_model), make(model)
    loops.train(plain_model, theirs, range(6))
    loops.train(model, mine, range(2))
    zeor.shard(model, mine, stage=stage)
    loops.train(model, mine, range(2, 4), loops.own_loss)
    zeor.unshard(model, mine)
    shapes = [{k: v.shape for k, v in s.items() if isinstance(v, Tensor)} for s in mine.state.values()]
    wanted = [{k: v.shape for k, v in s.items() if isinstance(v, Tensor)} for s in theirs.state.values()]
    assert shapes == wanted
    loops.train(model, mine, range(4, 6))
    loops.assert_close(loops.values(model), loops.values(plain_model))


def check_plain_state(make: Any, stage: int) -> None:
    plain_model, model = loops.net(), loops.net(seed=99)
    theirs = make(plain_model)
    loops.train(plain_model, theirs, range(2))
    _, mine = zeor.shard(model, make(model), stage=stage)
    model.load_state_dict(copy.deepcopy(plain_model.state_dict()))
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    loops.train(plain_model, theirs, range(2, 4))
    loops.train(model, mine, range(2, 4), loops.own_loss)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain_model))


@pytest.mark.parametrize("check", [check_state_round_trip, check_there_and_back, check_plain_state])
@pytest.mark.parametrize("make", [muon, adafactor])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_an_owner_keeps_goes_in_and_out(ranks, stage, make, check):
    ranks(check, 2, make, stage)


def check_group_added() -> None:
    plain_model, model = loops.net(), loops.net()
    theirs, mine = (torch.optim.Muon(stages.matrices(each.blocks), lr=0.05) for each in (plain_model, model))
    zeor.shard(model, mine, stage=3)
    loops.train(plain_model, theirs, range(2))
    loops.train(model, mine, range(2), loops.own_loss)
    for each, optimizer in ((plain_model, theirs), (model, mine)):
        each.zero_grad()
        optimizer.add_param_group({"params": [each.head.weight], "lr": 0.02})
    loops.train(plain_model, theirs, range(2, 4))
    loops.train(model, mine, range(2, 4), loops.own_loss)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain_model))


def test_a_group_added_later_gets_owners(ranks):
    ranks(check_group_added, 2)


# ---- proof that owners are general


class Shampoo(Optimizer):
    """Small: a preconditioner for each dimension, kept in a list, as inverse roots of summed outer products."""

    def __init__(self, params: Any, lr: float = 0.1, eps: float = 1e-3):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        grad, state = param.grad, self.state[param]
        if not state:
            state["step"] = 0
            state["factors"] = [group["eps"] * torch.eye(n, dtype=param.dtype) for n in grad.shape]
        state["step"] += 1
        update = grad
        for dim, factor in enumerate(state["factors"]):
            sides = grad.transpose(0, dim).reshape(grad.shape[dim], -1)
            factor.add_(sides @ sides.T)
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp_min(1e-12) ** (-0.5 / grad.dim())) @ vectors.T
            update = torch.tensordot(root, update.transpose(0, dim), dims=1).transpose(0, dim)
        param.add_(update, alpha=-group["lr"])


class RowsAndColumns(Optimizer):
    """Like Adafactor: second moments as one vector for rows and one for columns; a counter lives in the group."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            beta = group["beta"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, rows = self.state[param], param.shape[0] if param.dim() else 1
                square = param.grad.reshape(rows, -1) ** 2 + 1e-8
                for name, dim in (("rows", 1), ("columns", 0)):
                    state.setdefault(name, torch.zeros_like(square.mean(dim))).lerp_(square.mean(dim), 1 - beta)
                scale = torch.outer(state["rows"], state["columns"]) / state["rows"].mean()
                scale = (scale / (1 - beta ** group["count"])).sqrt().view(param.shape)
                param.add_(param.grad / scale, alpha=-group["lr"] / group["count"])


class MuonAndAdam(Optimizer):
    """One class, two ways to update, told apart by a setting of the group."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__(groups, {"lr": 0.05, "use_muon": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                moment.mul_(0.9).add_(param.grad)
                if group["use_muon"]:  # two Newton-Schulz steps
                    update = moment / moment.norm()
                    for _ in range(2):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                    param.add_(update, alpha=-group["lr"])
                else:
                    param.add_(moment.sign(), alpha=-group["lr"] / 10)


class CountingMuonAndAdam(MuonAndAdam):
    """The same with a count of calls of its own, outside any group: it may be called only once."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__(groups)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.calls
        MuonAndAdam.step.__wrapped__(self)


def shampoo(model: nn.Module) -> Optimizer:
    return Shampoo(model.parameters())


def rows_and_columns(model: nn.Module) -> Optimizer:
    return RowsAndColumns(model.parameters())


def by_setting(model: nn.Module, cls: Any = MuonAndAdam) -> Optimizer:
    return cls([{"params": stages.others(model)}, {"params": stages.matrices(model), "use_muon": True}])


def by_setting_counting(model: nn.Module) -> Optimizer:
    return by_setting(model, CountingMuonAndAdam)


@pytest.mark.parametrize("make", [shampoo, rows_and_columns, by_setting, by_setting_counting])
@pytest.mark.parametrize("world", [2, 3])
def test_any_matrix_optimizer_equals_one_process_at_every_stage(ranks, world, make):
    ranks(stages.check, world, make, 3)


@pytest.mark.parametrize("make", [shampoo, rows_and_columns])
def test_nested_and_odd_state_goes_there_and_back(ranks, make):
    ranks(check_there_and_back, 2, make, 3)


def check_groups_differ() -> tuple[int, int]:
    model = loops.net()
    _, optimizer = zeor.shard(model, by_setting(model), stage=3)
    loops.train(model, optimizer, range(1), loops.own_loss)
    cut = sum(p.dim() == 1 or p.numel() == 1 for p in optimizer.state)
    return cut, len(optimizer.state) - cut


def test_only_the_group_that_needs_whole_matrices_has_owners(ranks):
    found = ranks(check_groups_differ, 2)
    assert sum(whole for _, whole in found) == len(stages.matrices(loops.net()))
    assert all(cut for cut, _ in found)


# ---- what cannot be computed apart


class SharedRate(Optimizer):
    """The rate depends on all gradients together, as Prodigy's and D-Adaptation's do."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        largest = max((grad.abs().max() for grad in grads), default=torch.ones(()))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad / largest, alpha=-group["lr"])


def check_coupled() -> str:
    plain_model, model = loops.net(), loops.net()
    theirs, mine = SharedRate(plain_model.parameters()), SharedRate(model.parameters())
    with pytest.raises(ValueError) as caught:
        zeor.shard(model, mine, stage=2)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    zeor.shard(model, mine, stage=0)
    loops.train(plain_model, theirs, range(3))
    loops.train(model, mine, range(3), loops.own_loss)
    with zeor.full_params(model):
        loops.assert_close(loops.values(model), loops.values(plain_model))
    return str(caught.value)


def test_an_optimizer_that_couples_parameters_works_at_stage_0_and_says_so(ranks):
    texts = ranks(check_coupled, 2)
    assert texts[0] == texts[1] and "stage=0" in texts[0]
    assert texts[0].startswith("SharedRate updates each parameter by what it finds in the others")
