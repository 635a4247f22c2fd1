"""Every call to the disk fails, where a checkpoint is written in the background, to a folder per host, or to a URL.

The same error on both ranks or a checkpoint; the latest one loads in every bit; the next save works and cleans up. Each
call fails in one of three ways, in turn: before it does its work, after it, or from then on. `make test-all`: in all.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint import kept
from tests.checkpoint.disks import FaultyDisk, fail
from tests.checkpoint.test_faults import NUMBERS, WAYS, WAYS_TAKEN, faults, same
from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint import save as saving
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.store import complete
from zeor.checkpoint.files.urls import Place, place_of

KEEP = 2


class Trials:
    """Steps 1 and 2 are saved; the save of step 3 fails somewhere, each time in a fresh copy of the folder."""

    def __init__(self, mode: str, root: str) -> None:
        self.mode, self.rank = mode, dist.get_rank()
        self.root = Path(root) / f"host{self.rank if mode == 'hosts' else 0}"
        self.leads = mode == "hosts" or self.rank == 0  # of its host
        self.model, self.optimizer, scheduler = make(2)
        self.probe = make(2, seed=9)[:2]
        if self.leads:
            self.root.mkdir()
        dist.barrier()
        os.chdir(self.root)
        for step in (1, 2):
            steps(self.model, self.optimizer, scheduler, range(step - 1, step))
            assert self.save(FaultyDisk(), step) == ""
        self.old = everything(self.model, self.optimizer)
        if self.leads:
            shutil.copytree("now", "first")
        steps(self.model, self.optimizer, scheduler, range(2, 3))
        self.new = everything(self.model, self.optimizer)

    @property
    def folder(self) -> Place:
        return place_of(f"kept://{self.root}/now") if self.mode == "url" else Path("now")

    def fresh(self) -> None:
        dist.barrier()
        if self.leads:
            shutil.rmtree("now")
            shutil.copytree("first", "now")
        dist.barrier()

    def save(self, disk: FaultyDisk, step: int) -> str:
        """What was raised, if anything."""
        plain = saving.write
        saving.write, kept.disk = functools.partial(plain, disk=disk), disk
        later: Any = self.mode == "async"
        try:
            handle: Any = save(self.folder, self.model, self.optimizer, step=step, keep=KEEP, asynchronous=later)
            if later:
                handle.wait()
            return ""
        except CheckpointError as error:
            return str(error)
        finally:
            saving.write, kept.disk = plain, FaultyDisk()
            dist.barrier()

    def calls(self) -> list[int]:
        """How many a save takes, by rank."""
        self.fresh()
        disk = FaultyDisk()
        assert self.save(disk, 3) == ""
        found: list[Any] = [None, None]
        dist.all_gather_object(found, len(disk.calls))
        return found

    def check(self, text: str, lasting: bool) -> None:
        texts: list[Any] = [None, None]
        dist.all_gather_object(texts, text)
        assert texts[0] == texts[1]
        loaded = load(self.folder, *self.probe)
        assert loaded.step == (2 if text else 3) or (lasting and loaded.step == 3)
        assert same(everything(*self.probe), self.new if loaded.step == 3 else self.old)
        # The run goes on, and what was left lying about is gone.
        assert self.save(FaultyDisk(), 4) == ""
        names = os.listdir("now")
        assert len(names) <= KEEP and all(name.startswith("step-") for name in names), names
        assert load(self.folder, *self.probe).step == complete(self.folder)[-1].step == 4
        assert same(everything(*self.probe), self.new)


def every_call_fails(mode: str, root: str, every_way: bool) -> int:
    before = os.getcwd()
    kept.register()
    try:
        trials = Trials(mode, root)
        numbers, count = itertools.cycle(NUMBERS), 0
        for rank, at, after, lasting in faults(trials.calls(), 0, every_way):
            trials.fresh()
            disk = FaultyDisk(at, fail(next(numbers)), after=after, lasting=lasting)
            trials.check(trials.save(disk if trials.rank == rank else FaultyDisk(), 3), lasting)
            count += 1
        return count
    finally:
        os.chdir(before)


@pytest.mark.long
@pytest.mark.parametrize("every_way", WAYS_TAKEN)
@pytest.mark.parametrize(
    ("mode", "least"),
    [
        ("async", 20),
        pytest.param("hosts", 30, marks=pytest.mark.whole),
        pytest.param("url", 20, marks=pytest.mark.whole),
    ],
)
def test_whatever_call_fails_there_the_latest_loads_and_the_run_goes_on(
    ranks: Any, tmp_path: Path, mode: str, least: int, every_way: bool
) -> None:
    count = ranks(every_call_fails, 2, mode, str(tmp_path), every_way, timeout=280)[0]
    assert count >= least * (len(WAYS) if every_way else 1)
