"""A step's time and what it keeps for backward by level of recomputation, side by side in one process on CPU.

The same decoder is sharded once per level (stage 3, one rank, fp32); rounds of one step each take turns, so that what
else the machine does falls on all alike. Seconds are the processor's, of one thread. Kept bytes are counted by storage
between forward and backward: what operations of forward have made and somebody holds, parameters left out. Ratios are
to recompute=False.

    python -m benchmarks.recompute_levels --out benchmarks/results/recompute_levels.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from typing import Any

import torch

import zeor
from benchmarks.decoder import Block, Shape, build, loss_of, random_batch
from zeor.features.keeping import Alive
from zeor.features.products import Products

LEVELS: dict[str, Any] = {"nothing recomputed": False, "products": "products", "blocks": True}
# Said before the first run, from operations and tensors of a block: (time, bytes) beside recompute=False.
FORESEEN = {"products": (1.05, 0.58), "blocks": (1.27, 0.06)}
WARM_UP = 2  # the first makes state; of recompute="products" it counts what is needed


class Run:
    """One level's model."""

    def __init__(self, shape: Shape, recompute: Any):
        self.model = build(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        zeor.shard(self.model, self.optimizer, stage=3, units=[Block], recompute=recompute)
        self.seconds: list[tuple[float, float]] = []

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        begun = time.process_time()
        loss = loss_of(self.model, tokens, targets)
        middle = time.process_time()
        loss.backward()
        over = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append((middle - begun, over - middle))
        return loss.item()

    def kept_nbytes(self, tokens: torch.Tensor, targets: torch.Tensor) -> int:
        """Of the blocks alone: the head's and the loss's are the same at every level."""
        with Alive() as alive:
            hidden = self.model(tokens)
            found = alive.nbytes() - hidden.untyped_storage().nbytes()
        hidden.sum().backward()
        self.optimizer.zero_grad()
        return found


def measure(shape: Shape, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    runs = {name: Run(shape, recompute) for name, recompute in LEVELS.items()}
    generator = torch.Generator().manual_seed(0)
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UP + rounds):
        data = random_batch(shape, batch, tokens, generator)
        order = list(runs)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            losses[name].append(runs[name].step(*data))
    for run in runs.values():
        run.seconds = run.seconds[WARM_UP:]
    data = random_batch(shape, batch, tokens, generator)
    found = {}
    for name, run in runs.items():
        forward, backward = (statistics.median(each) for each in zip(*run.seconds))
        both = statistics.median(sum(each) for each in run.seconds)
        found[name] = {
            "forward_s": forward, "backward_s": backward, "both_s": both, "kept_nbytes": run.kept_nbytes(*data),
            "each_s": [round(sum(each), 4) for each in run.seconds],
        }  # fmt: skip
    best = found["nothing recomputed"]
    for each in found.values():
        each["time_ratio"] = each["both_s"] / best["both_s"]
        each["bytes_ratio"] = each["kept_nbytes"] / best["kept_nbytes"]
    return {"levels": found, "same_losses": len({tuple(each) for each in losses.values()}) == 1}


def microseconds_per_operation(rounds: int = 9, count: int = 2_000) -> dict[str, float]:
    """That the host takes for an operation on a tiny tensor, alone and seen by what keeps products; medians."""
    x, seen = torch.zeros(4), Products(torch.device("cpu"), 1)
    found: dict[str, list[float]] = {"plain": [], "seen": []}
    for _ in range(rounds):
        for name, inside in (("plain", contextlib.nullcontext()), ("seen", seen.hands())):
            with inside:
                begun = time.process_time()
                for _ in range(count):
                    x.add(1.0)
                found[name].append((time.process_time() - begun) / count * 1e6)
    return {name: round(statistics.median(each), 2) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=3)
    add("--width", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--batch", type=int, default=2)
    add("--tokens", type=int, default=256)
    add("--rounds", type=int, default=7)
    add("--date", default="")
    add("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(options.layers, options.width, options.heads, vocabulary=2_048, positions=options.tokens)
    found = measure(shape, options.batch, options.tokens, options.rounds)
    found["microseconds_per_operation"] = microseconds_per_operation()
    found = {
        "command": "python -m benchmarks.recompute_levels " + " ".join(sys.argv[1:]),
        "date": options.date, "torch": torch.__version__, "threads": torch.get_num_threads(),
        "shape": vars(shape), "batch": options.batch, "tokens": options.tokens, "foreseen": FORESEEN, **found,
    }  # fmt: skip
    for name, each in found["levels"].items():
        print(f"{name:20} {each['both_s']:7.3f} s x{each['time_ratio']:.3f}   "
              f"{each['kept_nbytes'] / 2**20:8.1f} MiB x{each['bytes_ratio']:.3f}")  # fmt: skip
    print(found["microseconds_per_operation"])
    print("the same losses" if found["same_losses"] else "OTHER LOSSES")
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=1)
            file.write("\n")
    return 0 if found["same_losses"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
