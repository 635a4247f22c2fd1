"""What every example does first and last: find its rank and device, join the group, print on rank 0, write its result.

An example runs under python (one process), torchrun or SLURM, on CPU or on a GPU. Nothing here is needed to use zeor:
`zeor.shard` joins a group by itself. It is done by hand for one case that a library should not guess: several ranks
that share one GPU. NCCL refuses that; Gloo does it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Place:
    """This process: its rank, the world, its device; and what it says and writes."""

    def __init__(self, seed: int = 0):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        gpus = torch.cuda.device_count()
        self.device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        else:  # torchrun gives a rank one thread; the cores are there to be used
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // local_world))
        if "RANK" in os.environ and not dist.is_initialized():
            own_gpu = gpus >= local_world
            dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")
        torch.manual_seed(seed)
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """One line, on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def progress(self, step: int, steps: int, loss: Tensor, norm: Tensor | None) -> None:
        """A line about one step in twenty parts of the run; `norm` is the gradients' before clipping, if they were."""
        if step % max(1, steps // 20) == 0:
            clipped = "" if norm is None else f"  norm before clipping {norm.item():.2f}"
            self.say(f"step {step:5d}  loss {loss.item():.3f}{clipped}  {self.seconds():.0f} s")

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def end(self, options: argparse.Namespace, **result: Any) -> None:
        """Add one line of JSON to --out (settings, place, result), on rank 0, and leave the group."""
        if self.rank == 0 and options.out is not None:
            settings = {key: value for key, value in vars(options).items() if key != "out"}
            device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
            place = {"world": self.world, "device": device, "torch": torch.__version__}
            line = {**settings, **place, "seconds": round(self.seconds(), 1), **result}
            with open(options.out, "a") as out:
                out.write(json.dumps(line) + "\n")
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def turns(count: int, world: int, batch: int) -> int:
    """How often every rank must go to see `count` items once, at most `batch` at a time and never none."""
    if count < world or batch < 2:
        raise ValueError(f"{count} items in batches of {batch} cannot be shared by {world} ranks: take more of either.")
    return -(-count // (batch * world))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all examples share."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, help="add the result to this file, as a line of JSON")
    return made
