"""A signal becomes a checkpoint on every rank and a clean exit, whoever got the signal."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint import save as writing
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.commit import complete
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.preemption import Preempted, preempt


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


def told_after(folder: str, how: str) -> Any:
    """Rank 1 gets the signal after an asynchronous save that failed, or while one is under way."""
    run, gate, write, lines = make(2), threading.Event(), writing.write, []
    Path(folder, "file").touch()

    def held(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        return write(*args)

    with (
        preempt(folder, *run[:2], exit_code=None) as stop,
        patch.object(writing, "write", held),
        patch.object(logging.getLogger("zeor"), "handle", lambda record: lines.append(record.getMessage())),
    ):
        saving = save(f"{folder}/file" if how == "failed" else folder, *run[:2], step=1, asynchronous=True)
        join = saving.join
        if how == "failed":
            gate.set()
            join()
        saving.join = lambda: (gate.set(), join())  # type: ignore  # only who waits for it lets it go on
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted, match="step 2 is saved"):
            stop.check(2)
    assert saving.done
    save(folder, *run[:2], step=3)  # the old error was told
    return [found.step for found in complete(Path(folder))], [line for line in lines if "saving step 2 though" in line]


@pytest.mark.parametrize("how", ["failed", "under way"])
def test_an_asynchronous_save_before_it_does_not_stand_in_its_way(ranks, tmp_path: Path, how: str) -> None:
    for found, lines in ranks(told_after, 2, str(tmp_path), how):
        assert found == ([2, 3] if how == "failed" else [1, 2, 3])
        wanted = "the checkpoint of step 1, written in the background, failed: The checkpoint could not be written to "
        assert [wanted in line for line in lines] == [True] * (how == "failed")


SCRIPT = """
import logging, os, sys, threading
import torch, zeor
from zeor.checkpoint.preemption import preempt
from zeor.checkpoint.api import save
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
@pytest.mark.parametrize("all_ranks", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_sigterm_under_torchrun_saves_and_exits_with_zero(tmp_path: Path, all_ranks: bool) -> None:
    process = start(tmp_path, "300", "free", ranks=2)
    rank = first_steps(process)
    os.kill(process.pid if all_ranks else rank, signal.SIGTERM)  # torchrun passes it on to every rank
    text = end(process)
    found = complete(tmp_path / "checkpoints")
    assert len(found) == 2 and found[1].step > 1, text
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]
    saved = [line for line in text.splitlines() if "is saved in" in line]
    assert len(saved) == 2 and all(line.startswith(f"zeor: step {found[1].step} ") for line in saved), text
    assert all_ranks or process.returncode == 0, text  # a torchrun that is told to stop itself says so by its code


@pytest.mark.long
def test_a_step_that_outlasts_the_time_ends_the_process_and_earlier_checkpoints_stand(tmp_path: Path) -> None:
    process = start(tmp_path, "0.2", "stuck")
    os.kill(first_steps(process), signal.SIGTERM)
    text = end(process)
    assert process.returncode == 1
    assert "no checkpoint within 0.2 s of the signal" in text
    assert [found.step for found in complete(tmp_path / "checkpoints")] == [1]


MISUSES: list[tuple[dict[str, Any], str]] = [
    ({"signals": ["SIGNOTHING"]}, "'SIGNOTHING' is no signal"),
    ({"signals": None}, "None is no signal"),
    ({"signals": ["SIGTERM", "SIGKILL"]}, "SIGKILL ends or stops a process without asking"),
    ({"signals": signal.SIGSTOP}, "SIGSTOP ends or stops a process without asking"),
    ({"within": 0}, "within=0"),
    ({"keep": 0}, r"zeor.preempt\(keep=0\): give how many checkpoints stay, at least 1"),
    ({"extra": {"x": object()}}, "extra/x is a object, which a checkpoint cannot hold"),
    ({"extra": [1]}, r"zeor.preempt\(extra=...\): list has no names"),
    ({"data": 5}, r"zeor.preempt\(data=...\): int has no state_dict"),
    ({"folder": "zzz://a"}, "zzz://a cannot be used: "),
    ({"folder": "a\0b"}, "no folder can have that name"),
]


def test_misuse_is_refused_when_it_is_armed(tmp_path: Path) -> None:
    model, optimizer, _ = make(1)
    before = signal.getsignal(signal.SIGTERM)
    for given, match in MISUSES:
        with pytest.raises(ValueError, match=match):
            preempt(**{"folder": tmp_path, "model": model, "optimizer": optimizer, **given})
    assert signal.getsignal(signal.SIGTERM) is before
    with preempt(tmp_path, model, optimizer) as stop:
        with pytest.raises(ValueError, match=r"check\(step=1.0\)"):
            stop.check(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"check\(extra=...\): list has no names"):
            stop.check(1, extra=[1])  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
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


@pytest.mark.parametrize("given", ["SIGUSR1", signal.SIGUSR1, ["SIGUSR1", signal.SIGUSR1]])
def test_signals_are_one_or_many_and_come_back(tmp_path: Path, given: Any) -> None:
    model, optimizer, _ = make(1)
    before = signal.getsignal(signal.SIGUSR1)
    with preempt(tmp_path, model, optimizer, signals=given, exit_code=None) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Preempted):
            stop.check(1)
    assert signal.getsignal(signal.SIGUSR1) is before


def differ(folder: str) -> None:
    rank, run = dist.get_rank(), make(2)
    with pytest.raises(ValueError if rank == 1 else CheckpointError, match=r"zeor.preempt\(keep=0\)"):
        preempt(folder, *run[:2], keep=1 - rank)
    with preempt(folder, *run[:2]) as stop:
        stop.check(1)
        with pytest.raises(ValueError, match="The ranks check different steps, from step=2 to step=3"):
            stop.check(2 + rank)


def test_what_is_wrong_on_one_rank_is_raised_on_all_before_any_signal(ranks, tmp_path: Path) -> None:
    ranks(differ, 2, str(tmp_path))
