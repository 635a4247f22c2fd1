"""How a checkpoint comes to be, all at once, and how the latest is found: by looking, not by a pointer.

    checkpoints/
      .writing-step-000000000200-.../   being written: nobody reads it
      step-000000000100/              complete: it was renamed into place, whole and synced
        manifest.json
        rank-00000.safetensors ...
      .removing-step-000000000050-.../  being deleted: nobody reads it

1. A hidden folder is made (hidden.py) and filled; every file is synced, the manifest last, then the folder itself.
2. Every file that the manifest lists is there in its size. One rename makes all of it visible under its final name.
   Before it there is nothing, after it everything.
3. Old ones (branches.py says which) are hidden by a rename before anything in them is deleted.
That is for folders. At a URL (store.py) a checkpoint is complete when its manifest, written last, is there; without a
shared disk every host commits its own folder (per_host.py).
A step saved again gets a suffix (`step-000000000100.1`): nothing is ever replaced in place. Where another job takes the
name first, the next suffix is taken.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from zeor.checkpoint.files import hidden
from zeor.checkpoint.files import manifest as manifests
from zeor.checkpoint.files.branches import Complete, ordered, surplus, with_head
from zeor.checkpoint.files.disk import Disk, FolderEntry
from zeor.checkpoint.files.errors import CheckpointError, readable
from zeor.checkpoint.files.hidden import Hidden
from zeor.checkpoint.files.names import name_of, numbers_of
from zeor.checkpoint.files.urls import Place, Url, names_in

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # what a rename says where something has the name
_MOST_NAMES = 100  # that other jobs take before one gives up

log = logging.getLogger("zeor")


def named(folder: Place) -> list[Complete]:
    """What has the name of a checkpoint: complete, being written, left by a run that died, or half deleted."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in names_in(folder):
            numbers = numbers_of(name)
            if numbers:
                found.append(Complete(*numbers, folder / name))
    return sorted(found, key=lambda each: each[:2])


def complete(folder: Place) -> list[Complete]:
    """The complete checkpoints of a folder or URL, the latest last. One that is a link counts."""
    found = []
    for each in named(folder):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            if (each.path / manifests.NAME).is_file():
                found.append(with_head(each, _head(each.path / manifests.NAME)))
    return ordered(found)


def _head(manifest: Place) -> bytes:
    if isinstance(manifest, Url):
        return manifest.read_range(0, manifests.HEAD_NBYTES)
    with open(manifest, "rb") as file:
        return file.read(manifests.HEAD_NBYTES)


def free_number(folder: Place, step: int) -> int:
    """Of the next attempt at a step: beyond all whose names are taken, by checkpoints or by anything else."""
    return max((each.attempt + 1 for each in named(folder) if each.step == step), default=0)


def find(folder: Place) -> Place:
    """The checkpoint that is meant: itself, or the latest complete one in it. At a URL, one that can be read."""
    with readable(folder):
        if (folder / manifests.NAME).is_file():
            return folder
        found = complete(folder)
        exists = isinstance(folder, Url) or folder.exists()
    if found:
        tell_of_branches(found)
    for each in reversed(found):
        try:
            if isinstance(folder, Url):
                read_manifest(each.path)
            return each.path
        except CheckpointError as error:
            log.warning("zeor: %s is passed over: %s", each.path, error)
    if not exists:
        raise CheckpointError(f"{folder} does not exist, so there is no checkpoint to load.")
    what = f"{manifests.NAME} that can be read" if isinstance(folder, Url) else manifests.NAME
    raise CheckpointError(f"{folder} holds no complete checkpoint (no step-... folder with a {what}).")


def latest(folder: Place) -> Complete | None:
    """The one that `find` would take, as far as can be seen."""
    with contextlib.suppress(OSError):
        return next(reversed(complete(folder)), None)
    return None


def tell_of_branches(found: list[Complete]) -> None:
    """Where the latest is not that of the largest step."""
    last, largest = found[-1], max(found, key=lambda each: each[:2])
    if largest.step > last.step:
        log.warning(
            "zeor: %s was saved last and is the latest; %s was saved before it, by a run that went back since. Name a "
            "checkpoint itself to load another.", last.path, largest.path.name,
        )  # fmt: skip


def read_manifest(path: Place) -> manifests.Manifest:
    file = path / manifests.NAME
    with readable(file):
        size = file.stat().st_size
        if size > manifests.MOST_MANIFEST_NBYTES:
            raise CheckpointError(f"{file} is {size} bytes long, more than a manifest may be.")
        data = file.read_bytes()
    manifest, numbers = manifests.parse(data, str(file)), numbers_of(path.name)
    if numbers and numbers.step != manifest.step:
        raise CheckpointError(
            f"{file} is of step {manifest.step}, and its folder is named for step {numbers.step}; rename the folder to "
            f"{name_of(manifest.step, 0)}."
        )
    return manifest


class Attempt:
    """One checkpoint being written to a folder."""

    def __init__(self, disk: Disk, folder: Path, step: int):
        self._disk, self._folder, self.step = disk, folder, step
        self.number = free_number(folder, step)
        self.may_move = True  # to the next suffix, where another job takes the name
        self._hidden = Hidden(disk, folder, self.name)
        self.writing = self._hidden.path
        self._here: dict[str, int] = {}  # files that must be there, by their sizes
        self._renaming = self._ended = False

    @property
    def name(self) -> str:
        return name_of(self.step, self.number)

    @property
    def final(self) -> Path:
        return self._folder / self.name

    def begin(self) -> None:
        new = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._disk.make_folder(self._folder)
        self._hidden.make()
        for path in new:
            self._disk.sync_folder(path.parent)

    def commit(self, manifest: bytes) -> None:
        """Steps 1 and 2 of the module's docstring; the other files are there and synced."""
        self.prepare(manifest)
        self.publish()

    def prepare(self, manifest: bytes, here: Collection[str] | None = None) -> None:
        """`here`: which of the manifest's files this host keeps; None: all."""
        disk, listed = self._disk, manifests.parse(manifest, str(self.writing / manifests.NAME))
        assert listed.step == self.step and self._hidden.fd is not None
        self._here = {file.name: file.nbytes for file in listed.files if here is None or file.name in here}
        self._here[manifests.NAME] = len(manifest)
        fd = disk.create(FolderEntry(self._hidden.fd, manifests.NAME))
        try:
            disk.write(fd, [manifest], 0)
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.sync_folder(self.writing)

    def publish(self) -> None:
        self._check_files()
        self._renaming = True
        self._rename()
        self._disk.sync_folder(self._folder)
        self._ended = True
        self._hidden.release()

    def _check_files(self) -> None:
        """What becomes visible is whole, whoever has been at it."""
        assert self._hidden.fd is not None
        for name, nbytes in self._here.items():
            try:
                found = os.stat(name, dir_fd=self._hidden.fd, follow_symlinks=False)
            except FileNotFoundError as error:
                raise OSError(errno.ENOENT, f"{name} was written there and is gone") from error
            if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
                raise OSError(errno.EIO, f"{name} has {found.st_size} bytes there, of {nbytes} that were written")

    def _rename(self) -> None:
        """To a name that nobody has. A folder that is not empty, a file and a link stay as they are."""
        for _ in range(_MOST_NAMES):
            try:
                return self._disk.rename(self.writing, self.final)
            except OSError as error:
                there = os.path.lexists(self.final)
                if error.errno not in (_TAKEN if there else _TAKEN[:2]) or self._hidden.is_at(self.final):
                    raise
                if there and not self.may_move:
                    raise OSError(errno.EEXIST, f"another job took {self.name} meanwhile; save again") from error
            if not there:  # deleted again
                continue
            taken = self.final
            self.number = free_number(self._folder, self.step)
            log.warning(
                "zeor: %s was taken by another job while it was written; this one is %s. Give each job a folder of its "
                "own.", taken, self.name,
            )  # fmt: skip
        raise OSError(errno.EEXIST, f"other jobs take every name of step {self.step}; give each job its own folder")

    def abandon(self) -> bool:
        """Remove what was written so far, unless it was committed; what cannot be removed stays hidden, and a later
        `clean` removes it. Whether nothing of it is visible: a rename may have happened though it, or what came after,
        failed. A checkpoint of others that has the name stays."""
        if not self._ended:
            self._ended = True
            path = self.writing
            with contextlib.suppress(OSError):
                if self._renaming and self._hidden.is_at(self.final):
                    removing = self._folder / hidden.removing_name(self.name)
                    self._disk.rename(self.final, removing)
                    path = removing
            with contextlib.suppress(OSError):
                if not self._is_visible():
                    self._hidden.remove(path)
            self._hidden.release()
        return not self._is_visible()

    def _is_visible(self) -> bool:
        return self._renaming and self._hidden.is_at(self.final)

    def withdraw(self) -> bool:
        """Take back what was committed here, because another host could not."""
        self._ended = False
        return self.abandon()


@contextlib.contextmanager
def abandoned_on_error(attempt: Any) -> Iterator[None]:
    """Nothing stays of an attempt (or of None) where anything fails inside."""
    try:
        yield
    except BaseException:
        if attempt is not None:
            attempt.abandon()
        raise


def clean(disk: Disk, folder: Path, keep: int | None, new: Path | None = None) -> None:
    """Hide and delete all but the last `keep` complete checkpoints, and what dead runs have left. The `new` one stays
    whatever its step: a run that went back to an earlier step must not lose what it saves."""
    failed: OSError | None = None
    with hidden.opened(folder, follow=True) as fd:
        for old in surplus(complete(folder), keep, new.name if new is not None else ""):
            try:
                hidden.prune(disk, fd, old.path.name)
            except FileNotFoundError:  # another job deletes it
                continue
            except OSError as error:  # the others may go all the same
                failed = error
        hidden.clean(disk, fd)
    if failed is not None:
        raise failed
