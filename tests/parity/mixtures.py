"""Models with expert parallelism, trained by zeor, and the same in one process on the batches of all ranks.

A `Mixed` says on which mesh and how; `train` gives what ranks hold at the end, whole, and `reference` what one process
has. Expert number 0 of the last mixture is never chosen, and the first one is without rows on some ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zeor
from examples.experts import Mixture, divide
from tests.parity.divided import LENGTH, ROWS, STEPS, VOCABULARY, WIDTH, adamw, new_mesh, whole

COUNT, CHOSEN = 4, 2
SHAPES = ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1))  # (dp, ep)
OVER = ("all", "mesh", "crossed")


@dataclass(frozen=True)
class Mixed:
    """over: what zeor shards over: "all" ranks at once, the "mesh" of both dimensions (experts= are neighbours), or the
    mesh with ep as its outer dimension, "crossed"."""

    shape: tuple[int, int] = (1, 2)
    stage: Any = 3
    micro: str = "1"  # micro-batches: "1", "3" (each reduced), "3 no_sync"
    clip: str = "none"  # "none", "stock", "zeor"
    over: str = "all"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    plain: bool = False  # no expert parallelism: every rank has all experts

    @property
    def micros(self) -> int:
        return int(self.micro[0])

    @property
    def world(self) -> int:
        return self.shape[0] * self.shape[1]


class Block(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture(WIDTH, 24, COUNT, CHOSEN)
        self.register_buffer("offset", torch.zeros(COUNT))
        self.is_left_out = False
        if number == 1:
            self.offset[0] = -1e9  # an expert that no token is sent to
        self.mixture.router.register_forward_hook(lambda module, args, out: out + self.offset.to(out.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_left_out else x + self.mixture(self.norm(x))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made() -> Language:
    torch.manual_seed(0)
    return Language().double()


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@functools.cache
def reference(ranks: int, micros: int, clips: bool) -> tuple[dict[str, Tensor], list[float]]:
    """(parameters, norms) of one process over the batches of all ranks."""
    model = made()
    optimizer, norms = adamw(model), []
    for step in range(STEPS):
        for micro in range(micros):
            for rank in range(ranks):
                (loss_of(model, *batch(step, micro, rank)) / ranks).backward()
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def mesh_of(setting: Mixed) -> Any:
    dp, ep = setting.shape
    if setting.over == "crossed":
        return new_mesh(ep, dp, names=("ep", "dp"))
    return new_mesh(dp, ep, names=("dp", "ep"))


def sharded(setting: Mixed, make: Callable = adamw) -> tuple[nn.Module, Any, int]:
    """(model, optimizer, rank)."""
    mesh, model = mesh_of(setting), made()
    over = None if setting.over == "all" else mesh
    options = {"keep_whole": 32, **setting.options}
    if not setting.plain:
        divide(model, mesh["ep"])
        options["experts"] = mesh["ep"]
    optimizer = make(model)
    zeor.shard(model, optimizer, stage=setting.stage, mesh=over, **options)
    return model, optimizer, torch.distributed.get_rank()


def one_step(model: nn.Module, optimizer: Any, step: int, rank: int, setting: Mixed) -> float:
    """The norm, where it clips."""
    for micro in range(setting.micros):
        last = micro == setting.micros - 1
        with zeor.no_sync(model) if "no_sync" in setting.micro and not last else contextlib.nullcontext():
            loss_of(model, *batch(step, micro, rank)).backward()
    norm = 0.0
    if setting.clip == "zeor":
        norm = float(zeor.clip_grad_norm_(model, 0.1))
    elif setting.clip == "stock":
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def train(setting: Mixed) -> tuple[dict[str, Tensor], list[float]]:
    """(parameters, norms)."""
    model, optimizer, rank = sharded(setting)
    norms = [one_step(model, optimizer, step, rank, setting) for step in range(STEPS)]
    return whole(model), norms if setting.clip != "none" else []


def compared(setting: Mixed) -> tuple[float, bytes]:
    """The largest difference to one process, of parameters and norms, and what tells the bits of the parameters."""
    found, norms = train(setting)
    wanted, their_norms = reference(setting.world, setting.micros, setting.clip != "none")
    assert list(found) == list(wanted)
    differences = [float((found[name] - wanted[name]).abs().max()) for name in wanted]
    differences += [abs(a - b) for a, b in zip(norms, their_norms, strict=True)]
    return max(differences), b"".join(value.numpy().tobytes() for value in found.values())
