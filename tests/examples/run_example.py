"""Run one example in processes of its own and read the line of JSON that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 280  # below pytest's own limit, so that no rank is left behind


def run(tmp_path: Path, name: str, *options: str, ranks: int = 2) -> dict[str, Any]:
    """The result of `examples/NAME.py` under torchrun, or python for one rank. zeor is found beside the examples."""
    out = tmp_path / "result.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, f"examples/{name}.py", *options, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)
    try:
        shown, _ = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()  # torchrun then ends its ranks; killed, it would leave them behind
        process.wait()
    assert process.returncode == 0, shown
    result = json.loads(out.read_text())
    assert result["world"] == ranks and result["example"] == name
    return result
