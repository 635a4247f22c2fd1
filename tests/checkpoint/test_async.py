"""Asynchronous saves: the values of the call, written while training goes on; nothing that goes wrong is lost."""

from __future__ import annotations

import gc
import logging
import os
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeor
from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint import room, saver, staging
from zeor.checkpoint import save as saving
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.commit import complete
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.writer import Source
from zeor.checkpoint.run import run_of
from zeor.checkpoint.saver import HostBlocks


class Gate:
    """Holds the background's writing until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        write = saving.write

        def held(*args: Any) -> Path:
            self.entered.set()
            assert self.open.wait(60)
            return write(*args)

        monkeypatch.setattr(saving, "write", held)


def train_on(folder: str, stage: int) -> Any:
    """Two models saved at once, trained on at once; then both loaded."""
    first, second = make(stage), make(stage, seed=5)
    for run in (first, second):
        steps(*run, range(3))
    wanted = [everything(*run[:2]) for run in (first, second)]
    saves = [
        save(f"{folder}/{number}", *run[:2], step=3, extra={"scheduler": run[2]}, asynchronous=True)
        for number, run in enumerate((first, second))
    ]
    losses = [steps(*run, range(3, 6)) for run in (first, second)]
    paths = [each.wait() for each in saves]
    assert all(each.done for each in saves) and paths[0].name == "step-000000000003"
    blocks = saver.saver_of(run_of(*first[:2])).blocks
    held = blocks.nbytes
    save(f"{folder}/0", *first[:2], step=6, asynchronous=True).wait()
    assert blocks.nbytes == held > 0
    for number, run in enumerate((first, second)):
        load(paths[number], *run[:2], extra={"scheduler": run[2]})
        found = everything(*run[:2])
        assert found.keys() == wanted[number].keys()
        assert all(torch.equal(value, wanted[number][key]) for key, value in found.items())
        assert steps(*run, range(3, 6)) == losses[number]
    return True


@pytest.mark.parametrize("stage", [0, 3])
def test_values_are_those_at_the_call_though_training_goes_on_at_once(ranks, tmp_path: Path, stage: int) -> None:
    assert all(ranks(train_on, 2, str(tmp_path), stage))


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model, optimizer, _ = make(1)
    first = save(tmp_path, model, optimizer, step=1, asynchronous=True)
    assert gate.entered.wait(60) and not first.done
    threading.Timer(0.05, gate.open.set).start()
    second = save(tmp_path, model, optimizer, step=2, asynchronous=True)
    assert first.done
    assert second.wait().name == "step-000000000002"
    assert [found.step for found in complete(tmp_path)] == [1, 2]


def test_a_second_save_is_refused_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model, optimizer, _ = make(1)
    first = save(tmp_path, model, optimizer, step=1, asynchronous=True)
    with pytest.raises(CheckpointError, match="still being written"):
        save(tmp_path, model, optimizer, step=2, asynchronous=True, busy="raise")
    gate.open.set()
    first.wait()
    save(tmp_path, model, optimizer, step=3, asynchronous=True, busy="raise").wait()
    assert [found.step for found in complete(tmp_path)] == [1, 3]
    with pytest.raises(ValueError, match="busy='later'"):
        save(tmp_path, model, optimizer, step=4, busy="later")


def fail_in_background(folder: str) -> Any:
    model, optimizer, _ = make(2)
    Path(folder, "file").touch()
    saving = save(f"{folder}/file", model, optimizer, step=1, asynchronous=True)
    with pytest.raises(CheckpointError, match="file: Not a directory"):
        saving.wait()
    save(f"{folder}/file", model, optimizer, step=2, asynchronous=True)
    with pytest.raises(CheckpointError, match="file: Not a directory"):
        save(folder, model, optimizer, step=3)
    save(folder, model, optimizer, step=4)  # it was told once
    return [found.step for found in complete(Path(folder))]


def test_an_error_surfaces_at_wait_and_at_the_next_save_on_every_rank(ranks, tmp_path: Path) -> None:
    assert ranks(fail_in_background, 2, str(tmp_path)) == [[4], [4]]


MISUSES: list[tuple[dict[str, Any], str]] = [
    ({"step": -1}, r"zeor.save\(step=-1\)"),
    ({"step": "1"}, r"zeor.save\(step='1'\)"),
    ({"keep": 0}, r"zeor.save\(keep=0\)"),
    ({"keep": True}, r"zeor.save\(keep=True\)"),
    ({"busy": "later"}, "busy='later'"),
    ({"extra": [1]}, r"zeor.save\(extra=...\): list has no names"),
    ({"data": 5}, r"zeor.save\(data=...\): int has no state_dict"),
    ({"folder": "a\0b"}, r"zeor.save\(folder='a\\x00b'\): no folder can have that name"),
    ({"folder": "a\ud800"}, "no folder can have that name"),
    ({"folder": 5}, r"zeor.save\(folder=5\): give a path or a URL"),
    ({"folder": "zzz://a"}, "zzz://a cannot be used: "),
]


def collect_on_one_rank_fails(folder: str) -> Any:
    model, optimizer, _ = make(2)
    extra = {"bad": object()} if torch.distributed.get_rank() == 0 else {}
    for asynchronous in (False, True):
        with pytest.raises(CheckpointError, match=r"extra/bad is a object"):
            save(folder, model, optimizer, step=1, extra=extra, asynchronous=asynchronous)
        with pytest.raises(CheckpointError, match="rank 0 gives step=1, rank 1 gives step=2"):
            save(folder, model, optimizer, step=1 + torch.distributed.get_rank(), asynchronous=asynchronous)
    for wrong, match in MISUSES:
        given = {"folder": folder, "step": 1}
        with pytest.raises(ValueError, match=match):  # on every rank at once
            save(model=model, optimizer=optimizer, **{**given, **wrong})
        with pytest.raises(ValueError, match=match):  # on one, and told to the others
            save(model=model, optimizer=optimizer, **{**given, **(wrong if torch.distributed.get_rank() else {})})
    return complete(Path(folder))


def test_what_one_rank_cannot_save_is_told_to_all(ranks, tmp_path: Path) -> None:
    assert ranks(collect_on_one_rank_fails, 2, str(tmp_path)) == [[], []]


AT_EXIT = """
import sys, torch, zeor
from zeor.checkpoint.api import save
for folder in sys.argv[1:]:
    model = torch.nn.Linear(300, 300)
    model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    save(folder, model, optimizer, step=7, asynchronous=True)
    del model, optimizer
"""


@pytest.mark.long
def test_the_end_of_the_program_waits_for_a_save_and_tells_of_one_that_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "good"), str(tmp_path / "file")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert [found.step for found in complete(tmp_path / "good")] == [7]
    assert "the program ends, and the checkpoint of step 7 was not written" in done.stderr


def test_a_model_may_be_unsharded_and_go_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model, optimizer, scheduler = make(3)
    steps(model, optimizer, scheduler, range(2))
    wanted = everything(model, optimizer)
    saving = save(tmp_path, model, optimizer, step=2, asynchronous=True)
    engine = weakref.ref(run_of(model, optimizer).engine)
    model = zeor.unshard(model, optimizer)
    with torch.no_grad():
        for param in model[0].parameters() if isinstance(model, tuple) else model.parameters():
            param.zero_()
    del model, optimizer, scheduler
    gc.collect()
    assert engine() is None
    again = make(0, seed=9)
    gate.open.set()
    saving.wait()
    load(tmp_path, *again[:2])
    found = everything(*again[:2])
    assert all(torch.equal(value, wanted[key]) for key, value in found.items())


def test_short_memory_makes_it_a_save_at_once_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, _ = make(1)
    monkeypatch.setattr(room, "free_host_nbytes", lambda: 100)
    with caplog.at_level(logging.WARNING, "zeor"):
        saving = save(tmp_path, model, optimizer, step=1, asynchronous=True)
    assert saving.done and saving.wait() == tmp_path / "step-000000000001"
    assert "written at once instead" in caplog.text
    assert saver.saver_of(run_of(model, optimizer)).blocks.nbytes == 0


def test_ranks_of_a_host_share_its_memory() -> None:
    given: list[Any] = [("a", 40, 100), ("a", 40, 90), ("b", 40, 100), ("c", 9, None)]
    everyone = [room.MemoryRequest(*each) for each in given]
    assert room.short_of(everyone, 0.8) == {"a": (80, 90)}
    assert room.short_of(everyone, 0.9) == {}
    free = room.free_host_nbytes()
    assert free is None or 0 < free < 1 << 50


def test_a_long_save_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(saving, "EVERY_SECONDS", 0.001)
    monkeypatch.setattr(saving.log, "info", lambda text, *args: lines.put(text % args))
    silent = saving.SaveProgress("another rank", 1, shown=False)
    with silent, saving.SaveProgress("saving step 5", 4 * 10**9, shown=True) as shown:
        shown.add(1_000_000_000)
        while not lines.empty():
            lines.get()  # of before
        lines.get(timeout=60)  # perhaps begun before
        assert lines.get(timeout=60).startswith("zeor: saving step 5: 1.00 of rank 0's 4.00 GB written")
    assert shown.line(2.0).endswith("in 2 s, 0.50 GB/s")
    shown.add(3_000_000_000)
    assert shown.line(4.0).endswith("1.00 GB/s; waiting for the disk and the other ranks")


def test_host_blocks_are_cut_by_hand_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeor.checkpoint.saver.BLOCK_NBYTES", 1024)
    values = [torch.arange(200.0), torch.tensor(3, dtype=torch.int64), torch.empty(0), torch.arange(900).double()]
    sources = [Source(str(i), v.dtype, tuple(v.shape), lambda v=v: v) for i, v in enumerate(values)]
    blocks = HostBlocks(pinned=False)
    for offset in (0, 1):
        wanted = [value.add_(offset).clone() for value in values]
        copies = blocks.take(sources)
        for value in values:
            value.fill_(-1)
        assert all(torch.equal(copy.read().view(w.shape), w) for copy, w in zip(copies, wanted, strict=True))
        for value, before in zip(values, wanted):
            value.copy_(before)
        assert blocks.nbytes == 1024 + 900 * 8 + 32 and blocks.missing_nbytes(sources) == 0


def load_both_ways(folder: str) -> Any:
    model, optimizer, scheduler = make(3)
    average = zeor.ema(model, 0.9)
    steps(model, optimizer, scheduler, range(2))
    average.update()
    save(folder, model, optimizer, step=2, extra={"average": average})
    results = []
    for share in (1e9, 0.0):
        again = make(2, seed=9)
        mean = zeor.ema(again[0], 0.9)
        with patch.multiple(staging, STAGED_SHARE=share, BATCH_NBYTES=64):
            load(folder, *again[:2], extra={"average": mean})
        with mean.applied():
            results.append((everything(*again[:2]), mean.updates))
    (staged, updates), (direct, again_updates) = results
    assert updates == again_updates == average.updates
    assert staged.keys() == direct.keys() and all(torch.equal(value, direct[key]) for key, value in staged.items())
    # Damage is found while verifying, before anything changes.
    file = next(Path(folder).glob("step-*/rank-00000.safetensors"))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    before = everything(*again[:2])
    tight = patch.multiple(staging, STAGED_SHARE=0.0, BATCH_NBYTES=64)
    with tight, pytest.raises(CheckpointError, match="do not match their hash"):
        load(folder, *again[:2])
    assert all(torch.equal(value, before[key]) for key, value in everything(*again[:2]).items())
    return True


def test_a_load_that_would_not_fit_beside_the_run_verifies_first_and_reads_again(ranks, tmp_path: Path) -> None:
    assert all(ranks(load_both_ways, 2, str(tmp_path)))
