"""What a run prints by itself: a start-up block of at most five lines, on rank 0, through `logging`, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each test starts a job of its own: processes, as a user would see them.
pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import logging, torch, zeor
from torch import nn

def run():
    SETUP
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer = zeor.shard(model, optimizer, OPTIONS)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 3))
    loader = zeor.data.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    for epoch in range(2):
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    with zeor.full_params(model):
        model.state_dict()
    zeor.unshard(model, optimizer)

if __name__ == "__main__":
    zeor.launch(run, ranks=2, threads=1)
"""


def printed(tmp_path: Path, setup: str = "pass", options: str = "") -> list[str]:
    """Every line that reached stdout or stderr."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("SETUP", setup).replace("OPTIONS", options))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_a_run_prints_at_most_five_lines_from_rank_0(tmp_path):
    lines = printed(tmp_path, options="precision='bf16'")
    assert 1 <= len(lines) <= 5
    assert all(line.startswith("zeor: ") for line in lines)
    assert "stage 3 on 2 rank(s)" in lines[0]
    text = "\n".join(lines)
    assert text.count("bfloat16/bfloat16/float32") == 1, "dtypes once, at the start"
    assert text.count("stage") == 1, "and no rank but the first"


def test_a_level_silences_it(tmp_path):
    assert printed(tmp_path, setup="logging.getLogger('zeor').setLevel('WARNING')") == []


def test_the_users_own_logging_decides_how_it_looks(tmp_path):
    setup = "logging.basicConfig(level='INFO', format='[%(name)s] %(levelname)s %(message)s', force=True)"
    lines = printed(tmp_path, setup=setup)
    ours = [line for line in lines if line.startswith("[zeor] INFO ")]
    assert 1 <= len(ours) == len(lines) <= 5, "once each, in the user's format, and not a second time in ours"
