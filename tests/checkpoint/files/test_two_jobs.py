"""Two jobs that save to one folder, in every order of their steps: what is visible is whole, neither takes the other's
for its own, and of what was saved the last stays."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.files.jobs import Job, Steps, problems, saved
from zeor.checkpoint.files import hidden
from zeor.checkpoint.files.commit import clean, complete, find, read_manifest
from zeor.checkpoint.files.disk import DISK, Disk
from zeor.checkpoint.files.tensorfile import Reader, read_header

A, B = 1.0, 2.0  # what each writes
STEPS = ("begin", "write", "prepare", "end", "clean")


@pytest.fixture(scope="module")
def jobs() -> Iterator[tuple[Job, Job]]:
    both = Job(), Job()
    yield both
    for job in both:
        job.kill()


def orders() -> list[tuple[int, ...]]:
    """Every way in which the steps of two jobs can follow each other: whose turn it is."""
    count = len(STEPS)
    return [
        tuple(0 if n in firsts else 1 for n in range(2 * count))
        for firsts in map(set, itertools.combinations(range(2 * count), count))
    ]


FEW = orders()[::21]


def value_in(path: Path) -> float:
    """Whose it is."""
    entry = read_header(path / "rank-00000.safetensors")["param/weight@0"]
    with Reader() as reader:
        found = torch.cat([values.clone() for _, values in reader.pieces(entry, 0, 100)])
    assert torch.equal(found, found[:1].expand(100))
    return found[0].item()


class Trial:
    """One order; `ends` says how each job ends what it wrote: publish or abandon."""

    def __init__(self, both: tuple[Job, Job], folder: Path, steps: tuple[int, int], ends: tuple[str, str]):
        self.jobs, self.folder, self.steps, self.ends = both, folder, steps, ends
        self.made: dict[int, str] = {}

    def run(self, order: tuple[int, ...]) -> None:
        todo = [iter(STEPS), iter(STEPS)]
        for who in order:
            self.take(who, next(todo[who]))
            assert problems(self.folder) == []
        self.check()

    def take(self, who: int, step: str) -> None:
        job = self.jobs[who]
        if step == "begin":
            job.do("begin", str(self.folder), self.steps[who], (A, B)[who])
        elif step == "clean":
            job.do("clean", str(self.folder), 1)
        elif step == "end" and self.ends[who] == "publish":
            self.made[who] = job.do("publish")
            path = self.folder / self.made[who]
            assert value_in(path) == (A, B)[who] and read_manifest(path).step == self.steps[who]
        elif step == "end":
            assert job.do("abandon") is True
        else:
            job.do(step)

    def check(self) -> None:
        """Of two with keep=1 the one that was written last is left, and nothing hidden."""
        found = complete(self.folder)
        owners = {(A, B)[who] for who in self.made}
        assert {value_in(each.path) for each in found} <= owners and bool(found) == bool(owners)
        assert len(set(self.made.values())) == len(self.made)
        assert sorted(os.listdir(self.folder)) == sorted(each.path.name for each in found)


@pytest.mark.parametrize("order", [*FEW, *(pytest.param(order, marks=pytest.mark.whole) for order in orders())])
@pytest.mark.parametrize("steps", [(5, 5), (5, 7)])
def test_whatever_the_order_what_is_visible_is_whole_and_the_last_stays(
    jobs: tuple[Job, Job], tmp_path: Path, steps: tuple[int, int], order: tuple[int, ...]
) -> None:
    for number, ends in enumerate(itertools.product(("publish", "abandon"), repeat=2)):
        Trial(jobs, tmp_path / str(number), steps, ends).run(order)


def test_there_are_as_many_orders_as_there_should_be() -> None:
    assert len(set(orders())) == 252 and len(FEW) == 12


def test_the_loser_of_a_race_for_a_step_takes_the_next_name_and_says_so(
    jobs: tuple[Job, Job], tmp_path: Path
) -> None:
    for job, value in zip(jobs, (A, B), strict=True):
        job.do("begin", str(tmp_path), 5, value)
        job.do("write")
        job.do("prepare")
    assert jobs[1].do("publish") == "step-000000000005"
    assert jobs[0].do("publish") == "step-000000000005.1"
    assert value_in(tmp_path / "step-000000000005") == B and value_in(tmp_path / "step-000000000005.1") == A


def test_what_a_killed_job_left_goes_and_what_a_live_one_writes_stays(jobs: tuple[Job, Job], tmp_path: Path) -> None:
    dead = Job()
    try:
        left = dead.do("begin", str(tmp_path), 5, A)
        dead.do("write")
        live = jobs[0].do("begin", str(tmp_path), 5, A)
        new = saved(tmp_path, 6, B)
        clean(DISK, tmp_path, 1, new)
        assert {left, live} <= set(os.listdir(tmp_path))
    finally:
        dead.kill()
    clean(DISK, tmp_path, 1, new)
    assert sorted(os.listdir(tmp_path)) == [live, f"{live}.lock", new.name]
    for step in ("write", "prepare"):
        jobs[0].do(step)
    assert jobs[0].do("publish") == "step-000000000005" and problems(tmp_path) == []


def can_unshare() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "--pid", "--fork", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make a PID namespace")
def test_jobs_of_the_same_process_number_are_told_apart(tmp_path: Path) -> None:
    """Two containers of a machine: each is process 1, under one host name."""
    both = [Job("unshare", "--pid", "--fork", "--kill-child") for _ in range(2)]
    try:
        first = both[0].do("begin", str(tmp_path), 5, A)
        both[0].do("write")
        both[1].do("begin", str(tmp_path), 6, B)
        for step in ("write", "prepare", "publish"):
            both[1].do(step)
        both[1].do("clean", str(tmp_path), 1)
        assert first in os.listdir(tmp_path)
        both[0].do("prepare")
        assert both[0].do("publish") == "step-000000000005"
        assert problems(tmp_path) == [] and len(complete(tmp_path)) == 2
    finally:
        for job in both:
            job.kill()


# ---- inside a step: another job comes at a given call to the disk


class Interrupted(Disk):
    """Does something before a call of a kind, once, and lets it fail then if `fails`."""

    def __init__(self, kind: str, act: Callable[[], Any], fails: bool = False):
        self._kind, self._act, self._fails = kind, act, fails
        self.acted = False

    def _hook(self, kind: str) -> None:
        if kind == self._kind and not self.acted:
            self.acted = True
            self._act()
            if self._fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def create(self, path: Any) -> int:
        self._hook(f"create {path.name.split('-')[0]}")
        return super().create(path)

    def new_folder(self, path: Path) -> None:
        self._hook("new_folder")
        super().new_folder(path)

    def sync(self, fd: int) -> None:
        self._hook("sync")
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._hook("sync_folder")
        super().sync_folder(path)

    def rename(self, source: Any, target: Any) -> None:
        self._hook("rename")
        super().rename(source, target)

    def unlink(self, path: Any) -> None:
        self._hook("unlink")
        super().unlink(path)


def taken_for_dead(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another job cleans up and takes whatever is hidden for left over: a machine far away, on a disk without locks."""
    with monkeypatch.context() as patch:
        patch.setattr(hidden, "_under_way", set())
        patch.setattr(hidden, "_state_of_lock", lambda folder, name: "missing")
        patch.setattr(hidden, "LEFTOVER_SECONDS", -1e9)
        clean(DISK, folder, 1, saved(folder, 9, B))


@pytest.mark.parametrize("kind", ["create .writing", "new_folder", "create rank", "sync", "create manifest.json",
                                  "sync_folder", "rename"])  # fmt: skip
def test_a_job_that_is_taken_for_dead_shows_all_or_nothing_and_spares_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    disk = Interrupted(kind, lambda: taken_for_dead(monkeypatch, tmp_path))
    steps, told = Steps(disk), ""
    try:
        steps.begin(str(tmp_path), 5, A)
        steps.write()
        steps.prepare()
        steps.publish()
    except OSError as error:
        told = str(error.strerror)
        assert steps.abandon()
    assert disk.acted and problems(tmp_path) == []
    expected = {9: B} if told else {5: A, 9: B}
    assert {each.step: value_in(each.path) for each in complete(tmp_path)} == expected
    assert bool(told) == (kind not in ("create .writing", "new_folder"))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("fails", [False, True])
def test_giving_up_spares_what_another_job_committed_under_the_same_name(tmp_path: Path, fails: bool) -> None:
    steps = Steps(Interrupted("rename", lambda: saved(tmp_path, 5, B), fails))
    steps.begin(str(tmp_path), 5, A)
    steps.write()
    steps.prepare()
    if fails:
        with pytest.raises(OSError, match="Input/output error"):
            steps.publish()
        assert steps.abandon()  # nothing of it is visible
    else:
        assert steps.publish() == "step-000000000005.1"
    assert value_in(tmp_path / "step-000000000005") == B
    assert len(complete(tmp_path)) == (1 if fails else 2) and problems(tmp_path) == []


def test_files_that_are_gone_or_cut_are_not_committed(tmp_path: Path) -> None:
    for damage in (os.unlink, lambda path: os.truncate(path, 10)):
        steps = Steps()
        writing = tmp_path / steps.begin(str(tmp_path), 5, A)
        steps.write()
        steps.prepare()
        damage(writing / "rank-00000.safetensors")
        with pytest.raises(OSError, match=r"rank-00000.safetensors (was written there and is gone|has 10 bytes there)"):
            steps.publish()
        assert steps.abandon() and os.listdir(tmp_path) == []


def test_a_name_that_became_anothers_meanwhile_is_not_deleted(tmp_path: Path) -> None:
    """Pruning chose step 5; before it comes to that, another job has deleted it and saved step 5 again."""
    old = saved(tmp_path, 5, A)
    new = saved(tmp_path, 6, A)

    def again() -> None:
        shutil.rmtree(old)
        assert saved(tmp_path, 5, B) == old

    clean(Interrupted("rename", again), tmp_path, 1, new)
    assert value_in(old) == B and find(tmp_path) == old
    assert sorted(os.listdir(tmp_path)) == [old.name, new.name]


def test_jobs_that_prune_at_the_same_time_leave_the_last(tmp_path: Path) -> None:
    """Each has seen both checkpoints and may keep one: before the first deletes, the second has."""
    first, second = saved(tmp_path, 7, A), saved(tmp_path, 5, B)
    disk = Interrupted("rename", lambda: clean(DISK, tmp_path, 1, first))
    clean(disk, tmp_path, 1, second)
    assert disk.acted and os.listdir(tmp_path) == [second.name]


def test_a_folder_that_others_rename_over_stays_as_it_is(tmp_path: Path) -> None:
    """What has the name already: a file, a link to a folder, a folder with something in it. An empty one gives way."""
    (tmp_path / "elsewhere").mkdir()
    makers: list[Callable[[Path], Any]] = [
        lambda path: path.write_text("mine"),
        lambda path: path.symlink_to(tmp_path / "elsewhere"),
        lambda path: (path.mkdir(), (path / "notes").touch()),
        lambda path: path.mkdir(),
    ]
    for number, maker in enumerate(makers):
        folder = tmp_path / f"run{number}"
        name = folder / "step-000000000005"
        steps = Steps(Interrupted("rename", lambda maker=maker, name=name: maker(name)))  # type: ignore[misc]
        steps.begin(str(folder), 5, A)
        steps.write()
        steps.prepare()
        assert steps.publish() == ("step-000000000005.1" if number < 3 else "step-000000000005")
        assert problems(folder) == [] and len(complete(folder)) == 1
    assert os.listdir(tmp_path / "elsewhere") == [] and os.listdir(tmp_path / "run2/step-000000000005") == ["notes"]
