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
from typing import NamedTuple

from zeor.checkpoint import manifest as manifests
from zeor.checkpoint.disk import Disk
from zeor.checkpoint.errors import CheckpointError

_FINAL = re.compile(r"step-(\d{12,})(?:\.(\d+))?")
_WRITING, _REMOVING = ".writing-", ".removing-"
LEFTOVER_SECONDS = 3600.0  # a hidden folder nobody touched for this long belongs to a run that died


class Complete(NamedTuple):
    """A checkpoint that can be read; the latest is the largest."""

    step: int
    attempt: int
    path: Path


def complete(folder: Path) -> list[Complete]:
    """The complete checkpoints of a folder, oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            match = _FINAL.fullmatch(name)
            if match and (folder / name / manifests.NAME).is_file():
                found.append(Complete(int(match[1]), int(match[2] or 0), folder / name))
    return sorted(found)


def find(path: Path) -> Path:
    """The checkpoint meant by a path: itself, or the latest complete one of a folder."""
    if (path / manifests.NAME).is_file():
        return path
    found = complete(path)
    if found:
        return found[-1].path
    if not path.exists():
        raise CheckpointError(f"{path} does not exist, so there is no checkpoint to load.")
    raise CheckpointError(f"{path} holds no complete checkpoint (no step-... folder with a {manifests.NAME}).")


def read_manifest(path: Path) -> manifests.Manifest:
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
        taken = [c.attempt for c in complete(folder) if c.step == step]
        suffix = f".{max(taken) + 1}" if taken else ""
        self.name = f"step-{step:012d}{suffix}"
        self.writing = folder / f"{_WRITING}{self.name}-{_maker()}-{secrets.token_hex(4)}"
        self.final = folder / self.name

    def begin(self) -> None:
        self._disk.make_folder(self.writing)

    def commit(self, manifest: bytes) -> None:
        """Steps 1 and 2 of the module's docstring; the other files are there and synced."""
        disk = self._disk
        fd = disk.create(self.writing / manifests.NAME)
        try:
            disk.write(fd, [manifest], 0)
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.sync_folder(self.writing)
        disk.rename(self.writing, self.final)
        disk.sync_folder(self._folder)

    def abandon(self) -> None:
        """Remove what was written so far; what cannot be removed stays hidden."""
        with contextlib.suppress(OSError):
            remove_tree(self._disk, self.writing)


def clean(disk: Disk, folder: Path, keep: int | None) -> None:
    """Hide and delete all but the last `keep` complete checkpoints, and what dead runs have left."""
    found = complete(folder)
    for old in found[: len(found) - keep] if keep else []:
        hidden = folder / f"{_REMOVING}{old.path.name}-{secrets.token_hex(4)}"
        disk.rename(old.path, hidden)
        remove_tree(disk, hidden)
    for name in disk.names(folder):
        if name.startswith(_REMOVING) or (name.startswith(_WRITING) and _is_left_over(folder / name)):
            with contextlib.suppress(OSError):
                remove_tree(disk, folder / name)


def _maker() -> str:
    """This process, as a part of a folder's name."""
    host = re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:40]
    return f"{host}-{os.getpid()}"


def _is_left_over(path: Path) -> bool:
    """Made by a process of this host that is gone, or untouched for long."""
    host, pid = path.name.split("-")[-3:-1]
    if host == _maker().split("-")[0] and pid.isdigit():
        return not Path(f"/proc/{pid}").exists() if Path("/proc").is_dir() else False
    with contextlib.suppress(OSError):
        newest = max(p.stat().st_mtime for p in (path, *path.iterdir()))
        return time.time() - newest > LEFTOVER_SECONDS
    return False


def remove_tree(disk: Disk, path: Path) -> None:
    """A folder of plain files."""
    for name in disk.names(path):
        disk.unlink(path / name)
    disk.remove_folder(path)
