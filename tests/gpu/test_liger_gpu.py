"""Liger's fused linear cross entropy: a custom autograd Function that is handed the head's weight outside its unit.

The model's forward gives the head's weight to the Function and never calls the head, as TRL and Liger's own patches of
transformers do. Liger is no dependency of zeor: these tests run where it is installed.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed"),
]

STEPS, ROWS, WORDS, WIDTH = 4, 12, 96, 64


class Fused(nn.Module):
    """Blocks with Liger's RMSNorm, and a loss that is computed chunk by chunk from the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        liger = importlib.import_module("liger_kernel.transformers")
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(liger.LigerRMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.loss = liger.LigerFusedLinearCrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.loss(self.head.weight, hidden.flatten(0, 1), targets.flatten())


def batch() -> tuple[Tensor, Tensor]:
    """The same in every step, so that it can be learnt."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (ROWS, 17), generator=generator).to("cuda")
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def train(stage: int | None) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and weights: of plain PyTorch on the whole batch (None), or of a rank's part at a stage."""
    torch.manual_seed(0)
    model = Fused().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    rank, world = 0, 1
    if stage is not None:
        zeor.shard(model, optimizer, stage=stage, keep_whole=0)
        rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    tokens, targets = batch()
    for _ in range(STEPS):
        loss = model(tokens[rank::world], targets[rank::world])
        loss.backward()
        assert model.head.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if stage is None:
        return losses, {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    with zeor.full_params(model):
        return losses, {name: value.flatten().tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_the_head_s_weight_is_trained_through_liger_s_function(ranks, stage: int, world: int) -> None:
    losses, weights = train(None)
    found = ranks(train, world, stage, timeout=240)
    together = [sum(values) / world for values in zip(*(rank[0] for rank in found))]
    assert together == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        assert found[0][1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert losses[-1] < losses[0] - 0.1, "the run trains"
