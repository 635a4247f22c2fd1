"""A model whose parts are several chunks long, and runs of it that differ only in where state rests.

`run()` trains and returns everything a run leaves: losses, full parameters, and this rank's pieces of the optimizer's
state. `same()` compares two of them in every bit. Chunks are as small as they may be, so that a segment of a rank has
several of them, the last one short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from zeor.access.sharded import state_of

WIDTH, INNER, OUT, ROWS = 26, 23, 7, 12
CHUNK = 256
LOOPS = ("plain", "clip", "backwards", "no_sync", "accumulate")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Several units; segments of 1 to about 600 elements on a rank of two, cut anywhere."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def net(blocks: int = 2, seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net(blocks)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Of this rank's rows of a joint batch."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randn(ROWS, OUT, generator=generator)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x, y = x[rank::world], y[rank::world]
    return (model(x).float() - y).square().mean()


def one_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, loop: str) -> float:
    """A step of a loop as users write them; the loss of its last batch on this rank."""
    first = {"no_sync": zeor.no_sync, "accumulate": zeor.accumulate}.get(loop)
    if loop in ("backwards", "no_sync", "accumulate"):
        for part in (1, 2):
            with first(model) if first else contextlib.nullcontext():
                loss_of(model, 1000 * part + step).backward()
    loss = loss_of(model, step)
    loss.backward()
    if loop == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    return loss.item()


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def made(make: Callable[[nn.Module], Any] = adamw, **options: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = net()
    optimizer = make(model)
    zeor.shard(model, optimizer, **options)
    return model, optimizer if isinstance(optimizer, list) else [optimizer]


def run(
    make: Callable[[nn.Module], Any] = adamw, *, steps: int = 3, loop: str = "plain", **options: Any
) -> dict[str, Any]:
    model, optimizers = made(make, **options)
    losses = [one_step(model, optimizers, step, loop) for step in range(steps)]
    return {**left(model), "losses": torch.tensor(losses)}


def left(model: nn.Module) -> dict[str, Any]:
    """Full parameters, and this rank's pieces of the optimizers' state, by name."""
    found: dict[str, Any] = {}
    for number, stepper in enumerate(state_of(model).steppers):
        for piece in stepper.state.pieces():
            value = piece.value.clone() if isinstance(piece.value, Tensor) else piece.value
            found[f"{number}/{piece.name}/{piece.key}/{piece.begin}"] = value
    with zeor.full_params(model):
        found.update({name: param.detach().clone() for name, param in model.named_parameters()})
    return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What differs, in any bit."""
    if found.keys() != wanted.keys():
        return sorted(found.keys() ^ wanted.keys())
    return [name for name in wanted if not _same(found[name], wanted[name])]


def same(found: dict[str, Any], wanted: dict[str, Any], what: object = "") -> None:
    differing = differences(found, wanted)
    assert not differing, f"{what}: {differing}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other


def whole(model: nn.Module) -> dict[str, Any]:
    """Full parameters and the whole state of each, on every rank: the same at any world and stage."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = {
        f"{names[id(param)]}/{key}": torch.as_tensor(value).clone()
        for stepper in state_of(model).steppers
        for param, state in stepper.state.whole().items()
        for key, value in state.items()
    }
    with zeor.full_params(model):
        found.update({name: param.detach().clone() for name, param in model.named_parameters()})
    return found
