"""A GPT over bytes in a pipeline of stages, each sharded over its replicas: pp x dp ranks, on Shakespeare and the SOTU.

    torchrun --nproc-per-node 2 examples/pipeline.py --pp 2 --steps 200
    torchrun --nproc-per-node 4 examples/pipeline.py --pp 2 --schedule ZBVZeroBubble --stage 3

The schedule is torch's, the stages are modules cut from the model, zeor shards each over mesh["dp"]. The embedding in
the first stage and the head in the last one are one parameter. Prints the loss per byte on held-out text before and
after.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.start import Place, parser
from examples.texts import Windows, endless, tokens
from zeor.tools import gpt

LOCAL = {"GPipe": 1, "1F1B": 1}  # stages per rank; two for all others
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # rank 0 has the first stage and the last


class Bytes:
    """What texts.py asks of a tokenizer: a text is its bytes."""

    def to_str(self) -> str:
        return "bytes"

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]


class Stage(nn.Module):
    """Some blocks of a GPT; the embeddings where it is the first stage, norm and head where it is the last."""

    def __init__(self, whole: gpt.GPT, number: int, count: int):
        super().__init__()
        blocks = list(whole.blocks)
        self.blocks = nn.ModuleList(blocks[number * len(blocks) // count : (number + 1) * len(blocks) // count])
        self.tokens = whole.tokens if number == 0 else None
        self.positions = whole.positions if number == 0 else None
        self.norm = whole.norm if number == count - 1 else None
        self.head = whole.head if number == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Run:
    """This rank's part of the pipeline."""

    def __init__(self, options: Any, place: Place):
        self.place = place
        self.mesh = zeor.mesh(device=place.device, pp=options.pp, dp=-1)
        rank, local = self.mesh["pp"].get_local_rank(), LOCAL.get(options.schedule, 2)
        count = options.pp * local
        self.numbers = [rank + options.pp * turn for turn in range(local)]
        if options.schedule in V_SHAPED:
            self.numbers = [rank, count - 1 - rank]
        config = gpt.GPTConfig(options.layers, options.width, max(1, options.width // 32), options.context)
        whole = gpt.GPT(config)
        whole.head.weight.data.copy_(whole.tokens.weight.data)  # one parameter, in two stages
        self.stages = nn.ModuleList(Stage(whole, number, count) for number in self.numbers).to(place.device)
        self.optimizer = torch.optim.AdamW(self.stages.parameters(), lr=options.lr, betas=(0.9, 0.95))
        zeor.shard(self.stages, self.optimizer, stage=options.stage, mesh=self.mesh["dp"])
        stages = [
            PipelineStage(module, number, count, place.device, group=self.mesh["pp"].get_group())
            for number, module in zip(self.numbers, self.stages)
        ]
        kind = schedules.get_schedule_class(options.schedule)
        self.schedule = kind(stages if local > 1 else stages[0], options.micro_batches, loss_fn=gpt.loss)
        zeor.pipeline(self.schedule, keep=options.keep, tied=[("tokens.weight", "head.weight")])
        self.is_first, self.is_last = 0 in self.numbers, count - 1 in self.numbers

    def batches(self, windows: Windows, batch: int, seed: int) -> Iterator[Tensor]:
        """The same on every stage of a replica: the first reads its inputs from it, the last its targets."""
        return endless(zeor.data.shard(windows.loader(batch), mesh=self.mesh["dp"], seed=seed))

    def play(self, rows: Tensor, trains: bool = True) -> tuple[float, int]:
        """One step of the schedule: (sum of the losses of its micro-batches, how many), on the last stage."""
        losses: list[Tensor] = []
        inputs = (rows[:, :-1],) if self.is_first else ()
        targets = {"target": rows[:, 1:], "losses": losses} if self.is_last else {}
        step = self.schedule.step if trains else self.schedule.eval
        step(*inputs, **targets, return_outputs=False)
        return sum(loss.item() for loss in losses), len(losses)

    @torch.no_grad()
    def evaluate(self, windows: Windows, batch: int) -> float:
        """The mean loss per byte; every stage takes part."""
        self.stages.eval()
        parts = list(windows.rows[: len(windows) // batch * batch].split(batch))
        own = parts[self.mesh["dp"].get_local_rank() :: self.mesh["dp"].size()][: len(parts) // self.mesh["dp"].size()]
        found = [self.play(rows, trains=False) for rows in own]
        self.stages.train()
        summed, count = zeor.total(sum(loss for loss, _ in found), sum(count for _, count in found))
        return summed / count


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--pp", type=int, default=2, help="stages in a row; the other ranks are replicas")
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
    options = asked.parse_args()
    place = Place(options.seed)
    train, held_out = tokens(["shakespeare", "sotu"], Bytes(), options.limit)
    run = Run(options, place)
    batches = run.batches(Windows(train, options.context + 1, place.device), options.batch, options.seed)
    unseen = Windows(held_out[: 64 * options.batch * (options.context + 1)], options.context + 1, place.device)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, options.lr, options.steps, pct_start=0.1)

    before = run.evaluate(unseen, options.batch)
    for step in range(1, options.steps + 1):
        loss, count = run.play(next(batches))
        norm = zeor.clip_grad_norm_(run.stages, 1.0)  # of all stages
        run.optimizer.step()
        scheduler.step()
        run.optimizer.zero_grad()
        if step % max(1, options.steps // 20) == 0:
            loss, count = zeor.total(loss, count)  # only the last stage knows it
            place.progress(step, options.steps, torch.tensor(loss / count), norm)
    after = run.evaluate(unseen, options.batch)
    place.say(
        f"held-out loss {before:.3f} -> {after:.3f} per byte ({before / math.log(2):.2f} -> {after / math.log(2):.2f} "
        f"bits); {options.schedule}, {options.pp} x {place.world // options.pp} ranks"
    )
    place.end(options, example="pipeline", loss_before=before, loss=after)


if __name__ == "__main__":
    main()
