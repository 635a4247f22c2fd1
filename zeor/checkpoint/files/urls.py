"""Checkpoints in any filesystem of fsspec: "s3://bucket/run", "gs://...", "memory://...".

A `Url` has as much of a Path's manners as checkpoints need, and raises OSError with words in `strerror` whatever
the filesystem raised. What it shows of itself, and what it says of errors, is without passwords and signatures.
Object stores cannot write in the middle of a file: `Uploads` writes one from its beginning to its end. A file:// URL
is a plain Path. Knows nothing of checkpoints; store.py does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.errors import CheckpointError

_PART_NBYTES = 64 << 20  # of a multi-part upload: stores allow some 10,000 parts
# Stores without folders: there, to make one may make a bucket of a name that was mistyped.
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "obs", "tos"}


class Stat(NamedTuple):
    st_size: int
    st_mode: int


# user:password@ or token@ behind the scheme (a port is no password), and the values behind a question mark. A password
# may hold an @: it ends at the last one, and better too much is hidden than too little.
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(?![^/@?#\s:]*:[0-9]+(?:[/?#]|$))([^/@?#\s:]*:\S*|[^/@?#\s:]+)@")
_QUERY = re.compile(r"(?<=[?&])([^=&#\s]+=)([^&#\s]+)")
_NAMED = _BUCKETS | {"sftp", "ssh", "hdfs", "wasb", "wasbs", "adl"}  # a mere name before the @ is no secret there
_HIDDEN = "***"


def shown(text: str) -> str:
    """A URL, or a text with URLs, without what only its owner may know."""
    if "://" not in text:
        return text
    hidden = _USERINFO.sub(lambda match: f"{match[1]}://{_HIDDEN}@" if _is_secret(match) else match[0], text)
    return _QUERY.sub(rf"\1{_HIDDEN}", hidden)


def _is_secret(match: re.Match[str]) -> bool:
    return ":" in match[2] or match[1].lower() not in _NAMED


def _secrets(text: str) -> list[str]:
    """What a URL holds that nobody else may know, the longest first, as it is written there and as it is meant."""
    found = [match[2] for match in _USERINFO.finditer(text) if _is_secret(match)]
    found += [each[:n] for each in found for n, letter in enumerate(each) if letter == "@"]
    found += [part for each in found for part in each.split(":", 1)[1:]]
    found += [match[2] for match in _QUERY.finditer(text)]
    return sorted({form for each in found for form in (each, unquote(each)) if len(form) > 2}, key=len, reverse=True)


class Url:
    def __init__(self, fs: Any, path: str, text: str, public: str | None = None, secrets: Sequence[str] | None = None):
        self.fs, self.path, self._text = fs, path.rstrip("/"), text.rstrip("/")
        self._shown = shown(self._text) if public is None else public
        self._secrets = _secrets(self._text) if secrets is None else secrets

    def __truediv__(self, name: str) -> Url:
        path, text, public = (f"{each}/{name}" for each in (self.path, self._text, self._shown))
        return Url(self.fs, path, text, public, self._secrets)

    def __str__(self) -> str:
        """For people: without credentials."""
        return self._shown

    def __fspath__(self) -> str:
        """So that it can be given wherever a folder can."""
        return self._text

    def __repr__(self) -> str:
        return f"Url({self._shown!r})"

    def without_secrets(self, text: str) -> str:
        """What a filesystem says, without the credentials it was given."""
        for each in self._secrets:
            text = text.replace(each, _HIDDEN)
        return shown(text)

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

    def is_link(self) -> bool:
        with contextlib.suppress(FileNotFoundError), _worded(self):
            return _is_link(self.fs.info(self.path))
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
        """A file; nothing there is fine."""
        with contextlib.suppress(FileNotFoundError), _worded(self):
            self.fs.invalidate_cache()
            self.fs.rm(self.path)

    def remove_alone(self) -> None:
        """A file that is no part of a checkpoint; nothing there is fine."""
        with contextlib.suppress(FileNotFoundError), _worded(self):
            self.fs.rm_file(self.path)

    def remove_folder(self, own: Callable[[str], bool]) -> None:
        """A folder and its own files, by their names; nothing there is fine. Of a link, the link. OSError where it
        holds anything else, which stays."""
        foreign: list[str] = []
        with contextlib.suppress(FileNotFoundError), _worded(self):
            self.fs.invalidate_cache()
            if _is_link(self.fs.info(self.path)):
                self.fs.rm_file(self.path)
                return
            found = {each["name"].rstrip("/").rsplit("/", 1)[-1]: each for each in self.fs.ls(self.path, detail=True)}
            foreign = [name for name in found if name and not own(name)]
            if not foreign and all(each["type"] == "file" and not _is_link(each) for each in found.values()):
                self.fs.rm(self.path, recursive=True)
                return
            for name in found:
                if own(name):
                    self.fs.rm_file(f"{self.path}/{name}")
            if not foreign:
                self.fs.rmdir(self.path)
        if foreign:
            raise OSError(errno.ENOTEMPTY, f"{self.name} holds {foreign[0]!r}, which zeor did not write; that stays")


def _is_link(info: Any) -> bool:
    """As the filesystems that know links tell it."""
    return bool(info.get("islink")) or info.get("type") == "link"


Place = Path | Url


def names_in(folder: Place) -> list[str]:
    """What is in a folder."""
    return folder.names() if isinstance(folder, Url) else sorted(os.listdir(folder))


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
        raise CheckpointError(f"{shown(text)} is a URL, which takes fsspec; pip install zeor[urls].") from error
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except Exception as error:  # an unknown scheme, a driver that is not installed, a URL that makes no sense to it
        url = Url(None, "", text)
        what = url.without_secrets(f"{error}")
        raise CheckpointError(f"{url} cannot be used: {what}.") from _cause(url, error)
    return Url(fs, path, text)


def _cause(url: Url, error: Exception) -> Exception | None:
    """A traceback would show what the filesystem said as it is."""
    return None if url._secrets else error


@contextlib.contextmanager
def _worded(url: Url) -> Iterator[None]:
    """Filesystems raise what they like; callers of ours wait for OSError, and tell users its strerror."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(url)) from _cause(url, error)
    except NotADirectoryError as error:
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(url)) from _cause(url, error)
    except OSError as error:
        what = url.without_secrets(error.strerror or str(error))
        raise OSError(error.errno or errno.EIO, what, str(url)) from _cause(url, error)
    except Exception as error:
        what = url.without_secrets(f"{type(error).__name__}: {error}")
        raise OSError(errno.EIO, what, str(url)) from _cause(url, error)


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
