"""Bytes that really cross a network: two ranks in two namespaces, the interface's counter around whole steps.

Each rank reads its own interface between two barriers, and that is set beside zeor's counter (`zeor.traffic`)
and the theory: a rank of W sends (W-1)/W of the model 2 times a step at stages 0 to 2, 3 times at stage 3.
The interface also sees headers and acknowledgements, so a little above the theory is right.

    python -m benchmarks.traffic_netns --systems zeor1,zeor2,zeor3 --out benchmarks/results/traffic_netns.json
    python -m benchmarks.traffic_netns --systems ddp --size tiny --rate 100mbit

Needs root and iproute2. The same file is the worker that torchrun starts in each namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# So that `python benchmarks/traffic_netns.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cpu_systems, netns, table
from benchmarks.decoder import SIZES, parameter_numel
from benchmarks.measure import command_line, describe_machine, write_json

ROOT = Path(__file__).resolve().parents[1]
# How many times the model crosses the wire in a step, each time (W-1)/W of it, with ideal collectives.
MODELS_PER_STEP = {"compute": 0, "ddp": 2, "ddp+zero": 3, "ddp+zero-views": 3, "fsdp2": 3}
MODELS_PER_STEP |= {"zeor0": 2, "zeor1": 2, "zeor2": 2, "zeor3": 3}


def theory_nbytes(system: str, size: str, world: int = 2) -> float:
    """What one rank sends in one fp32 step at least."""
    return MODELS_PER_STEP[system] * 4 * parameter_numel(SIZES[size]) * (world - 1) / world


# The worker: one rank


def work(options: argparse.Namespace) -> None:
    """Train, and write what crossed this rank's interface during the counted steps."""
    import torch.distributed as dist

    from benchmarks.cpu_worker import Rank

    (system,) = options.systems
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    rank = Rank(argparse.Namespace(**vars(options), system=system, adamw="fused", clip=0.0))
    rank.warm(options.warmup)
    dist.barrier()
    before = netns.sent_nbytes(interface)
    start = time.perf_counter()
    window = rank.window(options.steps)
    seconds = time.perf_counter() - start
    sent = netns.sent_nbytes(interface) - before
    dist.barrier()  # the other rank's reading is done before this one goes on to tear down
    counters = cpu_systems.traffic(system, rank.trained.model)
    answer = {
        "rank": rank.rank,
        "interface_nbytes": sent / options.steps,
        "counted_nbytes": None if window["bytes_sent"] is None else window["bytes_sent"] / options.steps,
        "collectives": None if counters is None else counters.get("collectives"),
        "step_ms": 1e3 * seconds / options.steps,
        "loss": window["losses"][-1],
    }
    Path(options.worker, f"rank{rank.rank}.json").write_text(json.dumps(answer, default=str))
    dist.destroy_process_group()


# The parent: namespaces and comparison


def run_system(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """One system in its own pair of namespaces; the figures are those of the rank that sent more."""
    with tempfile.TemporaryDirectory() as folder, netns.two_hosts(options.rate) as hosts:
        script = ["-m", "benchmarks.traffic_netns", "--worker", folder, "--systems", system]
        for name in ("size", "batch", "tokens", "steps", "warmup"):
            script += [f"--{name}", str(getattr(options, name))]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        finished = netns.torchrun(hosts, script, environment=environment, timeout_s=options.timeout)
        for node, (status, output) in enumerate(finished):
            if status != 0:
                raise RuntimeError(f"{system}: node {node} ended with status {status}:\n{output[-4000:]}")
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]
    counted = [rank["counted_nbytes"] for rank in ranks]
    return {
        "system": system,
        "interface_nbytes": max(rank["interface_nbytes"] for rank in ranks),
        "counted_nbytes": None if None in counted else max(counted),
        "theory_nbytes": theory_nbytes(system, options.size),
        "step_ms": max(rank["step_ms"] for rank in ranks),
        "ranks": ranks,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default="zeor1,zeor2,zeor3", help="comma-separated")
    parser.add_argument("--size", default="36.7M", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=4, help="steps counted")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rate", help="limit of the link, as tc writes it: 100mbit")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds one system may take")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.systems = options.systems.split(",")
    if unknown := [name for name in options.systems if name not in MODELS_PER_STEP]:
        parser.error(f"unknown systems {unknown}: choose from {', '.join(MODELS_PER_STEP)}")
    return options


def main() -> None:
    options = parse()
    if options.worker is not None:
        work(options)
        return
    if reason := netns.missing():
        raise SystemExit(f"cannot make network namespaces: {reason}")
    document: dict[str, Any] = {
        "kind": "traffic_netns",
        "machine": describe_machine(options.date),
        "command": command_line(),
        "workload": {name: getattr(options, name) for name in ("size", "batch", "tokens", "steps", "rate")},
        "runs": [],
    }
    for system in options.systems:
        document["runs"].append(run_system(system, options))
        if options.out is not None:
            write_json(options.out, document)
    print(table.traffic_table(document))


if __name__ == "__main__":
    main()
