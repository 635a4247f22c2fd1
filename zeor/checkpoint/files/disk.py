"""The system calls a checkpoint is written with, each in one place, so that a test can let any of them fail.

Nothing here decides anything: what is written where, and in which order, is commit.py's. `DISK` is the real
one; tests hand in another that raises, or kills the process, at a given call.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_MOST_PARTS = 256  # below every system's IOV_MAX


class FolderEntry(NamedTuple):
    """A name in a folder that is held open. Whoever moves the folder, or puts a link in its place, changes nothing."""

    folder: int  # its descriptor
    name: str


def _split(path: Any) -> tuple[Any, int | None]:
    """A name, and the descriptor of the folder it is in."""
    return (path.name, path.folder) if isinstance(path, FolderEntry) else (path, None)


class Disk:
    def make_folder(self, path: Path) -> None:
        """With its parents; one that is there is fine."""
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error

    def new_folder(self, path: Path) -> None:
        """One that is there is an error, and so is a link."""
        os.mkdir(path)

    def create(self, path: Any) -> int:
        """A new file for writing; an existing one is an error."""
        name, folder = _split(path)
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)

    def open_direct(self, path: Any) -> int:
        """The file once more, for whole pages that go past the page cache; -1 where that is not possible."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, AttributeError):  # a filesystem, or a system, without
            return -1

    def reserve(self, fd: int, nbytes: int) -> None:
        """Room for the whole file, so that its parts can be written side by side; a full disk says so at once."""
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "fallocate") and libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # else: a filesystem that reserves nothing
                raise OSError(number, os.strerror(number))

    def write(self, fd: int, parts: Sequence[memoryview | bytes], position: int) -> None:
        """All parts, one after the other, at a position of the file."""
        if len(parts) > _MOST_PARTS:
            parts = [b"".join(parts)]
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            written = self._pwritev(fd, left, position)
            position += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]

    def _pwritev(self, fd: int, parts: Sequence[memoryview], position: int) -> int:
        return os.pwritev(fd, parts, position)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """The names in a folder survive a power cut only after this."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path | FolderEntry, target: Path | FolderEntry) -> None:
        """Of what has the name: a link itself, never what it points to."""
        (old, old_folder), (new, new_folder) = _split(source), _split(target)
        os.rename(old, new, src_dir_fd=old_folder, dst_dir_fd=new_folder)

    def unlink(self, path: Path | FolderEntry) -> None:
        """A file, or a link and never what it points to."""
        name, folder = _split(path)
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, path: Path | FolderEntry) -> None:
        """An empty one; a link is an error."""
        name, folder = _split(path)
        os.rmdir(name, dir_fd=folder)

    def names(self, path: Path | int) -> list[str]:
        """What is in a folder, by its path or its descriptor."""
        return os.listdir(path)


DISK = Disk()
