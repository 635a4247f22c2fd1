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
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def start(
    program: str, ranks: int, *arguments: str, launcher: Sequence[str] = TORCHRUN, timeout: float = 280
) -> list[Any]:
    """What each rank found. `ranks`=1: under python alone, without any launcher."""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FOUND": folder}
        by = ["-m", *launcher, str(ranks)] if ranks > 1 else []
        module = ["-m", f"tests.integrations.{program}"] if ranks == 1 or launcher is TORCHRUN else []
        module = module or ["--module", f"tests.integrations.{program}"]
        command = [sys.executable, *by, *module, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def run(main: Callable[[Sequence[str]], Any]) -> None:
    """At the end of a program: what `main` returns of its arguments is this rank's."""
    found = main(sys.argv[1:])
    Path(os.environ["FOUND"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
