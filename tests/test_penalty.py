"""Penalties on the parameters in the loss: computed on slices, with the gradient of one process.

The reference is plain PyTorch on the joint batch with the same penalty written on its own parameters, in float64; the
stages are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeor
from tests import loops

STAGES = (0, 1, 2, 3)
L1 = lambda p: p.abs().sum()
L2 = lambda p: p.square().sum()
ELASTIC = lambda p: (0.3 * p.abs() + 0.7 * p.square()).sum()


def plain_penalty(model: nn.Module, fn: Callable, chosen: Callable[[str], bool] = lambda name: True) -> Tensor:
    return sum(fn(p) for name, p in model.named_parameters() if p.requires_grad and chosen(name))


def pair(stage: int, **options: Any) -> tuple[nn.Module, nn.Module, Any, Any]:
    plain, model = loops.net(), loops.net()
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model))
    zeor.shard(model, mine, stage=stage, **options)
    return plain, model, theirs, mine


def values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


def same_at_every_stage(ranks: Callable, world: int, check: Callable, *args: Any) -> None:
    found = [ranks(check, world, stage, *args)[0] for stage in STAGES]
    for other in found[1:]:
        loops.assert_equal(other, found[0])


def check_penalties(stage: int, overlap: bool) -> dict[str, Tensor]:
    plain, model, theirs, mine = pair(stage, overlap=overlap)
    for step in range(4):
        added = plain_penalty(plain, L1) * 0.01 + plain_penalty(plain, ELASTIC) * 0.02
        (loops.joint_loss(plain, step) + added).backward()
        found = zeor.penalty(model, L1) * 0.01 + 0.02 * zeor.penalty(model, ELASTIC)
        torch.testing.assert_close(found.detach(), added.detach(), **loops.TIGHT)
        loss = loops.own_loss(model, step)
        (loss + found if step % 2 else found + loss).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.7) for m in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0], **loops.TIGHT)
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_penalties_in_the_loss_equal_one_process(ranks, world, overlap):
    same_at_every_stage(ranks, world, check_penalties, overlap)


def check_value(stage: int) -> float:
    _, model, _, _ = pair(stage)
    with torch.no_grad():
        found = zeor.penalty(model, L2)
    assert not found.requires_grad and found.dim() == 0
    return found.item()


def test_the_value_is_the_same_on_every_rank_and_stage_in_bits(ranks):
    found = {value for stage in STAGES for value in ranks(check_value, 3, stage)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(plain_penalty(loops.net(), L2).item(), rel=1e-12)


def check_accumulation(stage: int, quiet: bool) -> dict[str, Tensor]:
    """Once for each backward it is in: in the first and the last of three."""
    plain, model, theirs, mine = pair(stage)
    for step in range(2):
        for micro in range(3):
            with_penalty = micro != 1
            loss = loops.joint_loss(plain, 3 * step + micro) / 3
            (loss + 0.1 * plain_penalty(plain, L1) if with_penalty else loss).backward()
            with zeor.no_sync(model) if quiet and micro < 2 else nullcontext():
                loss = loops.own_loss(model, 3 * step + micro) / 3
                (loss + 0.1 * zeor.penalty(model, L1) if with_penalty else loss).backward()
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


@pytest.mark.parametrize("quiet", [False, True], ids=["accumulated", "no_sync"])
def test_a_penalty_counts_once_for_each_backward_it_is_in(ranks, quiet):
    same_at_every_stage(ranks, 2, check_accumulation, quiet)


def check_alone(stage: int, quiet: bool) -> dict[str, Tensor]:
    plain, model, theirs, mine = pair(stage)
    for step in range(2):
        (plain_penalty(plain, L2) * 0.1).backward()
        with zeor.no_sync(model) if quiet else nullcontext():
            (zeor.penalty(model, L2) * 0.1).backward()
        loops.joint_loss(plain, step).backward()
        loops.own_loss(model, step).backward()
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    (zeor.penalty(model, L2) * 0.1).backward()
    mine.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


@pytest.mark.parametrize("quiet", [False, True], ids=["synced", "no_sync"])
def test_a_penalty_may_have_a_backward_of_its_own(ranks, quiet):
    same_at_every_stage(ranks, 2, check_alone, quiet)


def check_unsynced_step(stage: int) -> str:
    _, model, _, mine = pair(stage)
    with zeor.no_sync(model):
        zeor.penalty(model, L2).backward()
    with pytest.raises(RuntimeError) as error:
        mine.step()
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_on_a_penalty_that_no_sync_still_holds_is_refused(ranks, stage):
    assert all("outside no_sync" in text for text in ranks(check_unsynced_step, 2, stage))


# ---- mean_loss


def check_mean_loss(stage: int, quiet: bool) -> dict[str, Tensor]:
    """Unequal numbers of rows in each micro-batch; the penalty is not divided by their number."""
    plain, model, theirs, mine = pair(stage)
    rows = (7, 3, 11)
    for step in range(2):
        total = sum(rows)
        for micro, count in enumerate(rows):
            x, y = (t[:count] for t in loops.batch(3 * step + micro))
            ((plain(x) - y).square().sum() / total + 0.1 * plain_penalty(plain, L1)).backward()
            x, y = loops.mine(x), loops.mine(y)
            with zeor.no_sync(model) if quiet and micro < 2 else nullcontext():
                loss = zeor.mean_loss(model, (model(x) - y).square().sum(), len(x))
                (loss + 0.1 * zeor.penalty(model, L1)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.7) for m in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0], **loops.TIGHT)
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


@pytest.mark.parametrize("quiet", [False, True], ids=["accumulated", "no_sync"])
def test_a_penalty_beside_mean_loss_is_not_divided_by_the_items(ranks, quiet):
    same_at_every_stage(ranks, 2, check_mean_loss, quiet)


# ---- which parameters, and what of them


def check_chosen(stage: int) -> dict[str, Tensor]:
    plain, model, theirs, mine = pair(stage)
    weights = [name for name, _ in plain.named_parameters() if name.endswith("weight")]
    for each in (plain, model):
        each.blocks[0].norm.weight.requires_grad_(False)
    ways = [lambda name: name.endswith("weight"), weights, [model.get_parameter(name) for name in weights]]
    for step, way in enumerate(ways):
        (loops.joint_loss(plain, step) + 0.1 * plain_penalty(plain, L2, lambda n: n in weights)).backward()
        (loops.own_loss(model, step) + 0.1 * zeor.penalty(model, L2, params=way)).backward()
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


def test_a_penalty_of_some_parameters_by_name_function_or_object_leaves_frozen_ones_out(ranks):
    same_at_every_stage(ranks, 2, check_chosen)


def check_consolidation(stage: int) -> dict[str, Tensor]:
    """Elastic weight consolidation: sum of F (p - p0)^2 with full tensors given by name."""
    plain, model, theirs, mine = pair(stage)
    start = {name: p.detach().clone() + 0.1 for name, p in plain.named_parameters()}
    fisher = {name: torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / 10 for name, p in plain.named_parameters()}

    def ewc(name: str, p: Tensor, cut: Callable) -> Tensor:
        return (cut(fisher[name]) * (p - cut(start[name])).square()).sum()

    for step in range(3):
        added = sum((fisher[n] * (p - start[n]).square()).sum() for n, p in plain.named_parameters())
        (loops.joint_loss(plain, step) + 0.01 * added).backward()
        (loops.own_loss(model, step) + 0.01 * zeor.penalty(model, ewc, named=True)).backward()
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


def test_elastic_weight_consolidation_by_name_and_cut(ranks):
    same_at_every_stage(ranks, 3, check_consolidation)


def check_whole(stage: int) -> dict[str, Tensor]:
    plain, model, theirs, mine = pair(stage)
    matrix = lambda name: name.endswith(("up.weight", "head.weight"))
    orthogonal = lambda w: (w @ w.t() - torch.eye(len(w), dtype=w.dtype)).norm()
    for step in range(3):
        (loops.joint_loss(plain, step) + 0.1 * plain_penalty(plain, orthogonal, matrix)).backward()
        (loops.own_loss(model, step) + 0.1 * zeor.penalty(model, orthogonal, params=matrix, whole=True)).backward()
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_penalty_of_whole_matrices(ranks, world):
    same_at_every_stage(ranks, world, check_whole)


def check_half(stage: int) -> dict[str, Tensor]:
    """Under bf16 compute the penalty sees, and moves, the fp32 master."""
    model = loops.net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    zeor.shard(model, optimizer, stage=stage, precision="bf16")
    with zeor.full_params(model):
        before = loops.values(model)
    (0.5 * zeor.penalty(model, L2)).backward()
    optimizer.step()
    found = values(model)
    loops.assert_equal(found, {name: value - 2.0**-6 * value for name, value in before.items()})
    return found


def test_the_penalty_works_on_the_fp32_master_under_bf16(ranks):
    same_at_every_stage(ranks, 2, check_half)


# ---- errors


def check_errors() -> list[str]:
    _, model, _, _ = pair(3)
    calls = [
        lambda: zeor.penalty(model, lambda p: p.norm()),
        lambda: zeor.penalty(model, lambda p: p.square().mean()),
        lambda: zeor.penalty(model, lambda p: p.abs()),
        lambda: zeor.penalty(model, L1, params=["head.wieght"]),
        lambda: zeor.penalty(model, lambda n, p, cut: (p * cut(torch.ones(2))).sum(), named=True),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_cannot_be_a_penalty_is_said_in_one_sentence_on_every_rank(ranks):
    for norm, mean, vector, name, shape in ranks(check_errors, 2):
        assert "is no sum over elements" in norm and "whole=True" in norm and "is no sum over elements" in mean
        assert "returned a tensor of shape (16,)" in vector and "one floating number" in vector
        assert name.endswith("'head.wieght', which is no parameter of this model, did you mean 'head.weight'?")
        assert shape.startswith("cut() takes a tensor of the shape of '") and shape.endswith(", not (2,).")
