"""What the planner says today of the runs on one H200 that benchmarks/results holds: peak memory and time of a step.

    python -m benchmarks.forecast_gpu --out benchmarks/results/forecast_gpu.json
    python -m benchmarks.forecast_gpu --table            # the table of the file there is

Needs no GPU and starts no rank: each row is planned anew, from the run's own arguments, beside what that run took when
it was made. Runs are of different days and versions of zeor (each file says which command made it), so a row's error is
the planner's and that of all changes since. What a run left to offload="auto" is planned with the budgets that it
found: 139.8 GiB of the device, 115.9 GiB of the host. Rows of BY_HAND were timed on such a machine on 2026-11-16, with
torchao's own conversion for fp8; only their tokens/s were written down.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import zeor
from benchmarks.decoder import SIZES, Decoder
from benchmarks.measure import GIB, command_line, write_json
from benchmarks.offload import ScoredDecoder
from benchmarks.table import markdown
from zeor.planner import automatic

RESULTS = Path(__file__).resolve().parent / "results"
OUT = RESULTS / "forecast_gpu.json"
FILES = ("gpu_125m", "gpu_suite", "gpu_auto", "gpu_wires_rank_of_64", "offload_3b", "offload_13b", "offload_large")
OFTEN_MEASURED = "earlier"  # in the label of a run that a later one of the same file repeats
DEVICE, HOST = int(139.8 * GIB), int(115.9 * GIB)
FP8 = {"precision": "fp8"}
# (size, batch, recomputed, compiled, what zeor.predict is told, tokens a second)
BY_HAND: tuple[tuple[str, int, bool, bool, dict[str, Any], int], ...] = (
    ("1.3B", 4, False, False, {}, 56_970),
    ("1.3B", 8, False, True, FP8, 78_010),
    ("7B", 4, False, False, {}, 12_791),
    ("7B", 4, False, True, {}, 13_428),
    ("7B", 4, False, True, FP8, 18_501),
    ("7B", 6, False, True, FP8, 19_866),
    ("7B", 8, False, True, FP8, 20_251),
    ("7B", 8, True, True, FP8, 15_761),
)
TOKENS = 2048


def planned_of(run: dict[str, Any]) -> dict[str, Any]:
    """zeor.predict's arguments for a run."""
    options: dict[str, Any] = {"stage": run["stage"], "precision": "bf16", **json.loads(run["zeor"])}
    if options.pop("plan", None) == "auto":
        options = {"recompute": "auto", "compile": True, "offload": "auto", **options}
    if run.get("compile"):
        options["compile"] = True
    if isinstance(options.get("offload"), dict) and options["offload"].get("auto"):
        options["offload"] = {"host_budget": HOST, **options["offload"]}
    return {"world": run.get("world", 1), "gpu": "H200", "clip": run["clip"] > 0, **options}


def row(source: str, run: dict[str, Any]) -> dict[str, Any]:
    recompute = not run["no_recompute"]
    with torch.device("meta"):
        model = (ScoredDecoder if run.get("chunked_loss") else Decoder)(SIZES[run["size"]], recompute=recompute)
    options, found = planned_of(run), {"file": source, "arguments": run["arguments"]}
    try:
        said = zeor.predict(model, batch=(run["batch"], run["tokens"]), **options)
    except ValueError as refused:
        return {**found, "refused": str(refused)}
    assert said.time is not None
    measured_s, measured_gib = run["median_step_ms"] / 1e3, run["gpu_allocated_gib"]
    planned_gib = max(said.device, said.device_peak) / GIB
    return {
        **found,
        "size": run["size"],
        "batch": run["batch"],
        "stage": run["stage"],
        "world": run.get("world", 1),
        "zeor": run["zeor"],
        "clip": run["clip"] > 0,
        "compiled": bool(options.get("compile")),
        "measured_s": round(measured_s, 4),
        "planned_s": round(said.time.seconds, 4),
        "time_error": round(said.time.seconds / measured_s - 1, 3),
        "measured_gib": round(measured_gib, 2),
        "planned_gib": round(planned_gib, 2),
        "peak_error": round(planned_gib / measured_gib - 1, 3),
    }


def by_hand(size: str, batch: int, recompute: bool, compiled: bool, told: dict[str, Any], speed: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = Decoder(SIZES[size], recompute=recompute)
    options = {"precision": "bf16", "compile": compiled, **told}
    said = zeor.predict(model, batch=(batch, TOKENS), gpu="H200", **options)
    assert said.time is not None
    measured_s = batch * TOKENS / speed
    return {
        "file": "by hand",
        "size": size,
        "batch": batch,
        "stage": 3,
        "zeor": json.dumps(told),
        "recomputed": recompute,
        "compiled": compiled,
        "measured_s": round(measured_s, 4),
        "planned_s": round(said.time.seconds, 4),
        "time_error": round(said.time.seconds / measured_s - 1, 3),
        "planned_gib": round(max(said.device, said.device_peak) / GIB, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["model, batch", "plan", "s a step", "planned", "error", "GiB in use", "planned", "error"]
    lines = []
    for each in rows:
        plan = [f"stage {each.get('stage')}"] if "refused" not in each else [each["arguments"]]
        if each.get("world", 1) > 1:
            plan.append(f"1 of {each['world']} ranks")
        if each.get("zeor", "{}") != "{}":
            plan.append(f"`{each['zeor']}`")
        if each.get("compiled") and "plan" not in each["zeor"]:
            plan.append("compiled")
        if not each.get("clip", True):
            plan.append("no clipping")
        if not each.get("recomputed", True):
            plan.append("nothing recomputed")
        if "refused" in each:
            lines.append(["", ", ".join(plan), "refused", "", "", "", "", ""])
            continue
        peaks = ["", f"{each['planned_gib']:.1f}", ""]
        if "measured_gib" in each:
            peaks = [f"{each['measured_gib']:.1f}", f"{each['planned_gib']:.1f}", f"{each['peak_error']:+.1%}"]
        else:
            plan.append("by hand")
        seconds = [f"{each['measured_s']:.3f}", f"{each['planned_s']:.3f}", f"{each['time_error']:+.1%}"]
        lines.append([f"{each['size']}, {each['batch']}", ", ".join(plan), *seconds, *peaks])
    return markdown(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="plan nothing; print the table of the file")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())["rows"]))
        return
    # Nobody had named budgets, and named ones are kept with more room to spare: see automatic._margin.
    automatic._budgets = lambda offload: (offload.device_budget or DEVICE, offload.host_budget or HOST)
    rows = []
    for source in FILES:
        for run in json.loads((RESULTS / f"{source}.json").read_text())["runs"]:
            if run.get("system", "zeor") != "zeor" or OFTEN_MEASURED in run.get("label", ""):
                continue
            rows.append(row(source, run))
            print(json.dumps(rows[-1]), flush=True)
    for each in BY_HAND:
        rows.append(by_hand(*each))
        print(json.dumps(rows[-1]), flush=True)
    found = {"kind": "forecast_gpu", "command": command_line(), "torch": torch.__version__, "rows": rows}
    write_json(options.out, found)
    print(table(rows))


if __name__ == "__main__":
    main()
