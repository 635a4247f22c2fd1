"""Stock SyncBatchNorm inside a sharded model: with it a step equals one process on the joint batch.

torch's SyncBatchNorm runs on accelerators only, so this cannot be tested on CPU ranks. Here Gloo ranks share the one
GPU. Statistics are then the same on every rank by themselves, and zeor's mean over ranks keeps their bits.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops

pytestmark = pytest.mark.gpu

STEPS = 3


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x.to("cuda"), torch.randn(12, 5, generator=generator, dtype=torch.float64).to("cuda")


def build(synchronised: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Convolutions().double().to("cuda")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronised else model


def evaluate(model: nn.Module) -> list[float]:
    model.eval()
    with torch.no_grad():
        return model(batch(9)[0]).flatten().tolist()


def one_process() -> tuple[dict[str, list[float]], list[float]]:
    model = build(synchronised=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}, evaluate(model)


def on_ranks(stage: int) -> tuple[dict[str, list[float]], list[float]]:
    model = build(synchronised=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    zeor.shard(model, optimizer, stage=stage)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        x, y = batch(step)
        (model(x[rank::world]) - y[rank::world]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        state = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    return state, evaluate(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_sync_batch_norm_a_step_equals_one_process_on_the_joint_batch(ranks, stage, world):
    wanted, outputs = one_process()
    found = ranks(on_ranks, world, stage, timeout=180)
    for state, evaluated in found:
        assert state == found[0][0] and evaluated == found[0][1], "the same on every rank"
        for name, value in wanted.items():
            assert state[name] == pytest.approx(value, rel=1e-9, abs=1e-11), name
        assert evaluated == pytest.approx(outputs, rel=1e-9, abs=1e-11)


def plain_batch_norm() -> tuple[list[float], int]:
    """Without it each rank normalises by its own rows; the statistics are the mean's, from one collective."""
    torch.manual_seed(0)
    model = build(synchronised=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3)
    for step in range(STEPS):
        x, y = batch(step)
        (model(loops.mine(x)) - loops.mine(y)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluate(model), int(model.blocks[0][1].num_batches_tracked)


def test_plain_batch_norm_evaluates_the_same_on_every_rank(ranks):
    first, second = ranks(plain_batch_norm, 2, timeout=180)
    assert first == second and first[1] == STEPS
