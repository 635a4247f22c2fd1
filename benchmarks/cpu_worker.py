"""One rank of one system in the CPU benchmark: it sets itself up, then serves windows on command.

Commands arrive as lines on stdin and answers leave as one JSON line each, so a rank that is not being
measured sleeps in read() and costs the measured ones nothing. It knows its own system only; `cpu_ranks`
makes the comparison.

    {"do": "warm", "steps": 2}     -> {"rank": 0, "losses": [...]}
    {"do": "window", "steps": 4}   -> {"seconds": 3.1, "losses": [...], "bytes_sent": 1234 or null}
    {"do": "report"}               -> memory of this rank
    {"do": "stop"}                 -> {}
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks import cpu_systems
from benchmarks.decoder import SIZES, build, loss_of, random_batch
from benchmarks.measure import reset_peak_rss, status_nbytes

FIXED_BATCHES = 4  # a few batches over and over: the loss falls fast, so a wrong gradient shows in its digits
# What each system imports, done before the memory baseline is read.
IMPORTS = {"zeor": "zeor", "fsdp2": "torch.distributed.fsdp", "ddp": "torch.distributed.optim"}


class Rank:
    """A prepared model with its data and the memory readings taken on the way."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.imported_nbytes = status_nbytes("VmRSS")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        shape = SIZES[arguments.size]
        tokens = min(arguments.tokens, shape.positions)
        generator = torch.Generator().manual_seed(1_000 + self.rank)
        self.batches = [random_batch(shape, arguments.batch, tokens, generator) for _ in range(FIXED_BATCHES)]
        self.trained = cpu_systems.prepare(arguments.system, build(shape), arguments.adamw)
        self.steps_done = 0
        self.setup_peak_nbytes = 0

    def train(self, steps: int) -> list[float]:
        """The plain loop, the same for every system."""
        model, optimizer = self.trained
        losses = []
        for _ in range(steps):
            loss = loss_of(model, *self.batches[self.steps_done % FIXED_BATCHES])
            loss.backward()
            if self.arguments.clip > 0:
                cpu_systems.clip(self.arguments.system, model, self.arguments.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            self.steps_done += 1
        return losses

    def warm(self, steps: int) -> dict[str, Any]:
        """Steps outside the clock; the memory peak starts again after them (set-up is kept apart)."""
        losses = self.train(steps)
        cpu_systems.settle(self.arguments.system, self.trained.model)
        self.setup_peak_nbytes = status_nbytes("VmHWM")
        reset_peak_rss()
        return {"rank": self.rank, "losses": losses}

    def window(self, steps: int) -> dict[str, Any]:
        """Steps between two barriers: nothing that a step leaves for later can escape the clock."""
        system, model = self.arguments.system, self.trained.model
        before = cpu_systems.traffic(system, model)
        dist.barrier()
        start = time.perf_counter()
        losses = self.train(steps)
        cpu_systems.settle(system, model)
        dist.barrier()
        seconds = time.perf_counter() - start
        after = cpu_systems.traffic(system, model)
        sent = None if before is None or after is None else after["bytes_sent"] - before["bytes_sent"]
        return {"seconds": seconds, "losses": losses, "bytes_sent": sent}

    def report(self) -> dict[str, Any]:
        """Peaks in bytes: of the whole life, of training after warm-up, and the growth since the imports."""
        steady = status_nbytes("VmHWM")
        peak = max(self.setup_peak_nbytes, steady)
        return {
            "rank": self.rank,
            "peak_rss_nbytes": peak,
            "steady_peak_rss_nbytes": steady,
            "imported_rss_nbytes": self.imported_nbytes,
            "growth_nbytes": peak - self.imported_nbytes,
        }


def serve(rank: Rank, replies: TextIO) -> None:
    """Answer commands until told to stop or until the coordinator is gone."""
    for line in sys.stdin:
        command = json.loads(line)
        verb = command.pop("do")
        answer = {} if verb == "stop" else getattr(rank, verb)(**command)
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        if verb == "stop":
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--system", required=True)
    parser.add_argument("--size", default="36.7M")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--adamw", default="fused")
    parser.add_argument("--clip", type=float, default=0.0)
    arguments = parser.parse_args()
    # Answers get a descriptor of their own; whatever a library prints goes to stderr with the rest.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    importlib.import_module("torch._dynamo")  # every optimizer imports it; it is no part of what training takes
    for prefix, module in IMPORTS.items():
        if arguments.system.startswith(prefix):
            importlib.import_module(module)
    serve(Rank(arguments), replies)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
