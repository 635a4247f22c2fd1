"""A small language model on a mesh of pipeline, data-parallel and tensor-parallel ranks, and in one process.

A `Grid` says on which mesh and how; `Run` is a rank's part of it. The stages of a pipeline keep the names of the whole
model, as torch's own splits do: what is saved by one grid is loaded by any other, and by the plain model.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import zeor
from tests.parity.divided import VOCABULARY, WIDTH, Block, Language, adamw
from tests.parity.pipes import SCHEDULES

BLOCKS, ROWS, LENGTH, CLIP = 4, 4, 6, 0.1


@dataclass(frozen=True)
class Grid:
    pp: int = 1
    dp: int = 1
    tp: int = 1
    stage: int = 3
    schedule: str = "1f1b"
    micro: int = 2
    tied: bool = True  # the head is the embedding
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    keep: str = "step"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"{self.pp}x{self.dp}x{self.tp}-stage{self.stage}-{self.schedule}"


def made(tied: bool = True) -> Language:
    torch.manual_seed(0)
    model = Language(BLOCKS).double()
    if tied:
        model.head.weight = model.embed.weight
    return model


class Part(nn.Module):
    """A stage: what it does not have is left out, and the rest keeps the model's names."""

    def __init__(self, whole: Language, number: int, count: int):
        super().__init__()
        first, last = number * BLOCKS // count, (number + 1) * BLOCKS // count
        self.embed = whole.embed if number == 0 else None
        self.blocks = nn.ModuleDict({str(at): whole.blocks[at] for at in range(first, last)})
        self.norm, self.head = (whole.norm, whole.head) if number == count - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def cut(module: nn.Module, mesh: Any) -> None:
    """By sequence, so that stages hand each other parts of one, and gradients of norms are partial."""
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, {name: plan for name, plan in outer.items() if getattr(module, name) is not None})
    for block in (each for each in module.modules() if isinstance(each, Block)):
        inner = {
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, inner)


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_mesh(grid: Grid) -> Any:
    _clear_sharding_prop_cache()  # see tests/parity/divided.py
    return zeor.mesh(device="cpu", pp=grid.pp, dp=grid.dp, tp=grid.tp)


class Run:
    """This rank's part of a model on a grid."""

    def __init__(self, grid: Grid, make: Any = adamw, meta: bool = False):
        self.grid, self.mesh = grid, new_mesh(grid)
        self.replica = self.mesh.get_local_rank("dp")
        rank, local = self.mesh.get_local_rank("pp"), SCHEDULES[grid.schedule][1]
        self.count = grid.pp * local if grid.pp > 1 else 1
        self.numbers = [rank + grid.pp * turn for turn in range(local)] if self.count > 1 else [0]
        if SCHEDULES[grid.schedule][2] == "v":
            self.numbers = [rank, self.count - 1 - rank]
        self.modules = self._modules(meta)
        if grid.tp > 1:
            for module in self.modules:
                cut(module, self.mesh["tp"])
                if self.count == 1 and grid.tied:  # parallelize_module has made two of them
                    module.head.weight = module.embed.weight
        self.model = self.modules[0] if len(self.modules) == 1 else nn.ModuleList(self.modules)
        self.optimizer = make(self.model)
        options = {"keep_whole": 32, **grid.options}
        zeor.shard(self.model, self.optimizer, stage=grid.stage, mesh=self.mesh["dp"], **options)
        if self.count > 1:
            self._pipe()

    def _modules(self, meta: bool) -> list[Any]:
        with zeor.on_meta() if meta else torch.device("cpu"):
            whole = made(self.grid.tied)
            if self.count == 1:
                return [whole]
            if self.grid.tied and 0 in self.numbers and self.count - 1 in self.numbers and self.grid.tp > 1:
                whole.head.weight = nn.Parameter(whole.embed.weight.detach().clone())
            return [Part(whole, number, self.count) for number in self.numbers]

    def _pipe(self) -> None:
        group = self.mesh["pp"].get_group()
        stages = [
            PipelineStage(module, number, self.count, torch.device("cpu"), group=group)
            for number, module in zip(self.numbers, self.modules)
        ]
        kind = SCHEDULES[self.grid.schedule][0]
        self.schedule = kind(stages if len(stages) > 1 else stages[0], self.grid.micro, loss_fn=loss_of)
        tied = [("embed.weight", "head.weight")] if self.grid.tied else None
        zeor.pipeline(self.schedule, keep=self.grid.keep, tied=tied)

    def backward(self, step: int) -> None:
        inputs, targets = batch(step, self.replica)
        if self.count > 1:
            given = (inputs,) if 0 in self.numbers else ()
            last = self.count - 1 in self.numbers
            self.schedule.step(*given, **({"target": targets, "losses": []} if last else {}))
            return
        parts = list(zip(inputs.chunk(self.grid.micro), targets.chunk(self.grid.micro)))
        for rows, wanted in parts[:-1]:
            with zeor.no_sync(self.model):
                (loss_of(self.model(rows), wanted) / self.grid.micro).backward()
        (loss_of(self.model(parts[-1][0]), parts[-1][1]) / self.grid.micro).backward()

    def step(self, number: int) -> float:
        """The norm before clipping."""
        self.backward(number)
        norm = float(zeor.clip_grad_norm_(self.model, CLIP))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def train(self, *steps: int) -> list[float]:
        return [self.step(number) for number in steps]

    def values(self) -> dict[str, Tensor]:
        """Of this rank's stages, whole and by the model's names."""
        found = {}
        with zeor.full_params(self.model):
            for module in self.modules:
                for name, param in module.named_parameters():
                    value = param.full_tensor() if isinstance(param, DTensor) else param
                    found[name] = value.detach().clone()
        return found


@functools.cache
def reference(dp: int, steps: int, tied: bool = True) -> tuple[dict[str, Tensor], list[float]]:
    """(parameters, norms) of one process over the batches of all replicas; a tied one under both names."""
    model = made(tied)
    optimizer, norms = adamw(model), []
    for step in range(steps):
        inputs, targets = (torch.cat(each) for each in zip(*(batch(step, replica) for replica in range(dp))))
        loss_of(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}, norms


def differs(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found and found.keys() <= wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in found)


__all__ = ["BLOCKS", "CLIP", "WIDTH", "Grid", "Run", "batch", "cut", "differs", "loss_of", "made", "reference"]
