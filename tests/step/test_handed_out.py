"""Gradients that are read between the backwards of one step: reading changes nothing, and what is written later counts.

A gradient can be read where all of it lies on this rank: at stage 0, and in a world of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from zeor import api

READ = {
    "not": lambda grad: None,
    "a sum": lambda grad: grad.sum().item(),
    "a view that is kept": lambda grad: grad.view(-1),
    "a copy": lambda grad: grad.clone(),
}


def made(stage: int | None, precision: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        zeor.shard(model, optimizer, stage=stage, precision=precision, keep_whole=4)
    return model, optimizer


def backward(model: nn.Module, number: int) -> None:
    seed = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randn(4, 3, generator=seed)).float().square().sum().backward()


def after_a_step(stage: int, precision: str | None, how: str) -> list[Tensor]:
    """The weights after one step over three backwards, each followed by a look at the gradients."""
    model, optimizer = made(stage, precision)
    held = []
    for number in range(3):
        backward(model, number)
        held.append([READ[how](param.grad) for param in model.parameters()])
    optimizer.step()
    with zeor.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def compare(world: int) -> None:
    for stage in (0, 1, 2, 3) if world == 1 else (0,):
        for precision in (None, "bf16"):
            wanted = after_a_step(stage, precision, "not")
            for how in READ:
                found = after_a_step(stage, precision, how)
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (stage, precision, how)


@pytest.mark.parametrize("world", [1, 2])
def test_reading_between_backwards_changes_no_bit(ranks: Callable[..., list[Any]], world: int) -> None:
    ranks(compare, world, world)


def written_late(stage: int | None, precision: str | None) -> list[Tensor]:
    """A view that was taken before the second backward is written to after it."""
    model, optimizer = made(stage, precision)
    backward(model, 0)
    kept = next(model.parameters()).grad.view(-1)  # type: ignore[union-attr]
    backward(model, 1)
    kept[:5] = 0
    optimizer.step()
    if stage is None:
        return [param.detach().clone() for param in model.parameters()]
    with zeor.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def written(stage: int | None, precision: str | None, clip: bool) -> Tensor:
    """How far a row moves in a step whose gradient was zeroed through a view that nobody kept."""
    model, optimizer = made(stage, precision)
    weight = next(model.parameters())
    for number in range(1 if clip else 2):
        backward(model, number)
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    weight.grad[0].zero_()  # type: ignore[index]
    with zeor.full_params(model):
        before = weight.detach()[:2].clone()
    optimizer.step()
    with zeor.full_params(model):
        return (weight.detach()[:2] - before).abs().sum(dim=1)


def check_writes() -> None:
    for stage in range(4):
        for precision in (None, "bf16"):
            for clip in (False, True):
                first, second = written(stage, precision, clip).tolist()
                assert first == 0.0 and second > 0.0, (stage, precision, clip)


def test_a_write_into_what_nobody_keeps_counts(ranks: Callable[..., list[Any]]) -> None:
    """In bf16 a sum that was accumulated or scaled is wider than the parameter, and what is read is a copy."""
    ranks(check_writes, 1)


def count_entries() -> int:
    model, _ = made(1, None)
    for number in range(6):
        backward(model, number)
        for param in model.parameters():
            param.grad.sum(), param.grad.view(-1)  # type: ignore[union-attr]
    return max(len(given) for given in api._state(model).engine.handed_out._out.values())


def test_reading_again_and_again_keeps_one_entry(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(count_entries, 1) == [1]


def check_late_writes() -> None:
    wanted = written_late(None, None)
    for stage in range(4):
        for found, param in zip(written_late(stage, None), wanted, strict=True):
            torch.testing.assert_close(found, param, rtol=0, atol=1e-6)
        # In bf16 the sum became wider, and lies elsewhere.
        with pytest.raises(RuntimeError, match=r"'0.weight' that was read before the last backward was written to"):
            written_late(stage, "bf16")


def test_what_is_written_into_an_old_view_counts_or_is_refused(ranks: Callable[..., list[Any]]) -> None:
    ranks(check_late_writes, 1)
