"""One loop told twice, for the tests of how models are called.

A loop is written once, as `loop(model, optimizer, parts)`: plain PyTorch gets the parts of all ranks, zeor each
rank its own, and the loss of a step is the mean over parts. `compare` runs on ranks: every stage within 1e-10 of
plain PyTorch on the joint batch, and all stages the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zeor
from tests.parity.models import Run, full_state, largest

STAGES = (0, 1, 2, 3)
Parts = Sequence[tuple[Tensor, Tensor]]
Loop = Callable[[Any, Any, Parts], Any]
Build = Callable[[], nn.Module]


def parts_of(step: int, world: int) -> Parts:
    """Every rank's (inputs, targets) of one step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world, 4, 3, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.sin(x[..., :2] * 2)))


def mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def mse(model: Any, parts: Parts) -> Tensor:
    return mean([mse_loss(model(x), y) for x, y in parts])


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def plain_step(model: Any, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward()
    finish(optimizer)


def rank_of(number: int, parts: Parts) -> int:
    """Whose part the number-th of these is: a rank has only its own."""
    return number if len(parts) == dist.get_world_size() else dist.get_rank()


class Mlp(nn.Module):
    """Four equal layers, each a unit, and a first and last of their own. `gain` belongs to the root."""

    def __init__(self, dim: int = 5):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.1))
        self.first = nn.Linear(3, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))
        self.last = nn.Linear(dim, 2)

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)) * self.gain


def run(loop: Loop, build: Build, options: dict[str, Any] | None, steps: int = 3) -> Run:
    """Plain PyTorch where there are no options, zeor with these otherwise."""
    torch.manual_seed(11)
    model = build().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    world = dist.get_world_size()
    if options is not None:
        zeor.shard(model, optimizer, **options)
    seen = []
    for step in range(steps):
        parts = parts_of(step, world)
        seen.append(loop(model, optimizer, parts if options is None else [parts[dist.get_rank()]]))
    params = dict(model.named_parameters()) if options is None else full_state(model)
    return Run({name: p.detach().clone() for name, p in params.items()}, seen, [])


def compare(loop: Loop, build: Build = Mlp, options: dict[str, Any] | None = None, steps: int = 3) -> None:
    """On ranks: a loop at every stage against the same loop in plain PyTorch; what it returns must be equal."""
    want, first = run(loop, build, None, steps), None
    for stage in STAGES:
        got = run(loop, build, {"stage": stage, **(options or {})}, steps)
        difference = largest(got, want)
        assert difference <= 1e-10, f"stage {stage}: off by {difference:.2e}"
        assert got.losses == want.losses, f"stage {stage}: saw {got.losses}, plain {want.losses}"
        first = first or got
        assert got.digest() == first.digest(), f"stage {stage} differs from stage 0 by {largest(got, first):.2e}"
