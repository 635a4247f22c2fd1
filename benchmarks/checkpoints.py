"""Checkpoints beside plain writes, torch.save, torch DCP and DeepSpeed, in one run: GB/s to and from one disk.

    torchrun --nproc-per-node 2 -m benchmarks.checkpoints --gigabytes 1.2 --folder /tmp/ck --out benchmarks/results
    python -m benchmarks.checkpoints --gigabytes 24 --folder /tmp/ck --ways plain zeor --rounds 2 --out OUT

A model with AdamW whose state (fp32 master and two moments) has the given size. Every way writes the same bytes and
syncs them, ways interleaved over --rounds; the best of each counts. Reads come from disk where the page cache can be
dropped (root), else the result says so; `plain` reads into one small buffer, `kept` into new memory for all of it.
With --memory equal the same bytes went through the page cache before each timed read, and were dropped from it. As it
is, only the ways that write through it find memory that was just in use, and a virtual machine may have given away what
else was free.
`stall` is how long an asynchronous save holds up training, beside a plain copy of the same bytes into memory that is
pinned already. DeepSpeed is left out where it is not installed; on CPU ranks it wants DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zeor
from zeor.access.sharded import state_of

WIDTH = 4096
WAYS = ("plain", "zeor", "torch", "dcp", "deepspeed")


def layers(gigabytes: float, device: torch.device) -> nn.Sequential:
    """Square ones: 12 bytes per parameter with AdamW's moments."""
    count = max(1, round(gigabytes * 1e9 / 12 / WIDTH**2))
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def build(gigabytes: float, device: torch.device) -> tuple[Any, Any]:
    model: Any = layers(gigabytes, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = zeor.shard(model, optimizer, stage=3)
    model(torch.randn(4, WIDTH, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def build_deepspeed(gigabytes: float, device: torch.device) -> Any:
    """The same model and optimizer at ZeRO stage 3, with state."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", verbose=False)
    engine, *_ = deepspeed.initialize(model=layers(gigabytes, device), config=config)
    engine.backward(engine(torch.randn(4, WIDTH, device=device)).square().mean())
    engine.step()
    return engine


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


def through_page_cache(ways: Ways, device: torch.device) -> None:
    """What was written, read once: the memory that is free afterwards is equally fresh for every way."""
    barrier(device)
    files = sorted(path for path in ways.folder.rglob("*") if path.is_file())
    view = memoryview(ways.host.numpy())
    for path in files[ways.rank :: dist.get_world_size()]:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(view):
                pass
    barrier(device)


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
        self.deepspeed: Any = None

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

    def read_kept(self) -> None:
        """The same into memory that is new, and all of it kept: what any loader has to do at the least."""
        kept = []
        with open(self.folder / f"plain{self.rank}", "rb", buffering=0) as file:
            for tensor in self.state.values():
                kept.append(torch.empty(tensor.nbytes, dtype=torch.uint8))
                view = memoryview(kept[-1].numpy())
                while len(view):
                    view = view[file.readinto(view) :]

    def write_zeor(self) -> None:
        zeor.save(self.folder / "zeor", self.model, self.optimizer, step=1, keep=1)

    def read_zeor(self) -> None:
        zeor.load(self.folder / "zeor", self.model, self.optimizer)

    def write_torch(self) -> None:
        path = self.folder / f"torch{self.rank}.pt"
        torch.save(self.state, path)
        sync(path)

    def read_torch(self) -> None:
        torch.load(self.folder / f"torch{self.rank}.pt", weights_only=True, map_location="cpu")

    def _named(self) -> dict[str, torch.Tensor]:
        return {f"{self.rank}.{key}": value for key, value in self.state.items()}

    def write_dcp(self) -> None:
        dcp.save(self._named(), checkpoint_id=self.folder / "dcp")  # its writer syncs files by default

    def read_dcp(self) -> None:
        dcp.load(self._named(), checkpoint_id=self.folder / "dcp")


    def write_deepspeed(self) -> None:
        self.deepspeed.save_checkpoint(self.folder / "deepspeed", tag="bench")
        for path in (self.folder / "deepspeed" / "bench").glob(f"*rank_{self.rank}_*"):
            sync(path)  # it does not itself

    def read_deepspeed(self) -> None:
        path, _ = self.deepspeed.load_checkpoint(self.folder / "deepspeed", tag="bench")
        assert path is not None


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


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


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of state, all ranks together")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is measured; plain always is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", choices=("as-is", "equal"), default="as-is", help="what reads find free")
    parser.add_argument("--no-stall", action="store_true", help="leave out the asynchronous save")
    parser.add_argument("--out", type=Path, help="a JSON file, or the folder it goes to")
    return parser.parse_args()


def measure(ways: Ways, names: list[str], options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every way in turn, again and again."""
    writes: dict[str, list[float]] = {}
    reads: dict[str, list[float]] = {}
    cold = True
    for _ in range(options.rounds):
        for name in names:
            writes.setdefault(name, []).append(timed(getattr(ways, f"write_{name}"), device))
            if options.memory == "equal":
                through_page_cache(ways, device)
            cold = drop_caches() and cold
            reads.setdefault(name, []).append(timed(getattr(ways, f"read_{name}"), device))
            if name == "plain":
                drop_caches()
                reads.setdefault("kept", []).append(timed(ways.read_kept, device))
            _remove(ways.folder, name, ways.rank, device)
    total = ways.nbytes * dist.get_world_size()
    return {
        "cold_reads": cold,
        "write_GBps": {name: total / min(s) / 1e9 for name, s in writes.items()},
        "read_GBps": {name: total / min(s) / 1e9 for name, s in reads.items()},
        "write_seconds": writes, "read_seconds": reads,
    }  # fmt: skip


def main() -> None:
    options = asked()
    device = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    else:  # DCP wants a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    names = [name for name in WAYS if name in options.ways or name == "plain"]
    if "deepspeed" in names and importlib.util.find_spec("deepspeed") is None:
        names.remove("deepspeed")
        if rank == 0:
            print("DeepSpeed is not installed: it is left out.")
    options.folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = build(options.gigabytes, device)
    ways = Ways(model, optimizer, options.folder, rank)
    if "deepspeed" in names:
        ways.deepspeed = build_deepspeed(options.gigabytes, device)
    result: dict[str, Any] = {
        "command": _command(world),
        "world": world, "device": str(device), "torch": torch.__version__, "bytes": ways.nbytes * world,
        "memory": options.memory,
        **measure(ways, names, options, device),
    }  # fmt: skip
    for kind in ("write", "read") if "zeor" in names else ():
        result[f"{kind}_of_plain"] = result[f"{kind}_GBps"]["zeor"] / result[f"{kind}_GBps"]["plain"]
    if not options.no_stall and "zeor" in names:
        result.update(stall(ways, device))
        result["stall_of_copy"] = result["stall_seconds"] / result["copy_seconds"]
    if rank == 0:
        show(result, options.out)
        shutil.rmtree(options.folder, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


def show(result: dict[str, Any], out: Path | None) -> None:
    """The result to a file, and a short table."""
    if out is not None:
        kind = "cpu" if result["device"] == "cpu" else "gpu"
        file = out if out.suffix == ".json" else out / f"checkpoints_{kind}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    cold = "cold" if result["cold_reads"] else "from the page cache"
    print(f"{result['bytes'] / 1e9:.2f} GB, {result['world']} rank(s), {result['device']}, reads {cold}")
    print(f"{'GB/s':10s} {'write':>7s} {'of plain':>9s} {'read':>7s} {'of plain':>9s}")
    write, read = result["write_GBps"], result["read_GBps"]
    for name in read:
        written = f"{write[name]:7.2f} {write[name] / write['plain']:8.2f}x" if name in write else " " * 17
        print(f"{name:10s} {written} {read[name]:7.2f} {read[name] / read['plain']:8.2f}x")
    if "stall_of_copy" in result:
        seconds = result["stall_seconds"]
        print(f"an asynchronous save holds training up for {result['stall_of_copy']:.2f}x of a copy ({seconds:.3f} s)")


def _command(world: int) -> str:
    """What was asked for; where the result goes is left out."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    start = f"torchrun --nproc-per-node {world}" if "RANK" in os.environ else "python"
    return " ".join([start, "-m benchmarks.checkpoints", *words])


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
