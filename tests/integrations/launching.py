"""Starts a program of this folder as its user would, and returns what each of its ranks wrote.

A program is a module with `main(arguments)` that ends in `run(main)`. It runs under python, torchrun, or a tool's own
launcher; every rank writes what it found as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# --multi_gpu is its launcher of several processes on one host; the programs themselves say that they are on CPUs.
ACCELERATE_LAUNCH = (
    "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--main_process_port", "0", "--num_processes",
)  # fmt: skip
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def start(
    program: str, ranks: int, *arguments: str, launcher: Sequence[str] | None = TORCHRUN, timeout: float = 280
) -> list[Any]:
    """What each rank found. `ranks`=1: under python alone, without any launcher; so too `launcher`=None, for programs
    that start their ranks by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FOUND": folder}
        by = ["-m", *launcher, str(ranks)] if ranks > 1 and launcher is not None else []
        flag = "-m" if not by or launcher is TORCHRUN else "--module"
        command = [sys.executable, *by, flag, f"tests.integrations.{program}", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def run(main: Callable[[Sequence[str]], Any]) -> None:
    """At the end of a program: what `main` returns of its arguments is this rank's."""
    found = main(sys.argv[1:])
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))  # Lightning's own launcher sets the second alone
    Path(os.environ["FOUND"], f"{rank}.json").write_text(json.dumps(found))
