"""Buffers that training changes: the same on every rank after each step, at the price of one collective.

The reference is plain PyTorch in one process: a copy of the model for each rank's rows, whose statistics are then
averaged by hand.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops
from zeor.access.sharded import state_of

STAGES = [0, 1, 2, 3]
Values = dict[str, list[float]]


class BatchNet(nn.Module):
    """A buffer of each kind: statistics and counters that training changes, a constant, a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(loops.FEATURES, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 7)
        self.last_norm = nn.BatchNorm1d(7, momentum=None)
        self.head = nn.Linear(7, loops.CLASSES)
        self.register_buffer("constant", torch.arange(3.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.cache.fill_(float(x.sum()))
        return self.head(self.last_norm(self.second(torch.tanh(self.norm(self.first(x))))))


def batch_net() -> BatchNet:
    torch.manual_seed(3)
    return BatchNet().double()


def sharded(stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = batch_net()
    return zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.05), stage=stage, **options)


def buffer_values(model: nn.Module) -> Values:
    return {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}


def assert_near(found: list[float], wanted: list[float]) -> None:
    double = torch.float64
    torch.testing.assert_close(torch.tensor(found, dtype=double), torch.tensor(wanted, dtype=double), **loops.TIGHT)


def evaluate(model: nn.Module, step: int = 9) -> list[float]:
    model.eval()
    with torch.no_grad():
        result = model(loops.batch(step)[0]).flatten().tolist()
    model.train()
    return result


# ---- the mean


def train_and_evaluate(stage: int, steps: int, **options: Any) -> tuple[Values, list[float]]:
    model, optimizer = sharded(stage, **options)
    loops.train(model, optimizer, range(steps), loops.own_loss)
    return buffer_values(model), evaluate(model)


def reference(world: int, steps: int) -> tuple[Values, list[float]]:
    """Each rank's rows through a copy of the model; gradients and statistics averaged by hand."""
    model = batch_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        copies = [copy.deepcopy(model) for _ in range(world)]
        x, y = loops.batch(step)
        for rank, each in enumerate(copies):
            (each(x[rank::world]) - y[rank::world]).square().mean().backward()
        for param, *parts in zip(model.parameters(), *(each.parameters() for each in copies)):
            param.grad = torch.stack([part.grad for part in parts]).mean(0)
        for buffer, *parts in zip(model.buffers(), *(each.buffers() for each in copies)):
            buffer.copy_(torch.stack(parts).mean(0) if buffer.is_floating_point() else parts[0])
        optimizer.step()
        optimizer.zero_grad()
    return buffer_values(model), evaluate(model)


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_has_the_mean_of_the_statistics_and_evaluates_the_same(ranks, world):
    wanted, outputs = reference(world, 3)
    found = [ranks(train_and_evaluate, world, stage, 3) for stage in STAGES]
    for stage in STAGES:
        for values, evaluated in found[stage]:
            assert evaluated == found[0][0][1], "the same bits on every rank and at every stage"
            for name in set(wanted) - {"cache"}:
                assert values[name] == found[0][0][0][name]
                assert_near(values[name], wanted[name])
            assert_near(evaluated, outputs)
    assert found[0][0][0]["norm.num_batches_tracked"] == [3.0]
    assert found[0][0][0]["cache"] != found[0][1][0]["cache"], "what is not in the state dict is each rank's own"


def test_rank0_sends_rank_0s_statistics(ranks):
    def rank_0s_rows(steps: int) -> Values:
        model, optimizer = sharded(3, buffers="rank0")
        alone = batch_net()  # the same parameters and rank 0's rows: rank 0's statistics
        for step in range(steps):
            with zeor.full_params(model):
                alone.load_state_dict({**alone.state_dict(), **{k: v.clone() for k, v in model.named_parameters()}})
            alone(loops.batch(step)[0][:: dist.get_world_size()])
            loops.train(model, optimizer, range(step, step + 1), loops.own_loss)
        found, wanted = buffer_values(model), buffer_values(alone)
        for name in set(wanted) - {"cache"}:
            assert_near(found[name], wanted[name])
        return found

    first, second = ranks(rank_0s_rows, 2, 2)
    assert {**first, "cache": 0} == {**second, "cache": 0}


def test_local_leaves_each_rank_its_own(ranks):
    (first, a), (second, b) = ranks(train_and_evaluate, 2, 3, 2, buffers="local")
    assert first["norm.running_mean"] != second["norm.running_mean"] and a != b
    assert first["norm.num_batches_tracked"] == second["norm.num_batches_tracked"]


# ---- what it costs


def collectives(stage: int, build: str, how: str, training: bool) -> int:
    """Of one step, once everything is learned."""
    torch.manual_seed(3)
    model = batch_net() if build == "batch norm" else loops.net()
    model.train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, buffers=how)
    loops.train(model, optimizer, range(2), loops.own_loss)
    before = zeor.traffic(model)["collectives"]
    loops.train(model, optimizer, range(2, 3), loops.own_loss)
    return zeor.traffic(model)["collectives"] - before


@pytest.mark.parametrize("stage", [1, 3])
def test_one_collective_per_step_and_none_where_nothing_changed(ranks, stage):
    def count(build: str, how: str, training: bool = True) -> int:
        return ranks(collectives, 2, stage, build, how, training)[0]

    none = count("batch norm", "local")
    assert count("batch norm", "mean") == none + 1
    assert count("batch norm", "rank0") == none + 1
    assert count("batch norm", "mean", training=False) == none, "frozen statistics are not sent"
    assert count("layer norm", "mean") == count("layer norm", "local")


def accumulate() -> tuple[int, Values]:
    model, optimizer = sharded(2)
    loops.train(model, optimizer, range(2), loops.own_loss)
    sent = zeor.traffic(model)["bytes_by_verb"]["agree"]
    with zeor.no_sync(model):
        loops.own_loss(model, 2).backward()
        loops.own_loss(model, 3).backward()
    loops.own_loss(model, 4).backward()
    assert zeor.traffic(model)["bytes_by_verb"]["agree"] - sent < 200, "an agreement, no buffers"
    own = buffer_values(model)
    optimizer.step()
    assert buffer_values(model) != own
    return int(model.norm.num_batches_tracked), {**buffer_values(model), "cache": []}


def test_accumulation_sends_once_at_the_step(ranks):
    first, second = ranks(accumulate, 2)
    assert first == second and first[0] == 5


# ---- ranks on different paths


class Towers(nn.Module):
    """Only rank 0 takes the left tower, both take the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.right = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.right(x) + self.left(x) if both else self.right(x)


def towers(stage: int) -> Values:
    torch.manual_seed(0)
    model = Towers().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    zeor.shard(model, optimizer, stage=stage)
    for step in range(2):
        model(loops.mine(loops.batch(step)[0]), dist.get_rank() == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return buffer_values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_mean_is_over_the_ranks_that_changed_a_buffer(ranks, stage):
    torch.manual_seed(0)
    model = Towers().double()
    for step in range(2):
        model(loops.batch(step)[0][::2], True)
    alone = buffer_values(model)  # rank 0's rows alone
    first, second = ranks(towers, 2, stage)
    assert first == second
    for name in ("left.1.running_mean", "left.1.running_var", "left.1.num_batches_tracked"):
        assert_near(first[name], alone[name])
    assert first["right.1.running_mean"] != alone["right.1.running_mean"]


def out_of_data() -> tuple[Values, list[float]]:
    model, optimizer = sharded(3)
    with zeor.join(model):
        loops.train(model, optimizer, range(2 + dist.get_rank()), loops.own_loss)
    return {**buffer_values(model), "cache": []}, evaluate(model)


def test_a_rank_out_of_data_takes_over_the_statistics_of_those_that_train_on(ranks):
    first, second = ranks(out_of_data, 2)
    assert first == second and first[0]["norm.num_batches_tracked"] == [3.0]


class Odd(nn.Module):
    """Buffers of unusual kinds, changed by training, equal on all ranks or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("narrow", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("limits", torch.tensor([0.1, -torch.inf, torch.inf]))
        self.register_buffer("whirl", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("transposed", torch.zeros(2, 3).t())
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank()
        self.mask[rank] = True
        self.narrow.fill_(rank)
        self.limits[0] += 0.1
        self.whirl += 1j * rank
        self.transposed = torch.full((2, 3), float(rank)).t()
        return self.linear(x)


def odd_buffers() -> Values:
    torch.manual_seed(0)
    model = Odd()
    model.linear.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3)
    loops.train(model, optimizer, range(1), loops.own_loss)
    assert model.transposed.shape == (3, 2)
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_buffers_of_any_dtype_and_layout(ranks):
    found = ranks(odd_buffers, 3)
    assert found[0] == found[1] == found[2]
    values = found[0]
    assert values["mask"] == [True, False, False], "the first rank's, whole"
    assert values["narrow"] == [1.0] * 5 and values["whirl"] == [1j, 1j]
    assert values["limits"] == [torch.tensor(0.1).add(0.1).item(), -torch.inf, torch.inf], "equal ones keep their bits"
    assert values["transposed"] == [[1.0, 1.0]] * 3 and values["nothing"] == []


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, torch.ones(1 + dist.get_rank())])
        return self.linear(x)


def grow() -> tuple[list[str], int]:
    torch.manual_seed(0)
    model = Growing().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops.train(model, optimizer, range(3), loops.own_loss)
    return [str(each.message) for each in caught if "buffer" in str(each.message)], len(model.seen)


def test_a_buffer_that_changes_its_shape_stays_local_and_is_named_once(ranks):
    (text, first), (_, second) = ranks(grow, 2)
    assert len(text) == 1 and "module 'root'" in text[0] and "persistent=False" in text[0]
    assert (first, second) == (3, 6)


# ---- evaluation by one rank


def alone_on_rank_0(stage: int) -> list[float]:
    model, optimizer = sharded(stage, timeout=20)
    found = [evaluate(model)] if dist.get_rank() == 0 else [[]]  # before anything is learned
    for step in range(2):
        loops.train(model, optimizer, range(step, step + 1), loops.own_loss)
        if dist.get_rank() == 0:
            found.append(evaluate(model))
    dist.barrier()
    everyone = evaluate(model)
    if dist.get_rank() == 0:
        assert found[-1] == everyone and found[0] != found[1]
    return everyone


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_rank_0_may_evaluate_alone_where_parameters_are_whole(ranks, stage):
    first, second = ranks(alone_on_rank_0, 2, stage)
    assert first == second


def alone_at_stage_3(together_before: bool) -> str:
    """As over NCCL, where ranks do not meet before a forward (tests/comm/test_meeting.py has the other case)."""
    model, optimizer = sharded(3, timeout=3)
    state_of(model).engine.axes.everyone.meets = False
    loops.train(model, optimizer, range(2), loops.own_loss)
    if together_before:
        evaluate(model)

    def go_on() -> None:
        if dist.get_rank() == 0:
            evaluate(model)
        loops.train(model, optimizer, range(2, 6), loops.own_loss)

    with pytest.raises(RuntimeError) as caught:
        go_on()
    return str(caught.value)


@pytest.mark.parametrize("together_before", [False, True])
def test_rank_0_alone_cannot_evaluate_where_parameters_are_sliced_and_all_are_told(ranks, together_before):
    for rank, text in enumerate(ranks(alone_at_stage_3, 2, together_before)):
        assert f"Rank {rank} of 2 ran a forward of kind {'eval' if rank == 0 else 'train'!r}" in text
        assert "evaluate on every rank, or one rank alone at stages 0 to 2" in text


# ---- the public function


def by_hand(how: str) -> Values:
    model = batch_net()
    optimizer = zeor.optim.SGD(model.parameters(), lr=0.05)
    loops.train(model, optimizer, range(2), loops.own_loss)
    own = buffer_values(model)
    zeor.sync_buffers(model, how=how)
    found = buffer_values(model)
    assert (own == found) == (how == "rank0" and dist.get_rank() == 0)
    return {**found, "own": own["norm.running_mean"], "cache": []}


def test_sync_buffers_for_a_plain_model_with_a_drop_in_optimizer(ranks):
    first, second = ranks(by_hand, 2, "mean")
    mean = [(a + b) / 2 for a, b in zip(first["own"], second["own"])]
    assert_near(first["norm.running_mean"], mean)
    assert {**first, "own": 0} == {**second, "own": 0}
    first, second = ranks(by_hand, 2, "rank0")
    assert {**first, "own": 0} == {**second, "own": 0} and first["norm.running_mean"] == first["own"]


def by_hand_on_a_sharded_model() -> tuple[Values, int]:
    model, optimizer = sharded(3)
    loops.train(model, optimizer, range(1), loops.own_loss)
    with torch.no_grad():
        model(loops.mine(loops.batch(5)[0]))  # training mode: statistics change and no step follows
    own = buffer_values(model)
    zeor.sync_buffers(model)
    assert own != buffer_values(model)
    before = zeor.traffic(model)["collectives"]
    optimizer.step()
    return {**buffer_values(model), "cache": []}, zeor.traffic(model)["collectives"] - before


def test_sync_buffers_for_statistics_that_no_step_followed(ranks):
    (first, calls), (second, _) = ranks(by_hand_on_a_sharded_model, 2)
    assert first == second and calls == 0


def differ() -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3 + dist.get_rank()))
    with pytest.raises(ValueError) as caught:
        zeor.sync_buffers(model)
    return str(caught.value)


def test_sync_buffers_names_what_differs(ranks):
    for text in ranks(differ, 2):
        assert "The ranks' buffers differ" in text and "'1'" in text


def test_a_world_of_one_and_wrong_words():
    model = batch_net()
    zeor.sync_buffers(model)
    with pytest.raises(ValueError, match="use 'mean' or 'rank0'"):
        zeor.sync_buffers(model, how="local")
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        zeor.shard(model, buffers="means")
