"""Runs of `gpu_single`, one after another, each in its own process: a line each, one JSON, one table.

    python -m benchmarks.gpu_suite --preset small
    python -m benchmarks.gpu_suite --run "--system fsdp2 --size 7B --batch 4" --run "--system zeor --size 7B"
    python -m benchmarks.gpu_suite --preset tiny --common "--device cpu"         # a check without a GPU

The JSON is written anew after every run, so a suite that is cut off keeps what it had. It goes to --out, or
else to $OUT/gpu_suite.json where OUT is set. A run that fails or exceeds its time is recorded with its
error, and the suite goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# So that `python benchmarks/gpu_suite.py` finds benchmarks, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_single, table
from benchmarks.measure import command_line, write_json

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--size 1.3B --batch 8"
LARGE = "--size 7B --batch 4"
# Steps before the fourth measure what can be kept.
AUTO = """--no-recompute --warmup 5 --zeor '{"plan": "auto"}'"""
AUTO_FP8 = """--no-recompute --warmup 5 --zeor '{"plan": "auto", "precision": "fp8"}'"""
# Rivals stand next to each other: what drifts with the machine's temperature drifts for both.
PRESETS: dict[str, list[str]] = {
    "tiny": [
        f"--tiny --batch 2 {rest}"
        for rest in (
            "--system plain --profile",
            "--system pure-bf16",
            "--system fsdp2",
            "--system fsdp2 --world 64",
            "--system zeor --stage 1",
            "--system zeor --stage 3",
            "--system zeor --stage 3 --world 64",
        )
    ],
    "small": [
        f"--system fsdp2 {SMALL}",
        f"--system zeor --stage 3 {SMALL}",
        f"--system zeor --stage 1 {SMALL}",
        f"--system zeor --stage 2 {SMALL}",
        f"--system plain {SMALL}",
        f"--system pure-bf16 {SMALL}",
    ],
    "compiled": [
        f"--system fsdp2 --compile {SMALL}",
        f"--system fsdp2 --compile forward {SMALL}",
        f"--system zeor --stage 3 --compile {SMALL}",
        f"--system zeor --stage 3 --compile forward {SMALL}",
    ],
    "large": [
        f"--system fsdp2 {LARGE}",
        f"--system zeor --stage 3 {LARGE}",
        f"--system zeor --stage 2 {LARGE}",
    ],
    "world64": [
        f"--system fsdp2 --world 64 {LARGE}",
        f"--system zeor --stage 3 --world 64 {LARGE}",
        "--system fsdp2 --world 64 --size 13B --batch 8",
        "--system zeor --stage 3 --world 64 --size 13B --batch 8",
    ],
    # FSDP2 at its best, found by hand, and zeor by one word. Never run so far.
    "auto": [
        "--system fsdp2 --compile --size 7B --batch 8",
        "--system fsdp2 --compile --size 7B --batch 2 --no-recompute",
        f"--system zeor {AUTO} --size 7B --batch 4",
        "--system fsdp2 --compile --torchao tensorwise --size 7B --batch 8",
        f"--system zeor {AUTO_FP8} --size 7B --batch 8",
        "--system fsdp2 --compile --torchao tensorwise --size 1.3B --batch 8 --no-recompute",
        f"--system zeor {AUTO_FP8} --size 1.3B --batch 8",
        f"--system zeor {AUTO} --size 1.3B --batch 8",
        "--system zeor --size 1.3B --batch 8",
    ],
}


def describe_machine_apart(date: str | None) -> dict[str, Any]:
    """The machine in words, asked in another process: a CUDA context here would cost every run memory."""
    code = f"import json; from benchmarks.measure import describe_machine as d; print(json.dumps(d({date!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_one(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """One gpu_single in a process of its own; its figures, or its settings with what went wrong."""
    settings = gpu_single.settings_of(gpu_single.parse(arguments))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu_single", *arguments, "--out", str(answer)]
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
        return dict(json.loads(answer.read_text()))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path, characters: int = 4_000) -> str:
    return log.read_text(errors="replace")[-characters:]


def _last_error(log: Path, status: int) -> str:
    """The last line that looks like an exception's, or the exit status."""
    lines = log.read_text(errors="replace").splitlines()
    named = [line for line in lines if "Error" in line and not line.removeprefix("[rank0]: ").startswith(" ")]
    return named[-1].removeprefix("[rank0]: ").strip()[:300] if named else f"ended with status {status}"


def line_of(run: dict[str, Any]) -> str:
    """A run in one short line."""
    what = f"{table.settings_in_words(run)} {run['size']} batch {run['batch']}"
    if run.get("error"):
        return f"{what}: FAILED: {run['error'][:160]}"
    phases = run.get("profile") or {}
    split = "".join(f", {phase} {ms:.1f}" for phase, ms in phases.items())
    return (
        f"{what}: {run['tokens_per_s']:,.0f} tok/s, {run['median_step_ms']:,.1f} ms, "
        f"{run['tflops_per_s']:,.0f} TFLOP/s, {run['gpu_allocated_gib']:.2f} GiB GPU "
        f"({run['gpu_reserved_gib']:.2f} reserved), {run['host_peak_gib']:.1f} GiB host, "
        f"loss {run['losses'][-1]:.5f}{split}"
    )


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every configuration, `repeat` times, list after list: so repeats are spread in time."""
    document: dict[str, Any] = {
        "kind": "gpu_suite",
        "machine": describe_machine_apart(options.date),
        "command": command_line(),
        "runs": [],
    }
    deadline = time.monotonic() + options.budget
    for configuration in options.runs * options.repeat:
        arguments = shlex.split(configuration) + shlex.split(options.common)
        left_s = deadline - time.monotonic()
        if left_s < 20:
            settings = gpu_single.settings_of(gpu_single.parse(arguments))
            run = {**settings, "error": "not run: the suite's time was spent"}
        else:
            run = run_one(arguments, min(options.timeout, left_s))
        run["arguments"] = " ".join(arguments)
        document["runs"].append(run)
        print(line_of(run), flush=True)
        if run.get("error") and run.get("log") and options.verbose:
            print(run["log"], flush=True)
        if run.get("kernels"):
            print(run["kernels"], flush=True)
        if options.out is not None:
            write_json(options.out, document)
    return document


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", action="append", default=[], choices=list(PRESETS), help="may be repeated")
    parser.add_argument("--run", action="append", default=[], help="arguments of one gpu_single; may be repeated")
    parser.add_argument("--common", default="", help="arguments added to every run")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds one run may take")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds the whole suite may take")
    parser.add_argument("--verbose", action="store_true", help="print the log of a run that failed")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file (default: $OUT/gpu_suite.json)")
    options = parser.parse_args(argv)
    options.runs = [run for preset in options.preset for run in PRESETS[preset]] + options.run
    if not options.runs:
        parser.error("nothing to run: name a --preset or a --run")
    if options.out is None and os.environ.get("OUT"):
        options.out = Path(os.environ["OUT"], "gpu_suite.json")
    return options


def main() -> None:
    print(table.gpu_table(run_all(parse())))


if __name__ == "__main__":
    main()
