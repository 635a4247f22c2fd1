"""How far does one step walk through zeor's code? Files executed, distinct calls between folders, Python calls.

    python -m benchmarks.walk                    # two CPU ranks, stage 3, bf16, clipping, a root and six small units
    python -m benchmarks.walk --files            # the files too, with the calls into each
    python -m benchmarks.walk --zeor ../before   # zeor of another checkout

One steady step (forward, backward, clip_grad_norm_, step, zero_grad) runs under sys.setprofile, in every thread. A
crossing is a pair of functions, caller and callee, that lie in different folders of zeor; a sub-folder is a folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
WIDTH, UNITS, WARMUP = 16, 6, 8


class Walk:
    """Counts calls into zeor's files."""

    def __init__(self, root: str):
        self.root = root + os.sep
        self.calls: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.crossings: set[tuple[str, str]] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self.root):
            return
        here = frame.f_code.co_filename[len(self.root) :]
        self.calls[here] += 1
        self.functions[_function(here, frame)] += 1
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(self.root):
            there = caller.f_code.co_filename[len(self.root) :]
            if os.path.dirname(there) != os.path.dirname(here):
                self.crossings.add((_function(there, caller), _function(here, frame)))

    def found(self) -> dict[str, Any]:
        return {
            "files": len(self.calls),
            "crossings": len(self.crossings),
            "calls": sum(self.calls.values()),
            "calls by file": dict(self.calls.most_common()),
            "calls by function": dict(self.functions.most_common(60)),
            "crossing": sorted(f"{a} -> {b}" for a, b in self.crossings),
        }


def _function(file: str, frame: Any) -> str:
    return f"{file}:{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(UNITS))
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.scale


def rank_main(options: argparse.Namespace) -> None:
    import zeor

    logging.getLogger("zeor").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, stage=options.stage, precision=options.precision)

    def step() -> None:
        model(torch.full((4, WIDTH), 1.0 + dist.get_rank())).float().square().mean().backward()
        zeor.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP):
        step()
    walk = Walk(str(Path(zeor.__file__).parent))
    threading.setprofile_all_threads(walk) if hasattr(threading, "setprofile_all_threads") else sys.setprofile(walk)
    step()
    sys.setprofile(None)
    threading.setprofile(None)
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(walk.found()))
    dist.destroy_process_group()


def run_ranks(options: argparse.Namespace) -> dict[str, Any]:
    tree = Path(options.zeor or ROOT).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__,
                   "--rank", "--out", str(out), "--stage", str(options.stage),
                   "--precision", options.precision]  # fmt: skip
        subprocess.run(command, check=True, env=environment, cwd=folder)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--files", action="store_true", help="print files, functions and crossings too")
    parser.add_argument("--zeor", help="a checkout whose zeor to take; this one's by default")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return
    found = run_ranks(options)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    if options.files:
        print(json.dumps(found, indent=1))
    print(f"{found['files']} files, {found['crossings']} crossings, {found['calls']} Python calls")


if __name__ == "__main__":
    main()
