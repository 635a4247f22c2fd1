"""Runs of `offload`, each in its own process: a line each, one JSON, one table at the end.

    python -m benchmarks.offload_suite --preset 3b
    python -m benchmarks.offload_suite --preset 13b --preset 20b --budget 580
    python -m benchmarks.offload_suite --run "--size 7B --batch 4 --zeor '{\"offload\": \"auto\"}'"
    python -m benchmarks.offload_suite --preset smoke --common "--device cpu" --only 0,1      # a check without a GPU
    python -m benchmarks.offload_suite --merge a.json b.json --out c.json       # results of several calls in one file

The JSON is written anew after every run, so a suite that is cut off keeps what it had. It goes to --out, or else to
$OUT/offload_PRESET.json where OUT is set. A run that fails or exceeds its time is recorded with its error, and the
suite goes on. Runs of `smoke` go side by side (--jobs); those that are timed one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

# So that `python benchmarks/offload_suite.py` finds benchmarks, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import disk_rates, offload, table
from benchmarks.gpu_suite import _end_session, _last_error, _tail, describe_machine_apart
from benchmarks.measure import command_line, write_json
from benchmarks.offload_presets import JOBS, PRESETS, PROBED, TIMEOUTS

ROOT = Path(__file__).resolve().parents[1]
LEAST_S = 15.0  # with less time left no run is begun


def run_one(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """One run in a process of its own; its figures, or its settings with what went wrong."""
    settings = offload.settings_of(offload.parse(arguments))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        more = ["--out", str(answer), "--deadline", f"{max(5.0, timeout_s - 20):.0f}"]
        command = [sys.executable, "-m", "benchmarks.offload", *arguments, *more]
        with log.open("w") as stream:
            # Its own session, so that a run out of time ends with every process it started.
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                status = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                _end_session(process)
                return {**settings, "error": f"no result after {timeout_s:.0f} s", "log": _tail(log)}
            except BaseException:
                _end_session(process)
                raise
        if not answer.exists():
            return {**settings, "error": _last_error(log, status), "log": _tail(log)}
        run = dict(json.loads(answer.read_text()))
        if run.get("error"):
            run["log"] = _tail(log)
        elif status:
            run["late_error"] = _last_error(log, status)  # it had its figures, but did not end well
        return run


def line_of(run: dict[str, Any]) -> str:
    """A run in one short line."""
    what = f"{run['size']} batch {run['batch']} {table.offload_words(run)}"
    if run.get("error"):
        return f"{what}: FAILED: {run['error'][:240]}"
    phases = "/".join(f"{ms:.0f}" for ms in run["profile"].values())
    return (
        f"{what}: {run['tokens_per_s']:,.0f} tok/s, {run['tflops_per_s']:,.0f} TFLOP/s, "
        f"{run['median_step_ms']:,.0f} ms ({phases}), GPU {run['gpu_allocated_gib']:.1f} "
        f"({run['gpu_reserved_gib']:.1f}) GiB, "
        f"host {run['host_peak_gib']:.1f} (taken {run['host_taken_gib']:.1f}) GiB, "
        f"{run['host_bytes_per_parameter']:.1f} B/param, setup {run['setup_s']:.0f} + {run['warmup_s']:.0f} s, "
        f"loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}"
        + (f", LATE ERROR: {run['late_error'][:120]}" if run.get("late_error") else "")
    )


class Suite:
    """All runs of one call, and the document they go into."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.budget
        self.document: dict[str, Any] = {
            "kind": "offload_suite",
            "machine": describe_machine_apart(options.date),
            "command": command_line(),
            "presets": options.preset,
            "runs": [],
        }

    def run(self) -> dict[str, Any]:
        if self.options.disk_rates:
            self.document["disk"] = disk_rates.measure(self.options.folder)
            print(disk_rates.line_of(self.document["disk"]), flush=True)
        for run in self._runs():
            self.document["runs"].append(run)
            print(line_of(run), flush=True)
            if run.get("error") and run.get("log") and self.options.verbose:
                print(run["log"], flush=True)
            if self.options.out is not None:
                write_json(self.options.out, self.document)
        return self.document

    def _runs(self) -> Iterator[dict[str, Any]]:
        """In the order they were named, `jobs` at a time."""
        with ThreadPoolExecutor(self.options.jobs) as pool:
            waiting: list[Future[dict[str, Any]]] = [pool.submit(self._one, each) for each in self.options.runs]
            for future in waiting:
                yield future.result()

    def _one(self, configuration: str) -> dict[str, Any]:
        arguments = shlex.split(configuration) + shlex.split(self.options.common)
        if self.options.folder is not None:
            arguments += ["--folder", self.options.folder]
        left_s = self.deadline - time.monotonic()
        started = time.monotonic()
        if left_s < LEAST_S:
            run = {**offload.settings_of(offload.parse(arguments)), "error": "not run: the suite's time was spent"}
        else:
            run = run_one(arguments, min(self.options.timeout, left_s))
        run["whole_s"] = round(time.monotonic() - started, 1)
        run["arguments"] = configuration
        return run


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", action="append", default=[], choices=list(PRESETS), help="may be repeated")
    parser.add_argument("--run", action="append", default=[], help="arguments of one run; may be repeated")
    parser.add_argument("--only", help="numbers of the runs to take, such as 0,2,5-7")
    parser.add_argument("--common", default="", help="arguments added to every run")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: 1; more for the small ones of smoke)")
    parser.add_argument("--timeout", type=float, help="seconds one run may take (default: by preset, or 200)")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds the whole suite may take")
    parser.add_argument("--folder", help="of disk tiers (default: a temporary one)")
    parser.add_argument("--disk-rates", action="store_true", help="measure the disk first (the preset disk does)")
    parser.add_argument("--merge", nargs="+", type=Path, help="run nothing: put these results into --out")
    parser.add_argument("--list", action="store_true", help="print the runs with their numbers and end")
    parser.add_argument("--verbose", action="store_true", help="print the log of a run that failed")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file (default: $OUT/offload_PRESET.json)")
    options = parser.parse_args(argv)
    runs = [run for preset in options.preset for run in PRESETS[preset]] + options.run
    options.runs = runs if options.only is None else [runs[number] for number in numbers(options.only)]
    if not options.runs and not options.merge:
        parser.error("nothing to run: name a --preset or a --run")
    if options.timeout is None:
        options.timeout = max((TIMEOUTS.get(preset, 200.0) for preset in options.preset), default=200.0)
    if options.jobs is None:
        options.jobs = min((JOBS.get(preset, 1) for preset in options.preset), default=1)
    options.disk_rates = options.disk_rates or any(preset in PROBED for preset in options.preset)
    if options.out is None and os.environ.get("OUT"):
        options.out = Path(os.environ["OUT"], f"offload_{'_'.join(options.preset) or 'runs'}.json")
    return options


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document of several, all of one machine; runs in the order given."""
    first = documents[0]
    if any(other["machine"] != first["machine"] for other in documents):
        raise ValueError("these results are of different machines; keep them apart")
    whole = {**first, "command": "; ".join(each["command"] for each in documents)}
    for name in ("presets", "runs"):
        whole[name] = [entry for each in documents for entry in each[name]]
    disks = [each["disk"] for each in documents if each.get("disk")]
    return {**whole, "disk": disks[0]} if disks else whole


def numbers(text: str) -> list[int]:
    """ "0,2,5-7" -> [0, 2, 5, 6, 7]"""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> None:
    options = parse()
    if options.list:
        for number, run in enumerate(options.runs):
            print(f"{number:3}  {run}")
        return
    if options.merge:
        document = merged([json.loads(path.read_text()) for path in options.merge])
        if options.out is not None:
            write_json(options.out, document)
    else:
        document = Suite(options).run()
    print(table.offload_table(document))


if __name__ == "__main__":
    main()
