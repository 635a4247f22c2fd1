"""Small models with many units and odd sizes, and one training loop told twice: by zeor and by plain PyTorch.

A `Setting` is one combination of what a user can choose. `train(setting)` runs inside ranks, each on its part
of a joint batch; `reference(setting, world)` is plain PyTorch on the joint batch. Both return a `Run`: the full
parameters, the losses and the gradient norms, to be compared in bits or within a bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zeor
from tests import covering

VOCAB, LENGTH, PER_RANK, MAX_NORM = 13, 5, 2, 0.05


# ---- what can be chosen


@dataclass(frozen=True)
class Setting:
    """One combination. `micro`: micro-batches per step, with or without no_sync; `clip`: none, zeor or stock.
    `shape`: of a mesh (node, gpu); then `stage` is one for each, inside and across."""

    stage: int | tuple[int, int] = 3
    overlap: bool = True
    micro: str = "1"
    clip: str = "none"
    checkpoint: str = "none"
    optimizer: str = "SGD"
    precision: str | None = None
    shape: tuple[int, int] | None = None

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "no overlap"
        rest = f"checkpoint {self.checkpoint}, {self.optimizer}, {self.precision}"
        mesh = "" if self.shape is None else f" on {self.shape}"
        return f"stage {self.stage}{mesh}, {overlap}, micro {self.micro}, clip {self.clip}, {rest}"


FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "overlap": (True, False),
    "micro": ("1", "3", "3 no_sync"),
    "clip": ("none", "zeor", "stock"),
    "checkpoint": ("none", "plain", "reentrant"),
    "optimizer": ("SGD", "AdamW", "Adagrad"),
    "precision": ("fp32", "bf16"),
}


def product(**factors: Sequence[Any]) -> list[Setting]:
    """Every combination of the factors given."""
    return [Setting(**row) for row in covering.product(factors)]


def triples(**factors: Sequence[Any]) -> list[Setting]:
    """Few settings that together hold every three values of every three factors."""
    return [Setting(**row) for row in covering.covering(factors, strength=3)]


def pairwise(**factors: Sequence[Any]) -> list[Setting]:
    """Fewer still, that together hold every pair of values of every two factors."""
    return [Setting(**row) for row in covering.covering(factors, strength=2)]


def pairs_here(world: int, worlds: Sequence[int], **factors: Sequence[Any]) -> list[Setting]:
    """This world's share of settings that hold every pair, where the world itself is one of the factors."""
    rows = covering.covering({"world": worlds, **factors}, strength=2)
    return [Setting(**{name: row[name] for name in factors}) for row in rows if row["world"] == world]


def pairs_everywhere(world: int, worlds: Sequence[int], **factors: Sequence[Any]) -> list[Setting]:
    """Every pair of the factors at each world."""
    return pairwise(**factors)


# For @pytest.mark.parametrize("select", SELECTIONS): what `make test` takes, and what `make test-all` takes beside it.
SELECTIONS = [
    pytest.param(pairs_here, id="pairs"),
    pytest.param(pairs_everywhere, id="pairs at each world", marks=pytest.mark.whole),
]


# ---- models


class Block(nn.Module):
    """A transformer block, as small as it can be: a norm, attention without an output projection, an MLP."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Embedding, blocks, norm, head: the shape of a language model. `checkpoint`: none, plain or reentrant."""

    def __init__(self, checkpoint: str = "none", tied: bool = False, dim: int = 6, blocks: int = 2):
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpoint == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpoint == "reentrant")
        return self.head(self.norm(x))


class Wave(nn.Module):
    """A unit of `size` elements, and nothing else: it may well be smaller than the world."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x.unsqueeze(-1) * self.weight).sum(-1)


class Odd(nn.Module):
    """Parameters of 0 dimensions, 1, W-1, W+1 and prime numbers of elements, each a unit; 0-d ones in the root.
    At world size 1, W-1 is a parameter without elements."""

    def __init__(self, world: int):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(0.1))
        self.embed = nn.Embedding(VOCAB, 1)
        self.waves = nn.ModuleList(Wave(size) for size in (1, world - 1, world + 1, 2, 7, 13, 31))
        self.head = nn.Linear(1, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.gain * self.embed(tokens) + self.shift
        for wave in self.waves:
            x = wave(x)
        return self.head(x)


class One(nn.Module):
    """A model with one parameter."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.only = nn.Parameter(torch.full(shape, 0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(VOCAB, dtype=self.only.dtype)
        return torch.sin(self.only.sum() * places + tokens.unsqueeze(-1))


# ---- one loop, told twice


class Run(NamedTuple):
    params: dict[str, Tensor]
    losses: list[float]
    norms: list[float]

    def digest(self) -> str:
        """Equal digests: the same bits in every parameter and norm, on every rank."""
        hashed = hashlib.sha256(repr(self.norms).encode())
        for name, value in self.params.items():
            hashed.update(name.encode() + value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()


Build = Callable[[Setting], nn.Module]


def net(setting: Setting) -> nn.Module:
    return Net(setting.checkpoint)


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    options: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.1, "momentum": 0.9},
        "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
        "Adagrad": {"lr": 0.05},
    }
    return getattr(torch.optim, name)(params, **options[name])


def steps(micro: int) -> int:
    """The first step learns orders, the second goes by them; one more where that costs little."""
    return 3 if micro == 1 else 2


def joint_batches(world: int, micro: int) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step its micro-batches of (tokens, targets); rank r's part is its rows, see `part`."""
    generator = torch.Generator().manual_seed(100 * world + micro)
    shape = (steps(micro), micro, 2, world * PER_RANK, LENGTH)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    return [[(one[0], one[1]) for one in step] for step in tokens]


def part(joint: Tensor) -> Tensor:
    """This rank's rows of a joint batch."""
    rows = joint.shape[0] // dist.get_world_size()
    return joint[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(logits.to(wide).flatten(0, -2), targets.flatten())


def build_model(setting: Setting, build: Build) -> nn.Module:
    torch.manual_seed(7)
    model = build(setting)
    return model.double() if setting.precision == "fp64" else model


def placed(setting: Setting) -> dict[str, Any]:
    """What shard() is told of the stage, and of the mesh where there is one."""
    if setting.shape is None:
        return {"stage": setting.stage}
    assert isinstance(setting.stage, tuple)
    mesh = init_device_mesh("cpu", setting.shape, mesh_dim_names=("node", "gpu"))
    return {"stage": dict(zip(("gpu", "node"), setting.stage)), "mesh": mesh}


def train(setting: Setting, build: Build = net) -> Run:
    """A few steps with zeor, on this rank's part of the data."""
    model = build_model(setting, build)
    optimizer = make_optimizer(setting.optimizer, model.parameters())
    precision = None if setting.precision == "fp64" else setting.precision
    zeor.shard(model, optimizer, **placed(setting), overlap=setting.overlap, precision=precision)
    losses, norms = [], []
    for batches in joint_batches(dist.get_world_size(), int(setting.micro[0])):
        for number, (tokens, targets) in enumerate(batches, start=1):
            hold = "no_sync" in setting.micro and number < len(batches)
            with zeor.no_sync(model) if hold else nullcontext():
                loss = loss_of(model, part(tokens), part(targets))
                loss.backward()
                losses.append(loss.item())
        if setting.clip == "zeor":
            norms.append(zeor.clip_grad_norm_(model, MAX_NORM).item())
        elif setting.clip == "stock":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return Run(full_state(model), losses, norms)


def reference(setting: Setting, world: int, build: Build = net) -> Run:
    """The same steps in plain PyTorch, on the joint batch. Losses are those of the joint micro-batches."""
    model = build_model(setting, build)
    optimizer = make_optimizer(setting.optimizer, model.parameters())
    losses, norms = [], []
    for batches in joint_batches(world, int(setting.micro[0])):
        for tokens, targets in batches:
            loss = loss_of(model, tokens, targets)
            loss.backward()
            losses.append(loss.item())
        if setting.clip != "none":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return Run({name: p.detach().clone() for name, p in model.named_parameters()}, losses, norms)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a sharded model, full and plain."""
    with zeor.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


# ---- comparing


def same_bits(got: Run, want: Run) -> str:
    """What differs, or nothing."""
    if got.digest() == want.digest() and got.losses == want.losses:
        return ""
    names = [name for name in want.params if not torch.equal(got.params[name], want.params[name])]
    return f"{len(names)} of {len(want.params)} parameters differ ({names[:3]}), by at most {largest(got, want):.2e}"


def largest(got: Run, want: Run) -> float:
    """The largest difference of any parameter, relative to the parameter's own largest value (at least 1)."""
    assert got.params.keys() == want.params.keys(), f"{got.params.keys()} are not {want.params.keys()}"
    worst = 0.0
    for name, value in want.params.items():
        assert got.params[name].shape == value.shape and got.params[name].dtype == value.dtype, name
        if value.numel():
            difference = (got.params[name].double() - value.double()).abs().max()
            apart = float(difference / value.double().abs().max().clamp(min=1.0))
            worst = max(worst, math.inf if math.isnan(apart) else apart)  # max(0.0, nan) is 0.0
    return worst


def baseline(setting: Setting) -> Setting:
    """What a setting must equal in bits."""
    return replace(setting, stage=0 if setting.shape is None else (0, 0), overlap=False)
