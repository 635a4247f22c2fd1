"""Checkpoints beside plain writes, torch.save and torch DCP, in one run: GB/s to and from one disk.

    python -m benchmarks.checkpoints --gigabytes 8 --folder /tmp/ck [--out benchmarks/results/checkpoints_gpu.json]
    torchrun --nproc-per-node 2 -m benchmarks.checkpoints --gigabytes 1 --folder /tmp/ck

A model with AdamW whose state (fp32 master and two moments) has the given size. Every way writes the same bytes and
syncs them, ways interleaved over --rounds; the best of each counts. Reads come from disk where the page cache can be
dropped (root), else the result says so. `stall` is how long an asynchronous save holds up training, beside a plain
copy of the same bytes into memory that is pinned already.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zeor
from zeor.runtime.sharded import state_of

WIDTH = 4096


def build(gigabytes: float, device: torch.device) -> tuple[Any, Any]:
    """Square layers: 12 bytes per parameter with AdamW's moments."""
    layers = max(1, round(gigabytes * 1e9 / 12 / WIDTH**2))
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = zeor.shard(model, optimizer, stage=3)
    model(torch.randn(4, WIDTH, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def local_state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """This rank's own bytes, as plain tensors: what torch.save and DCP are given."""
    found = {}
    stepper = state_of(model).steppers[0]
    for number, segment in enumerate(stepper.segments.all()):
        found[f"{number}.value"] = segment.detach()
        for key, value in optimizer.state[segment].items():
            if value.dim():
                found[f"{number}.{key}"] = value
    return found


def drop_caches() -> bool:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return True
    except OSError:
        return False


def timed(do: Callable[[], Any], device: torch.device) -> float:
    barrier(device)
    start = time.perf_counter()
    do()
    barrier(device)
    return time.perf_counter() - start


def barrier(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    if dist.is_initialized():
        dist.barrier()


class Ways:
    """Each way to write and read this rank's state."""

    def __init__(self, model: Any, optimizer: Any, folder: Path, rank: int):
        self.model, self.optimizer, self.folder, self.rank = model, optimizer, folder, rank
        self.state = local_state(model, optimizer)
        self.nbytes = sum(t.nbytes for t in self.state.values())
        largest = max(t.nbytes for t in self.state.values())
        on_device = next(iter(self.state.values())).device.type != "cpu"
        self.host = torch.empty(largest, dtype=torch.uint8, pin_memory=on_device)

    def write_plain(self) -> None:
        """What the disk gives: each tensor by one write, one sync."""
        fd = os.open(self.folder / f"plain{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in self.state.values():
            flat = tensor.reshape(-1).view(torch.uint8)
            if flat.device.type != "cpu":
                flat = self.host[: flat.numel()].copy_(flat)
            view = memoryview(flat.numpy())
            while len(view):
                view = view[os.write(fd, view) :]
        os.fsync(fd)
        os.close(fd)

    def read_plain(self) -> None:
        fd = os.open(self.folder / f"plain{self.rank}", os.O_RDONLY)
        view = memoryview(self.host.numpy())
        while os.readv(fd, [view]):
            pass
        os.close(fd)

    def write_zeor(self) -> None:
        zeor.save(self.folder / "zeor", self.model, self.optimizer, step=1, keep=1)

    def read_zeor(self) -> None:
        zeor.load(self.folder / "zeor", self.model, self.optimizer)

    def write_torch(self) -> None:
        path = self.folder / f"torch{self.rank}.pt"
        torch.save(self.state, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def read_torch(self) -> None:
        torch.load(self.folder / f"torch{self.rank}.pt", weights_only=True, map_location="cpu")

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{self.rank}.{key}": value for key, value in self.state.items()}

    def write_dcp(self) -> None:
        dcp.save(self._named(), checkpoint_id=self.folder / "dcp")  # its writer syncs files by default

    def read_dcp(self) -> None:
        dcp.load(self._named(), checkpoint_id=self.folder / "dcp")


def stall(ways: Ways, device: torch.device) -> dict[str, float]:
    """Seconds an asynchronous save holds up the caller, beside a copy of the same bytes to the host."""
    pinned = torch.empty(ways.nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")

    def copy() -> None:
        at = 0
        for tensor in ways.state.values():
            flat = tensor.reshape(-1).view(torch.uint8)
            pinned[at : at + flat.numel()].copy_(flat, non_blocking=True)
            at += flat.numel()

    pinned.fill_(0)
    copy_seconds = min(timed(copy, device) for _ in range(3))
    pinned.untyped_storage().resize_(0)  # the save needs as much
    gc.collect()
    found = []
    for step in (10, 11, 12):  # the first makes the buffers
        barrier(device)
        start = time.perf_counter()
        handle = zeor.save(
            ways.folder / "async", ways.model, ways.optimizer, step=step, keep=1, asynchronous=True
        )
        barrier(device)
        found.append(time.perf_counter() - start)
        handle.wait()
    return {"copy_seconds": copy_seconds, "first_stall_seconds": found[0], "stall_seconds": min(found[1:])}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--gigabytes", type=float, default=1.0, help="of state, all ranks together")
    asked.add_argument("--folder", type=Path, required=True)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    device = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    else:  # DCP wants a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    options.folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = build(options.gigabytes, device)
    ways = Ways(model, optimizer, options.folder, rank)
    total = ways.nbytes * world
    writes: dict[str, list[float]] = {}
    reads: dict[str, list[float]] = {}
    cold = True
    for _ in range(options.rounds):
        for name in ("plain", "zeor", "torch", "dcp"):
            writes.setdefault(name, []).append(timed(getattr(ways, f"write_{name}"), device))
            cold = drop_caches() and cold
            reads.setdefault(name, []).append(timed(getattr(ways, f"read_{name}"), device))
            if name != "zeor":
                _remove(options.folder, name, rank, device)
        shutil.rmtree(options.folder / "zeor", ignore_errors=True)
    result: dict[str, Any] = {
        "world": world, "device": str(device), "torch": torch.__version__, "bytes": total, "cold_reads": cold,
        "write_GBps": {name: total / min(s) / 1e9 for name, s in writes.items()},
        "read_GBps": {name: total / min(s) / 1e9 for name, s in reads.items()},
        "write_seconds": writes, "read_seconds": reads,
    }  # fmt: skip
    result["write_of_plain"] = result["write_GBps"]["zeor"] / result["write_GBps"]["plain"]
    result["read_of_plain"] = result["read_GBps"]["zeor"] / result["read_GBps"]["plain"]
    result.update(stall(ways, device))
    result["stall_of_copy"] = result["stall_seconds"] / result["copy_seconds"]
    if rank == 0:
        print(json.dumps({k: v for k, v in result.items() if not k.endswith("_seconds") or "stall" in k}, indent=1))
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        shutil.rmtree(options.folder, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


def _remove(folder: Path, name: str, rank: int, device: torch.device) -> None:
    barrier(device)
    for path in (folder / f"{name}{rank}", folder / f"{name}{rank}.pt"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    if rank == 0:
        shutil.rmtree(folder / name, ignore_errors=True)
    barrier(device)


if __name__ == "__main__":
    main()
