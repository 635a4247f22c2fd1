"""Markdown tables from the JSON files the benchmarks write; the measuring scripts print through here as well.

    python -m benchmarks.table                         # every file of benchmarks/results
    python -m benchmarks.table results/cpu_ranks.json  # one of them
    python -m benchmarks.table --into docs/benchmarks.md  # replace the tables inside a document

A document names the table it wants by the result's path, and --into replaces what lies between:

    <!-- table: benchmarks/results/cpu_ranks.json -->
    <!-- end of table -->

Standard library only, so that documentation can be regenerated without torch.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import offload_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A GitHub table; the first column is left-aligned text, the others are numbers."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


# CPU ranks


def paired_ratio(windows: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> float | None:
    """Median over rounds of this system's window over the reference's window of the same round."""
    if reference is None:
        return None
    return median(mine["step_ms"] / other["step_ms"] for mine, other in zip(windows, reference))


def _flat_losses(windows: list[dict[str, Any]]) -> list[float]:
    return [loss for window in windows for rank in window["losses"] for loss in rank]


def loss_distance(windows: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> float | None:
    """The largest relative difference of any loss of any rank from the reference's."""
    if reference is None:
        return None
    pairs = zip(_flat_losses(windows), _flat_losses(reference))
    return max(abs(mine - other) / abs(other) for mine, other in pairs)


def _sent_per_step(windows: list[dict[str, Any]], steps: int) -> float | None:
    """The mean over windows of what the busiest rank sent in one step, in MB; None where nobody counted."""
    counts = [max(window["bytes_sent"]) for window in windows if None not in window["bytes_sent"]]
    return sum(counts) / len(counts) / steps / 1e6 if counts else None


def cpu_table(document: dict[str, Any]) -> str:
    """Time, paired ratios, memory, traffic and losses of every system of a cpu_ranks run."""
    windows = {entry["system"]: entry["windows"] for entry in document["systems"]}
    steps = document["workload"]["steps_per_window"]
    rows = []
    for entry in document["systems"]:
        mine, memory = entry["windows"], entry["memory"]
        times = [window["step_ms"] for window in mine]
        # A rank that trains alone sees other gradients: its losses say nothing about the others.
        distance = None if entry["system"] == "compute" else loss_distance(mine, windows.get("ddp"))
        rows.append(
            [
                entry["system"],
                f"{median(times):,.0f} / {min(times):,.0f}",
                _number(paired_ratio(mine, windows.get("ddp+zero")), 3),
                _number(paired_ratio(mine, windows.get("fsdp2")), 3),
                _number(max(rank["peak_rss_nbytes"] for rank in memory) / MIB),
                _number(max(rank["growth_nbytes"] for rank in memory) / MIB),
                _number(max(rank["steady_peak_rss_nbytes"] for rank in memory) / MIB),
                _number(_sent_per_step(mine, steps), 1),
                f"{mine[-1]['losses'][0][-1]:.6f}",
                "" if distance is None else f"{distance:.0e}",
            ]
        )
    for entry, row in zip(document["systems"], rows):
        row.append(_number(paired_ratio(entry["windows"], windows.get(f"{entry['system']} before")), 3))
    header = [
        "system",
        "step ms, median / best",
        "ratio to ddp+zero",
        "ratio to fsdp2",
        "peak RSS MiB",
        "above imports MiB",
        "peak after warm-up MiB",
        "sent MB/step",
        "last loss",
        "losses off ddp by",
        "ratio to before",
    ]
    return markdown(header, rows)


# One GPU


def settings_in_words(run: dict[str, Any]) -> str:
    """What a run was, in words: system, stage and whatever was not left at its default."""
    words = [run["system"] if run["system"] != "zeor" else f"zeor stage {run['stage']}"]
    if run.get("compile"):
        words.append(f"+ compile ({run['compile']})")
    if run.get("world", 1) > 1:
        words.append(f"one rank of {run['world']} (fake group)")
    if run.get("label"):
        words.append(f"[{run['label']}]")
    return " ".join(words)


def gpu_table(document: dict[str, Any]) -> str:
    """Speed and memory of every run of a gpu_suite; a run that failed shows why instead."""
    header = ["what", "size", "batch", "tokens/s", "step ms", "TFLOP/s", "GPU GiB"]
    header += ["reserved GiB", "host GiB", "loss"]
    profiled = any(run.get("profile") for run in document["runs"])
    if profiled:
        header.append("forward / backward / clip / step ms")
    rows = []
    for run in document["runs"]:
        row = [settings_in_words(run), run["size"], str(run["batch"])]
        if run.get("error"):
            row += [run["error"].replace("|", "/")[:80]] + [""] * (len(header) - 4)
        else:
            row += [
                _number(run["tokens_per_s"]),
                _number(run["median_step_ms"], 1),
                _number(run["tflops_per_s"]),
                _number(run["gpu_allocated_gib"], 2),
                _number(run["gpu_reserved_gib"], 2),
                _number(run["host_peak_gib"], 1),
                f"{run['losses'][-1]:.5f}",
            ]
            if profiled:
                row.append(" / ".join(_number(ms, 1) for ms in (run.get("profile") or {}).values()))
        rows.append(row)
    return markdown(header, rows)


# Bytes on the wire


def traffic_table(document: dict[str, Any]) -> str:
    """Bytes a rank sent per step: seen by the network interface, counted by the system, and in theory."""
    header = ["system", "interface MB/step", "counted MB/step", "theory MB/step", "interface / theory"]
    header.append("step ms")
    rows = []
    for run in document["runs"]:
        theory = run["theory_nbytes"]
        rows.append(
            [
                run["system"],
                _number(run["interface_nbytes"] / 1e6, 2),
                _number(None if run["counted_nbytes"] is None else run["counted_nbytes"] / 1e6, 2),
                _number(None if theory is None else theory / 1e6, 2),
                _number(None if not theory else run["interface_nbytes"] / theory, 4),
                _number(run["step_ms"]),
            ]
        )
    return markdown(header, rows)


# Offload


def offload_table(document: dict[str, Any]) -> str:
    """Speed, memory and losses of every run of an offload_suite."""
    return markdown(*offload_rows.rows(document))


offload_words = offload_rows.words

TABLES = {
    "cpu_ranks": cpu_table,
    "gpu_suite": gpu_table,
    "traffic_netns": traffic_table,
    "offload_suite": offload_table,
}


def _machine_line(document: dict[str, Any]) -> str:
    machine = document["machine"]
    words = [machine.get("gpu"), f"{machine['cpu']}, {machine['cores']} cores", f"torch {machine['torch']}"]
    words += [machine.get("date"), f"`{document['command']}`"]
    return "; ".join(word for word in words if word)


def render(path: Path) -> str:
    """The table of one result file, with the machine and the command under it."""
    document = json.loads(path.read_text())
    return f"{TABLES[document['kind']](document)}\n\n{_machine_line(document)}\n"


def fill(text: str) -> str:
    """Every marked table of a document made anew; a marker whose result does not exist is an error."""
    return MARKED.sub(lambda match: match[1] + "\n" + render(ROOT / match[2]) + "\n" + match[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: all of benchmarks/results")
    parser.add_argument("--into", action="append", type=Path, default=[], help="document to fill")
    options = parser.parse_args()
    if options.into:
        for document in options.into:
            document.write_text(fill(document.read_text()))
        return
    for path in options.files or sorted(RESULTS.glob("*.json")):
        print(f"### {path.stem}\n\n{render(path)}")


if __name__ == "__main__":
    main()
