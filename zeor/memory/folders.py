"""A sub-folder of one's own in a folder that jobs may share: held while the job lives, gone when it has ended.

    folder the user named / zeor-offload-<job>-<random> / lock        flock'ed for as long as the job lives
                                                        / *.array     files.py's

A job deletes its own at the end; those of jobs that were killed are deleted by the next that opens the folder: named
like ours, a lock that can be taken. Of the folder itself only the default one is deleted, by the last that leaves it
empty. Nothing else is touched. Knows nothing of what the arrays hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Any

from zeor.plan import DEFAULT_FOLDER, default_folder

_OURS = re.compile(r"zeor-offload-[A-Za-z0-9_.]*-[0-9a-f]{16}")
_ARRAY = re.compile(r"[A-Za-z0-9_.-]+\.array")
_LOCK = "lock"
_TRIES = 100

log = logging.getLogger("zeor")


def array_name(text: str) -> str:
    """As a name of a file that `OwnFolder` takes for its own."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:160] + ".array"


def free_disk_nbytes(folder: str | os.PathLike[str]) -> int:
    """What this user may still write in that folder, or where it is going to be."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def unusable(folder: Path, error: OSError) -> RuntimeError:
    return RuntimeError(
        f"The offload folder {folder} cannot be used ({error.strerror}); choose folder= on a disk that this user may "
        "write to."
    )


class OwnFolder:
    """`path`, made and held; `close()`, or the end of this object or of the process, deletes it."""

    def __init__(self, folder: str | os.PathLike[str], job: str | None) -> None:
        self.folder = Path(folder).expanduser().absolute()
        _make(self.folder)
        _clean(self.folder)
        self.path, lock = _own(self.folder, re.sub(r"[^A-Za-z0-9_.]", "_", job or "")[:64])
        also = None
        with contextlib.suppress(OSError, RuntimeError):  # no current directory, no such home: then it is neither
            if str(self.folder) == default_folder():  # which nobody has named in this program
                log.info("offload=disk: state rests in %s until the run ends.", self.path)
            also = self.folder if self.folder == Path(DEFAULT_FOLDER).absolute() else None
        self._delete = weakref.finalize(self, _delete, self.path, lock, os.getpid(), also)

    @property
    def is_open(self) -> bool:
        return self._delete.alive

    def close(self) -> None:
        """More than once is as good as once."""
        self._delete()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _make(folder: Path) -> None:
    """The folder itself is made; a missing parent is more likely a wrong name, or a disk that is not mounted."""
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise RuntimeError(
            f"The offload folder {folder} cannot be made because {folder.parent} does not exist; make that, mount its "
            "disk, or choose another folder=."
        ) from None
    except OSError as error:
        raise unusable(folder, error) from error


def _own(folder: Path, job: str) -> tuple[Path, int]:
    """A new sub-folder and its lock. Another job may take it for a leftover between two of these steps, or leave the
    folder as the last: then again. Not for ever: there are filesystems, such as /proc, on which none can be made.

    1. make the sub-folder; 2. make the lock file; 3. lock it; 4. see that it is still there.
    """
    for tries_left in reversed(range(_TRIES)):
        path, lock = folder / f"zeor-offload-{job}-{secrets.token_hex(8)}", None
        try:
            path.mkdir(0o700)
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            _hold(lock)
            os.stat(path / _LOCK)
            return path, lock
        except OSError as error:
            if lock is not None:
                os.close(lock)
            if tries_left and isinstance(error, (FileNotFoundError, BlockingIOError)):
                _make(folder)
                continue
            _empty(path)
            raise unusable(folder, error) from error
    raise AssertionError("the last try returns or raises")


def _hold(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # a filesystem without locks: nobody can take it, so nobody deletes it
        log.info("zeor: no file locks here (%s); what a killed job leaves is to be deleted by hand.", error.strerror)


def _clean(folder: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # alive, another user's, or being deleted by another job
                    _clean_one(Path(entry.path))


def _clean_one(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        path.rmdir()  # killed between two steps; one that is just being made is made again
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(path)
        log.info("zeor: deleted %s, left by a job that has ended.", path)
    finally:
        os.close(lock)


def _empty(path: Path) -> None:
    """Delete a sub-folder, the lock last; a file that is not ours stays, and so does the folder then."""
    with contextlib.suppress(OSError):
        with os.scandir(path) as entries:
            for entry in entries:
                if _ARRAY.fullmatch(entry.name):
                    os.unlink(entry.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / _LOCK)
        path.rmdir()


def _delete(path: Path, lock: int, owner: int, also: Path | None) -> None:
    """The sub-folder and, once it is empty, `also`. A forked child that ends leaves its parent's folder alone."""
    if os.getpid() == owner:
        _empty(path)
        os.close(lock)
        if also is not None:
            with contextlib.suppress(OSError):
                also.rmdir()
