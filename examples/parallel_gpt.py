"""A GPT over bytes on a mesh of pp x dp x tp ranks: pipeline stages, replicas that zeor shards over, parts of matrices.

    torchrun --nproc-per-node 4 examples/parallel_gpt.py --pp 2 --tp 1                  # pp x dp x tp = 2 x 2 x 1
    torchrun --nproc-per-node 4 examples/parallel_gpt.py --pp 1 --tp 2                  # 1 x 2 x 2
    torchrun --nproc-per-node 4 examples/parallel_gpt.py --pp 2 --schedule ZBVZeroBubble --keep action
    torchrun --nproc-per-node 2 examples/parallel_gpt.py --pp 2 --checkpoints runs      # saves there at the end, and
    torchrun --nproc-per-node 2 examples/parallel_gpt.py --tp 2 --checkpoints runs --export weights    # goes on from it

torch cuts: schedules and PipelineStage are torch.distributed.pipelining's, matrices are cut by parallelize_module. zeor
shards what is left over mesh["dp"]. dp is the ranks that the others leave. Stages keep the names that the model has, so
one checkpoint and one export hold all of it. Trains on Shakespeare and the SOTU, and prints the loss per byte on
held-out text before and after.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.start import Place, parser
from examples.texts import Bytes, Windows, endless, tokens

LOCAL = {"GPipe": 1, "1F1B": 1}  # stages per rank; two for all others
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # rank 0 has the first stage and the last
HEAD = 32  # width of a head: how many a rank has follows from its part of q


# ---- the model: plain torch


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """All of it or, as stage `number` of `count`, a part: the rest is left out, and names stay what they are."""

    def __init__(self, options: Any, number: int = 0, count: int = 1):
        super().__init__()
        width, layers = options.width, options.layers
        first, last = number == 0, number == count - 1
        mine = range(number * layers // count, (number + 1) * layers // count)
        self.tokens = nn.Embedding(256, width) if first else None
        self.positions = nn.Embedding(options.context, width) if first else None
        self.blocks = nn.ModuleDict({str(at): Block(width) for at in mine})
        self.norm = nn.LayerNorm(width) if last else None
        self.head = nn.Linear(width, 256, bias=False) if last else None  # its weight is the embedding's

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def draw(module: nn.Module, seed: int) -> None:
    """Values that depend on a parameter's name alone: the same model, however it is cut."""
    for name, param in module.named_parameters():
        name = name.replace("head.weight", "tokens.weight")
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        if param.dim() > 1:
            param.data.copy_(0.02 * torch.randn(param.shape, generator=generator))
        elif "norm" not in name:
            nn.init.zeros_(param)


def divide(module: GPT, mesh: Any) -> None:
    """By columns and rows, embedding and head by vocabulary. Makes new parameters: before the optimizer."""
    for block in module.blocks.values():
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        parallelize_module(block, mesh, {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()})
    if module.tokens is not None:
        parallelize_module(module, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate())})
    if module.head is not None:
        parallelize_module(module, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# ---- a run


class Run:
    """This rank's part: one stage or several, or all of the model where pp is 1."""

    def __init__(self, options: Any, place: Place):
        self.options, self.place = options, place
        self.mesh = zeor.mesh(device=place.device, pp=options.pp, dp=-1, tp=options.tp)
        rank, local = self.mesh["pp"].get_local_rank(), LOCAL.get(options.schedule, 2) if options.pp > 1 else 1
        self.count = options.pp * local
        self.numbers = [rank + options.pp * turn for turn in range(local)]
        if options.schedule in V_SHAPED and options.pp > 1:
            self.numbers = [rank, self.count - 1 - rank]
        self.modules = [GPT(options, number, self.count).to(place.device) for number in self.numbers]
        for module in self.modules:
            draw(module, options.seed)
            if options.tp > 1:
                divide(module, self.mesh["tp"])
        self.is_first, self.is_last = 0 in self.numbers, self.count - 1 in self.numbers
        if self.is_first and self.is_last:  # one parameter, on one rank: one object
            self.modules[-1].head.weight = self.modules[0].tokens.weight
        self.model = nn.ModuleList(self.modules) if len(self.modules) > 1 else self.modules[0]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=(0.9, 0.95))
        zeor.shard(self.model, self.optimizer, stage=options.stage, mesh=self.mesh["dp"])
        if self.count > 1:
            self._pipe()

    def _pipe(self) -> None:
        stages = [
            PipelineStage(module, number, self.count, self.place.device, group=self.mesh["pp"].get_group())
            for number, module in zip(self.numbers, self.modules)
        ]
        kind = schedules.get_schedule_class(self.options.schedule)
        given = stages if len(stages) > 1 else stages[0]
        self.schedule = kind(given, self.options.micro_batches, loss_fn=loss_of)
        zeor.pipeline(self.schedule, keep=self.options.keep, tied=[("tokens.weight", "head.weight")])

    def loader(self, windows: Windows) -> Any:
        """The same for all stages and parts of a replica."""
        return zeor.data.shard(windows.loader(self.options.batch), mesh=self.mesh["dp"], seed=self.options.seed)

    def play(self, rows: Tensor, trains: bool = True) -> tuple[float, int]:
        """One forward, and backward where it trains: (sum of losses, how many), on ranks with the last stage."""
        if self.count == 1:
            loss = loss_of(self.model(rows[:, :-1]), rows[:, 1:])
            if trains:
                loss.backward()
            return loss.item(), 1
        losses: list[Tensor] = []
        inputs = (rows[:, :-1],) if self.is_first else ()
        targets = {"target": rows[:, 1:], "losses": losses} if self.is_last else {}
        step = self.schedule.step if trains else self.schedule.eval
        step(*inputs, **targets, return_outputs=False)
        return sum(loss.item() for loss in losses), len(losses)

    @torch.no_grad()
    def evaluate(self, windows: Windows) -> float:
        """The mean loss per byte; every rank takes part."""
        self.model.eval()
        batch, replicas = self.options.batch, self.mesh["dp"].size()
        parts = list(windows.rows[: len(windows) // batch * batch].split(batch))
        own = parts[self.mesh["dp"].get_local_rank() :: replicas][: len(parts) // replicas]
        found = [self.play(rows, trains=False) for rows in own]
        self.model.train()
        summed, count = zeor.total(sum(loss for loss, _ in found), sum(count for _, count in found))
        return summed / count

    def train(self, batches: Iterator[Tensor], done: int) -> None:
        for step in range(done + 1, done + self.options.steps + 1):
            loss, count = self.play(next(batches))
            norm = zeor.clip_grad_norm_(self.model, 1.0)  # of all stages and parts
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % max(1, self.options.steps // 20) == 0:
                loss, count = zeor.total(loss, count)  # only the last stage knows it
                self.place.progress(step, self.options.steps, torch.tensor(loss / count), norm)


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--pp", type=int, default=1, help="ranks in a row, with stages of the model")
    asked.add_argument("--tp", type=int, default=1, help="ranks that share each matrix; what is left are replicas")
    asked.add_argument("--schedule", default="1F1B", help="as torch names it: GPipe, 1F1B, Interleaved1F1B, ...")
    asked.add_argument("--keep", choices=["step", "action"], default="step")
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--batch", type=int, default=16, help="windows per replica and step")
    asked.add_argument("--micro-batches", type=int, default=4)
    asked.add_argument("--context", type=int, default=64)
    asked.add_argument("--layers", type=int, default=4)
    asked.add_argument("--width", type=int, default=128)
    asked.add_argument("--lr", type=float, default=2e-3)
    asked.add_argument("--limit", type=int, help="take so many texts of each source only")
    asked.add_argument("--checkpoints", help="save there at the end, and go on from what is there")
    asked.add_argument("--export", help="write the whole model there, as safetensors")
    options = asked.parse_args()
    place = Place(options.seed)
    if not dist.is_initialized():  # python, without torchrun
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train, held_out = tokens(["shakespeare", "sotu"], Bytes(), options.limit)
    run = Run(options, place)
    loader = run.loader(Windows(train, options.context + 1, place.device))
    batches, done = endless(loader), 0
    if options.checkpoints is not None and any(Path(options.checkpoints).glob("step-*")):
        done = zeor.load(options.checkpoints, run.model, run.optimizer, data=loader).step  # of any pp, dp and tp
    unseen = Windows(held_out[: 64 * options.batch * (options.context + 1)], options.context + 1, place.device)

    before = run.evaluate(unseen)
    run.train(batches, done)
    after = run.evaluate(unseen)
    if options.checkpoints is not None:
        zeor.save(options.checkpoints, run.model, run.optimizer, step=done + options.steps, data=loader)
    if options.export is not None:
        zeor.export(run.model, options.export)
    shape = " x ".join(map(str, run.mesh.mesh.shape))
    place.say(
        f"pp x dp x tp = {shape}: held-out loss {before:.3f} -> {after:.3f} per byte "
        f"({before / math.log(2):.2f} -> {after / math.log(2):.2f} bits)"
    )
    place.end(options, example="parallel_gpt", loss_before=before, loss=after, begun_at=done)


if __name__ == "__main__":
    main()
