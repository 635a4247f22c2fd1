"""Losses of training with products in 8 bits, beside bf16 with the same seed, on real text, on one GPU.

    python -m benchmarks.text                        # once, where there is a network: the text, as tokens
    python -m benchmarks.fp8_losses --minutes 12     # begins no run after that; what was left out is in the file
    python -m benchmarks.fp8_losses --resume         # only the runs that the file has not yet
    python -m benchmarks.fp8_losses --table          # prints the table of the file there is
    python -m benchmarks.fp8_losses --size tiny --steps 8 --device cpu --eager      # a check without a GPU

A decoder of 350 million parameters with one seed, and one of 42 million with three. A seed decides the weights and the
order of the text: all runs of one seed and size begin alike and see the same batches. The JSON goes to --out, or else
to $OUT/fp8_losses.json where OUT is set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

# So that `python benchmarks/fp8_losses.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeor
from benchmarks.decoder import SIZES, Shape, build, loss_of, parameter_numel
from benchmarks.format_curves import BETAS, CLIP_NORM, LAST, WEIGHT_DECAY, kept_runs, lr_factor
from benchmarks.measure import command_line, describe_machine, write_json
from benchmarks.table import markdown
from benchmarks.text import Windows, read

OUT = Path(__file__).resolve().parent / "results" / "fp8_losses.json"
EVALUATED = 16  # held-out windows at a time
BF16 = "bf16"


class Trained(NamedTuple):
    """A shape, how many sequences a step has, the rate at its highest, and with how many seeds it is trained."""

    shape: Shape
    batch: int
    lr: float
    seeds: int


MODELS = {
    "350M": Trained(Shape(24, 1_024, 16, vocabulary=16_384, positions=1_024), 16, 6e-4, 1),
    "42M": Trained(Shape(8, 512, 8, vocabulary=16_384, positions=512), 32, 1e-3, 3),
    "tiny": Trained(SIZES["tiny"], 4, 2e-3, 1),
}
WAYS: dict[str, Any] = {
    BF16: "bf16",
    "fp8 tensorwise": "fp8",
    "fp8 rowwise": zeor.Precision(fp8="rowwise"),
    "fp8 rowwise_with_gw_hp": zeor.Precision(fp8="rowwise_with_gw_hp"),
}


# 1. One run


def train(size: str, way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train from the seed's weights, evaluate, and tell all losses; they are read once the run is over."""
    shape, batch, lr, _ = MODELS[size]
    windows = Windows(read(shape.vocabulary).ids, shape.positions)
    turn = torch.randperm(len(windows.order), generator=torch.Generator().manual_seed(seed)).tolist()
    windows.order = [windows.order[place] for place in turn]
    model = build(shape, options.device, seed=seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=options.device == "cuda"
    )
    compiled = {} if options.eager else {"compile": True}
    model, optimizer = zeor.shard(model, optimizer, precision=WAYS[way], device=options.device, **compiled)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))
    losses = []
    began_s = time.perf_counter()
    for step in range(options.steps):
        loss = loss_of(model, *_there(windows.batch(step, batch), options.device))
        loss.backward()
        zeor.clip_grad_norm_(model, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    told = torch.stack(losses).tolist()
    run = {
        "size": size,
        "way": way,
        "seed": seed,
        "parameters": parameter_numel(shape),
        "tokens_a_step": batch * shape.positions,
        "held_out_loss": round(evaluate(model, windows, options.device), 5),
        "last_mean_loss": round(mean(told[-LAST:]), 5),
        "seconds": round(time.perf_counter() - began_s, 1),
        "losses": [round(loss, 4) for loss in told],
    }
    zeor.unshard(model, optimizer)
    return run


def _there(batch: tuple[torch.Tensor, torch.Tensor], device: str) -> list[torch.Tensor]:
    return [part.to(device, non_blocking=True) for part in batch]


@torch.no_grad()
def evaluate(model: torch.nn.Module, windows: Windows, device: str) -> float:
    """Mean loss of the held-out windows; of a part of them, if they are no multiple of a batch."""
    model.eval()
    batches = max(1, min(len(windows.held_out) // EVALUATED, 40))
    held_out = [_there(windows.held_out_batch(number, EVALUATED), device) for number in range(batches)]
    return mean(loss_of(model, *batch).item() for batch in held_out)


# 2. The table


def table(document: dict[str, Any]) -> str:
    """Held-out losses by size, way and seed, and how far they are from bf16 with the same seed."""
    found = {(run["size"], run["way"], run["seed"]): run for run in document["runs"]}
    rows = []
    for size, trained in MODELS.items():
        for way in WAYS:
            here = [found[size, way, seed] for seed in range(trained.seeds) if (size, way, seed) in found]
            bases = [found.get((size, BF16, run["seed"])) for run in here]
            off = [100 * (run["held_out_loss"] / base["held_out_loss"] - 1) for run, base in zip(here, bases) if base]
            if here:
                losses = " / ".join(f"{run['held_out_loss']:.4f}" for run in here)
                told = " / ".join(f"{each:+.2f}%" for each in off)
                rows.append([size, way, losses, told, f"{sum(run['seconds'] for run in here):.0f}"])
    return markdown(["model", "products in", "held-out loss, by seed", "off bf16", "seconds"], rows)


# 3. All of them


def described(options: argparse.Namespace) -> dict[str, Any]:
    """The document before any run."""
    return {
        "kind": "fp8_losses",
        "command": command_line(),
        "machine": describe_machine(options.date),
        "workload": {
            "text": {size: read(MODELS[size].shape.vocabulary).what for size in options.size},
            "models": {size: {**MODELS[size]._asdict(), "shape": _fields(MODELS[size].shape)} for size in options.size},
            "steps": options.steps,
            "optimizer": f"AdamW, betas {BETAS}, weight decay {WEIGHT_DECAY}, gradients clipped to {CLIP_NORM}",
            "compiled": not options.eager,
        },
        "runs": [],
        "left_out": [],
    }


def _fields(shape: Shape) -> dict[str, int]:
    return dataclasses.asdict(shape)


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Rivals stand next to each other, so that what was cut short still compares; the file is whole after each run."""
    document = described(options)
    if options.resume:
        document["runs"] = kept_runs(options.out, document["workload"])
    done = {(run["size"], run["way"], run["seed"]) for run in document["runs"]}
    began_s = time.monotonic()
    for size in options.size:
        for seed in range(MODELS[size].seeds):
            for way in WAYS:
                if (size, way, seed) in done:
                    continue
                if options.minutes is not None and time.monotonic() - began_s > 60 * options.minutes:
                    document["left_out"].append({"size": size, "way": way, "seed": seed})
                    continue
                run = train(size, way, seed, options)
                document["runs"].append(run)
                write_json(options.out, document)
                print(f"{size}, {way}, seed {seed}: {run['held_out_loss']:.4f}, {run['seconds']} s", flush=True)
    write_json(options.out, document)
    return document


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="+", default=["350M", "42M"], choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--eager", action="store_true", help="blocks are not compiled")
    parser.add_argument("--minutes", type=float, help="begin no run later than this")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the file, and add those not in it")
    parser.add_argument("--table", action="store_true", help="train nothing; print the table of the file")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"], OUT.name) if "OUT" in os.environ else OUT)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    print(table(json.loads(options.out.read_text()) if options.table else run_all(options)))


if __name__ == "__main__":
    main()
