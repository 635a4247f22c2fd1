"""Losses of training by wires, beside exact training with the same seed, on real text.

    python -m benchmarks.wire_losses                                # screening: one seed, 1,000 steps, all wires
    python -m benchmarks.wire_losses --steps 2000 --seeds 0 1 2 --wires "int8,int4 hadamard stochastic"
    python -m benchmarks.wire_losses --resume                       # only the runs that the file has not yet
    python -m benchmarks.wire_losses --jobs 7                       # so many runs at a time, on a host of many cores
    python -m benchmarks.wire_losses --table                        # prints the table of the file there is

A decoder of a few million parameters over `--ranks` CPU ranks of this host. A seed decides the weights and the order of
the text; all runs of one seed begin alike and see the same batches, but for "exact, other order", which shows how far
apart two runs are that nobody would tell apart. It measures losses only, and the bytes that rank 0 sent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import zeor
from benchmarks.decoder import Shape, build, loss_of, parameter_numel
from benchmarks.format_curves import (
    BETAS,
    CLIP_NORM,
    EXACT,
    LAST,
    OTHER_ORDER,
    WEIGHT_DECAY,
    evaluate,
    kept_runs,
    lr_factor,
)
from benchmarks.measure import command_line, describe_machine, write_json
from benchmarks.table import markdown
from benchmarks.text import Windows, read

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "wire_losses.json"
SHAPE = Shape(layers=4, width=256, heads=8, vocabulary=256, positions=64)
BATCH = 8  # of each rank


class Variant(NamedTuple):
    """A wire by name, and what zeor.shard is told. Stage 2, but where gathers are to be those of stage 3."""

    name: str
    wire: zeor.Wire | dict[str, Any] | str | None = None
    stage: int = 2
    other_order: bool = False


ROUNDED = {"rounding": "stochastic"}
TURNED = {"rotate": True}
WARM_UP = 50  # steps before gradients are left out
VARIANTS = (
    Variant(EXACT),
    Variant("bf16", "bf16"),
    Variant("fp8", "fp8"),
    Variant("fp8 e5m2 gradients", {"reduce": "fp8_e5m2"}),
    Variant("int8", "int8"),
    Variant("int8, stage 3", "int8", stage=3),
    Variant("int8 stochastic", {"gather": "int8", "reduce": "int8", **ROUNDED}),
    Variant("int4 gradients", {"reduce": "int4"}),
    Variant("int4 gradients hadamard", {"reduce": "int4", **TURNED}),
    Variant("int4 weights", {"gather": "int4"}),
    Variant("int2 weights", {"gather": "int2"}),
    Variant("int2/int4", {"gather": "int2", "reduce": "int4"}),
    Variant("int4", "int4"),
    Variant("int4 stochastic", {"gather": "int4", "reduce": "int4", **ROUNDED}),
    Variant("int4 hadamard", {"gather": "int4", "reduce": "int4", **TURNED}),
    Variant("int4 hadamard stochastic", {"gather": "int4", "reduce": "int4", **TURNED, **ROUNDED}),
    Variant("int4 hadamard feedback", {"gather": "int4", "reduce": "int4", **TURNED, "feedback": True}),
    Variant("topk 10%", zeor.Wire(reduce=zeor.TopK(0.1, warmup=WARM_UP))),
    Variant("topk 1%", zeor.Wire(reduce=zeor.TopK(0.01, warmup=WARM_UP))),
    Variant("randomk 10%", zeor.Wire(reduce=zeor.RandomK(0.1, warmup=WARM_UP))),
    Variant("sign", zeor.Wire(reduce=zeor.Sign(warmup=WARM_UP))),
    Variant("powersgd 1", zeor.Wire(reduce=zeor.PowerSGD(1, warmup=WARM_UP))),
    Variant("powersgd 4", zeor.Wire(reduce=zeor.PowerSGD(4, warmup=WARM_UP))),
    Variant("powersgd 16", zeor.Wire(reduce=zeor.PowerSGD(16, warmup=WARM_UP))),
    Variant("int4 weights, powersgd 4", zeor.Wire("int4", zeor.PowerSGD(4, warmup=WARM_UP))),
    Variant("int2/powersgd 4", zeor.Wire("int2", zeor.PowerSGD(4, warmup=WARM_UP))),
    Variant("int4 weights, topk 1%", zeor.Wire("int4", zeor.TopK(0.01, warmup=WARM_UP))),
    Variant("exact, other order", other_order=True),
)


# 1. One run


def ordered_windows(ids: torch.Tensor, seed: int) -> Windows:
    """Windows whose training order is the seed's, while those held out are the same for every seed."""
    windows = Windows(ids, SHAPE.positions)
    generator = torch.Generator().manual_seed(seed)
    windows.order = [windows.order[i] for i in torch.randperm(len(windows.order), generator=generator).tolist()]
    return windows


def train(name: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """On each rank: train from the seed's weights, evaluate, and tell all losses of the joint batch."""
    torch.set_num_threads(1)
    variant = next(each for each in VARIANTS if each.name == name)
    windows = ordered_windows(read(SHAPE.vocabulary).ids, seed + OTHER_ORDER * variant.other_order)
    model = build(SHAPE, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["lr"], betas=BETAS, weight_decay=WEIGHT_DECAY)
    chosen = {"precision": options["precision"], "stage": variant.stage, "wire": variant.wire}
    model, optimizer = zeor.shard(model, optimizer, **chosen)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options["steps"]))
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    began_s = time.perf_counter()
    for step in range(options["steps"]):
        loss = loss_of(model, *windows.batch(step * world + rank, BATCH))
        loss.backward()
        zeor.clip_grad_norm_(model, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    traffic = zeor.traffic(model)
    return {
        "variant": name,
        "wire": str(variant.wire) if isinstance(variant.wire, zeor.Wire) else variant.wire,
        "stage": variant.stage,
        "seed": seed,
        "held_out_loss": round(evaluate(model, windows), 5),
        "last_mean_loss": round(mean(losses[-LAST:]), 5),
        "sent_nbytes": traffic["bytes_sent"],
        "compression": traffic.get("compression", {}),
        "seconds": round(time.perf_counter() - began_s, 1),
        "losses": [round(loss, 4) for loss in losses],
    }


# 2. The table


def table(document: dict[str, Any]) -> str:
    """Held-out losses by wire and seed, in percent off exact training of the same seed, and bytes beside exact."""
    found = {(run["variant"], run["seed"]): run for run in document["runs"]}
    seeds = sorted({seed for name, seed in found if name == EXACT})
    rows = []
    for variant in VARIANTS:
        here = [(found[variant.name, seed], found[EXACT, seed]) for seed in seeds if (variant.name, seed) in found]
        if not here:
            continue
        off = [100 * (run["held_out_loss"] / exact["held_out_loss"] - 1) for run, exact in here]
        fewer = mean(exact["sent_nbytes"] / run["sent_nbytes"] for run, exact in here)
        losses = " / ".join(f"{run['held_out_loss']:.4f}" for run, _ in here)
        told = " / ".join(f"{each:+.2f}%" for each in off)
        rows.append([variant.name, str(variant.stage), losses, told, f"{mean(off):+.2f}%", f"{fewer:.2f}x"])
    named = "seed " + " / ".join(map(str, seeds))
    return markdown(["wire", "stage", f"held-out loss ({named})", "off exact", "mean", "fewer bytes"], rows)


# 3. All of them


def described(options: argparse.Namespace) -> dict[str, Any]:
    """The document before any run."""
    return {
        "kind": "wire_losses",
        "command": command_line(),
        "machine": describe_machine(options.date),
        "workload": {
            "text": read(SHAPE.vocabulary).what,
            "shape": dataclasses.asdict(SHAPE),
            "parameters": parameter_numel(SHAPE),
            "batch_per_rank": BATCH,
            "ranks": options.ranks,
            "tokens": SHAPE.positions,
            "steps": options.steps,
            "precision": options.precision,
            "optimizer": f"AdamW, betas {BETAS}, weight decay {WEIGHT_DECAY}, gradients clipped to {CLIP_NORM}",
            "lr": options.lr,
        },
        "runs": [],
        "left_out": [],
    }


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Seed by seed, so that what was cut short still has whole seeds; the file is whole after each run."""
    document = described(options)
    if options.resume:
        document["runs"] = kept_runs(options.out, document["workload"])
    done = {(run["variant"], run["seed"]) for run in document["runs"]}
    wanted = [name.strip() for name in options.wires.split(",")] if options.wires else [v.name for v in VARIANTS]
    if unknown := [name for name in wanted if name not in {variant.name for variant in VARIANTS}]:
        raise SystemExit(f"no wire is called {unknown[0]!r}; there are {[variant.name for variant in VARIANTS]}")
    begin_until_s = time.monotonic() + 60 * options.minutes if options.minutes is not None else None
    todo = [(seed, name) for seed in options.seeds for name in dict.fromkeys([EXACT, *wanted])]
    with ThreadPoolExecutor(options.jobs) as pool:
        under_way = {
            pool.submit(run_apart, name, seed, options, begin_until_s): (name, seed)
            for seed, name in todo
            if (name, seed) not in done
        }
        for finished in as_completed(under_way):
            name, seed = under_way[finished]
            run = finished.result()
            if run is None:
                document["left_out"].append({"variant": name, "seed": seed})
                continue
            document["runs"].append(run)
            write_json(options.out, document)
            print(f"seed {seed}, {name}: held-out {run['held_out_loss']:.4f}, {run['seconds']} s", flush=True)
    write_json(options.out, document)
    return document


def run_apart(name: str, seed: int, options: argparse.Namespace, begin_until_s: float | None) -> dict[str, Any] | None:
    """One run in a process of its own, so that several can go on at a time; None where it is too late to begin."""
    if begin_until_s is not None and time.monotonic() > begin_until_s:
        return None
    command = [sys.executable, "-m", "benchmarks.wire_losses", "--one", name, "--seeds", str(seed)]
    for setting in ("steps", "lr", "precision", "ranks"):
        command += [f"--{setting}", str(getattr(options, setting))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{name}, seed {seed}: {done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_here(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"steps": options.steps, "lr": options.lr, "precision": options.precision}
    return dict(zeor.launch(train, options.one, options.seeds[0], settings, ranks=options.ranks)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wires", help="comma-separated names of variants (default: all); exact always runs")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--lr", type=float, default=1e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="begin no run later than this")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the file, and add those not in it")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with its ranks")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="train nothing; print the table of the file")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_here(options)))
        return
    print(table(json.loads(options.out.read_text()) if options.table else run_all(options)))


if __name__ == "__main__":
    main()
