"""A small model cut into stages, the schedules of torch.distributed.pipelining over it, and one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

import zeor
from zeor.access.sharded import state_of

DIM, BATCH, STEPS, VOCAB = 8, 8, 3, 11
SCHEDULES = {
    "gpipe": (schedules.ScheduleGPipe, 1, "loop"),
    "1f1b": (schedules.Schedule1F1B, 1, "loop"),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2, "loop"),
    "zero bubble": (schedules.ScheduleInterleavedZeroBubble, 2, "loop"),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2, "v"),
    "dualpipev": (schedules.ScheduleDualPipeV, 2, "v"),
}


@dataclass(frozen=True)
class Piping:
    """One run. `local`: stages per rank, where the schedule leaves a choice."""

    schedule: str = "gpipe"
    stage: int = 3
    micro: int = 4
    keep: str = "step"
    reduce: str = "step"
    together: bool = True  # the local stages are one nn.ModuleList, with one optimizer
    clip: bool = False
    tied: bool = False  # the first stage's embedding is the last one's head
    local: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def stages_per_rank(self) -> int:
        return self.local or SCHEDULES[self.schedule][1]


class Block(nn.Module):
    def __init__(self, dim: int = DIM):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Part(nn.Module):
    """One stage: blocks, and parameters of its own. The last thing it does makes a view."""

    def __init__(self, dim: int = DIM):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.reshape(x.shape[0], -1, 2).view(x.shape)


class First(Part):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.embed(tokens))


class Last(Part):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x)).transpose(1, 2)


TIED = ("embed.weight", "head.weight")


def parts_of(count: int, tied: bool = False) -> list[nn.Module]:
    torch.manual_seed(3)
    parts: list[Any] = [Part().double() for _ in range(count)]
    if tied:
        parts[0], parts[-1] = First().double(), Last().double()
        parts[-1].head.weight.data.copy_(parts[0].embed.weight.data)
    return parts


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) if target.dtype == torch.long else F.mse_loss(output, target)


def batch_of(step: int, replica: int, tied: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    if tied:
        x, y = torch.randint(VOCAB, (2, BATCH, 3), generator=generator)
    else:
        x, y = torch.randn(2, BATCH, DIM, generator=generator, dtype=torch.float64)
    return x, y


def reference(piping: Piping, pp: int, dp: int) -> list[nn.Module]:
    """All stages after the same steps in one process."""
    parts: list[Any] = parts_of(pp * piping.stages_per_rank, piping.tied)
    if piping.tied:
        parts[-1].head.weight = parts[0].embed.weight
    params = list(dict.fromkeys(param for part in parts for param in part.parameters()))
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for step in range(STEPS):
        batches = [batch_of(step, replica, piping.tied) for replica in range(dp)]
        x, y = (torch.cat(each) for each in zip(*batches))
        for part in parts:
            x = part(x)
        loss_of(x, y).backward()
        if piping.clip:
            torch.nn.utils.clip_grad_norm_(params, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return parts


class Piped:
    """This rank's part of a run."""

    def __init__(self, piping: Piping, mesh: Any, **options: Any):
        self.piping, pp = piping, mesh["pp"]
        rank, size, count = pp.get_local_rank(), pp.size(), piping.stages_per_rank
        kind, _, style = SCHEDULES[piping.schedule]
        total = size * count
        parts = parts_of(total, piping.tied)
        self.indices = [rank + size * n for n in range(count)] if style == "loop" else [rank, total - 1 - rank]
        self.modules = [parts[index] for index in self.indices]
        options = {"stage": piping.stage, "mesh": mesh["dp"], "keep_whole": DIM, **dict(piping.options), **options}
        if piping.together and count > 1:
            whole = nn.ModuleList(self.modules)
            self.optimizers = [torch.optim.AdamW(whole.parameters(), lr=0.1)]
            zeor.shard(whole, self.optimizers, **options)
            self.models: list[nn.Module] = [whole]
        else:
            self.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in self.modules]
            for module, optimizer in zip(self.modules, self.optimizers):
                zeor.shard(module, optimizer, **options)
            self.models = list(self.modules)
        group, device = pp.get_group(), torch.device("cpu")
        self.stages = [
            PipelineStage(module, index, total, device, group=group)
            for index, module in zip(self.indices, self.modules)
        ]  # fmt: skip
        given = self.stages if count > 1 else self.stages[0]
        self.schedule = kind(given, piping.micro, loss_fn=loss_of)
        zeor.pipeline(self.schedule, keep=piping.keep, reduce=piping.reduce, tied=[TIED] if piping.tied else None)
        self.replica = mesh["dp"].get_local_rank()

    @property
    def is_first(self) -> bool:
        return 0 in self.indices

    @property
    def is_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    def run(self, step: int, method: str = "step") -> list[Tensor]:
        x, y = batch_of(step, self.replica, self.piping.tied)
        losses: list[Tensor] = []
        call = getattr(self.schedule, method)
        if self.is_last:
            call(*([x] if self.is_first else []), target=y, losses=losses)
        else:
            call(*([x] if self.is_first else []))
        return losses

    def train(self, steps: int = STEPS) -> None:
        for step in range(steps):
            self.run(step)
            self.finish()

    def finish(self) -> None:
        if self.piping.clip:
            zeor.clip_grad_norm_(self.models[0], 0.05)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def differs(self, parts: list[nn.Module]) -> float:
        """The largest difference to these stages, of those that are here."""
        largest = 0.0
        for index, module in zip(self.indices, self.modules, strict=True):
            wanted = dict(parts[index].named_parameters())
            with zeor.full_params(self._of(module)):
                found = {name: param.detach().clone() for name, param in module.named_parameters()}
            assert found.keys() == wanted.keys()
            largest = max(largest, *((found[name] - wanted[name]).abs().max().item() for name in wanted))
        return largest

    def _of(self, module: nn.Module) -> nn.Module:
        return module if module in self.models else self.models[0]

    @property
    def engines(self) -> list[Any]:
        return [state_of(model).engine for model in self.models]


def mesh_of(pp: int) -> Any:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))
