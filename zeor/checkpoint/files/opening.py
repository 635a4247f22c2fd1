"""Which checkpoint is loaded, and which rank can read which of its files.

Rank 0 finds the latest. Where every rank sees all of its files (a shared disk) that is it, and what is wrong with it
is an error. Otherwise each host has its own folder, and all tell what they have: the latest of which every file is
somewhere is chosen. One that lacks all files of a host was not committed there, or the host is lost: an earlier one
is taken if any is whole. One that lacks a file of a host that has others was damaged, and is refused.

Another job may save to the folder meanwhile, and delete what is being loaded: then there is a newer one to load.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from zeor.checkpoint.files.branches import is_newer
from zeor.checkpoint.files.commit import complete, find, latest, read_manifest
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import NAME, PARAM, FileInfo, Manifest, digest, parse
from zeor.checkpoint.files.names import listed
from zeor.checkpoint.files.urls import Place, Url
from zeor.comm.agree import exchange, raise_first, together
from zeor.comm.axes import Axis
from zeor.comm.transfers import broadcast_bytes

_RANK_FILE = re.compile(r"rank-([0-9]+)\.safetensors")
_MOST_TRIES = 10  # newer checkpoints that come while one is used

_T = TypeVar("_T")

log = logging.getLogger("zeor")


class Opened(NamedTuple):
    path: Place  # on this rank, where it may hold some of the files, or not exist
    manifest: Manifest
    holders: dict[str, list[int]]  # by file: the ranks that have it; empty where every rank has all


@dataclass
class _Look:
    """What a rank sees of a checkpoint."""

    path: Place
    manifest: Manifest | None = None
    problem: str = ""
    absent: bool = False  # the problem is that something is not there

    @property
    def digest(self) -> str:
        return digest(self.manifest.to_bytes()) if self.manifest else ""


def with_newest(axis: Axis, folder: Place, use: Callable[[], _T]) -> _T:
    """What every rank does with the latest checkpoint of a folder. Where it fails, and a newer one has come since it
    began, it is done again with that: the first one was most likely deleted meanwhile."""
    for tries in range(1, _MOST_TRIES + 1):
        before = latest(folder) if axis.rank == 0 else None
        try:
            return use()
        except CheckpointError as error:
            if axis.stuck or tries == _MOST_TRIES:
                raise
            newer = axis.rank == 0 and is_newer(latest(folder), before)  # one that was not there
            if not exchange(axis, newer, "look for a newer checkpoint")[0]:
                raise
            if axis.rank == 0:
                log.warning("zeor: %s A newer checkpoint has come meanwhile, which is taken instead.", error)
    raise AssertionError


def open_checkpoint(axis: Axis, folder: Place) -> Opened:
    """Every rank calls it; all get the same manifest, or the same error."""
    problem, place, name = "", "", ""
    if axis.rank == 0:
        try:
            path = find(folder)
            place, name = str(path), "" if path == folder else path.name
        except CheckpointError as error:
            problem = str(error)
    problem, place, name = exchange(axis, [problem, place, name], "choice of a checkpoint")[0]
    is_url = isinstance(folder, Url)  # which all ranks share
    if problem and is_url:
        raise CheckpointError(problem)
    if not problem:
        here = folder / name if name else folder
        seen = _look(here) if is_url else _look(Path(place), here)
        looks = exchange(axis, [seen.problem, seen.absent, seen.digest], "exchange about a checkpoint's manifest")
        texts, hashes = [text for text, _, _ in looks], {each for _, _, each in looks}
        if not any(texts) and len(hashes) == 1:
            assert seen.manifest is not None
            return Opened(seen.path, seen.manifest, {})
        # Damaged, or something is missing on a disk that all ranks share.
        shared = len(hashes) == 1 and seen.manifest is not None and "hosts" not in seen.manifest.state
        damaged = ["" if absent else text for text, absent, _ in looks]
        raise_first(damaged, CheckpointError)
        if is_url or (shared and len(set(texts)) == 1):
            raise_first(texts, CheckpointError)
            raise CheckpointError(f"{seen.path} is not the same checkpoint on every rank.")
    return _choose(axis, folder, problem)


def _look(*places: Place) -> _Look:
    """At rank 0's path, or at the same checkpoint in this rank's own folder."""
    seen = _Look(places[0])
    for seen in map(_Look, places):
        try:
            seen.manifest = read_manifest(seen.path)
            for file in seen.manifest.files:
                _check_file(seen.path, seen.manifest, file)
        except CheckpointError as error:
            seen.problem, seen.absent = str(error), isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))
        if seen.manifest is not None:
            return seen
    return seen


def _check_file(path: Place, manifest: Manifest, file: FileInfo) -> None:
    """That it is there, as long as the manifest says: nothing is allocated for one that lies."""
    try:
        found = (path / file.name).stat().st_size
    except OSError as error:
        lost = _held(manifest, [file.name])
        raise CheckpointError(f"{path / file.name} cannot be read: {error.strerror}.{lost}") from error
    if found != file.nbytes:
        raise CheckpointError(f"{path / file.name} has {found} bytes; its manifest says {file.nbytes}.")


def _held(manifest: Manifest, files: list[str]) -> str:
    """Which parameters lost files take with them."""
    lost = {number for number, file in enumerate(manifest.files) if file.name in files}
    names = [repr(t.name) for t in manifest.tensors if t.role == PARAM and any(p.file in lost for p in t.pieces)]
    return f" It holds parts of parameters: {listed(names)}." if names else ""


# ---- no shared disk


_Key = tuple[int, int, int, str]


@dataclass
class _Candidate:
    """A checkpoint of which some ranks have something."""

    step: int
    number: int
    digest: str
    name: str  # of its folder; "" where the user named the checkpoint itself
    files: list[str] = field(default_factory=list)
    leads: list[int] = field(default_factory=list)
    present: list[str] = field(default_factory=list)  # of the files, on one rank
    order: int = 0  # of its branch

    @property
    def key(self) -> _Key:
        """The latest has the largest."""
        return self.order, self.step, self.number, self.digest


def _choose(axis: Axis, folder: Place, problem: str) -> Opened:
    mine: dict[_Key, _Candidate] = {}
    try:
        mine = _candidates(folder)
    except OSError as error:  # other ranks may have what is needed
        log.warning("zeor: %s cannot be read: %s.", folder, error.strerror)
    offers = exchange(axis, [vars(each) for each in mine.values()], "exchange about the checkpoints of hosts")
    offered: dict[_Key, dict[int, _Candidate]] = {}
    for rank, offer in enumerate(offers):
        for values in offer:
            each = _Candidate(**values)
            offered.setdefault(each.key, {})[rank] = each
    passed_over = None
    for key in sorted(offered, reverse=True):
        ranks = offered[key]
        one = next(iter(ranks.values()))
        holders = {name: [rank for rank in ranks if name in ranks[rank].present] for name in one.files}
        lost = [name for name in one.files if not holders[name]]
        if not lost:
            if passed_over and axis.rank == 0:
                log.warning("zeor: %s is loaded; a later one is not complete on every host.", one.name)
            return _opened(axis, folder, one, min(ranks), holders)
        passed_over = passed_over or (key, lost)
        if not _was_not_committed(one, lost, holders):
            passed_over = (key, lost)
            break
    if passed_over is None:
        raise CheckpointError(problem or f"{folder} holds no complete checkpoint.")
    _raise_lost(axis, folder, mine.get(passed_over[0]), passed_over[1])
    raise AssertionError


def _candidates(folder: Place) -> dict[_Key, _Candidate]:
    """What this rank has."""
    found = {}
    here = [(0, "")] if (folder / NAME).is_file() else [(c.attempt, c.path.name) for c in complete(folder)]
    for number, name in here:
        path = folder / name if name else folder
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            log.warning("zeor: %s is passed over: %s", path, error)
            continue
        each = _Candidate(manifest.step, number, digest(manifest.to_bytes()), name)
        each.order = manifest.branch.order if manifest.branch else 0
        leads = manifest.state.get("hosts")
        if isinstance(leads, list) and len(leads) == manifest.world and all(type(lead) is int for lead in leads):
            each.leads = leads
        each.files = [file.name for file in manifest.files]
        for file in manifest.files:
            try:
                _check_file(path, manifest, file)
                each.present.append(file.name)
            except CheckpointError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    log.warning("zeor: %s", error)
        found[each.key] = each
    return found


def _was_not_committed(one: _Candidate, lost: list[str], holders: dict[str, list[int]]) -> bool:
    """Whether what is lost are all files of some hosts, and nothing of others."""
    leads: dict[str, int | None] = {}
    for name in one.files:
        match = _RANK_FILE.fullmatch(name)
        leads[name] = one.leads[int(match[1])] if match and int(match[1]) < len(one.leads) else None
    gone = {leads[name] for name in lost}
    return None not in gone and not any(holders[name] and leads[name] in gone for name in one.files)


def _opened(axis: Axis, folder: Place, one: _Candidate, source: int, holders: dict[str, list[int]]) -> Opened:
    """The manifest, to ranks that have none."""
    path = folder / one.name if one.name else folder

    def read() -> bytes | None:  # it was there when it was offered: it may be gone by now
        return read_manifest(path).to_bytes() if axis.rank == source else None

    data = together(axis, read, "reading of a checkpoint's manifest", CheckpointError)
    data = broadcast_bytes(axis, data, source, "sending of a checkpoint's manifest")
    return Opened(path, parse(data, str(path / NAME)), holders)


def _raise_lost(axis: Axis, folder: Place, mine: _Candidate | None, lost: list[str]) -> None:
    """By the words of a rank that has the manifest."""
    text = ""
    if mine is not None:
        path = folder / mine.name if mine.name else folder
        held = ""
        with contextlib.suppress(CheckpointError):  # gone by now; other ranks wait for this one
            held = _held(read_manifest(path), lost).replace(" It holds", " There are")
        text = (
            f"{path} cannot be loaded: {listed(lost)}: on no rank's disk.{held} Bring back the host that has them, or "
            "copy them to any other."
        )
    texts = exchange(axis, text, "exchange about lost files of a checkpoint")
    raise CheckpointError(next(text for text in texts if text))
