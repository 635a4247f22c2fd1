"""The examples are real programs: run in a small setting, as their users would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zeor.tools import gpt

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher", [pytest.param((), id="python"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.whole)]
)
def test_drop_in_learns(launcher):
    shown = run(*launcher, "examples/drop_in.py")
    assert float(re.search(r"([\d.]+)%", shown).group(1)) > 80.0


@pytest.mark.long
def test_stage3_learns_and_saves_plain_weights(tmp_path):
    shown = run(*TORCHRUN, "examples/stage3.py", "--steps", "30", "--out", str(tmp_path / "weights.pt"))
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", shown).groups())
    assert last < first - 1.0
    plain = gpt.GPT(gpt.GPTConfig(layers=2, width=64, heads=2, context=64))
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
