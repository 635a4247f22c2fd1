"""Two CPU ranks over Gloo: zeor's stages beside DDP, DDP + ZeroRedundancyOptimizer and FSDP2, interleaved.

Each system lives in its own pair of rank processes, so that its memory is its own. All pairs stay alive; in
each round every system in turn runs one window of steps while the others sleep on a pipe. So a ratio
compares windows seconds apart, and the machine's drift cancels. Only ratios inside one run mean anything.

    python -m benchmarks.cpu_ranks --out benchmarks/results/cpu_ranks.json
    python -m benchmarks.cpu_ranks --systems ddp,fsdp2,zeor3 --rounds 3 --size tiny
    python -m benchmarks.cpu_ranks --systems zeor1,zeor3 --before ../before     # zeor of another checkout beside

With --before every zeor system also runs as "zeor3 before", from the zeor of that checkout.

The steps of a run: 1. start all ranks; 2. warm each system up; 3. rounds of windows; 4. memory; 5. report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

# So that `python benchmarks/cpu_ranks.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cpu_systems, table
from benchmarks.decoder import SIZES, parameter_numel
from benchmarks.measure import command_line, describe_machine, free_port, write_json

ROOT = Path(__file__).resolve().parents[1]
BEFORE = " before"  # ends the name of a system that runs from another checkout


class Pair:
    """The rank processes of one system, commanded together."""

    def __init__(self, system: str, options: argparse.Namespace) -> None:
        self.system = system
        self.processes: list[subprocess.Popen[str]] = []
        port = free_port()
        for rank in range(options.world):
            self.processes.append(_start_rank(system, rank, port, options))

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Send one command to every rank, then read every answer."""
        line = json.dumps(command) + "\n"
        for process in self.processes:
            stdin = _pipe(process.stdin)
            try:
                stdin.write(line)
                stdin.flush()
            except BrokenPipeError:
                break  # the read below says which rank it was
        return [self._answer(rank, process) for rank, process in enumerate(self.processes)]

    def _answer(self, rank: int, process: subprocess.Popen[str]) -> dict[str, Any]:
        line = _pipe(process.stdout).readline()
        if not line:
            status = process.wait(timeout=30)
            raise RuntimeError(f"rank {rank} of {self.system} ended with status {status}: its error is above")
        return dict(json.loads(line))

    def end(self) -> None:
        """Make sure that no rank outlives the run, whatever happened."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _start_rank(system: str, rank: int, port: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    tree = options.before.resolve() if system.endswith(BEFORE) else ROOT
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.world),
        "LOCAL_WORLD_SIZE": str(options.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "benchmarks.cpu_worker", "--system", system.removesuffix(BEFORE)]
    for name in ("size", "batch", "tokens", "adamw", "clip"):
        command += [f"--{name}", str(getattr(options, name))]
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_rounds(pairs: list[Pair], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Round-robin windows; the first system of a round moves on, so that none always goes first."""
    windows: dict[str, list[dict[str, Any]]] = {pair.system: [] for pair in pairs}
    for turn in range(options.rounds):
        first = turn % len(pairs)
        for pair in pairs[first:] + pairs[:first]:
            answers = pair.ask(do="window", steps=options.steps)
            step_ms = 1e3 * max(answer["seconds"] for answer in answers) / options.steps
            windows[pair.system].append(
                {
                    "round": turn,
                    "step_ms": round(step_ms, 3),
                    "losses": [answer["losses"] for answer in answers],
                    "bytes_sent": [answer["bytes_sent"] for answer in answers],
                }
            )
        line = "  ".join(f"{pair.system} {windows[pair.system][-1]['step_ms']:.0f}" for pair in pairs)
        print(f"round {turn + 1}/{options.rounds} (ms a step): {line}", file=sys.stderr, flush=True)
    return windows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole run; see the steps in the module's docstring."""
    pairs: list[Pair] = []
    try:
        # 1-2. All start at once (imports overlap), and each warms up alone.
        for system in options.systems:
            pairs.append(Pair(system, options))
        warm = {pair.system: pair.ask(do="warm", steps=options.warmup) for pair in pairs}
        # 3-4.
        windows = run_rounds(pairs, options)
        memory = {pair.system: pair.ask(do="report") for pair in pairs}
        for pair in pairs:
            pair.ask(do="stop")
    finally:
        for pair in pairs:
            pair.end()
    return {
        "kind": "cpu_ranks",
        "machine": describe_machine(options.date),
        "command": command_line(),
        "workload": {
            "size": options.size,
            "parameters": parameter_numel(SIZES[options.size]),
            "batch": options.batch,
            "tokens": options.tokens,
            "world": options.world,
            "adamw": options.adamw,
            "clip": options.clip,
            "steps_per_window": options.steps,
            "rounds": options.rounds,
        },
        "systems": [
            {"system": name, "warm": warm[name], "windows": windows[name], "memory": memory[name]}
            for name in options.systems
        ],
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default=",".join(cpu_systems.SYSTEMS), help="comma-separated")
    parser.add_argument("--size", default="36.7M", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps per window")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--clip", type=float, default=0.0, help="gradient norm limit; 0: no clipping")
    parser.add_argument("--adamw", default="fused", choices=["default", "foreach", "fused"])
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version, with its benchmarks")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file for every window")
    options = parser.parse_args(argv)
    options.systems = options.systems.split(",")
    known = cpu_systems.SYSTEMS + cpu_systems.EXTRA_SYSTEMS
    if unknown := [name for name in options.systems if name not in known]:
        parser.error(f"unknown systems {unknown}: choose from {', '.join(known)}")
    if options.before is not None:
        names = [[name, name + BEFORE] if name.startswith("zeor") else [name] for name in options.systems]
        options.systems = [each for pair in names for each in pair]
    return options


def main() -> None:
    options = parse()
    if any(name.startswith("zeor") for name in options.systems) and not cpu_systems.zeor_present():
        options.systems = [name for name in options.systems if not name.startswith("zeor")]
        print("zeor cannot be imported: running its peers only", file=sys.stderr)
    document = measure(options)
    if options.out is not None:
        write_json(options.out, document)
    print(table.cpu_table(document))


if __name__ == "__main__":
    main()
