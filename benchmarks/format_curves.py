"""Loss curves of the formats of moments and of delay=1 on real text, on the CPU, against exact training.

    python -m benchmarks.format_curves                   # two seeds of five runs; writes results/format_curves.json
    python -m benchmarks.format_curves --minutes 14      # begins no run after that; what was left out is in the file
    python -m benchmarks.format_curves --resume          # only the runs that the file has not yet
    python -m benchmarks.format_curves --table           # prints the table of the file there is

A decoder of 1.4 million parameters on the bytes of Moby Dick, which lie in this repository. A seed decides the
weights and the order of the text; the runs of one seed begin with the same weights and see the same batches, but for
"exact, other order", which shows how far apart two runs are that nobody would tell apart. Every run is
evaluated on the same held-out text. It measures losses only: the seconds in the file are of a machine with other work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import nn

import zeor
from benchmarks.decoder import Shape, build, loss_of, parameter_numel
from benchmarks.measure import command_line, describe_machine, write_json
from benchmarks.table import markdown
from benchmarks.text import Windows, read

OUT = Path(__file__).resolve().parent / "results" / "format_curves.json"
SHAPE = Shape(layers=3, width=192, heads=6, vocabulary=256, positions=64)
BATCH = 8
EVALUATED = 64  # held-out windows at a time
BETAS = (0.9, 0.999)
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
RISE_STEPS = 60
LAST = 100  # training losses whose mean is told
OTHER_ORDER = 1000  # added to the seed of the order
EXACT = "exact"


class Variant(NamedTuple):
    """One way to train: what shard() is told, and whether the text comes in another order."""

    name: str
    options: dict[str, Any]
    other_order: bool = False


VARIANTS = (
    Variant(EXACT, {}),
    Variant("moments=bf16", {"moments": "bf16"}),
    Variant("moments=int8", {"moments": "int8"}),
    Variant("delay=1", {"delay": 1}),
    Variant("exact, other order", {}, other_order=True),
)


# 1. One run


def ordered_windows(ids: torch.Tensor, seed: int) -> Windows:
    """Windows whose training order is the seed's, while those held out are the same for every seed."""
    windows = Windows(ids, SHAPE.positions)
    generator = torch.Generator().manual_seed(seed)
    windows.order = [windows.order[i] for i in torch.randperm(len(windows.order), generator=generator).tolist()]
    return windows


def lr_factor(step: int, steps: int) -> float:
    """A linear rise, then a cosine down to a tenth."""
    if step < RISE_STEPS:
        return (step + 1) / RISE_STEPS
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - RISE_STEPS) / max(1, steps - RISE_STEPS)))


def train(variant: Variant, seed: int, ids: torch.Tensor, steps: int, lr: float) -> dict[str, Any]:
    """Train from the seed's weights, evaluate, and tell all losses."""
    windows = ordered_windows(ids, seed + OTHER_ORDER * variant.other_order)
    model: nn.Module = build(SHAPE, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    model, optimizer = zeor.shard(model, optimizer, precision="bf16", **variant.options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps))
    losses = []
    began_s = time.perf_counter()
    for step in range(steps):
        loss = loss_of(model, *windows.batch(step, BATCH))
        loss.backward()
        zeor.clip_grad_norm_(model, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return {
        "variant": variant.name,
        "options": variant.options,
        "seed": seed,
        "held_out_loss": round(evaluate(model, windows), 5),
        "last_mean_loss": round(mean(losses[-LAST:]), 5),
        "seconds": round(time.perf_counter() - began_s, 1),
        "losses": [round(loss, 4) for loss in losses],
    }


@torch.no_grad()
def evaluate(model: nn.Module, windows: Windows) -> float:
    """Mean loss of the held-out windows, each seen once. With delay=1 forward reads weights one update old."""
    model.eval()
    batches = len(windows.held_out) // EVALUATED
    return mean(loss_of(model, *windows.held_out_batch(number, EVALUATED)).item() for number in range(batches))


# 2. The table


def table(document: dict[str, Any]) -> str:
    """Losses by variant, and how far they are from exact training of the same seed; one number for each seed."""
    found = {(run["variant"], run["seed"]): run for run in document["runs"]}
    seeds = sorted({run["seed"] for run in document["runs"]})
    rows = []
    for variant in VARIANTS:
        here = [found.get((variant.name, seed)) for seed in seeds]
        cells = [variant.name]
        for field in ("held_out_loss", "last_mean_loss"):
            cells.append(_by_seed([None if run is None else f"{run[field]:.4f}" for run in here]))
            off = [None if run is None else f"{run[field] - found[EXACT, run['seed']][field]:+.4f}" for run in here]
            cells.append("" if variant.name == EXACT else _by_seed(off))
        if any(here):
            rows.append(cells)
    named = "seed " + " / ".join(map(str, seeds))
    header = [f"what ({named})", "held-out loss", "off exact", f"mean of the last {LAST}", "off exact"]
    return markdown(header, rows)


def _by_seed(cells: list[str | None]) -> str:
    return " / ".join(cell or "not run" for cell in cells)


# 3. All of them


def described(options: argparse.Namespace, text: str) -> dict[str, Any]:
    """The document before any run."""
    parameters = parameter_numel(SHAPE)
    return {
        "kind": "format_curves",
        "command": command_line(),
        "machine": describe_machine(time.strftime("%Y-%m-%d", time.gmtime())),
        "workload": {
            "text": text,
            "shape": dataclasses.asdict(SHAPE),
            "parameters": parameters,
            "batch": BATCH,
            "tokens": SHAPE.positions,
            "steps": options.steps,
            "precision": "bf16",
            "optimizer": f"AdamW, betas {BETAS}, weight decay {WEIGHT_DECAY}, gradients clipped to {CLIP_NORM}",
            "lr": f"{options.lr:g}, reached in {RISE_STEPS} steps, then a cosine down to a tenth",
            "ranks": 1,
            "threads": torch.get_num_threads(),
        },
        "runs": [],
        "left_out": [],
    }


def kept_runs(path: Path, workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a file there is; one of another workload is refused."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    if before["workload"] != workload:
        raise SystemExit(f"{path.name} holds runs of another workload; give another --out, or leave out --resume.")
    return before["runs"]


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Seed by seed, so that a run cut short still has whole seeds; the file is whole after each."""
    text = read(SHAPE.vocabulary)
    document = described(options, text.what)
    if options.resume:
        document["runs"] = kept_runs(options.out, document["workload"])
    done = {(run["variant"], run["seed"]) for run in document["runs"]}
    began_s = time.monotonic()
    for seed in options.seeds:
        for variant in VARIANTS:
            if (variant.name, seed) in done:
                continue
            if options.minutes is not None and time.monotonic() - began_s > 60 * options.minutes:
                document["left_out"].append({"variant": variant.name, "seed": seed})
                continue
            run = train(variant, seed, text.ids, options.steps, options.lr)
            document["runs"].append(run)
            write_json(options.out, document)
            print(f"seed {seed}, {variant.name}: held-out {run['held_out_loss']:.4f}, {run['seconds']} s", flush=True)
    write_json(options.out, document)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--lr", type=float, default=2e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="begin no run later than this")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the file, and add those not in it")
    parser.add_argument("--table", action="store_true", help="train nothing; print the table of the file")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(table(json.loads(options.out.read_text()) if options.table else run_all(options)))


if __name__ == "__main__":
    main()
