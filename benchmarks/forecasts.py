"""Forecasts beside what others have published, and for clusters that nobody here has: step time by zeor's own planner.

    python -m benchmarks.forecasts --out benchmarks/results/forecasts.json

Needs no GPU and starts no rank. Published rows: ZeRO++ (arXiv 2306.10209) on 384 V100, TFLOP/s per GPU with what is
computed again counted; torchtitan (arXiv 2410.06511), Llama 3.1 8B from 8 to 128 H100; Fernandez et al. (arXiv
2411.13055), Llama 2 7B from 128 to 2,048 H100. Layers and widths of ZeRO++'s models are assumed from their sizes
(12 layers width^2 parameters), and so are the batches of the H100 rows. Each row says its error.

DeepSpeed's speed on a V100 is not zeor's on an H200: one row (the last with four links) sets how many times slower than
the planner's V100 it computes, and the others are forecast with that. zeor has no compressed wire; for ZeRO++ its bytes
are put in place of zeor's: weights in 8 bits for forward, whole ones inside a node for backward, gradients in 4 bits.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zeor
from benchmarks.decoder import Decoder, Shape
from zeor.memory.roles import Sizes
from zeor.plan import Plan
from zeor.planner import network
from zeor.planner.bytes import Loop, Source, pace_of, setting_of
from zeor.planner.machine import MACHINES
from zeor.planner.network import Cost, ring
from zeor.planner.step_time import Pace, durations_of, schedule_of
from zeor.planner.timeline import Key, play

# (parameters, links of 100 Gbit/s a host, published with ZeRO-3, published with ZeRO++), 1,024 tokens a GPU.
ZERO_PP = [
    ("18B", 1, 14.0, 31.0),
    ("49B", 1, 11.0, 22.0),
    ("138B", 1, 11.0, 22.0),
    ("18B", 4, 25.0, 35.0),
    ("138B", 4, 23.0, 36.0),
]
WIDTHS = {"18B": (40, 6144, 48), "49B": (60, 8192, 64), "138B": (76, 12288, 96)}
LLAMA3 = Shape(32, 4096, 32, vocabulary=128_256, positions=8_192)
LLAMA2 = Shape(32, 4096, 32, vocabulary=32_000, positions=4_096)
SEVENTY = Shape(80, 8192, 64, vocabulary=128_256, positions=8_192)


def traced(shape: Shape, batch: tuple[int, int], recompute: bool) -> Source:
    with torch.device("meta"):
        model = Decoder(shape, recompute)
    return Source(model, {"batch": batch})


# ---- ZeRO++


def compressed(moves: Mapping[Key, Sequence[Cost]], model: Any, pace: Pace) -> dict[Key, Sequence[Cost]]:
    """ZeRO++'s bytes in place of zeor's. Of two gathers one is in 8 bits over all ranks and one inside a node: half of
    each stands for both."""
    found = dict(moves)
    inner, outer = pace.axes
    for lanes in model.lanes:
        for number, lane in enumerate(lanes):
            whole = float(lane.layout.numel * lane.key.compute_dtype.itemsize)
            narrow, inside = network.flat(whole / 2, pace.axes), ring(whole, inner)
            halves = [Cost(c.axis, c.nbytes / 2, c.seconds / 2) for c in (*narrow, inside)]
            for key, costs in (("gather", halves), ("reduce", [ring(whole / 4, inner), ring(whole / 4, outer)])):
                if found[key, lane.unit, number]:
                    found[key, lane.unit, number] = costs
    return found


def zero_pp_tflops(source: Source, size: str, links: int, slower: float, hides: bool, packed: bool) -> float:
    v100 = MACHINES["V100"]
    rates = {name: getattr(v100, name) / slower for name in ("products", "attention", "elementwise")}
    machine = replace(v100, across=zeor.Link(links * 12.5e9, 14e-6, 2.7e-6), launch=0.0, hides=hides, **rates)
    plan = Plan.parse({"stage": 3, "precision": "fp16"})
    model = source.model(setting_of(plan, Sizes(384), "AdamW", True, Loop()))
    pace = pace_of(model, machine, machine.links(Sizes(384)), False, frozenset())
    durations = durations_of(model, pace)
    if packed:
        durations = replace(durations, moves=compressed(durations.moves, model, pace))
    seconds = play(schedule_of(model), durations).seconds
    layers, width, _ = WIDTHS[size]
    return 8 * 12 * layers * width**2 * 1024 / seconds / 1e12


def zero_pp_rows() -> tuple[float, list[dict[str, Any]]]:
    sources = {size: traced(Shape(*shape, positions=1024), (1, 1024), True) for size, shape in WIDTHS.items()}
    low, high = 1.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        fast = zero_pp_tflops(sources["138B"], "138B", 4, middle, True, True) > 36.0
        low, high = (middle, high) if fast else (low, middle)
    rows = []
    for size, links, *published in ZERO_PP:
        for system, said in zip(("ZeRO-3", "ZeRO++"), published):
            row: dict[str, Any] = {"system": system, "size": size, "links": links, "published_tflops": said}
            for name, hides in (("overlapped", True), ("not_overlapped", False)):
                found = zero_pp_tflops(sources[size], size, links, low, hides, system == "ZeRO++")
                row |= {name: round(found, 1), f"{name}_error": round(found / said - 1, 3)}
            row["sets_the_speed"] = (system, size, links) == ("ZeRO++", "138B", 4)
            rows.append(row)
    return low, rows


# ---- H100 and H200


def seconds_of(shape: Shape, batch: tuple[int, int], world: int, gpu: str, **options: Any) -> float:
    with torch.device("meta"):
        model = Decoder(shape, recompute=True)
    found = zeor.predict(model, batch=batch, world=world, gpu=gpu, precision="bf16", **options).time
    assert found is not None
    return found.seconds


def scaling_rows() -> list[dict[str, Any]]:
    rows = []
    for name, shape, batch, few, many, published in (
        ("torchtitan, Llama 3.1 8B", LLAMA3, (2, 8192), 8, 128, (-0.03, -0.02)),
        ("Fernandez et al., Llama 2 7B", LLAMA2, (2, 4096), 128, 2048, (-0.3722, -0.3722)),
    ):
        before, after = (seconds_of(shape, batch, world, "H100", stage=3) for world in (few, many))
        found = before / after - 1
        middle = sum(published) / 2
        rows.append({
            "system": name, "from": few, "to": many, "batch": batch, "published_change": published,
            "forecast_change": round(found, 4), "error_of_throughput": round((1 + found) / (1 + middle) - 1, 4),
            "without_latency": round(_without_latency(shape, batch, few, many), 4),
        })  # fmt: skip
    return rows


def _without_latency(shape: Shape, batch: tuple[int, int], few: int, many: int) -> float:
    h100 = MACHINES["H100"]
    still = [replace(link, latency=0.0, message=0.0) for link in (h100.inside, h100.across)]
    link = {"inside": still[0], "across": still[1]}
    before, after = (seconds_of(shape, batch, world, "H100", stage=3, link=link) for world in (few, many))
    return before / after - 1


def h200_rows() -> list[dict[str, Any]]:
    rows = []
    for name, shape, batch in (("8B", LLAMA3, (2, 8192)), ("70B", SEVENTY, (1, 8192))):
        for world in (64, 1024, 16384):
            for told, options in (("stage 3", {"stage": 3}), ("3 inside, 1 across", {"stage": 3, "hierarchy": 8})):
                with torch.device("meta"):
                    model = Decoder(shape, recompute=True)
                said = zeor.predict(model, batch=batch, world=world, gpu="H200", precision="bf16", **options)
                assert said.time is not None
                rate = batch[0] * batch[1] / said.time.seconds
                waiting = round(said.time.exposed_seconds, 4)
                rows.append({
                    "size": name, "ranks": world, "plan": told, "batch": batch, "seconds": round(said.time.seconds, 4),
                    "waiting": waiting, "tokens_per_s_per_gpu": round(rate),
                    "device_peak_gib": round(said.device_peak / 2**30, 1),
                    "fits": said.device_peak < 0.98 * (MACHINES["H200"].memory - 2**30),
                })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    slower, rows = zero_pp_rows()
    found = {
        "command": "python -m benchmarks.forecasts --out benchmarks/results/forecasts.json",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "computes_slower_than_planned": round(slower, 3),
        "zero_pp_384_v100": rows,
        "h100": scaling_rows(),
        "h200": h200_rows(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
