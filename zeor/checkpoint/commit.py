"""How a checkpoint comes to be, all at once, and how the latest is found: by looking, not by a pointer.

    checkpoints/
      .writing-step-000000000200-.../   being written: nobody reads it
      step-000000000100/              complete: it was renamed into place, whole and synced
        manifest.json
        rank-00000.safetensors ...
      .removing-step-000000000050-.../  being deleted: nobody reads it

1. A hidden folder is made and filled; every file is synced, the manifest last, then the folder itself.
2. One rename makes it visible under its final name. Before it there is nothing, after it everything.
3. Old ones are hidden by a rename before anything in them is deleted.
A step saved again gets a suffix (`step-000000000100.1`): nothing is ever replaced in place.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from zeor.checkpoint import manifest as manifests
from zeor.checkpoint.disk import Disk
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.urls import Place

FINAL = re.compile(r"step-(\d{12,})(?:\.(\d+))?")
_WRITING, _REMOVING = ".writing-", ".removing-"
LEFTOVER_SECONDS = 3600.0  # a hidden folder nobody touched for this long belongs to a run that died
_under_way: set[str] = set()  # hidden folders that this process writes now


class Complete(NamedTuple):
    """A checkpoint that can be read; the latest is the largest."""

    step: int
    attempt: int
    path: Any  # a Path, or a Url of store.py


def complete(folder: Path) -> list[Complete]:
    """The complete checkpoints of a folder, oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            match = FINAL.fullmatch(name)
            if match and (folder / name / manifests.NAME).is_file():
                found.append(Complete(int(match[1]), int(match[2] or 0), folder / name))
    return sorted(found)


def find(path: Path) -> Path:
    """The checkpoint meant by a path: itself, or the latest complete one of a folder."""
    try:
        if (path / manifests.NAME).is_file():
            return path
        found = complete(path)
        exists = path.exists()
    except OSError as error:  # a lost mount, a folder of somebody else
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if found:
        return found[-1].path
    if not exists:
        raise CheckpointError(f"{path} does not exist, so there is no checkpoint to load.")
    raise CheckpointError(f"{path} holds no complete checkpoint (no step-... folder with a {manifests.NAME}).")


def read_manifest(path: Place) -> manifests.Manifest:
    file = path / manifests.NAME
    try:
        size = file.stat().st_size
        if size > manifests.MOST_MANIFEST_NBYTES:
            raise CheckpointError(f"{file} is {size} bytes long, more than a manifest may be.")
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    return manifests.parse(data, str(file))


class Attempt:
    """One checkpoint being written to a folder."""

    def __init__(self, disk: Disk, folder: Path, step: int):
        self._disk, self._folder, self.step = disk, folder, step
        self.number = max(_attempts(folder, step), default=-1) + 1
        self.writing = folder / hidden_name(self.name)
        self._renaming = self._ended = False

    @property
    def name(self) -> str:
        return f"step-{self.step:012d}" + (f".{self.number}" if self.number else "")

    @property
    def final(self) -> Path:
        return self._folder / self.name

    def begin(self) -> None:
        _under_way.add(self.writing.name)
        new = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._disk.make_folder(self.writing)
        for path in new:
            self._disk.sync_folder(path.parent)

    def commit(self, manifest: bytes) -> None:
        """Steps 1 and 2 of the module's docstring; the other files are there and synced."""
        self.prepare(manifest)
        self.publish()

    def prepare(self, manifest: bytes) -> None:
        disk = self._disk
        fd = disk.create(self.writing / manifests.NAME)
        try:
            disk.write(fd, [manifest], 0)
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.sync_folder(self.writing)

    def publish(self) -> None:
        self._renaming = True
        self._disk.rename(self.writing, self.final)
        self._disk.sync_folder(self._folder)
        self._ended = True
        _under_way.discard(self.writing.name)

    def abandon(self) -> bool:
        """Remove what was written so far, unless it was committed; what cannot be removed stays hidden, and a later
        `clean` removes it. Whether nothing of it is visible: a rename may have happened though it, or what came after,
        failed."""
        if not self._ended:
            self._ended = True
            _under_way.discard(self.writing.name)
            with contextlib.suppress(OSError):
                if self._renaming and not self.writing.exists() and self.final.exists():
                    self._disk.rename(self.final, self.writing)
            with contextlib.suppress(OSError):
                remove_tree(self._disk, self.writing)
        return not (self._renaming and os.path.lexists(self.final))

    def withdraw(self) -> bool:
        """Take back what was committed here, because another host could not."""
        self._ended = False
        return self.abandon()


def clean(disk: Disk, folder: Path, keep: int | None, new: Path | None = None) -> None:
    """Hide and delete all but the last `keep` complete checkpoints, and what dead runs have left. The `new` one stays
    whatever its step: a run that went back to an earlier step must not lose what it saves."""
    failed: OSError | None = None
    for old in _surplus(folder, keep, new):
        hidden = folder / f"{_REMOVING}{old.name}-{secrets.token_hex(4)}"
        try:
            disk.rename(old, hidden)
            remove_tree(disk, hidden)
        except OSError as error:  # the others may go all the same
            failed = error
    for name in disk.names(folder):
        if name.startswith(_REMOVING) or (name.startswith(_WRITING) and _is_left_over(folder / name)):
            with contextlib.suppress(OSError):
                remove_tree(disk, folder / name)
    if failed is not None:
        raise failed


def _surplus(folder: Path, keep: int | None, new: Path | None) -> list[Path]:
    if keep is None:
        return []
    found = [each.path for each in complete(folder)]
    if new is not None and new in found:
        found.remove(new)
        keep -= 1
    return found[: max(0, len(found) - keep)]


def _attempts(folder: Path, step: int) -> list[int]:
    """The attempts at a step whose names are taken, by complete checkpoints or by anything else."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        matches = [FINAL.fullmatch(name) for name in os.listdir(folder)]
        return [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
    return []


def hidden_name(name: str) -> str:
    """A folder of this process's own, which `clean` removes when the process is gone."""
    return f"{_WRITING}{name}-{_maker()}-{secrets.token_hex(4)}"


def _maker() -> str:
    """This process, as a part of a folder's name."""
    host = re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:40]
    return f"{host}-{os.getpid()}"


def _is_left_over(path: Path) -> bool:
    """Made by a process of this host that is gone, or untouched for long. A process of our own number that is not us
    has died too: in containers, a restarted rank gets the number it had."""
    host, pid = ["", "", *path.name.split("-")][-3:-1]
    if path.name in _under_way:
        return False
    gone = pid == str(os.getpid()) or (Path("/proc").is_dir() and not Path(f"/proc/{pid}").exists())
    if host == _maker().split("-")[0] and pid.isdigit() and gone:
        return True
    with contextlib.suppress(OSError):
        newest = max(p.stat().st_mtime for p in (path, *path.iterdir()))
        return time.time() - newest > LEFTOVER_SECONDS
    return False


def remove_tree(disk: Disk, path: Path) -> None:
    """A folder of plain files."""
    for name in disk.names(path):
        disk.unlink(path / name)
    disk.remove_folder(path)
