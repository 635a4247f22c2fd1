"""Where checkpoints are kept: a folder (commit.py), or a URL, whose store may know no rename.

    s3://bucket/run/
      step-000000000100/
        rank-00000.safetensors ...
        manifest.json                 written last: from then on it is a checkpoint

1. Files are written under their final names; an attempt never takes a name that is taken, by whatever it be.
2. The manifest is the commit. A store that shows a file before it is whole may show half a manifest: one that cannot
   be read is passed over.
3. To delete a checkpoint, its manifest goes first. What has none is deleted once a later one is complete.
"""

from __future__ import annotations

import contextlib
import errno
import logging

from zeor.checkpoint import commit
from zeor.checkpoint.commit import Attempt, Complete
from zeor.checkpoint.disk import Disk
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import NAME, Manifest, parse
from zeor.checkpoint.urls import Place, Uploads, Url

log = logging.getLogger("zeor")


def disk_of(folder: Place, disk: Disk) -> Disk:
    """What files are written with."""
    return Uploads() if isinstance(folder, Url) else disk


def complete(folder: Place) -> list[Complete]:
    """The complete checkpoints, oldest first."""
    if not isinstance(folder, Url):
        return commit.complete(folder)
    return [each for each in _named(folder) if (each.path / NAME).is_file()]


def _named(folder: Url) -> list[Complete]:
    """What has the name of a checkpoint: complete, being written, left by a run that died, or half deleted."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in folder.names():
            match = commit.FINAL.fullmatch(name)
            if match:
                found.append(Complete(int(match[1]), int(match[2] or 0), folder / name))
    return sorted(found, key=lambda each: each[:2])


def find(folder: Place) -> Place:
    """The checkpoint that is meant: itself, or the latest complete one in it."""
    if not isinstance(folder, Url):
        return commit.find(folder)
    try:
        if (folder / NAME).is_file():
            return folder
        found = complete(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from error
    for each in reversed(found):
        try:
            commit.read_manifest(each.path)
        except CheckpointError as error:
            log.warning("zeor: %s is passed over: %s", each.path, error)
        else:
            return each.path
    raise CheckpointError(f"{folder} holds no complete checkpoint (no step-... folder with a {NAME} that can be read).")


def new_attempt(disk: Disk, folder: Place, step: int) -> Attempt | UrlAttempt:
    return UrlAttempt(folder, step) if isinstance(folder, Url) else Attempt(disk, folder, step)


class UrlAttempt:
    """One checkpoint being written to a URL, in the manner of commit.Attempt."""

    def __init__(self, folder: Url, step: int):
        number = max((each.attempt + 1 for each in _named(folder) if each.step == step), default=0)
        self.step = step
        self.name = f"step-{step:012d}" + (f".{number}" if number else "")
        self.final = self.writing = folder / self.name
        self._ended = False

    def begin(self) -> None:
        self.writing.make_folder()

    def _check(self, manifest: Manifest) -> None:
        """That every rank's file is there: in a store that ranks do not share, it is not."""
        for file in manifest.files:
            try:
                found = (self.final / file.name).stat().st_size
            except FileNotFoundError as error:
                what = f"{file.name} is not there once it was written; give a URL that all ranks share"
                raise OSError(errno.ENOENT, what) from error
            if found != file.nbytes:
                raise OSError(errno.EIO, f"{file.name} has {found} bytes there, of {file.nbytes} that were written")

    def commit(self, manifest: bytes) -> None:
        self._check(parse(manifest, str(self.final / NAME)))
        (self.final / NAME).write_bytes(manifest)
        self._ended = True

    def abandon(self) -> bool:
        """Remove what was written so far, unless it was committed. Whether nothing of it is visible."""
        if not self._ended:
            self._ended = True
            try:
                _remove(self.final)
            except OSError:
                return False
        return True


def clean(disk: Disk, folder: Place, keep: int | None, new: Place) -> None:
    """Delete all but the last `keep` checkpoints, the `new` one among them, and what dead runs have left."""
    if not isinstance(folder, Url):
        assert not isinstance(new, Url)
        return commit.clean(disk, folder, keep, new)
    whole = complete(folder)
    older = [each for each in whole if each.path != new]
    surplus = older[: max(0, len(older) - keep + 1)] if keep is not None else []
    dead = [each for each in _named(folder) if each not in whole and each[:2] < whole[-1][:2]]
    for each in surplus + dead:
        _remove(each.path)
    return None


def _remove(place: Url) -> None:
    (place / NAME).remove()
    place.remove()
