"""A rank killed at any moment leaves a checkpoint that loads, bit for bit what the uninterrupted run had at its step.

A seeded sample: every system call of a save on both ranks, before and after it, and random moments. ZEOR_KILLS=240
makes more of them; benchmarks/kill_matrix.py writes their result down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_kill_around_a_save_loses_a_checkpoint_or_loads_wrong_values(tmp_path: Path) -> None:
    count = int(os.environ.get("ZEOR_KILLS", "52"))
    result = tmp_path / "result.json"
    root = tmp_path / "runs"
    root.mkdir()
    command = [sys.executable, "-m", "tests.checkpoint.killing", root, str(count), "7", result]
    # A process of its own: it forks, and this one has threads.
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.exists(), ended.stderr[-3000:]
    report = json.loads(result.read_text())
    assert report["problems"] == []
    wrong = {key: report[key] for key in ("unloadable", "wrong_loads", "lost", "hung")}
    assert wrong == {"unloadable": 0, "wrong_loads": 0, "lost": 0, "hung": 0}
    assert report["kills"] == count
    calls = sum(report["calls_by_rank"])
    assert report["at_a_call"] >= min(count, 2 * calls) and min(report["by_rank"]) > 0
    assert report["peer_raised"] + report["peer_ended"] == report["lives"]
