"""Step time that the planner says beside what ranks of this machine take: 2 to 8 of them, stages, two axes.

    python -m benchmarks.forecast_cpu --out benchmarks/results/forecast_cpu.json

How fast the machine computes is measured first, on two ranks that compute at the same time and send nothing; links by
zeor.measure_links on as many ranks as the row has. Nothing is fitted to the rows themselves. More ranks than cores
share them. Run it on a quiet machine; ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeor
from benchmarks.decoder import SIZES, Decoder, build, loss_of, random_batch
from zeor.planner.machine import MACHINES, Machine

SIZE, BATCH = "36.7M", (2, 128)
ROWS = [(2, 0, None), (2, 2, None), (2, 3, None), (4, 2, None), (4, 3, None), (4, 3, 2), (8, 3, None)]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.set_num_threads(1)
    shape = SIZES[SIZE]
    model = build(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), random_batch(shape, *BATCH, torch.Generator())


def alone(steps: int) -> tuple[float, float]:
    """Seconds of forward and backward, and of the update, of a rank that sends nothing while the others do the same."""
    model, optimizer, batch = made()
    dist.init_process_group("gloo")
    zeor.shard(model, optimizer, mesh=dist.new_group([dist.get_rank()], use_local_synchronization=True))
    passes, updates = [], []
    for step in range(steps + 2):
        if step == 2:
            dist.barrier()
        begin = time.perf_counter()
        loss_of(model, *batch).backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        passes.append(middle - begin)
        updates.append(time.perf_counter() - middle)
    return statistics.median(passes[2:]), statistics.median(updates[2:])


def together(stage: int, hierarchy: int | None, windows: int) -> tuple[list[float], Any]:
    """Seconds a step of each window of two steps between barriers, and the links."""
    model, optimizer, batch = made()
    zeor.shard(model, optimizer, stage=stage, hierarchy=hierarchy)
    links = zeor.measure_links(hierarchy=hierarchy)
    found = []
    for window in range(windows + 2):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(2):
            loss_of(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        if window >= 2:
            found.append((time.perf_counter() - begin) / 2)
    return found, links


def said(machine: Machine, world: int, stage: int, hierarchy: int | None, link: Any) -> Any:
    with torch.device("meta"):
        model = Decoder(SIZES[SIZE])
    options = {"hierarchy": hierarchy} if hierarchy else {}
    found = zeor.predict(model, batch=BATCH, world=world, stage=stage, gpu=machine, link=link, clip=False, **options)
    assert found.time is not None
    return found.time


def calibrated() -> Machine:
    by_rank = zeor.launch(alone, 6, ranks=2, threads=1)
    passes, updates = (max(each) for each in zip(*by_rank))
    machine = replace(MACHINES["CPU"], cores=2)
    planned = said(machine, 1, 3, None, None)
    slower = passes / (planned.forward + planned.backward)
    rates = {name: getattr(machine, name) / slower for name in ("products", "products32", "attention", "elementwise")}
    return replace(machine, launch=machine.launch * slower, hbm=machine.hbm * planned.update / updates, **rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    arguments = parser.parse_args()
    machine, rows = calibrated(), []
    for world, stage, hierarchy in ROWS:
        by_rank = zeor.launch(together, stage, hierarchy, arguments.windows, ranks=world, threads=1)
        times, links = by_rank[0]
        measured = statistics.median(times)
        planned = said(machine, world, stage, hierarchy, links)
        rows.append({
            "ranks": world, "stage": stage, "hierarchy": hierarchy, "measured_s": round(measured, 4),
            "windows_s": [round(each, 4) for each in times], "forecast_s": round(planned.seconds, 4),
            "waiting_s": round(planned.exposed_seconds, 4), "error": round(planned.seconds / measured - 1, 3),
            "links": str(links),
        })  # fmt: skip
        print(rows[-1], flush=True)
    found = {
        "command": "python -m benchmarks.forecast_cpu --out benchmarks/results/forecast_cpu.json", "size": SIZE,
        "batch": BATCH, "cores": os.cpu_count(), "torch": torch.__version__, "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
