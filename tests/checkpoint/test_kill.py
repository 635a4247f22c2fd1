"""A rank killed at any moment leaves a checkpoint that loads, bit for bit what the uninterrupted run had at its step.

A seeded sample: in a shared folder every call to the disk of a save on both ranks, before and after it, and random
moments; fewer of them in the background, with a folder per host, at a URL, and with direct writes. ZEOR_KILLS=240 makes
more of them; benchmarks/kill_matrix.py writes their result down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COUNTS = {"shared": 52, "async": 8, "hosts": 8, "url": 8, "direct": 8}


def killed(tmp_path: Path, count: int, mode: str) -> dict[str, Any]:
    result = tmp_path / "result.json"
    root = tmp_path / "runs"
    root.mkdir()
    command = [sys.executable, "-m", "tests.checkpoint.killing", root, str(count), "7", mode, result]
    # A process of its own: it forks, and this one has threads.
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.exists(), ended.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", COUNTS)
def test_no_kill_around_a_save_loses_a_checkpoint_or_loads_wrong_values(tmp_path: Path, mode: str) -> None:
    count = int(os.environ.get("ZEOR_KILLS", COUNTS[mode]))
    report = killed(tmp_path, count, mode)
    assert report["problems"] == []
    wrong = {key: report[key] for key in ("unloadable", "wrong_loads", "lost", "hung")}
    assert wrong == {"unloadable": 0, "wrong_loads": 0, "lost": 0, "hung": 0}
    assert report["kills"] == count
    assert (report["direct_writes"] > 0) == (mode == "direct")
    calls = sum(report["calls_by_rank"])
    assert report["at_a_call"] >= min(count, 2 * calls) and min(report["by_rank"]) > 0
    assert report["peer_raised"] + report["peer_ended"] == report["lives"]
    # Who waited for the dead rank in a save was told so in zeor's own words, which name it.
    assert report["peer_told"] >= report["peer_named"] > 0
