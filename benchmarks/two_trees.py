"""Two versions of zeor beside each other: every run of `gpu_single` in one checkout, then in the other, round by round.

    git worktree add ../before COMMIT
    python -m benchmarks.two_trees --before ../before --rounds 3 --out benchmarks/results/two_trees.json \
        --run "--system zeor --stage 3 --size 1.3B --batch 8" --run "--system zeor --stage 3 --size 7B --batch 4"

Alternated, so that what drifts with the machine drifts for both. The JSON is written anew after every round; the table
says the best and the median step of each version, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

# So that `python benchmarks/two_trees.py` finds benchmarks, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import command_line, write_json

ROOT = Path(__file__).resolve().parents[1]


def measure(tree: Path, run: str, timeout: float) -> dict[str, Any]:
    """One run in one checkout: its figures, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.gpu_single", *shlex.split(run), "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {timeout:g} s"}
        if done.returncode or not out.exists():
            return {"error": done.stderr[-1000:]}
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier version")
    parser.add_argument("--run", action="append", required=True, help="arguments of gpu_single")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds for one run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    trees = {"before": options.before, "after": ROOT}
    found: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for run in options.run:
            for name, tree in trees.items():
                figures = measure(tree, run, options.timeout)
                found.append({"version": name, "round": number, "run": run, **figures})
                print(name, run, figures.get("error") or f"{figures['median_step_ms']} ms", flush=True)
        write_json(options.out, {"command": command_line(), "runs": found})
    print(table(found))


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| run | before ms (best, median) | after ms | after / before | GiB before, after |", "|" + "---|" * 5]
    for run in dict.fromkeys(each["run"] for each in found):
        good = [each for each in found if each["run"] == run and "error" not in each]
        of = {name: [each for each in good if each["version"] == name] for name in ("before", "after")}
        if not all(of.values()):
            lines.append(f"| {run} | failed |")
            continue
        steps = {name: [ms for each in runs for ms in each["step_times_ms"]] for name, runs in of.items()}
        gib = [max(each["gpu_allocated_gib"] for each in of[name]) for name in of]
        cells = [f"{min(ms):.2f}, {median(ms):.2f}" for ms in steps.values()]
        ratio = median(steps["after"]) / median(steps["before"])
        lines.append(f"| {run} | {cells[0]} | {cells[1]} | {ratio:.4f} | {gib[0]}, {gib[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
