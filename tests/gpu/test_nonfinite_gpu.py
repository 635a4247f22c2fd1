"""Non-finite gradients on a GPU: "warn" makes the host wait for nothing, and is picked up when it has arrived."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor

pytestmark = pytest.mark.gpu


class Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "not finite" in record.getMessage():
            self.texts.append(record.getMessage())


def train(
    how: str, steps: int, bad_step: int, bad_rank: int = 0, clip: bool = False, factor: bool = False
) -> tuple[list[str], bool]:
    """What was said, and whether the weights are finite in the end. `factor`: gradients are multiplied by nan, and not
    the loss."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeor.shard(model, optimizer, stage=2, precision="bf16", nonfinite=how)
    handler = Keep()
    logging.getLogger("zeor").addHandler(handler)
    try:
        for step in range(steps):
            loss = model(torch.randn(4, 32, device="cuda")).float().square().mean()
            times = float("nan") if step == bad_step and rank == bad_rank else 1.0
            (loss if factor else loss * times).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if factor:
                for param in model.parameters():
                    param.grad.mul_(times)
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.synchronize()  # so that every answer has arrived by the next step
    finally:
        logging.getLogger("zeor").removeHandler(handler)
    with zeor.full_params(model):
        return handler.texts, all(bool(torch.isfinite(param).all()) for param in model.parameters())


@pytest.mark.parametrize("clip", [False, True])
def test_warn_names_the_parameter_with_the_next_step_at_the_latest(clip):
    texts, finite = train("warn", 3, 1, clip=clip)
    assert "Step 2: the gradient of parameter '0.weight' is not finite" in texts[0] and not finite


@pytest.mark.parametrize("clip", [False, True])
def test_skip_keeps_the_weights_finite(clip):
    texts, finite = train("skip", 3, 1, clip=clip)
    assert "Step 2 was skipped on every rank" in texts[0] and len(texts) == 1 and finite


def test_what_one_rank_finds_is_said_by_rank_0(ranks):
    (first, _), (second, _) = ranks(train, 2, "warn", 4, 1, bad_rank=1)
    assert "Step 2: the gradient of parameter '0.weight' is not finite" in first[0] and second == []


@pytest.mark.parametrize("clip", [False, True])
def test_a_factor_that_one_rank_alone_remembers(ranks, clip):
    (first, finite), (second, also) = ranks(train, 2, "skip", 3, 1, bad_rank=1, clip=clip, factor=True)
    assert "Step 2 was skipped on every rank" in first[0] and second == [] and finite and also
    (first, finite), (second, _) = ranks(train, 2, "warn", 4, 1, bad_rank=1, clip=clip, factor=True)
    assert "Step 2: the gradient of parameter" in first[0] and second == [] and not finite


def test_warn_makes_the_host_wait_for_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeor.shard(model, optimizer, stage=2, precision="bf16")
    x = torch.randn(4, 32, device="cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
