"""Checkpoints in any filesystem of fsspec: "s3://bucket/run", "gs://...", "memory://...".

A `Url` has as much of a Path's manners as checkpoints need, and raises OSError with words in `strerror` whatever
the filesystem raised. Object stores cannot write in the middle of a file: `Uploads` writes one from its beginning
to its end. A file:// URL is a plain Path. Knows nothing of checkpoints; store.py does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeor.checkpoint.disk import Disk
from zeor.checkpoint.errors import CheckpointError

_PART_NBYTES = 64 << 20  # of a multi-part upload: stores allow some 10,000 parts
# Stores without folders: there, to make one may make a bucket of a name that was mistyped.
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "obs", "tos"}


class Stat(NamedTuple):
    st_size: int
    st_mode: int


class Url:
    def __init__(self, fs: Any, path: str, text: str):
        self.fs, self.path, self._text = fs, path.rstrip("/"), text.rstrip("/")

    def __truediv__(self, name: str) -> Url:
        return Url(self.fs, f"{self.path}/{name}", f"{self._text}/{name}")

    def __str__(self) -> str:
        return self._text

    __fspath__ = __str__  # so that it can be given wherever a folder can

    def __repr__(self) -> str:
        return f"Url({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def stat(self) -> Stat:
        with _worded(self):
            self.fs.invalidate_cache()  # others write here too
            found = self.fs.info(self.path)
        kind = stat.S_IFDIR if found["type"] == "directory" else stat.S_IFREG
        return Stat(int(found["size"] or 0), kind)

    lstat = stat

    def exists(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.stat()
            return True
        return False

    def is_file(self) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return stat.S_ISREG(self.stat().st_mode)
        return False

    def names(self) -> list[str]:
        with _worded(self):
            self.fs.invalidate_cache()
            paths = self.fs.ls(self.path, detail=False)
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in paths})

    def read_bytes(self) -> bytes:
        with _worded(self):
            return bytes(self.fs.cat_file(self.path))

    def read_range(self, begin: int, end: int) -> bytes:
        with _worded(self):
            return bytes(self.fs.cat_file(self.path, start=begin, end=end))

    def write_bytes(self, data: bytes) -> None:
        with _worded(self):
            self.fs.pipe_file(self.path, data)

    def make_folder(self) -> None:
        protocol = self.fs.protocol
        if _BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            with _worded(self):
                self.fs.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """A file, or a folder and what is in it; nothing there is fine."""
        with contextlib.suppress(FileNotFoundError), _worded(self):
            self.fs.invalidate_cache()
            self.fs.rm(self.path, recursive=True)


Place = Path | Url


def place_of(folder: str | os.PathLike[str] | Url) -> Place:
    """A local path, or what a URL means to fsspec."""
    if isinstance(folder, Url):
        return folder
    text = os.fspath(folder)
    scheme, found, rest = text.partition("://")
    if found and scheme in ("file", "local"):
        return Path(rest)
    if not found:
        return Path(text)
    try:
        import fsspec
    except ImportError as error:
        raise CheckpointError(f"{text} is a URL, which takes fsspec; pip install zeor[urls].") from error
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except Exception as error:  # an unknown scheme, a driver that is not installed, a URL that makes no sense to it
        raise CheckpointError(f"{text} cannot be used: {error}.") from error
    return Url(fs, path, text)


@contextlib.contextmanager
def _worded(url: Url) -> Iterator[None]:
    """Filesystems raise what they like; callers of ours wait for OSError, and tell users its strerror."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(url)) from error
    except NotADirectoryError as error:
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(url)) from error
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(url)) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(url)) from error


class Uploads(Disk):
    """The calls a file is written with. Blocks come from several threads; each waits for its turn."""

    def __init__(self) -> None:
        self._files: dict[int, _Upload] = {}

    def create(self, path: Any) -> int:
        self._files[len(self._files)] = _Upload(path)
        return len(self._files) - 1

    def open_direct(self, path: Any) -> int:
        return -1

    def reserve(self, fd: int, nbytes: int) -> None:
        pass

    def write(self, fd: int, parts: Sequence[memoryview | bytes], position: int) -> None:
        self._files[fd].write(parts, position)

    def sync(self, fd: int) -> None:
        """A store keeps a file from the moment it is closed."""
        self._files[fd].end()

    def close(self, fd: int) -> None:
        self._files[fd].drop()


class _Upload:
    def __init__(self, url: Url):
        self._url, self._turn = url, threading.Condition()
        self._position, self._broken, self._ended = 0, False, False
        with _worded(url):
            self._file = url.fs.open(url.path, "wb", block_size=_PART_NBYTES)

    def write(self, parts: Sequence[memoryview | bytes], position: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._broken or self._position == position)
            if self._broken:
                raise OSError(errno.EIO, "an earlier part of the file could not be written", str(self._url))
            try:
                with _worded(self._url):
                    for part in parts:
                        self._file.write(part)
                        self._position += len(part)
            except OSError:
                self._broken = True
                raise
            finally:
                self._turn.notify_all()

    def end(self) -> None:
        with _worded(self._url):
            self._file.close()
        self._ended = True

    def drop(self) -> None:
        """Give up an upload that was not ended; whatever stays of it, no manifest will speak of."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # else the collector closes it, and that would complete the upload
