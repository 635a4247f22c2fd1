"""Every system call of the commit path fails: a clear error on every rank or a checkpoint, the latest one loads in
every bit, nothing half-written is visible, the next save works and cleans up.

A call fails in one of three ways, in turn: before it does its work, after it, or from then on. `make test-all`: in all.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.checkpoint.disks import FaultyDisk, ShortDisk, fail
from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.commit import complete
from zeor.checkpoint.files.disk import DISK, Disk
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.run import run_of
from zeor.checkpoint.save import Destination, collect, write

NUMBERS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE)
WAYS = ((False, False), (True, False), (False, True))  # after its work; at every later call too
WAYS_TAKEN = [pytest.param(False, id="in turn"), pytest.param(True, id="every way", marks=pytest.mark.whole)]
KINDS = {
    "make_folder", "new_folder", "create", "write", "sync", "close", "sync_folder", "rename", "names", "unlink",
    "remove_folder",
}  # fmt: skip


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(value, wanted[key]) for key, value in found.items())


class Trials:
    """Steps 1 and 2 are saved; the save of step 3 fails somewhere, each time in a fresh copy of the folder."""

    def __init__(self, root: str, keep: int) -> None:
        self.keep, self.root = keep, Path(root) / f"{dist.get_world_size()}-{keep}"
        self.first, self.folder = self.root / "first", self.root / "now"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model, self.optimizer, scheduler = make(2)
        self.probe = make(2, seed=9)[:2]
        for step in (1, 2):
            steps(self.model, self.optimizer, scheduler, range(step - 1, step))
            save(self.first, self.model, self.optimizer, step=step, keep=keep)
        self.old = everything(self.model, self.optimizer)
        steps(self.model, self.optimizer, scheduler, range(2, 3))
        self.new = everything(self.model, self.optimizer)
        assert not same(self.old, self.new)

    def fresh(self) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(self.first, self.folder)
        dist.barrier()

    def save(self, disk: Disk, step: int) -> str:
        """What was raised, if anything."""
        run = run_of(self.model, self.optimizer)
        try:
            write(run.everyone, run.lineage, collect(run, None, None), Destination(self.folder, step, self.keep), disk)
            return ""
        except CheckpointError as error:
            return str(error)
        finally:
            dist.barrier()

    def calls(self) -> list[list[str]]:
        """Of a save that goes well, by rank."""
        self.fresh()
        disk = FaultyDisk()
        assert self.save(disk, 3) == ""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, disk.calls)
        return found

    def check(self, text: str, number: int, visible_if_raised: bool) -> None:
        texts: list[Any] = [None] * self.world
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1, texts
        seen = [each.step for each in complete(self.folder)]
        loaded = load(self.folder, *self.probe)
        assert loaded.step == seen[-1]
        assert same(everything(*self.probe), self.new if loaded.step == 3 else self.old)
        if not text:
            assert loaded.step == 3
        else:
            assert os.strerror(number) in text
            assert (loaded.step == 3) == ("is there, whole" in text) and (visible_if_raised or loaded.step == 2)
        for name in os.listdir(self.folder):
            assert name.startswith((".writing-", ".removing-", "step-0000")), name
        dist.barrier()

    def check_next(self) -> None:
        """The run goes on, and what was left lying about is gone."""
        assert self.save(DISK, 4) == ""
        names = sorted(os.listdir(self.folder))
        assert len(names) == min(self.keep, len(names)) and all(name.startswith("step-") for name in names), names
        assert load(self.folder, *self.probe).step == 4
        assert same(everything(*self.probe), self.new)


def faults(calls: list[int], first: int, every_way: bool) -> Iterator[tuple[int, int, bool, bool]]:
    """(rank, call, after, lasting) for every call of every rank; the ways take turns, `first` is that of the first."""
    for rank, count in enumerate(calls):
        for at in range(count):
            turn = (first + rank + at) % len(WAYS)
            for after, lasting in WAYS if every_way else WAYS[turn : turn + 1]:
                yield rank, at, after, lasting


def every_call_fails(root: str, keep: int, every_way: bool) -> tuple[int, set[str]]:
    trials = Trials(root, keep)
    calls = trials.calls()
    numbers, count = itertools.cycle(NUMBERS), 0
    for rank, at, after, lasting in faults([len(mine) for mine in calls], keep, every_way):
        number = next(numbers)
        trials.fresh()
        disk = FaultyDisk(at, fail(number), after=after, lasting=lasting) if trials.rank == rank else DISK
        trials.check(trials.save(disk, 3), number, visible_if_raised=lasting)
        trials.check_next()
        count += 1
    return count, set(itertools.chain(*calls))


@pytest.mark.long
@pytest.mark.parametrize("every_way", WAYS_TAKEN)
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_whatever_call_fails_the_latest_loads_and_the_run_goes_on(
    ranks, tmp_path: Path, world: int, keep: int, every_way: bool
) -> None:
    results = ranks(every_call_fails, world, str(tmp_path), keep, every_way, timeout=280)
    count, kinds = results[0]
    assert kinds == KINDS
    assert count >= (17 + 4 * (world - 1)) * (len(WAYS) if every_way else 1)


def test_without_every_way_each_call_fails_once_and_each_way_comes() -> None:
    few, all_of_them = (list(faults([5, 2], 1, every_way)) for every_way in (False, True))
    assert [each[:2] for each in few] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    assert {each[2:] for each in few} == set(WAYS)
    assert len(set(all_of_them)) == len(all_of_them) == 3 * len(few) and set(few) < set(all_of_them)


def short_writes(root: str) -> bool:
    trials = Trials(root, 2)
    trials.fresh()
    trials.check(trials.save(ShortDisk(), 3), 0, visible_if_raised=False)
    trials.check_next()
    return True


def test_a_disk_that_writes_a_little_at_a_time_gets_everything(ranks, tmp_path: Path) -> None:
    assert all(ranks(short_writes, 2, str(tmp_path)))


# ---- folders that cannot be written to, as they are met


def run_once() -> Any:
    model, optimizer, scheduler = make(2)
    steps(model, optimizer, scheduler, range(1))
    return model, optimizer


def test_a_folder_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    run = run_once()
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"file.*: Not a directory\. Nothing of it is visible"):
            save(target, *run, step=1)
    assert (tmp_path / "file").read_text() == "mine" and os.listdir(tmp_path) == ["file"]


class VanishingDisk(Disk):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sync(self, fd: int) -> None:
        shutil.rmtree(self.folder)


def test_a_folder_that_vanishes_in_the_middle_is_a_clear_error_and_comes_back(tmp_path: Path) -> None:
    model, optimizer = run_once()
    folder, run = tmp_path / "lost", run_of(model, optimizer)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        write(run.everyone, run.lineage, collect(run, None, None), Destination(folder, 1, 3), VanishingDisk(folder))
    assert not folder.exists()
    assert save(folder, model, optimizer, step=2).is_dir()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A real filesystem of 256 KiB, where the rights to mount one are there."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if not made or made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(small_disk: Path) -> None:
    model, optimizer = run_once()
    wanted = everything(model, optimizer)
    save(small_disk, model, optimizer, step=1, keep=1)
    (small_disk / "ballast").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(small_disk, model, optimizer, step=2, keep=1)
    assert sorted(os.listdir(small_disk)) == ["ballast", "step-000000000001"]
    probe = make(1, seed=9)[:2]
    assert load(small_disk, *probe).step == 1 and same(everything(*probe), wanted)
    (small_disk / "ballast").unlink()
    assert save(small_disk, model, optimizer, step=2, keep=1).is_dir()
    assert os.listdir(small_disk) == ["step-000000000002"]


def test_a_read_only_disk_is_told(small_disk: Path) -> None:
    model, optimizer = run_once()
    save(small_disk, model, optimizer, step=1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(small_disk, model, optimizer, step=2)
    assert load(small_disk, model, optimizer).step == 1
