"""Hidden folders: what is taken for left over and what is not, and that nothing is deleted through a link."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files.jobs import problems, saved
from tests.checkpoint.test_reshard import make
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files import hidden
from zeor.checkpoint.files.commit import Attempt, clean, complete
from zeor.checkpoint.files.disk import DISK, Disk
from zeor.checkpoint.files.hidden import Hidden

STEP = "step-{:012d}"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- links


def run() -> Any:
    model, optimizer, _ = make(1)
    return model, optimizer


def test_a_linked_checkpoint_is_loaded_and_pruning_removes_the_link_alone(tmp_path: Path) -> None:
    model, optimizer = run()
    theirs = save(tmp_path / "a", model, optimizer, step=1)
    before = content(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / theirs.name).symlink_to(theirs, target_is_directory=True)
    assert load(tmp_path / "b", model, optimizer).step == 1
    for step in (2, 3, 4):
        save(tmp_path / "b", model, optimizer, step=step, keep=2)
    assert sorted(os.listdir(tmp_path / "b")) == [STEP.format(3), STEP.format(4)]
    assert content(tmp_path / "a") == before
    assert load(tmp_path / "a", model, optimizer).step == 1


@pytest.mark.parametrize("kind", ["removing", "writing"])
@pytest.mark.parametrize("to", ["folder", "checkpoint", "nowhere"])
def test_a_hidden_link_that_somebody_left_is_no_way_to_what_it_points_to(tmp_path: Path, kind: str, to: str) -> None:
    other = saved(tmp_path / "other", 1, 1.0)
    target = {"folder": tmp_path / "private", "checkpoint": other, "nowhere": tmp_path / "x"}
    (tmp_path / "private").mkdir()
    for name in ("manifest.json", "rank-00000.safetensors", "thesis.tex"):
        (tmp_path / "private" / name).write_text("mine")
    before = content(tmp_path / "private"), content(tmp_path / "other")
    folder = tmp_path / "run"
    new = saved(folder, 3, 1.0)
    ours, foreign = folder / f".{kind}-{STEP.format(1)}-0-0123456789abcdef", folder / f".{kind}-x"
    for link in (ours, foreign):
        link.symlink_to(target[to])
        then = time.time() - 2 * hidden.LEFTOVER_SECONDS
        os.utime(link, (then, then), follow_symlinks=False)
    clean(DISK, folder, 1, new)
    assert (content(tmp_path / "private"), content(tmp_path / "other")) == before
    assert sorted(os.listdir(folder)) == sorted([foreign.name, new.name])  # the link went, and the other is not ours


def test_links_inside_a_checkpoint_are_unlinked_and_what_they_point_to_stays(tmp_path: Path) -> None:
    old, new = saved(tmp_path / "run", 1, 1.0), saved(tmp_path / "run", 2, 1.0)
    (tmp_path / "cache").mkdir()
    for name in ("manifest.json", "rank-00000.safetensors"):
        (old / name).rename(tmp_path / "cache" / name)
        (old / name).symlink_to(tmp_path / "cache" / name)
    before = content(tmp_path / "cache")
    assert len(before) == 2 and problems(tmp_path / "run") == [f"{old / 'rank-00000.safetensors'} is no plain file."]
    clean(DISK, tmp_path / "run", 1, new)
    assert os.listdir(tmp_path / "run") == [new.name] and content(tmp_path / "cache") == before


class Swapping(Disk):
    """Puts a link in the place of a folder as soon as it was renamed to be removed."""

    def __init__(self, target: Path, folder: Path):
        self._target, self._folder = target, folder

    def rename(self, source: Any, target: Any) -> None:
        super().rename(source, target)
        if target.name.startswith(".removing-"):
            (self._folder / target.name).rename(self._folder / "moved")
            (self._folder / target.name).symlink_to(self._target)


def test_a_folder_that_is_swapped_for_a_link_on_the_way_is_no_way_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saved(folder, 1, 1.0)
    new, private = saved(folder, 2, 1.0), saved(tmp_path / "private", 1, 2.0)
    before = content(private)
    clean(Swapping(private, folder), folder, 1, new)
    assert content(private) == before and complete(folder)[-1].path == new
    assert problems(folder) == []


# ---- names that zeor does not write


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "rank-0.safetensors", "rank-0000\u0663.safetensors",
                                  "manifest.json.bak"])  # fmt: skip
def test_what_zeor_did_not_write_stays_and_a_warning_names_it(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = run()
    first = save(tmp_path, model, optimizer, step=1, keep=1)
    (first / name).write_text("mine")
    with caplog.at_level(logging.WARNING, "zeor"):
        for step in (2, 3):
            save(tmp_path, model, optimizer, step=step, keep=1)
    assert content(tmp_path / first.name) == {name: b"mine"}
    assert [each.step for each in complete(tmp_path)] == [3]
    told = [record.getMessage() for record in caplog.records if "could not be deleted" in record.getMessage()]
    assert len(told) == 1 and f"{first.name} holds {name!r}, which zeor did not write; that stays" in told[0]


def test_a_folder_in_a_checkpoint_stays_with_what_is_in_it(tmp_path: Path) -> None:
    old, new = saved(tmp_path, 1, 1.0), saved(tmp_path, 2, 1.0)
    (old / "rank-00007.safetensors").mkdir()
    (old / "rank-00007.safetensors" / "mine").touch()
    with pytest.raises(OSError):
        clean(DISK, tmp_path, 1, new)
    assert len(list(tmp_path.rglob("mine"))) == 1 and [each.path for each in complete(tmp_path)] == [new]


# ---- left over or not


def aged(*paths: Path) -> None:
    then = time.time() - 2 * hidden.LEFTOVER_SECONDS
    for path in paths:
        os.utime(path, (then, then))


def left(folder: Path, maker: str) -> Path:
    """What a job of `maker` wrote, without a lock."""
    path = folder / f".writing-{STEP.format(1)}-{maker}-0123456789abcdef"
    path.mkdir(parents=True)
    (path / "rank-00000.safetensors").write_bytes(b"half")
    return path


@pytest.mark.parametrize("maker", ["", "ip1001-4711-", "other-", "0-"])
def test_without_a_lock_it_is_left_over_once_nobody_touched_it_for_long(tmp_path: Path, maker: str) -> None:
    """Of an older zeor, of another machine, of a disk without locks; the same process number says nothing."""
    path = left(tmp_path, maker.rstrip("-") or f"{socket.gethostname()}-{os.getpid()}")
    clean(DISK, tmp_path, 1)
    assert path.exists()
    aged(path)
    clean(DISK, tmp_path, 1)
    assert path.exists()  # its file is young
    aged(path / "rank-00000.safetensors", path)
    clean(DISK, tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_hosts_whose_names_differ_in_dots_and_dashes_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["ip-10-0-1-23", "ip-10-0-12-3", "ip-10-0-123"]
    found = set()
    for name in names:
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        found.add(hidden.host.__wrapped__())
    assert len(found) == len(names)


def test_a_machine_that_started_again_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hidden.host.__wrapped__()
    monkeypatch.setattr(hidden, "_started", lambda: "again")
    other = hidden.host.__wrapped__()
    monkeypatch.setattr(hidden, "_started", lambda: "")
    assert len({one, other, hidden.host.__wrapped__()}) == 3 and hidden.host.__wrapped__() == "0"


def test_a_free_lock_of_another_machine_says_nothing(tmp_path: Path) -> None:
    path = left(tmp_path, "0123456789ab")
    lock = path.with_name(path.name + ".lock")
    lock.touch()
    aged(path / "rank-00000.safetensors", path)
    clean(DISK, tmp_path, 1)
    assert path.exists() and lock.exists()  # the lock is young
    aged(lock)
    clean(DISK, tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_what_this_process_writes_stays_however_old(tmp_path: Path) -> None:
    attempt = Attempt(DISK, tmp_path, 2)
    attempt.begin()
    lock = attempt.writing.with_name(attempt.writing.name + ".lock")
    aged(attempt.writing, lock)
    clean(DISK, tmp_path, 1)
    assert attempt.writing.exists() and lock.exists()
    assert attempt.abandon() and os.listdir(tmp_path) == []


def test_a_lock_outlives_no_process_and_a_fork_does_not_keep_it(tmp_path: Path) -> None:
    """A worker that was forked while a folder was written lives on: the folder is given up, and its lock is free."""
    script = (
        "import os, sys; from pathlib import Path; from zeor.checkpoint.files.disk import DISK, Disk\n"
        "from zeor.checkpoint.files.hidden import Hidden\n"
        "class Stuck(Disk):\n"
        "    def remove_folder(self, path): raise OSError(5, 'no')\n"
        f"one = Hidden(Stuck(), Path({str(tmp_path)!r}), 'step-000000000001'); one.make()\n"
        "if os.fork() == 0:\n"
        "    sys.stdin.read(); os._exit(0)\n"
        "try: one.remove()\n"
        "except OSError: print('stuck', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "stuck\n"
    child.wait()  # its fork lives: it waits for the end of stdin
    assert len(os.listdir(tmp_path)) == 2
    clean(DISK, tmp_path, 1)
    assert os.listdir(tmp_path) == []
    child.stdin.close()


class Unlocked(Disk):
    """Locks are not to be had: another one has each before we do."""

    def __init__(self, take: Callable[[Path], None]):
        self._take = take

    def create(self, path: Any) -> int:
        fd = super().create(path)
        self._take(path)
        return fd


def test_where_there_are_no_locks_none_looks_free(tmp_path: Path) -> None:
    import fcntl

    held = []

    def take(path: Path) -> None:
        held.append(os.open(path, os.O_RDWR))
        fcntl.flock(held[0], fcntl.LOCK_EX)

    one = Hidden(Unlocked(take), tmp_path, STEP.format(1))
    one.make()
    os.close(held[0])
    assert os.listdir(tmp_path) == [one.path.name]  # and no lock
    hidden._under_way.discard(one.path.name)  # as another process sees it
    clean(DISK, tmp_path, 1)
    assert one.path.exists()
    one.remove()
    assert os.listdir(tmp_path) == []
