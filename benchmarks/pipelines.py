"""Pipelines on CPU ranks: zeor beside FSDP2 under torch's schedules: right or wrong, gathers, reduces, seconds.

Two ranks in a row, two replicas of each (pp x dp = 2 x 2). Every system trains the same stages in float64; what it ends
with is compared with one process on the joint batch. Gathers and reduces are those of one step of one rank, against the
number of groups of parameters that are gathered together (zeor's units, FSDP2's modules). Seconds of ranks that share
few cores say little about pipelines: look at them as ratios within a schedule.

    python -m benchmarks.pipelines --out benchmarks/results/pipelines.json
    python -m benchmarks.pipelines --schedules 1F1B,ZBVZeroBubble --steps 3
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

# So that `python benchmarks/pipelines.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeor
from benchmarks.measure import command_line, describe_machine, write_json

PP, RIGHT, WARM = 2, 1e-10, 1
# Stages per rank, and whether rank 0 has the first and the last.
SCHEDULES = {
    "GPipe": (1, False), "1F1B": (1, False), "Interleaved1F1B": (4, False), "InterleavedZeroBubble": (2, False),
    "ZBVZeroBubble": (2, True), "DualPipeV": (2, True),
}  # fmt: skip
SYSTEMS = ("zeor, kept for a step", "zeor, kept for an action", "FSDP2, kept", "FSDP2, resharded after forward")


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def parts_of(count: int, width: int) -> list[nn.Module]:
    """Stages of two blocks."""
    torch.manual_seed(0)
    return [nn.Sequential(Block(width), Block(width)).double() for _ in range(count)]


def batch_of(step: int, replica: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x, y = torch.randn(2, options.batch, options.width, generator=generator, dtype=torch.float64)
    return x, y


def reference(count: int, options: argparse.Namespace) -> list[nn.Module]:
    parts = parts_of(count, options.width)
    optimizer = torch.optim.AdamW([param for part in parts for param in part.parameters()], lr=0.01)
    for step in range(options.steps):
        x, y = (torch.cat(each) for each in zip(*(batch_of(step, replica, options) for replica in range(2))))
        for part in parts:
            x = part(x)
        nn.functional.mse_loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parts


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """The collectives that FSDP2 calls."""
    found: Counter[str] = Counter()
    names = {"all_gather_into_tensor": "gathers", "reduce_scatter_tensor": "reduces"}  # as it calls them by version
    names |= {"all_gather_single": "gathers", "reduce_scatter_single": "reduces"}
    names = {name: what for name, what in names.items() if hasattr(dist, name)}
    plain = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[names[name]] += 1
            return plain[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counted(name))
    try:
        yield found
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


class Run:
    """One system under one schedule, on this rank."""

    def __init__(self, system: str, name: str, mesh: Any, options: argparse.Namespace):
        self._system, self._mesh, self._options = system, mesh, options
        local, v_shaped = SCHEDULES[name]
        rank, self._count = mesh["pp"].get_local_rank(), PP * local
        self._numbers = [rank + PP * turn for turn in range(local)]
        if v_shaped:
            self._numbers = [rank, self._count - 1 - rank]
        parts = parts_of(self._count, options.width)
        self._stages = nn.ModuleList(parts[number] for number in self._numbers)
        if system.startswith("FSDP2"):
            for stage in self._stages:
                for block in stage:  # type: ignore[union-attr]
                    fully_shard(block, mesh=mesh["dp"], reshard_after_forward="resharded" in system)
                fully_shard(stage, mesh=mesh["dp"], reshard_after_forward="resharded" in system)
        self._optimizer = torch.optim.AdamW(self._stages.parameters(), lr=0.01)
        if system.startswith("zeor"):
            zeor.shard(self._stages, self._optimizer, stage=3, mesh=mesh["dp"], units=[Block], keep_whole=0)
        group = mesh["pp"].get_group()
        stages = [
            PipelineStage(module, number, self._count, torch.device("cpu"), group=group)
            for number, module in zip(self._numbers, self._stages)
        ]
        kind = schedules.get_schedule_class(name)
        self._schedule = kind(stages if local > 1 else stages[0], options.micro, loss_fn=nn.functional.mse_loss)
        if system.startswith("zeor"):
            zeor.pipeline(self._schedule, keep="action" if "action" in system else "step")

    def step(self, number: int) -> None:
        x, y = batch_of(number, self._mesh["dp"].get_local_rank(), self._options)
        inputs = (x,) if 0 in self._numbers else ()
        targets = {"target": y} if self._count - 1 in self._numbers else {}
        self._schedule.step(*inputs, **targets, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def calls(self) -> Counter[str]:
        if not self._system.startswith("zeor"):
            return Counter()
        calls: dict[str, int] = zeor.traffic(self._stages)["calls"]
        return Counter({"gathers": calls.get("gather", 0), "reduces": calls.get("reduce", 0)})

    def groups(self) -> int:
        """Groups of parameters of this rank that are gathered together."""
        if self._system.startswith("zeor"):
            return 2 * len(self._numbers)
        return sum(isinstance(module, FSDPModule) and isinstance(module, Block) for module in self._stages.modules())

    def differs(self, wanted: list[nn.Module]) -> float:
        largest = 0.0
        with zeor.full_params(self._stages) if self._system.startswith("zeor") else nullcontext():
            for number, stage in zip(self._numbers, self._stages):
                for name, param in stage.named_parameters():
                    value = param.full_tensor() if hasattr(param, "full_tensor") else param
                    other = wanted[number].get_parameter(name)
                    largest = max(largest, (value.detach() - other.detach()).abs().max().item())
        return largest


def measure(system: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    mesh = zeor.mesh(device="cpu", pp=PP, dp=-1)
    run = Run(system, name, mesh, options)
    seconds, counts = [], Counter[str]()
    with counting() as called:
        for step in range(options.steps):
            dist.barrier()
            before, began = run.calls() + called, time.perf_counter()
            run.step(step)
            seconds.append(time.perf_counter() - began)
            counts = (run.calls() + called) - before
    found = torch.tensor([run.differs(reference(SCHEDULES[name][0] * PP, options))], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {
        "differs": found.item(), "right": found.item() < RIGHT, "groups": run.groups(), "gathers": counts["gathers"],
        "reduces": counts["reduces"], "seconds": median(seconds[WARM:] or seconds),
    }  # fmt: skip


def one(system: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one set of ranks runs."""
    torch.set_num_threads(1)
    zeor.mesh(device="cpu", pp=PP, dp=-1)
    return {"schedule": name, "system": system, **measure(system, name, options)}


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    asked.add_argument("--schedules", default=",".join(SCHEDULES))
    asked.add_argument("--steps", type=int, default=6)
    asked.add_argument("--micro", type=int, default=8)
    asked.add_argument("--batch", type=int, default=32)
    asked.add_argument("--width", type=int, default=128)
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    rows = []
    for name in options.schedules.split(","):
        for system in SYSTEMS:
            try:
                row = zeor.launch(one, system, name, options, ranks=2 * PP, timeout=300)[0]
            except zeor.RankError as error:
                row = {"schedule": name, "system": system, "error": str(error).strip().splitlines()[-1]}
            rows.append(row)
            print(row, flush=True)
            if options.out is not None:
                write_json(options.out, {"command": command_line(), "machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    main()
