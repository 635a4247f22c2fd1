"""Where checkpoints are kept: a folder (commit.py), or a URL, whose store may know no rename.

    s3://bucket/run/
      step-000000000100/
        rank-00000.safetensors ...
        manifest.json                 written last: from then on it is a checkpoint

1. Files are written under their final names; an attempt never takes a name that is taken, by whatever it be.
2. The manifest is the commit. A store that shows a file before it is whole may show half a manifest: one that cannot
   be read is passed over.
3. To delete a checkpoint, its manifest goes first. What has none is deleted once a later one is complete.
4. While one is written, a small file beside it (`.writing-step-...`) claims its name. An attempt that does not find
   itself alone with its claim goes on to another name: two jobs never write to one. What is claimed is not deleted
   before the claim is an hour old.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from typing import NamedTuple

from zeor.checkpoint.files import commit
from zeor.checkpoint.files.branches import Complete, surplus
from zeor.checkpoint.files.commit import complete, free_number, named
from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.hidden import LEFTOVER_SECONDS
from zeor.checkpoint.files.manifest import NAME, Manifest, parse
from zeor.checkpoint.files.names import HIDDEN, is_own_file, name_of
from zeor.checkpoint.files.urls import Place, Uploads, Url

_MOST_CLAIMS = 100  # names that others claim before one gives up
_claims: dict[str, bool] = {}  # of this process, by name: whether it is still being written


def disk_of(folder: Place, disk: Disk) -> Disk:
    """What files are written with."""
    return Uploads() if isinstance(folder, Url) else disk


class UrlAttempt:
    """One checkpoint being written to a URL, in the manner of commit.Attempt."""

    def __init__(self, folder: Url, step: int):
        self.number = free_number(folder, step)
        self._folder, self.step = folder, step
        self._claim: Url | None = None
        self._owns = self._ended = False  # owns: nobody else writes under its name

    @property
    def name(self) -> str:
        return name_of(self.step, self.number)

    @property
    def final(self) -> Url:
        return self._folder / self.name

    writing = final

    def begin(self) -> None:
        self._folder.make_folder()
        for _ in range(_MOST_CLAIMS):
            before = self._rank_among_claims()
            if before is None:
                self._owns = True
                self.writing.make_folder()
                return
            self._drop_claim()
            self.number += 1 + before  # those who saw each other go on to different names
        raise OSError(errno.EEXIST, f"other jobs take every name of step {self.step}; give each job its own folder")

    def _rank_among_claims(self) -> int | None:
        """Claim the name. None where nobody else has it or claims it; else, how many claims of others come first."""
        self._claim = self._folder / f".writing-{self.name}-{secrets.token_hex(8)}"
        _claims[self._claim.name] = True
        self._claim.write_bytes(str(int(time.time())).encode())
        there = self._folder.names()
        claims = [name for name in there if _claimed(name) == self.name]
        if self.name not in there and claims == [self._claim.name]:
            return None
        return sorted({*claims, self._claim.name}).index(self._claim.name)

    def _drop_claim(self) -> None:
        """Where that fails, the next `clean` of this process does it."""
        if self._claim is not None:
            _claims[self._claim.name] = False
            with contextlib.suppress(OSError):
                self._claim.remove_alone()
                del _claims[self._claim.name]
            self._claim = None

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
        self._drop_claim()

    def abandon(self) -> bool:
        """Remove what was written so far, unless it was committed. Whether nothing of it is visible."""
        if not self._ended:
            self._ended = True
            try:
                if self._owns:
                    _remove(self.final)
            except OSError:
                return False
            finally:
                self._drop_claim()
        return True


def clean(disk: Disk, folder: Place, keep: int | None, new: Place) -> None:
    """Delete all but the last `keep` checkpoints, the `new` one among them, and what dead runs have left."""
    if not isinstance(folder, Url):
        assert not isinstance(new, Url)
        return commit.clean(disk, folder, keep, new)
    failed: OSError | None = None
    whole = complete(folder)
    claims = _look_at_claims(folder)
    for each in [*surplus(whole, keep, new.name), *_dead(folder, whole, {claim.of for claim in claims if claim.holds})]:
        try:
            _remove(folder / each.path.name)
        except OSError as error:  # the others may go all the same
            failed = error
    for claim in claims:
        if not claim.holds:
            claim.url.remove_alone()
            _claims.pop(claim.url.name, None)
    if failed is not None:
        raise failed
    return None


def _dead(folder: Url, whole: list[Complete], claimed: set[str]) -> list[Complete]:
    """What has no manifest and comes before one that has, unless somebody is writing it."""
    known, last = {each.path.name for each in whole}, max((each[:2] for each in whole), default=(0, 0))
    return [
        each for each in named(folder)
        if each.path.name not in known | claimed and each[:2] < last and not (each.path / NAME).is_file()
    ]  # fmt: skip


class _Claim(NamedTuple):
    url: Url
    of: str  # the name it claims
    holds: bool  # whether its job may be alive


def _look_at_claims(folder: Url) -> list[_Claim]:
    found = []
    for name in folder.names():
        claimed = _claimed(name)
        if claimed:
            found.append(_Claim(folder / name, claimed, _holds(folder / name)))
    return found


def _claimed(name: str) -> str:
    """The name that a file claims; "" where it is no claim."""
    match = HIDDEN.fullmatch(name)
    is_claim = match and match[1] == "writing" and not match[5]
    return name_of(int(match[2]), int(match[3] or 0)) if match and is_claim else ""


def _holds(claim: Url) -> bool:
    """Ours says itself whether it does; one of others holds for an hour."""
    if claim.name in _claims:
        return _claims[claim.name]
    with contextlib.suppress(OSError, ValueError):  # gone, or half written: next time
        return time.time() - int(claim.read_bytes()) < LEFTOVER_SECONDS
    return True


def _remove(place: Url) -> None:
    if not place.is_link():
        (place / NAME).remove()
    place.remove_folder(is_own_file)
