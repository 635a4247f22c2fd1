"""Disks that fail: a Disk that counts its calls and does something at one of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeor.checkpoint.files.disk import Disk


def fail(number: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyDisk(Disk):
    """`act()` at call number `at`, counted from 0: before the call does anything, or `after` it did (of a write: the
    first half). `lasting`: at every later call too."""

    def __init__(
        self, at: int | None = None, act: Callable[[], None] = die, *, after: bool = False, lasting: bool = False
    ) -> None:
        self.at, self.act, self.after, self.lasting = at, act, after, lasting
        self.calls: list[str] = []
        self._direct: set[int] = set()  # files that are open for direct writes
        self._lock = threading.Lock()

    def do(self, kind: str, do: Callable[[], Any]) -> Any:
        with self._lock:
            number = len(self.calls)
            self.calls.append(kind)
        hit = self.at is not None and (number == self.at or (self.lasting and number > self.at))
        if hit and not self.after:
            self.act()
        result = do()
        if hit and self.after:
            self.act()
        return result

    def make_folder(self, path: Path) -> None:
        self.do("make_folder", lambda: super(FaultyDisk, self).make_folder(path))

    def new_folder(self, path: Path) -> None:
        self.do("new_folder", lambda: super(FaultyDisk, self).new_folder(path))

    def create(self, path: Path) -> int:
        return self.do("create", lambda: super(FaultyDisk, self).create(path))

    def open_direct(self, path: Path) -> int:
        fd = self.do("open_direct", lambda: super(FaultyDisk, self).open_direct(path))
        self._direct.add(fd)
        return fd

    def reserve(self, fd: int, nbytes: int) -> None:
        self.do("reserve", lambda: super(FaultyDisk, self).reserve(fd, nbytes))

    def write(self, fd: int, parts: Sequence[memoryview | bytes], position: int) -> None:
        # One part stays where it lies, for a direct write is of whole pages; so are the halves of a block.
        whole = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        half, kind = len(whole) // 2, "write_direct" if fd in self._direct else "write"
        self.do(kind, lambda: super(FaultyDisk, self).write(fd, [whole[:half]], position))
        super().write(fd, [whole[half:]], position + half)

    def sync(self, fd: int) -> None:
        self.do("sync", lambda: super(FaultyDisk, self).sync(fd))

    def close(self, fd: int) -> None:
        self._direct.discard(fd)
        self.do("close", lambda: super(FaultyDisk, self).close(fd))

    def sync_folder(self, path: Path) -> None:
        self.do("sync_folder", lambda: super(FaultyDisk, self).sync_folder(path))

    def rename(self, source: Path, target: Path) -> None:
        self.do("rename", lambda: super(FaultyDisk, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self.do("unlink", lambda: super(FaultyDisk, self).unlink(path))

    def remove_folder(self, path: Path) -> None:
        self.do("remove_folder", lambda: super(FaultyDisk, self).remove_folder(path))

    def names(self, path: Path) -> list[str]:
        return self.do("names", lambda: super(FaultyDisk, self).names(path))


class ShortDisk(Disk):
    """Writes a few bytes at a time, as a disk may."""

    def _pwritev(self, fd: int, parts: Sequence[memoryview], position: int) -> int:
        return os.pwritev(fd, [b"".join(parts)[:1001]], position)
