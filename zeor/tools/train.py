"""`zeor train`: trains the small GPT on a text, sharded over local ranks, and shows what sharding saves.

1. parent: read the options, start the ranks with zeor.launch.
2. every rank: shard model, optimizer and data; validate, train, validate, sample a text.
3. every rank: for each stage shard a fresh model, train one step, measure; compare with the prediction.
4. parent: print the sample and the table.

The training loop is the one a user would write. Only _measure() asks zeor.report(). No line is longer than a terminal
of 80 columns, but for paths; every number has a name or a unit beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import zeor
import zeor.data
from zeor.tools import gpt
from zeor.tools.gpt import GPT, GPTConfig
from zeor.tools.plan import ROLES, predict
from zeor.tools.show import (
    Progress,
    common_unit,
    in_unit,
    paragraph,
    plain_lines,
    resident_nbytes,
    table,
    warnings_only,
    wrapped_log,
)
from zeor.tools.stopping import StepEnd, Stopped, file_at_ctrl_c, interrupted

TEXT = Path(__file__).parent / "text" / "moby-dick.txt"
CONTEXT = 64
HEAD_WIDTH = 32
VALIDATION_SHARE = 0.05
VALIDATION_WINDOWS = 512
WARMUP_STEPS = 20
CLIP_NORM = 1.0
# No padding: zeor.report() takes it from the layout, as the planner does, so there is nothing to compare.
COLUMNS = (*ROLES, "resident", "transient")
LEGEND = (
    f"loss: rank 0's, smoothed, nats per byte; grad_norm: before clipping at {CLIP_NORM:g}; tok/s: tokens a "
    "second, all ranks together; lr: learning rate"
)
TABLE_NOTE = (
    "resident: between backward and step, the sum of the four before it, as the sizes of the storages alive then. "
    "transient: what comes on top while a step runs, by zeor's own count of the buffers that it lent; temporaries of a "
    "reduction, autograd's gradients and activations are not in it."
)
PROMPT = "\n\n"
SAMPLE_NUMEL = 400


@dataclass(frozen=True)
class TrainSettings:
    """The options of one run; the same on every rank."""

    stage: int = 3
    ranks: int = 2
    steps: int = 600
    layers: int = 3
    width: int = 128
    batch: int = 16
    lr: float = 4e-3
    precision: str | None = None
    text: Path = TEXT
    save: Path | None = None
    seed: int = 0

    @property
    def gpt(self) -> GPTConfig:
        heads = self.width // HEAD_WIDTH if self.width % HEAD_WIDTH == 0 else 1
        return GPTConfig(layers=self.layers, width=self.width, heads=heads, context=CONTEXT)


class Result(NamedTuple):
    """What a rank hands back to the parent process."""

    loss_before: float  # validation, nats per byte
    loss_after: float
    steps: int  # taken in this run
    seconds: float
    tokens_per_s: float  # of all ranks together
    rss_nbytes: int  # of this rank's process, after the last step
    sample: str
    predicted: dict[int, dict[str, int]]  # bytes by stage and column
    measured: dict[int, dict[str, int]]


class TokenWindows(Dataset):
    """Overlapping runs of CONTEXT tokens, each with the same run one token later as its target."""

    def __init__(self, tokens: Tensor, stride: int = CONTEXT // 4) -> None:
        self.tokens = tokens
        self.starts = range(0, len(tokens) - CONTEXT, stride)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        return self.tokens[start : start + CONTEXT], self.tokens[start + 1 : start + CONTEXT + 1]


def run_rank(settings: TrainSettings, stop: Path | None = None) -> Result | Stopped:
    """Everything one rank does. A file at `stop` means that the user wants it to end."""
    with wrapped_log(enabled=_is_rank_0()):
        return _run_rank(settings, stop)


def _run_rank(settings: TrainSettings, stop: Path | None) -> Result | Stopped:
    training, validation = _loaders(settings)
    model, optimizer = _build(settings, settings.stage)
    before = _validate(model, validation)
    _say(f"validation loss {before:.3f} nats per byte before training. While it trains:")
    _say(paragraph(f"  {LEGEND}", indent="  "))
    try:
        steps, seconds = _train(model, optimizer, training, settings, stop)
    except zeor.Preempted as stopped:
        return Stopped(stopped.step, str(stopped.path))
    rss_nbytes = resident_nbytes()
    after = _validate(model, validation)
    sample = _sample(model, settings.seed)
    del model, optimizer
    stages = (0, 1, 2, 3)
    return Result(
        before,
        after,
        steps,
        seconds,
        steps * settings.batch * settings.ranks * CONTEXT / seconds,
        rss_nbytes,
        sample,
        predicted={stage: predict(settings.gpt, settings.ranks, stage, settings.precision) for stage in stages},
        measured={stage: _measure(settings, stage, training) for stage in stages},
    )


def _loaders(settings: TrainSettings) -> tuple[DataLoader, DataLoader]:
    tokens = gpt.encode(settings.text.read_bytes())
    split = len(tokens) - int(VALIDATION_SHARE * len(tokens))
    validation = TokenWindows(tokens[split:], stride=max(1, (len(tokens) - split) // VALIDATION_WINDOWS))
    training = DataLoader(TokenWindows(tokens[:split]), batch_size=settings.batch, shuffle=True, drop_last=True)
    return (
        zeor.data.shard(training, seed=settings.seed),
        zeor.data.shard(DataLoader(validation, batch_size=64)),
    )


def _build(settings: TrainSettings, stage: int) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(settings.seed)
    model = GPT(settings.gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.99))
    return zeor.shard(model, optimizer, stage=stage, precision=settings.precision)


def _train(
    model: GPT, optimizer: torch.optim.Optimizer, training: DataLoader, settings: TrainSettings, stop: Path | None
) -> tuple[int, float]:
    """The loop; returns the steps it took, and the seconds."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, settings.steps))
    first = _resume(model, optimizer, schedule, training, settings)
    end = StepEnd(settings.save, stop, model, optimizer, extra={"schedule": schedule}, data=training)
    progress = Progress(settings.steps, start=first, enabled=_is_rank_0())
    smooth_loss = math.nan
    started_s = time.perf_counter()
    for step, (x, y) in enumerate(islice(_endless(training), settings.steps - first), start=first + 1):
        lr = schedule.get_last_lr()[0]
        loss = gpt.loss(model(x), y)
        loss.backward()
        grad_norm = zeor.clip_grad_norm_(model, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        smooth_loss = loss.item() if step == first + 1 else 0.9 * smooth_loss + 0.1 * loss.item()
        if progress.due(step):
            speed = (step - first) * x.numel() * settings.ranks / (time.perf_counter() - started_s)
            progress.update(
                step,
                f"loss {smooth_loss:.2f}",
                f"grad_norm {float(grad_norm):.2f}",
                f"{speed:,.0f} tok/s",
                f"lr {lr:.1e}",
            )
        end.check(step)
    end.close()
    if settings.save is not None and first < settings.steps:
        extra = {"schedule": schedule}
        path = zeor.save(settings.save, model, optimizer, step=settings.steps, extra=extra, data=training)
        _say(f"step {settings.steps} is saved in {path}")
    return settings.steps - first, time.perf_counter() - started_s


def _resume(model: GPT, optimizer: Any, schedule: Any, training: DataLoader, settings: TrainSettings) -> int:
    """Go on from the latest checkpoint of --save, if there is one; returns how many steps are done."""
    if settings.save is None or not any(settings.save.glob("step-*")):
        return 0
    step = zeor.load(settings.save, model, optimizer, extra={"schedule": schedule}, data=training).step
    _say(f"going on from step {step} in {settings.save}")
    return min(step, settings.steps)


def _endless(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch; zeor.data reshuffles each."""
    while True:
        yield from loader


def _lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def _validate(model: GPT, validation: DataLoader) -> float:
    """Mean loss over the validation windows of all ranks."""
    model.eval()
    mean = torch.stack([gpt.loss(model(x), y).float() for x, y in validation]).mean()
    model.train()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def _sample(model: GPT, seed: int) -> str:
    """A text that continues PROMPT. All ranks draw the same one: a sharded forward needs them in step."""
    generator = torch.Generator().manual_seed(seed)
    tokens = gpt.generate(model, gpt.encode(PROMPT), SAMPLE_NUMEL, temperature=0.8, generator=generator)
    return gpt.decode(tokens).strip()


def _measure(settings: TrainSettings, stage: int, training: DataLoader) -> dict[str, int]:
    """Bytes on this rank under the names of COLUMNS, counted after a second backward.

    The first step makes the moments; gradients rest between a backward and its step.
    """
    with warnings_only():  # the start-up block was there once
        model, optimizer = _build(settings, stage)
    for step, (x, y) in enumerate(islice(training, 2)):
        gpt.loss(model(x), y).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    found = zeor.report(model)
    resident = sum(found[role] for role in ROLES)
    return {**found, "resident": resident, "transient": found["transient_peak"]}


def _is_rank_0() -> bool:
    """By the launcher's word: it is asked before zeor.shard has joined the process group, too."""
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if _is_rank_0():
        print(text, flush=True)


def bytes_table(predicted: dict[int, dict[str, int]], measured: dict[int, dict[str, int]]) -> str:
    """Two rows per stage, what was predicted and what was measured, with the columns of COLUMNS."""
    both = [(stage, kind, found[stage]) for stage in sorted(measured) for kind, found in
            (("predicted", predicted), ("measured", measured))]  # fmt: skip
    unit, nbytes = common_unit(counts[column] for _, _, counts in both for column in COLUMNS)
    rows = [[f"{stage} {kind}", *(in_unit(counts[name], nbytes) for name in COLUMNS)] for stage, kind, counts in both]
    return f"{unit} per rank, by stage:\n\n{table(['stage', *COLUMNS], rows)}"


def agreement(predicted: dict[int, dict[str, int]], measured: dict[int, dict[str, int]]) -> str:
    """Whether bytes at rest are those that were predicted, which the table's digits do not show to the byte, and
    whether the transient ones are no more than predicted."""

    def holds(stage: int) -> bool:
        found, said = measured[stage], predicted[stage]
        return all(found[role] == said[role] for role in ROLES) and found["transient"] <= said["transient"]

    differ = [str(stage) for stage in sorted(measured) if not holds(stage)]
    if differ:
        return f"Measured is not what was predicted at stage {', '.join(differ)}."
    return "Measured is what was predicted, to the byte (transient: at most that)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zeor train`; their defaults are those of TrainSettings."""
    default = TrainSettings()
    parser.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), default=default.stage,
        help="0 replicates everything, 3 shards everything (default: %(default)s)",
    )  # fmt: skip
    for name, kind, meaning in (
        ("ranks", _positive, "local processes to train on"),
        ("steps", _positive, "training steps"),
        ("layers", _positive, "transformer blocks"),
        ("width", _positive, "width of the residual stream"),
        ("batch", _positive, f"sequences of {CONTEXT} bytes per rank and step"),
        ("lr", float, "AdamW's highest learning rate: a warm-up leads to it, a cosine away from it"),
        ("seed", int, "decides the weights, the order of the data and the sample"),
    ):
        help_text = f"{meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=kind, default=getattr(default, name), help=help_text)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default=default.precision,
        help="what forward and backward compute in; the master stays fp32 (default: fp32)",
    )  # fmt: skip
    parser.add_argument(
        "--text", type=Path, default=default.text, metavar="FILE",
        help="any file to learn from, read as bytes (default: Moby-Dick, chapters 1 to 48)",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=Path, default=default.save, metavar="FOLDER",
        help="keep checkpoints there, at the end and at Ctrl-C; where there are some it goes on from the latest",
    )  # fmt: skip


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(options: argparse.Namespace) -> int:
    """`zeor train` with its options read."""
    settings = TrainSettings(**{field.name: getattr(options, field.name) for field in fields(TrainSettings)})
    _check_text(settings)
    sizes = settings.gpt
    ranks = f"{settings.ranks} local rank{'s' if settings.ranks > 1 else ''}"
    trained = f"a GPT of {sizes.layers} layers, width {sizes.width}, on {settings.text.name}"
    print(paragraph(f"training {trained}: stage {settings.stage}, {ranks}, {settings.steps} steps"), flush=True)
    try:
        with file_at_ctrl_c(settings.save is not None) as flag:
            result: Result | Stopped = zeor.launch(run_rank, settings, flag, ranks=settings.ranks)[0]
    except KeyboardInterrupt:
        return interrupted(None, settings.save)
    if isinstance(result, Stopped):
        return interrupted(result, settings.save)
    print(
        f"{result.steps} steps in {result.seconds:.0f} s, {result.tokens_per_s:,.0f} tokens/s; rank 0's process has "
        f"{result.rss_nbytes / 2**20:,.0f} MiB"
    )
    print(f"validation loss {result.loss_before:.3f} -> {result.loss_after:.3f} nats per byte")
    print(f"\nWhat it writes now:\n\n{plain_lines(result.sample)}\n")
    print(f"{bytes_table(result.predicted, result.measured)}\n")
    print(paragraph(f"{agreement(result.predicted, result.measured)} {TABLE_NOTE}"))
    return 0


def _check_text(settings: TrainSettings) -> None:
    if not settings.text.is_file():
        raise SystemExit(f"zeor train: there is no file {settings.text}")
    needed_nbytes = 2 * CONTEXT / VALIDATION_SHARE + settings.ranks * settings.batch * CONTEXT
    nbytes = settings.text.stat().st_size
    if nbytes < needed_nbytes:
        raise SystemExit(
            f"zeor train: {settings.text} has {nbytes:,} bytes; {settings.ranks} ranks with a batch of"
            f" {settings.batch} need at least {math.ceil(needed_nbytes):,}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zeor.tools.train", description="Train a small GPT on local ranks with ZeRO."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    # The ranks import run_rank by name, and it must not be __main__'s.
    from zeor.tools.train import main as imported_main

    raise SystemExit(imported_main())
