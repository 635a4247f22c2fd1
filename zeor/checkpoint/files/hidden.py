"""Hidden folders: who is at work on one, what was left by a run that died, and how a folder is removed.

    .writing-step-000000000200-HOST-RANDOM/         being written
    .writing-step-000000000200-HOST-RANDOM.lock     locked as long as the process lives that writes it
    .removing-step-000000000050-HOST-RANDOM/        being deleted: whoever finds it goes on with that

The lock (flock) ends with its process, however that ends, and is seen from other containers of the machine too. It is
taken before the folder is made. If it is free, and was taken on this machine since that started, its process is dead.
The locks of other machines may not be seen here, and some filesystems know none: there, a folder that nobody touched
for an hour was left.

What is removed is first renamed, so that a process that lives after all finds nothing, not half. Nothing follows a
link: folders are held open, names are taken inside them, and a link is itself what is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from ctypes import CDLL, byref, c_size_t, create_string_buffer
from pathlib import Path

from zeor.checkpoint.files.disk import Disk, FolderEntry
from zeor.checkpoint.files.manifest import NAME
from zeor.checkpoint.files.names import HIDDEN, is_own_file

_WRITING, _REMOVING, _LOCK = ".writing-", ".removing-", ".lock"
LEFTOVER_SECONDS = 3600.0  # what nobody touched for this long, and nobody is known to hold, was left by a run that died
_UNKNOWN = "0"  # a machine that cannot be told from others
_under_way: set[str] = set()  # hidden folders that this process writes now

Identity = tuple[int, int]  # of a folder, whatever its name is: device and inode


class Hidden:
    """A folder that this process writes, and that no other one takes for left over."""

    def __init__(self, disk: Disk, folder: Path, name: str):
        self._disk = disk
        self.path = folder / f"{_WRITING}{name}-{host()}-{secrets.token_hex(8)}"
        self._lock_path = self.path.with_name(self.path.name + _LOCK)
        self._lock: int | None = None
        self.fd: int | None = None  # while this is open, no other folder has the same identity

    @property
    def identity(self) -> Identity | None:
        return _identity(os.fstat(self.fd)) if self.fd is not None else None

    def make(self) -> None:
        _under_way.add(self.path.name)
        self._lock = self._disk.create(self._lock_path)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a filesystem without: then no lock is better than one that looks free
            self._disk.unlink(self._lock_path)
        self._disk.new_folder(self.path)
        self.fd = open_folder(self.path)
        weakref.finalize(self, os.close, self.fd)

    def is_at(self, path: Path) -> bool:
        """Whether this folder, and no other one, has that name now."""
        return self.identity is not None and identity_of(None, path) == self.identity

    def remove(self, path: Path | None = None) -> None:
        """It and what is in it, wherever it lies by now (`path`); never another folder."""
        path = path or self.path
        try:
            if self.fd is None:  # it was not made, or could not be opened; nobody else uses its random name
                remove_path(self._disk, path)
            else:
                empty(self._disk, self.fd)
                if self.is_at(path):
                    self._disk.remove_folder(path)
        finally:
            self.release()

    def release(self) -> None:
        """It is done. The lock stays beside a folder that could not be removed: free, it says that nobody is there."""
        _under_way.discard(self.path.name)
        if self._lock is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            os.close(self._lock)
            self._lock = None
        if not os.path.lexists(self.path):
            with contextlib.suppress(OSError):
                self._disk.unlink(self._lock_path)


def removing_name(name: str) -> str:
    """What a checkpoint is called while it is deleted."""
    return f"{_REMOVING}{name}-{host()}-{secrets.token_hex(8)}"


@functools.cache
def host() -> str:
    """This machine since it started, as a part of a name. Equal names of hosts make no equal machines."""
    started = _started()
    if not started:
        return _UNKNOWN
    return hashlib.sha256(f"{started} {socket.gethostname()}".encode()).hexdigest()[:12]


def _started() -> str:
    """A text that is another one after each start of a machine; "" where none is to be had."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if sys.platform == "darwin":
        text, size = create_string_buffer(64), c_size_t(64)
        if CDLL(None).sysctlbyname(b"kern.bootsessionuuid", text, byref(size), None, c_size_t(0)) == 0:
            return text.value.decode()
    return ""


# ---- what others left


def clean(disk: Disk, folder: int) -> None:
    """Remove what dead runs have left in a folder that is held open; what cannot be removed stays."""
    names = disk.names(folder)
    for name in names:
        match = HIDDEN.fullmatch(name)
        with contextlib.suppress(OSError):
            if match and match[5]:
                of = name.removesuffix(_LOCK)
                if of not in names and _is_left_over(folder, of):
                    disk.unlink(FolderEntry(folder, name))
            elif match and match[1] == "removing":
                remove(disk, folder, name)
            elif match and _is_left_over(folder, name):
                _remove_left_over(disk, folder, name)


def _remove_left_over(disk: Disk, folder: int, name: str) -> None:
    """From the rename on its maker, should it live, can neither add to it nor show it."""
    removing = _REMOVING + name.removeprefix(_WRITING)
    disk.rename(FolderEntry(folder, name), FolderEntry(folder, removing))
    remove(disk, folder, removing)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(FolderEntry(folder, name + _LOCK))


def _is_left_over(folder: int, name: str) -> bool:
    """Of a process that is dead, or untouched for long. Also asked of a lock without its folder."""
    if name in _under_way:
        return False
    lock = _state_of_lock(folder, name + _LOCK)
    if lock == "held":
        return False
    match = HIDDEN.fullmatch(name)
    made_by = match[4].split("-")[1] if match else _UNKNOWN
    if lock == "free" and made_by == host() != _UNKNOWN:
        return True
    times = list(_times(folder, name))
    return bool(times) and time.time() - max(times) > LEFTOVER_SECONDS


def _state_of_lock(folder: int, name: str) -> str:
    """held, free, or missing."""
    fd = -1
    for flags in (os.O_RDWR, os.O_RDONLY):  # NFS locks for who may write only; others' files may be readable only
        with contextlib.suppress(OSError):
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            break
    if fd < 0:
        return "missing"
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return "missing"
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "free"
    except OSError as error:
        return "held" if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else "missing"
    finally:
        os.close(fd)


def _times(folder: int, name: str) -> Iterator[float]:
    """When a hidden folder, its files and its lock were changed."""
    for each in (name, name + _LOCK):
        with contextlib.suppress(OSError):
            yield os.stat(each, dir_fd=folder, follow_symlinks=False).st_mtime
    with contextlib.suppress(OSError):
        with opened(name, folder) as fd:
            for each in os.listdir(fd):
                with contextlib.suppress(OSError):
                    yield os.stat(each, dir_fd=fd, follow_symlinks=False).st_mtime


# ---- removing, by handle


def open_folder(path: str | Path, folder: int | None = None) -> int:
    """A descriptor of a folder itself; OSError where it is a link or anything else."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


@contextlib.contextmanager
def opened(path: str | Path, folder: int | None = None, *, follow: bool = False) -> Iterator[int]:
    """open_folder, closed at the end. `follow`: of a folder that the user named, which may be a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    fd = os.open(path, flags) if follow else open_folder(path, folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def identity_of(folder: int | None, name: str | Path) -> Identity | None:
    """Of what has a name in a folder that is held open, or a path; None where nothing has. Of a link, the link's."""
    with contextlib.suppress(OSError):
        return _identity(os.stat(name, dir_fd=folder, follow_symlinks=False))
    return None


def _unlinked(disk: Disk, folder: int, name: str) -> bool:
    """Whether it was a link, which then is gone."""
    if not stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return False
    disk.unlink(FolderEntry(folder, name))
    return True


def prune(disk: Disk, folder: int, name: str) -> None:
    """Delete a checkpoint: hidden first, so that it is there whole or not at all. Of a link, the link."""
    if _unlinked(disk, folder, name):
        return
    with opened(name, folder) as fd:
        foreign = [each for each in disk.names(fd) if not is_own_file(each)]
        if foreign:  # the manifest goes first: from then on it is no checkpoint
            empty(disk, fd)
            raise OSError(errno.ENOTEMPTY, f"{name} holds {foreign[0]!r}, which zeor did not write; that stays")
        hidden = removing_name(name)
        disk.rename(FolderEntry(folder, name), FolderEntry(folder, hidden))
        if identity_of(folder, hidden) != _identity(os.fstat(fd)):  # another one has come by this name meanwhile
            if not _unlinked(disk, folder, hidden):  # a folder goes back to its name; a link in its place is gone
                disk.rename(FolderEntry(folder, hidden), FolderEntry(folder, name))
            return
        empty(disk, fd)
        disk.remove_folder(FolderEntry(folder, hidden))


def remove(disk: Disk, folder: int, name: str, own: Callable[[str], bool] = is_own_file) -> None:
    """A folder in one that is held open, with its own files; OSError where it holds others. Of a link, the link."""
    if _unlinked(disk, folder, name):
        return
    with opened(name, folder) as fd:
        empty(disk, fd, own)
    disk.remove_folder(FolderEntry(folder, name))


def remove_path(disk: Disk, path: Path, own: Callable[[str], bool] = is_own_file) -> None:
    """`remove`, by a path; nothing there is fine."""
    with contextlib.suppress(FileNotFoundError), opened(path.parent, follow=True) as folder:
        remove(disk, folder, path.name, own)


def empty(disk: Disk, fd: int, own: Callable[[str], bool] = is_own_file) -> None:
    """Unlink the own files of a folder that is held open, a manifest first."""
    for name in sorted(disk.names(fd), key=lambda name: name != NAME):
        if own(name):
            with contextlib.suppress(FileNotFoundError):  # somebody else is at it too
                disk.unlink(FolderEntry(fd, name))
