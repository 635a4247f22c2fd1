"""A small model, its batches and the plain PyTorch run that tests compare with.

`batch(step)` is the joint batch of a step; rank r of W trains on rows r, r + W, ... and the mean over ranks
is the mean over the joint batch. Everything is float64 unless asked otherwise, so that a comparison with one
process is a comparison of algorithms, not of rounding. This file knows nothing of zeor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

FEATURES, CLASSES, ROWS = 6, 5, 12
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, repeated blocks, a 0-d parameter and a head: several units, none of equal size."""

    def __init__(self, blocks: int = 2):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(blocks))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def net(dtype: torch.dtype = torch.float64, seed: int = 3) -> Net:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def mine(tensor: Tensor) -> Tensor:
    """This rank's rows of a joint batch."""
    if not dist.is_initialized():
        return tensor
    return tensor[dist.get_rank() :: dist.get_world_size()]


def joint_loss(model: nn.Module, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The loss of one process on the joint batch."""
    x, y = batch(step, dtype)
    return (model(x) - y).square().mean()


def own_loss(model: nn.Module, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The loss of this rank on its rows."""
    x, y = batch(step, dtype)
    return (model(mine(x)) - mine(y)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, loss: Callable = joint_loss) -> None:
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a plain model's parameters."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    assert list(found) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], **(tolerance or TIGHT), msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert_close(found, wanted, rtol=0.0, atol=0.0)
