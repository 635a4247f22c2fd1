"""kept://: a filesystem of fsspec that survives its process, and can be let fail or die at any of its calls.

It is the local one under another name, for zeor takes file:// as a plain path. Like an object store it is never asked
to rename. A file is written in halves, so that it can be seen half written. Every call goes through `disk`.
"""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint.disks import FaultyDisk

disk = FaultyDisk()


class Kept(LocalFileSystem):
    protocol = "kept"

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" not in mode:
            return super().open(path, mode)
        return _File(disk.do("create", lambda: open(path, "wb", buffering=0)))

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        file = self.open(path, "wb")
        file.write(value)
        file.close()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        disk.do("make_folder", lambda: os.makedirs(path, exist_ok=exist_ok))

    def rm_file(self, path: str) -> None:
        disk.do("unlink", lambda: os.unlink(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """File by file, as a store does."""
        if not os.path.isdir(path):
            disk.do("unlink", lambda: os.unlink(path))
            return
        for name in sorted(os.listdir(path)):
            disk.do("unlink", lambda name=name: os.unlink(f"{path}/{name}"))
        disk.do("remove_folder", lambda: os.rmdir(path))

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("a store that knows no rename")


class _File:
    def __init__(self, file: Any):
        self._file, self.closed = file, False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        half = len(view) // 2
        disk.do("write", lambda: self._file.write(view[:half]))
        self._file.write(view[half:])
        return len(view)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            disk.do("close", self._file.close)

    def discard(self) -> None:
        self.closed = True
        self._file.close()


def register() -> None:
    fsspec.register_implementation("kept", Kept, clobber=True)
