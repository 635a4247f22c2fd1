"""A sub-folder of one's own in a folder that jobs may share: held while the job lives, gone when it has ended.

    folder the user named / zeor-offload-<job>-<random> / lock        flock'ed for as long as the job lives
                                                        / *.array     files.py's

A job deletes its own at the end; those of jobs that were killed are deleted by the next that opens the folder: named
like ours, a lock that can be taken. Of the folder itself only the default one is deleted, by the last that leaves it
empty. Nothing else is touched. Knows nothing of what the arrays hold.

Note [Whose folder]
~~~~~~~~~~~~~~~~~~~
The current directory may be open to others, who can put a folder or a link of their own where the default one is going
to be. So the default folder must be this user's own and no link. A folder that somebody named may be shared (a scratch
disk of all users) and may be reached through a link, but not one that another user made (root may). What is made in it
is for this user alone (mode 0700), and is reached through its handle only: links are never followed there, and what
others rename or replace on the way to it does not matter. Of leftovers only this user's own are deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from zeor.plan import DEFAULT_FOLDER, default_folder

_OURS = re.compile(r"zeor-offload-[A-Za-z0-9_.]*-[0-9a-f]{16}")
_ARRAY = re.compile(r"[A-Za-z0-9_.-]+\.array")
_LOCK = "lock"
_TRIES = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PLAIN = os.O_NOFOLLOW | os.O_CLOEXEC

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
    """`path`, made and held; `close()`, or the end of this object or of the process, deletes it. `handle` is the open
    sub-folder: whoever renames things around it changes nothing of what is reached through it."""

    def __init__(self, folder: str | os.PathLike[str], job: str | None) -> None:
        self.folder = Path(folder).expanduser().absolute()
        own = _own(self.folder, re.sub(r"[^A-Za-z0-9_.]", "_", job or "")[:64])
        _clean(own.parent, os.fstat(own.handle).st_uid)
        self.path, self.handle = self.folder / own.name, own.handle
        with contextlib.suppress(OSError, RuntimeError):  # no current directory, no such home: then it is neither
            if str(self.folder) == default_folder():  # which nobody has named in this program
                log.info("offload=disk: state rests in %s until the run ends.", self.path)
        also = self.folder if _is_default(self.folder) else None
        self._delete = weakref.finalize(self, _delete, own, os.getpid(), also)

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


class _Own(NamedTuple):
    """A sub-folder: open, as is the folder it is in, with the lock that is held."""

    parent: int
    name: str
    handle: int
    lock: int


def _is_default(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # no current directory
        return folder == Path(DEFAULT_FOLDER).absolute()
    return False


def _open(folder: Path) -> int:
    """The folder, made where it is not there yet, as a handle; see Note [Whose folder]. Between two of these steps
    another job may leave it as the last, and delete it: then again."""
    is_default = _is_default(folder)
    for tries_left in reversed(range(_TRIES)):
        is_new = False
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700 if is_default else 0o777)
                is_new = True
            _refuse_link(folder, is_default)
            handle = os.open(folder, _FOLDER | (os.O_NOFOLLOW if is_default else 0))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not folder.parent.exists():
                # More likely a wrong name, or a disk that is not mounted.
                raise RuntimeError(
                    f"The offload folder {folder} cannot be made because {folder.parent} does not exist; make that, "
                    "mount its disk, or choose another folder=."
                ) from None
            if not tries_left or not isinstance(error, FileNotFoundError):
                raise unusable(folder, error) from error
            continue
        owner = os.fstat(handle).st_uid
        if is_default and not is_new and owner != os.geteuid():
            os.close(handle)
            raise RuntimeError(
                f"The default offload folder {folder} belongs to user {owner}, not to this one ({os.geteuid()}), who "
                "could change what lies in it; delete it, or choose folder= (or ZEOR_OFFLOAD_FOLDER)."
            )
        return handle
    raise AssertionError("the last try returns or raises")


def _refuse_link(folder: Path, is_default: bool) -> None:
    found = os.lstat(folder)
    if not stat.S_ISLNK(found.st_mode):
        return
    if is_default:
        raise RuntimeError(
            f"The default offload folder {folder} is a link to {os.readlink(folder)}, which zeor does not follow; "
            "delete the link, or name the place it leads to: folder= (or ZEOR_OFFLOAD_FOLDER)."
        )
    if found.st_uid not in (0, os.geteuid()):
        raise RuntimeError(
            f"The offload folder {folder} is a link that user {found.st_uid} has made, not this one ({os.geteuid()}); "
            "choose a folder= that nobody else can lead elsewhere."
        )


def _own(folder: Path, job: str) -> _Own:
    """A new sub-folder and its lock. Another job may take it for a leftover between two of these steps, or leave the
    folder as the last: then again. Not for ever: there are filesystems, such as /proc, on which none can be made.

    1. make the sub-folder; 2. open it; 3. make the lock file; 4. lock it; 5. see that it is still there.
    """
    for tries_left in reversed(range(_TRIES)):
        name, opened = f"zeor-offload-{job}-{secrets.token_hex(8)}", [_open(folder)]
        try:
            os.mkdir(name, 0o700, dir_fd=opened[0])
            opened.append(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=opened[0]))
            opened.append(os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600, dir_fd=opened[1]))
            _hold(opened[2])
            os.stat(_LOCK, dir_fd=opened[1], follow_symlinks=False)
            if os.fstat(opened[1]).st_uid != os.fstat(opened[2]).st_uid:  # another has put his in its place
                raise PermissionError(errno.EPERM, "another user has replaced what was made in it")
            return _Own(opened[0], name, opened[1], opened[2])
        except OSError as error:
            again = tries_left and isinstance(error, (FileNotFoundError, BlockingIOError))
            if not again and len(opened) > 1:
                _empty(opened[0], name, opened[1])
            for descriptor in opened:
                os.close(descriptor)
            if not again:
                raise unusable(folder, error) from error
    raise AssertionError("the last try returns or raises")


def _hold(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # a filesystem without locks: nobody can take it, so nobody deletes it
        log.info("zeor: no file locks here (%s); what a killed job leaves is to be deleted by hand.", error.strerror)


def _clean(parent: int, user: int) -> None:
    """What jobs of this user have left in a folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if _OURS.fullmatch(name):
                with contextlib.suppress(OSError):  # alive, a link, or being deleted by another job
                    _clean_one(parent, name, user)


def _clean_one(parent: int, name: str, user: int) -> None:
    handle, lock = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent), -1
    try:
        if os.fstat(handle).st_uid != user:
            return
        lock = os.open(_LOCK, os.O_RDWR | _PLAIN, dir_fd=handle)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(parent, name, handle)
        log.info("zeor: deleted %s, left by a job that has ended.", name)
    except FileNotFoundError:
        os.rmdir(name, dir_fd=parent)  # killed between two steps; one that is just being made is made again
    finally:
        os.close(handle)
        if lock >= 0:
            os.close(lock)


def _empty(parent: int, name: str, handle: int) -> None:
    """Delete a sub-folder, the lock last; a file that is not ours stays, and so does the folder then."""
    with contextlib.suppress(OSError):
        for file in os.listdir(handle):
            if _ARRAY.fullmatch(file):
                os.unlink(file, dir_fd=handle)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_LOCK, dir_fd=handle)
        os.rmdir(name, dir_fd=parent)


def _delete(own: _Own, owner: int, also: Path | None) -> None:
    """The sub-folder and, once it is empty, `also`, if that is still the folder it is in. A forked child that ends
    leaves its parent's folder alone."""
    if os.getpid() != owner:
        return
    _empty(own.parent, own.name, own.handle)
    if also is not None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(also), os.fstat(own.parent)):
                os.rmdir(also)
    for descriptor in (own.lock, own.handle, own.parent):
        os.close(descriptor)
