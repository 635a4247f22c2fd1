"""What does it cost to be observed? Steps with zeor.trace open and without, on two CPU ranks, in alternating windows.

    python -m benchmarks.observer_cost                                   # a GPT of 6 blocks, stage 3
    python -m benchmarks.observer_cost --stage 2 --width 128 --out benchmarks/results/observer_cost.json
    python -m benchmarks.observer_cost --windows 40 --before ../before   # and, off, against another checkout

Windows alternate (off, on, off, on, ...), so that what drifts with the machine drifts for both; the figure is the
median over pairs of windows of their ratio. Only steps are timed: the file is written outside. `off` against `--before`
are runs of their own, alternated too. On cores that something else uses the wall times mean nothing; the CPU time of
rank 0's process, threads of the backend included, suffers less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind the checkout that is measured

from benchmarks.measure import command_line, write_json

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ("stage", "layers", "width", "batch", "steps", "windows")
WARMUP, ROUNDS = 5, 5  # ROUNDS: of whole runs, with --before


def rank_main(options: argparse.Namespace) -> None:
    import logging

    import zeor
    from zeor.tools.gpt import GPT, GPTConfig

    logging.getLogger("zeor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=options.layers, width=options.width, heads=4, context=64, vocab=256))
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, stage=options.stage, nonfinite="ignore")
    tokens = torch.randint(256, (options.batch, 64), generator=torch.Generator().manual_seed(dist.get_rank()))

    def window(name: str) -> None:
        """Notes the milliseconds of one step."""
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            model(tokens).float().logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for kind, took in (("", time.perf_counter() - begin), (" cpu", time.process_time() - begin_cpu)):
            found.setdefault(name + kind, []).append(1000 * took / options.steps)

    found: dict[str, list[float]] = {}
    for _ in range(WARMUP):
        window("warm-up")
    for _ in range(options.windows):
        window("off")
        if hasattr(zeor, "trace"):
            with zeor.trace(model, str(Path(options.result).parent / "trace.json")):
                window("on")
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(found))
    dist.destroy_process_group()


def run(options: argparse.Namespace, tree: Path) -> dict[str, list[float]]:
    """Windows of one run in one checkout."""
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        given = [f"--{name}={getattr(options, name)}" for name in OPTIONS]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__,
                   "--rank", "--result", str(result), *given]  # fmt: skip
        subprocess.run(command, check=True, env=environment, cwd=folder)
        found: dict[str, list[float]] = json.loads(result.read_text())
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    if options.before is None:
        found = run(options, ROOT)
        pairs = {kind: list(zip(found[f"on{kind}"], found[f"off{kind}"], strict=True)) for kind in ("", " cpu")}
        ratios = {f"on / off{kind}": [round(on / off, 4) for on, off in some] for kind, some in pairs.items()}
        medians = {name: median(some) for name, some in ratios.items()}
        return {"ms": {name: round(median(ms), 3) for name, ms in found.items()}, "medians": medians, "ratios": ratios}
    trees = {"before": options.before, "after": ROOT}
    runs = [{name: min(run(options, tree)["off"]) for name, tree in trees.items()} for _ in range(ROUNDS)]
    ratios = [each["after"] / each["before"] for each in runs]
    return {"best ms": runs, "after / before, off": round(median(ratios), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--stage", type=int, default=3)
    add("--layers", type=int, default=6)
    add("--width", type=int, default=256)
    add("--batch", type=int, default=4, help="sequences of 64 tokens on each rank")
    add("--steps", type=int, default=10, help="in a window")
    add("--windows", type=int, default=20, help="of each sort")
    add("--before", type=Path, help="a checkout of an earlier version, to compare steps that nobody traces")
    add("--out", type=Path, help="JSON file")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return
    found = {"command": command_line(), "torch": torch.__version__, **compare(options)}
    print(json.dumps(found, indent=1))
    if options.out:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
