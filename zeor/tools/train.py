"""`zeor train`: trains the small GPT on a text, sharded over local ranks, and shows what sharding saves.

1. parent: read the options, start the ranks with zeor.launch.
2. every rank: shard model, optimizer and data; validate, train, validate, sample a text.
3. every rank: for each stage shard a fresh model, train one step, measure; compare with the prediction.
4. parent: print the sample and the table.

The training loop is the one a user would write. Only _measure() asks zeor.report(). No line is longer than a terminal
of 80 columns, but for paths; every number has a name or a unit beside it.

Ctrl-C: the ranks end their step, save where there is a place for it, and leave. The parent's handler leaves a file, as
Ctrl-C reaches the parent alone: each rank leads a session of its own. Every rank looks for the file at the end of a
step, and zeor.preempt lets all of them save after the same one. The parent says in one line what was saved, and exits
as a shell expects of an interrupted program. A second Ctrl-C ends the ranks at once. Nothing prints a traceback.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from zeor.tools.plan import COLUMNS, ROLES, predict
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

TEXT = Path(__file__).parent / "text" / "moby-dick.txt"
CONTEXT = 64
HEAD_WIDTH = 32
VALIDATION_SHARE = 0.05
VALIDATION_WINDOWS = 512
WARMUP_STEPS = 20
CLIP_NORM = 1.0
EXIT_CODE = 128 + signal.SIGINT  # of a run that Ctrl-C ended
LEGEND = (
    f"loss: rank 0's, smoothed, nats per byte; grad_norm: before clipping at {CLIP_NORM:g}; tok/s: tokens a "
    "second, all ranks together; lr: learning rate"
)
WIRE_LEGEND = (
    "sent: bytes that rank 0 sent in the last step, and how many times as many they are without --wire; codes: its "
    "time for encoding and decoding them"
)
TABLE_NOTE = (
    "resident: between backward and step, the sum of the four before it, as the sizes of the storages alive then. "
    "transient: what comes on top while a step runs, by zeor's own count of the buffers that it lent; temporaries of a "
    "reduction, autograd's gradients and activations are not in it."
)
PROMPT = "\n\n"
Batches = DataLoader[tuple[Tensor, Tensor]]
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
    wire: str | None = None
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


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
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
        training, validation = _loaders(settings)
        model, optimizer = _build(settings, settings.stage, settings.wire)
        before = _validate(model, validation)
        _say(f"validation loss {before:.3f} nats per byte before training. While it trains:")
        _say(paragraph(f"  {LEGEND}", indent="  "))
        if settings.wire is not None:
            _say(paragraph(f"  {WIRE_LEGEND}", indent="  "))
        try:
            steps, seconds = _train(model, optimizer, training, settings, stop)
        except zeor.Preempted as stopped:
            return Stopped(stopped.step, str(stopped.path))
        rss_nbytes = resident_nbytes()
        after = _validate(model, validation)
        sample = _sample(model, settings.seed)
        del model, optimizer
        stages, tokens = (0, 1, 2, 3), steps * settings.batch * settings.ranks * CONTEXT
        return Result(
            before, after, steps, seconds, tokens / seconds, rss_nbytes, sample,
            predicted={stage: predict(settings.gpt, settings.ranks, stage, settings.precision) for stage in stages},
            measured={stage: _measure(settings, stage, training) for stage in stages},
        )  # fmt: skip


def _loaders(settings: TrainSettings) -> tuple[Batches, Batches]:
    tokens = gpt.encode(settings.text.read_bytes())
    split = len(tokens) - int(VALIDATION_SHARE * len(tokens))
    validation = TokenWindows(tokens[split:], stride=max(1, (len(tokens) - split) // VALIDATION_WINDOWS))
    training = DataLoader(TokenWindows(tokens[:split]), batch_size=settings.batch, shuffle=True, drop_last=True)
    shard = zeor.data.shard
    return shard(training, seed=settings.seed), shard(DataLoader(validation, batch_size=64))


def _build(settings: TrainSettings, stage: int, wire: str | None = None) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(settings.seed)
    model = GPT(settings.gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.99))
    sharded: tuple[GPT, torch.optim.Optimizer]
    sharded = zeor.shard(model, optimizer, stage=stage, precision=settings.precision, wire=wire)
    return sharded


def _train(
    model: GPT, optimizer: torch.optim.Optimizer, training: Batches, settings: TrainSettings, stop: Path | None
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
            fields = [f"grad_norm {float(grad_norm):.2f}", f"{speed:,.0f} tok/s", f"lr {lr:.1e}"]
            if settings.wire is not None:
                fields = [fields[1], *_sent(model), fields[0], fields[2]]
            progress.update(step, f"loss {smooth_loss:.2f}", *fields)
        end.check(step)
    end.close()
    if settings.save is not None and first < settings.steps:
        extra = {"schedule": schedule}
        path = zeor.save(settings.save, model, optimizer, step=settings.steps, extra=extra, data=training)
        _say(f"step {settings.steps} is saved in {path}")
    return settings.steps - first, time.perf_counter() - started_s


def _sent(model: GPT) -> list[str]:
    """What this rank sent in the last step: bytes, how many times as many they would be without a wire, and the host's
    time for encoding and decoding."""
    traffic = zeor.traffic(model)
    sent = sum(nbytes for verbs in traffic["last_step"].values() for nbytes in verbs.values())
    codes = traffic.get("last_step_codes", {})
    shorter = f" x{codes['compression']:.1f}" if codes else ""
    spent = 1e3 * (codes.get("encode", 0.0) + codes.get("decode", 0.0))
    return [f"sent {sent / 1e6:.2f} MB{shorter}", f"codes {spent:.0f} ms"]


def _resume(model: GPT, optimizer: Any, schedule: Any, training: Batches, settings: TrainSettings) -> int:
    """Go on from the latest checkpoint of --save, if there is one; returns how many steps are done."""
    if settings.save is None or not any(settings.save.glob("step-*")):
        return 0
    step = zeor.load(settings.save, model, optimizer, extra={"schedule": schedule}, data=training).step
    _say(f"going on from step {step} in {settings.save}")
    return min(step, settings.steps)


def _endless(loader: Batches) -> Iterator[tuple[Tensor, Tensor]]:
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
def _validate(model: GPT, validation: Batches) -> float:
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


def _measure(settings: TrainSettings, stage: int, training: Batches) -> dict[str, int]:
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
    default, add = TrainSettings(), parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), default=default.stage,
        help="0 replicates everything, 3 shards everything (default: %(default)s)")  # fmt: skip
    for name, kind, meaning in (
        ("ranks", _positive, "local processes to train on"),
        ("steps", _positive, "training steps"),
        ("layers", _positive, "transformer blocks"),
        ("width", _positive, "width of the residual stream"),
        ("batch", _positive, f"sequences of {CONTEXT} bytes per rank and step"),
        ("lr", float, "AdamW's highest learning rate: a warm-up leads to it, a cosine away from it"),
        ("seed", int, "decides the weights, the order of the data and the sample"),
    ):
        add(f"--{name}", type=kind, default=getattr(default, name), help=f"{meaning} (default: %(default)s)")
    add("--precision", choices=("fp32", "bf16", "fp8"), default=default.precision,
        help="what forward and backward compute in; the master stays fp32 (default: fp32)")  # fmt: skip
    add("--wire", choices=("bf16", "fp8", "int8", "int4", "auto"), default=default.wire,
        help="in which format weights and gradients travel between ranks (default: exactly)")  # fmt: skip
    add("--text", type=Path, default=default.text, metavar="FILE",
        help="any file to learn from, read as bytes (default: Moby-Dick, chapters 1 to 48)")  # fmt: skip
    add("--save", type=Path, default=default.save, metavar="FOLDER",
        help="keep checkpoints there, at the end and at Ctrl-C; where there are some it goes on from the latest",
    )  # fmt: skip


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(options: argparse.Namespace) -> int:
    settings = TrainSettings(**{field.name: getattr(options, field.name) for field in fields(TrainSettings)})
    _check_text(settings)
    _check_wire(settings)
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


def _check_wire(settings: TrainSettings) -> None:
    try:
        zeor.Plan.parse({"stage": settings.stage, "wire": settings.wire})
    except ValueError as error:
        raise SystemExit(f"zeor train: {error}") from None


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


# ---- Ctrl-C


class Stopped(NamedTuple):
    """What a rank hands back in place of a result."""

    step: int
    path: str


@contextmanager
def file_at_ctrl_c(wanted: bool) -> Iterator[Path | None]:
    """A path where a file appears at the first Ctrl-C; the second raises KeyboardInterrupt. None, and the first one
    does, where nothing is `wanted`."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="zeor-train-") as folder:
        flag = Path(folder) / "stop"

        def note(number: int, frame: Any) -> None:
            if flag.exists():
                raise KeyboardInterrupt
            flag.touch()
            _tell("interrupted; it ends its step and saves. Press Ctrl-C again to leave at once.")

        before = signal.signal(signal.SIGINT, note)
        try:
            yield flag
        finally:
            signal.signal(signal.SIGINT, before)


class StepEnd:
    """What a rank does at the end of a step: nothing, without a folder."""

    def __init__(self, folder: Path | None, flag: Path | None, model: Any, optimizer: Any, **also: Any) -> None:
        self._flag, self._stop = flag, None
        if folder is not None:
            self._stop = zeor.preempt(folder, model, optimizer, signals="SIGTERM", exit_code=None, **also)

    def check(self, step: int) -> None:
        """Raise zeor.Preempted on every rank, after a save, where the parent was interrupted."""
        if self._stop is not None:
            if self._flag is not None and self._flag.exists():
                signal.raise_signal(signal.SIGTERM)
            self._stop.check(step)

    def close(self) -> None:
        if self._stop is not None:
            self._stop.close()


def interrupted(saved: Stopped | None, folder: Path | None) -> int:
    """Say what became of the run, and give the exit code."""
    if saved is not None:
        _tell(f"stopped after step {saved.step}, which is saved in {saved.path}; the same command goes on from there.")
    elif folder is not None:
        _tell(f"interrupted; nothing new was saved in {folder}.")
    else:
        _tell("interrupted; nothing was saved. With --save FOLDER it saves then, and goes on from there.")
    return EXIT_CODE


def _tell(text: str) -> None:
    print(f"zeor train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit("zeor: training is started by `zeor train`, or by `python -m zeor.tools.cli train`.")
