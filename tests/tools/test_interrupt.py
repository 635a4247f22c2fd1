"""Ctrl-C in `zeor train`, with real processes and real signals: one line, a checkpoint, exit code 130, nobody left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
STEPS = 100_000  # more than any test waits for


@contextmanager
def training(folder: Path, ranks: int, *more: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`zeor train` as a shell starts it, in a process group of its own, once it has taken its first step."""
    text, shown = folder / "line.txt", folder / "shown.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    sizes = ["--layers", "1", "--width", "32", "--batch", "2", "--ranks", str(ranks), "--text", str(text)]
    with shown.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "zeor.tools.cli", "train", "--steps", str(STEPS), *sizes, *more],
            stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests may run where it is ignored
        )  # fmt: skip
    try:
        waited_until = time.monotonic() + 120
        while not re.search(r"grad_norm [0-9]", shown.read_text()):  # the legend says the word alone before
            assert process.poll() is None and time.monotonic() < waited_until, shown.read_text()
            time.sleep(0.1)
        yield process, shown
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_saves_says_so_and_leaves_with_130(tmp_path: Path) -> None:
    saved, ranks = tmp_path / "runs", 2
    with training(tmp_path, ranks, "--save", str(saved)) as (process, shown):
        pids = ranks_of(process)
        assert len(pids) == ranks
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) == 130
    text = shown.read_text()
    assert "Traceback" not in text and "KeyboardInterrupt" not in text
    found = sorted(saved.glob("step-*"))
    assert len(found) == 1
    step = int(found[0].name.partition("-")[2])
    assert text.splitlines()[-1] == (
        f"zeor train: stopped after step {step}, which is saved in {found[0]}; the same command goes on from there."
    )
    assert not any(map(is_alive, pids))
    with training(tmp_path, ranks, "--save", str(saved)) as (process, shown):
        assert f"going on from step {step} in {saved}" in shown.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert int(sorted(saved.glob("step-*"))[-1].name.partition("-")[2]) > step


def test_without_a_folder_ctrl_c_ends_it_with_one_line(tmp_path: Path) -> None:
    with training(tmp_path, 1) as (process, shown):
        pids = ranks_of(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    text = shown.read_text()
    assert "Traceback" not in text and "KeyboardInterrupt" not in text
    assert text.splitlines()[-1].startswith("zeor train: interrupted; nothing was saved.")
    assert len(pids) == 1 and not any(map(is_alive, pids))
