"""`zeor.mean_loss`: the gradient of the mean over all items of all ranks and micro-batches, whatever their numbers.

The reference is plain PyTorch on the concatenated batch. A micro-batch of a rank has SIZES[rank][micro] rows, and of
each row some entries do not count, as padding does not.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests.loops import CLASSES, FEATURES, assert_close, assert_equal, net, values

SIZES = [[3, 1, 4, 2], [1, 5, 0, 6], [2, 0, 0, 1]]
MAX_NORM = 0.1


def rows(rank, micro, step=0, dtype=torch.float64):
    """(inputs, labels, which entries count) of one micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    count = SIZES[rank][micro]
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    keep = torch.rand(count, CLASSES, generator=generator) < 0.7
    return x.to(dtype), y.to(dtype), keep


def loss_sum(model, x, y, keep):
    return ((model(x) - y).square() * keep).sum(), keep.sum()


def joint(model, world, micros, step=0):
    """The mean over everything, in one process."""
    parts = [loss_sum(model, *rows(rank, micro, step)) for rank in range(world) for micro in micros]
    return sum(part[0] for part in parts) / sum(part[1] for part in parts)


def reference(world, steps=2, clip=True):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    grads, norms = [], []
    for step in range(steps):
        joint(model, world, range(4), step).backward()
        grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return grads, norms, values(model)


def full_grads(model):
    with zeor.full_params(model, grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters()}


def run(stage, no_sync=False, reduction="mean", dtype=torch.float64, as_number=False):
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    zeor.shard(model, optimizer, stage=stage, reduction=reduction)
    grads, norms = [], []
    for step in range(2):
        for micro in range(4):
            with zeor.no_sync(model) if no_sync and micro < 3 else nullcontext():
                total, count = loss_sum(model, *rows(rank, micro, step, dtype))
                loss = zeor.mean_loss(model, total, int(count) if as_number else count)
                assert loss.item() == pytest.approx(total.item() / max(count.item(), 1))
                loss.backward()
        if dtype == torch.float64 and step == 0:
            grads.append(full_grads(model))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        return grads, norms, values(model)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unequal_micro_batches_equal_the_concatenated_batch(ranks, stage, no_sync):
    grads, norms, params = reference(2)
    for mine in ranks(run, 2, stage, no_sync):
        assert_close(mine[0][0], grads[0])
        assert mine[1] == pytest.approx(norms, rel=1e-10)
        assert_close(mine[2], params)


def test_a_world_of_one_and_ranks_with_empty_batches(ranks):
    for world in (1, 3):
        _, norms, params = reference(world)
        for mine in ranks(run, world, 3, as_number=True):
            assert mine[1] == pytest.approx(norms, rel=1e-10)
            assert_close(mine[2], params)


def test_a_summed_reduction_changes_nothing(ranks):
    params = reference(2)[2]
    for mine in ranks(run, 2, 2, reduction="sum"):
        assert_close(mine[2], params)


def stages_in_bits(no_sync):
    first = run(0, no_sync, dtype=torch.float32)
    for stage in (1, 2, 3):
        again = run(stage, no_sync, dtype=torch.float32)
        assert again[1] == first[1]
        assert_equal(again[2], first[2])
    return first[2]


def test_stages_give_the_same_bits(ranks):
    for no_sync in (False, True):
        found = ranks(stages_in_bits, 3, no_sync)
        assert_equal(found[0], found[1])


# ---- odd uses


def partly_dropped(stage):
    """One gradient is dropped between two micro-batches, one is multiplied, one is set to zero."""
    rank = dist.get_rank()
    model = zeor.shard(net(), stage=stage)
    for micro in (0, 1):
        if micro == 1:
            model.head.bias.grad = None
            model.head.weight.grad.mul_(2.0)
            model.scale.grad.zero_()
        zeor.mean_loss(model, *loss_sum(model, *rows(rank, micro))).backward()
    return full_grads(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_dropped_alone_counts_anew_and_factors_of_the_user_stay(ranks, stage):
    model, sums, counts = net(), [], []
    for micro in (0, 1):
        parts = [loss_sum(model, *rows(rank, micro)) for rank in range(2)]
        found = torch.autograd.grad(sum(part[0] for part in parts), list(model.parameters()))
        sums.append({name: grad for (name, _), grad in zip(model.named_parameters(), found)})
        counts.append(sum(p[1] for p in parts))
    wanted = {name: (sums[0][name] + sums[1][name]) / sum(counts) for name in sums[0]}
    for name in ("head.bias", "scale"):
        wanted[name] = sums[1][name] / counts[1]
    wanted["head.weight"] = (2.0 * sums[0]["head.weight"] + sums[1]["head.weight"]) / sum(counts)
    for mine in ranks(partly_dropped, 2, stage):
        assert_close(mine, wanted)


def nothing_counts():
    model = zeor.shard(net(), stage=2)
    x, y, keep = rows(dist.get_rank(), 0)
    total, count = loss_sum(model, x, y, torch.zeros_like(keep))
    loss = zeor.mean_loss(model, total, count)
    loss.backward()
    empty = full_grads(model)
    zeor.mean_loss(model, *loss_sum(model, x, y, keep)).backward()
    return loss.item(), empty, full_grads(model)


def test_where_nothing_counts_gradients_are_zero_and_later_ones_right(ranks):
    model = net()
    joint(model, 2, [0]).backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    for loss, empty, later in ranks(nothing_counts, 2):
        assert loss == 0.0
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in empty.values())
        assert_close(later, wanted)


def scaled_loss():
    """A factor on the loss, as a loss scale is, and clipping by zeor."""
    model = zeor.shard(net(), stage=3)
    (8.0 * zeor.mean_loss(model, *loss_sum(model, *rows(dist.get_rank(), 0)))).backward()
    norm = zeor.clip_grad_norm_(model, MAX_NORM).item()
    return norm, full_grads(model)


def test_a_factor_on_the_loss_reaches_the_gradient(ranks):
    model = net()
    (8.0 * joint(model, 2, [0])).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    for mine, grads in ranks(scaled_loss, 2):
        assert mine == pytest.approx(norm, rel=1e-10)
        assert_close(grads, {name: param.grad for name, param in model.named_parameters()})


def drop_in(stage):
    model = net()
    optimizer = zeor.optim.AdamW(model.parameters(), lr=0.02, stage=stage)
    for step in range(2):
        for micro in range(4):
            zeor.mean_loss(optimizer, *loss_sum(model, *rows(dist.get_rank(), micro, step))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_drop_in_optimizer_in_the_place_of_the_model(ranks, stage):
    params = reference(2)[2]
    for mine in ranks(drop_in, 2, stage):
        assert_close(mine, params)


def inside_join(stage):
    """Rank 0 has two micro-batches, rank 1 has four; a step after every two."""
    rank = dist.get_rank()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage)
    with zeor.join(model):
        for micro in range(3 if rank == 0 else 4):
            with zeor.no_sync(model) if micro % 2 == 0 else nullcontext():
                zeor.mean_loss(model, *loss_sum(model, *rows(rank, micro))).backward()
            if micro % 2:
                optimizer.step()
                optimizer.zero_grad()
    with zeor.full_params(model):
        return values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_inside_join_the_items_of_ranks_that_left_count_too(ranks, stage):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in (0, 2):
        there = [(rank, micro) for micro in (first, first + 1) for rank in range(2) if micro < (3 if rank == 0 else 4)]
        parts = [loss_sum(model, *rows(rank, micro)) for rank, micro in there]
        (sum(part[0] for part in parts) / sum(part[1] for part in parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine in ranks(inside_join, 2, stage):
        assert_close(mine, values(model))


def test_value_is_plain_pytorchs_where_gradients_are_off():
    model = zeor.shard(net(), stage=1)
    with torch.no_grad():
        loss = zeor.mean_loss(model, torch.tensor(6.0), 4)
    assert loss.item() == 1.5 and not loss.requires_grad


# ---- sentences


def refusal(kind):
    rank = dist.get_rank()
    model = zeor.shard(net(), stage=2)
    total, count = loss_sum(model, *rows(rank, 0))
    mean = zeor.mean_loss(model, total, count)
    plain = loss_sum(model, *rows(rank, 3))[0]
    try:
        if kind == "plain after mean":
            mean.backward()
            plain.backward()
        elif kind == "mean after plain":
            plain.backward()
            mean.backward()
        elif kind == "two means":
            (mean + zeor.mean_loss(model, plain, 3)).backward()
        else:
            (mean if rank == 0 else plain).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    "kind, sentence",
    [
        ("plain after mean", "A backward of a plain loss would add to gradients of zeor.mean_loss"),
        ("mean after plain", "A backward of zeor.mean_loss would add to gradients of a plain loss"),
        ("two means", "add their sums and their counts"),
        ("differs by rank", "some ranks used zeor.mean_loss and others a plain loss"),
    ],
)
def test_mixing_losses_of_two_kinds_is_refused_on_every_rank(ranks, kind, sentence):
    for text in ranks(refusal, 2, kind):
        assert sentence in text


@pytest.mark.parametrize("count", [-1, float("nan"), True, "3", torch.ones(2)])
def test_a_count_that_is_none_is_refused(count):
    model = zeor.shard(net(), stage=0)
    with pytest.raises(ValueError, match="the number of items"):
        zeor.mean_loss(model, torch.tensor(1.0), count)


@pytest.mark.parametrize("loss", [3.0, torch.ones(2), torch.tensor(3)])
def test_a_loss_that_is_no_single_floating_number_is_refused(loss):
    model = zeor.shard(net(), stage=0)
    with pytest.raises(ValueError, match="the sum of the items' losses"):
        zeor.mean_loss(model, loss, 1)


def test_a_stock_optimizer_is_refused():
    with pytest.raises(ValueError, match="give the sharded model, or make it by"):
        zeor.mean_loss(torch.optim.SGD(net().parameters(), lr=0.1), torch.tensor(1.0), 1)
