"""shelf://: an object store of a folder, for tests. It has no rename, files appear when they are closed, and writing
one whose path holds the text $SHELF_REFUSES fails. Ranks share it as they would a bucket."""

from __future__ import annotations

import io
import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem


class Shelf(LocalFileSystem):
    protocol = "shelf"
    removed: list[str] = []  # noqa: RUF012  paths, in the order they went, of all shelves of this process

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return LocalFileSystem._strip_protocol(str(path).removeprefix("shelf://"))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if "w" in mode:
            self.makedirs(self._parent(path), exist_ok=True)
            return _Parcel(path)
        return LocalFileOpener(path, mode, fs=self, **options)

    def mv(self, *paths: Any, **options: Any) -> None:
        raise NotImplementedError("a shelf cannot rename")

    mv_file = mv

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        if os.path.isfile(path):
            self.removed.append(path)
        super().rm(path, recursive, maxdepth)


class _Parcel(io.BytesIO):
    """A file being written: it is nowhere until it is closed."""

    def __init__(self, path: str):
        super().__init__()
        self._path, self._dropped = path, False

    def write(self, data: Any) -> int:
        refused = os.environ.get("SHELF_REFUSES")
        if refused and refused in self._path:
            raise ConnectionError("the shelf is full")
        return super().write(data)

    def discard(self) -> None:
        self._dropped = True

    def close(self) -> None:
        if not self.closed and not self._dropped:
            with open(self._path, "wb") as file:
                file.write(self.getvalue())
        super().close()


def put_up() -> None:
    """In the process that calls it: makes shelf:// known."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)
