"""A signal becomes a checkpoint on every rank and a clean exit, whoever got the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint.commit import complete
from zeor.checkpoint.preemption import Preempted, preempt
from zeor.checkpoint.training import load


def told(folder: str, who: list[int], signals: list[str]) -> Any:
    """Some ranks get a real signal in the middle of step 3."""
    run = make(3)
    before = signal.getsignal(signal.SIGTERM)
    losses = []
    with preempt(folder, *run[:2], extra={"scheduler": run[2]}, exit_code=None, signals=signals) as stop:
        try:
            for step in range(6):
                if step == 3 and dist.get_rank() in who:
                    for name in signals:
                        os.kill(os.getpid(), signal.Signals[name])
                losses += steps(*run, range(step, step + 1))
                stop.check(step + 1, extra={"told": step})
        except Preempted as error:
            assert error.step == step + 1
            path = error.path
    assert signal.getsignal(signal.SIGTERM) is before
    wanted = everything(*run[:2])
    again = make(1, seed=9)
    loaded = load(folder, *again[:2], extra={"scheduler": again[2]})
    assert loaded.path == path and loaded.extra["told"] == step
    assert all(torch.equal(value, wanted[key]) for key, value in everything(*again[:2]).items())
    return loaded.step


@pytest.mark.parametrize(("who", "signals"), [([1], ["SIGTERM"]), ([0, 1, 2], ["SIGUSR1", "SIGTERM"])])
def test_all_ranks_save_the_same_step_whoever_was_signalled(ranks, tmp_path: Path, who: Any, signals: Any) -> None:
    assert ranks(told, 3, str(tmp_path), who, signals) == [4, 4, 4]


SCRIPT = """
import logging, os, sys, threading
import torch, zeor
from zeor.checkpoint.preemption import preempt
from zeor.checkpoint.training import save
torch.set_num_threads(1)
folder, within, stuck = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "stuck"
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
save(folder, model, optimizer, step=1)
stop = preempt(folder, model, optimizer, within=within)
step = 1
while True:
    step += 1
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, os.getpid(), flush=True)
    if stuck:
        threading.Event().wait()
    stop.check(step)
"""


def start(tmp_path: Path, *args: str, ranks: int = 1) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, str(script), str(tmp_path / "checkpoints"), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def first_steps(process: subprocess.Popen[str]) -> int:
    """Read on in the background from the first step on, whose process is returned."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return int(line.split()[2])


def end(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    text = process.stderr.read()
    process.wait(120)
    return text


@pytest.mark.long
@pytest.mark.parametrize("all_ranks", [True, False])
def test_sigterm_under_torchrun_saves_and_exits_with_zero(tmp_path: Path, all_ranks: bool) -> None:
    process = start(tmp_path, "300", "free", ranks=2)
    rank = first_steps(process)
    os.kill(process.pid if all_ranks else rank, signal.SIGTERM)  # torchrun passes it on to every rank
    text = end(process)
    found = complete(tmp_path / "checkpoints")
    assert len(found) == 2 and found[1].step > 1, text
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]
    assert text.count("is saved in") == 2, text
    assert all_ranks or process.returncode == 0, text  # a torchrun that is told to stop itself says so by its code


@pytest.mark.long
def test_a_step_that_outlasts_the_time_ends_the_process_and_earlier_checkpoints_stand(tmp_path: Path) -> None:
    process = start(tmp_path, "0.2", "stuck")
    os.kill(first_steps(process), signal.SIGTERM)
    text = end(process)
    assert process.returncode == 1
    assert "no checkpoint within 0.2 s of the signal" in text
    assert [found.step for found in complete(tmp_path / "checkpoints")] == [1]


def test_misuse_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = make(1)
    with pytest.raises(ValueError, match="'SIGNOTHING' is no signal"):
        preempt(tmp_path, model, optimizer, signals=["SIGNOTHING"])
    with pytest.raises(ValueError, match="within=0"):
        preempt(tmp_path, model, optimizer, within=0)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            preempt(tmp_path, model, optimizer)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
