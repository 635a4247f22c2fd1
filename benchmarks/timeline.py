"""Where the time of a training step goes: streams, waits, gaps. Takes the arguments of `offload`.

    python -m benchmarks.timeline --size 3B --zeor '{"offload": {"auto": true, "device_budget": "40GiB"}}' --expandable
    python -m benchmarks.timeline --size tiny --batch 2 --device cpu            # a check without a GPU

Two steps after the warm-up run under torch's profiler; what it says is added up: how long each stream was busy, when
the computing one stood still and what the host did then, which calls of each thread took long. The profiler costs
time on the host, so a step that the host holds up looks worse here than it is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import offload

STEPS = 2
GAPS = 12  # the longest, of the computing stream
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def record(options: Any) -> list[dict[str, Any]]:
    """The profiler's events of a few steps."""
    if options.device == "cuda":
        torch.cuda.set_device(0)
    model, optimizer, _ = offload.build(options)
    loop = offload.Loop(model, optimizer, options)
    loop.run(options.warmup)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if options.device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    everyone = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=kinds, experimental_config=everyone) as profiler:
        for number in range(STEPS):
            with torch.profiler.record_function(f"## step {number}"):
                loop.step()
        loop.settle()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def covered(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The intervals in which any of these was under way, in microseconds."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length_ms(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e3


def streams(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_DEVICE:
            found[str(event["args"].get("stream"))].append(event)
    return found


def kernels_ms(events: list[dict[str, Any]]) -> float:
    return length_ms(covered([event for event in events if event["cat"] == "kernel"]))


def say_streams(by_stream: dict[str, list[dict[str, Any]]]) -> None:
    for stream, events in sorted(by_stream.items(), key=lambda item: -len(item[1])):
        kinds = defaultdict(list)
        for event in events:
            kinds[event["name"][:40] if event["cat"] == "gpu_memcpy" else event["cat"]].append(event)
        told = ", ".join(f"{kind} {length_ms(covered(some)):.0f}" for kind, some in kinds.items())
        print(f"stream {stream}: busy {length_ms(covered(events)):.0f} ms in {len(events)} events ({told})")


def say_gaps(events: list[dict[str, Any]], computing: list[dict[str, Any]]) -> None:
    """The longest times nothing ran on the computing stream, and what the host was in when each ended."""
    busy = covered(computing)
    start = busy[0][0]
    gaps = sorted(((after[0] - before[1], before[1], after[0]) for before, after in pairwise(busy)), reverse=True)
    print(f"computing stream: {length_ms([(a, b) for _, a, b in gaps]):.0f} ms of gaps, {len(gaps)} of them")
    on_host = [event for event in events if event.get("cat") not in ON_DEVICE and event.get("dur", 0) > 50]
    for length, begin, end in gaps[:GAPS]:
        middle = (begin + end) / 2
        around = sorted((e for e in on_host if e["ts"] <= middle <= e["ts"] + e["dur"]), key=lambda e: -e["dur"])
        names = " > ".join(f"{e['name'][:48]}" for e in around[:6])
        print(f"  {length / 1e3:7.2f} ms at {(begin - start) / 1e3:8.1f}: {names}")


def say_threads(events: list[dict[str, Any]]) -> None:
    """Calls of each thread by the time they took in all."""
    totals: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"):
            totals[event["tid"]][event["name"][:56]].append(event["dur"] / 1e3)
    for thread, names in totals.items():
        print(f"thread {thread}:")
        for name, times in sorted(names.items(), key=lambda item: -sum(item[1]))[:16]:
            print(f"  {sum(times):9.1f} ms in {len(times):6} of {name} (longest {max(times):.2f})")


def main() -> None:
    options = offload.parse()
    offload.with_environment(options, "benchmarks.timeline")
    events = record(options)
    by_stream = streams(events)
    say_threads(events)
    if by_stream:
        say_streams(by_stream)
        computing = max(
            by_stream.values(), key=lambda some: length_ms(covered([e for e in some if e["cat"] == "kernel"]))
        )
        say_gaps(events, computing)
    for event in events:
        if event["name"].startswith("## step") and event.get("cat") == "user_annotation":
            print(f"{event['name'][3:]}: the host took {event['dur'] / 1e3:.0f} ms")


if __name__ == "__main__":
    main()
