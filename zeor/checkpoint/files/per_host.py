"""Where each rank's file of a new checkpoint goes: a folder that all ranks share, or one folder per host.

    shared disk         rank 0 leads: it makes the hidden folder, writes the manifest, renames.
    no shared disk      ranks that do not see rank 0's folder are on other hosts. The lowest rank of each host leads
                        there. Each host holds the files of its ranks and a copy of the manifest.

No host renames before every host has written and synced all of its files, the manifest included. A crash between the
renames of two hosts leaves a checkpoint without the files of one: opening.py passes over it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zeor.checkpoint.files.branches import Complete
from zeor.checkpoint.files.commit import Attempt, abandoned_on_error, complete, read_manifest
from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.store import UrlAttempt
from zeor.checkpoint.files.urls import Place, Url
from zeor.comm.agree import exchange
from zeor.comm.axes import Axis

INVISIBLE = "Nothing of it is visible; earlier checkpoints are as they were."

log = logging.getLogger("zeor")
_warned: set[str] = set()  # folders that are known not to be shared


class Site(NamedTuple):
    """Where a rank writes."""

    folder: Place
    writing: Place  # in it
    attempt: Attempt | UrlAttempt | None  # on ranks that lead a host
    leads: list[int]  # by rank: the rank that leads its host

    @property
    def apart(self) -> bool:
        return len(set(self.leads)) > 1


def words(error: Exception, path: Place) -> str:
    what = getattr(error, "strerror", None) or error
    return f"The checkpoint could not be written to {path}: {what}. {INVISIBLE}"


def begin(axis: Axis, disk: Disk, folder: Place, step: int) -> Site:
    """Make the hidden folders. Every rank calls it; a failure is raised on all."""
    attempt, problem = _begun(disk, folder, step) if axis.rank == 0 else (None, "")
    with abandoned_on_error(attempt):
        mine = [problem, attempt.writing.name if attempt else "", str(folder)]
        answers = exchange(axis, mine, "making of a checkpoint's folder")
        if answers[0][0]:
            raise CheckpointError(answers[0][0])
        name, shared = answers[0][1], [0] * axis.size
        if isinstance(folder, Url):  # of every rank the same, which a text without credentials does not tell
            return Site(folder, folder / name, attempt, shared)
        first = Path(answers[0][2]) / name
        found = [place for place in (first, folder / first.name) if axis.rank == 0 or os.path.isdir(place)]
        if all(exchange(axis, bool(found), "look for a checkpoint's folder")):
            return Site(found[0].parent, found[0], attempt, shared)
        return _begin_apart(axis, disk, Site(folder, found[0] if found else first, attempt, []), bool(found), step)


def _begun(disk: Disk, folder: Place, step: int) -> tuple[Attempt | UrlAttempt | None, str]:
    attempt: Attempt | UrlAttempt | None = None
    try:
        attempt = UrlAttempt(folder, step) if isinstance(folder, Url) else Attempt(disk, folder, step)
        attempt.begin()
    except OSError as error:
        if attempt is not None:
            attempt.abandon()
        return None, words(error, folder)
    return attempt, ""


def _begin_apart(axis: Axis, disk: Disk, site: Site, sees: bool, step: int) -> Site:
    """Ranks that do not see rank 0's hidden folder make one each: the lowest whose they see leads them."""
    attempt, problem = (site.attempt, "") if sees else _begun(disk, site.folder, step)
    name = attempt.writing.name if attempt is not None and not sees else ""
    number = attempt.number if isinstance(attempt, Attempt) else 0
    with abandoned_on_error(attempt):
        made = exchange(axis, [problem, name, number, sees], "making of the hosts' folders of a checkpoint")
        if axis.rank == 0:
            blind = [rank for rank, each in enumerate(made) if not each[3]]
            problem = _changed(site.folder, blind, axis.size)
        seen = [rank for rank, each in enumerate(made) if each[1] and os.path.isdir(site.folder / each[1])]
        answers = exchange(axis, [problem, 0 if sees else min(seen, default=axis.rank)], "finding of hosts")
        if any(text for text, _ in answers):
            raise CheckpointError(next(text for text, _ in answers if text))
    leads = [lead for _, lead in answers]
    if attempt is not None and leads[axis.rank] != axis.rank:
        attempt.abandon()
        attempt = None
    if isinstance(attempt, Attempt):
        attempt.number = max(each[2] for each in made)  # a name that is free on every host
        attempt.may_move = False  # and the same one on all
    writing = site.writing if sees else site.folder / made[leads[axis.rank]][1]
    return Site(writing.parent if isinstance(writing, Path) else site.folder, writing, attempt, leads)


def _changed(folder: Place, blind: list[int], world: int) -> str:
    """What is wrong where a folder was shared by as many ranks before: most likely a mount is lost."""
    ranks = ", ".join(map(str, blind[:10])) + (" and more" if len(blind) > 10 else "")
    found: list[Complete] = []
    with contextlib.suppress(OSError):  # other ranks wait for this one
        found = complete(folder)
    for each in reversed(found):
        try:
            manifest = read_manifest(each.path)
        except CheckpointError:
            continue
        if manifest.world == world and "hosts" not in manifest.state:
            return (
                f"Ranks {ranks} do not see what rank 0 writes to {folder}, yet {each.path.name} there was shared by as "
                f"many ranks: bring back the mount, or save to a new folder. {INVISIBLE}"
            )
        break
    if str(folder) not in _warned:
        _warned.add(str(folder))
        log.warning(
            "zeor: ranks %s do not see what rank 0 writes to %s: it is not on a shared disk. Each host keeps the files "
            "of its own ranks; loading fetches what a host lacks from those that have it.", ranks, folder,
        )  # fmt: skip
    return ""


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def commit(axis: Axis, site: Site, manifest: Callable[[], bytes], problem: str) -> Place:
    """Write the manifest and rename, on every host or on none, unless there is a problem, the same on all ranks. Where
    the checkpoint is; a failure is raised on every rank."""
    attempt = site.attempt
    if site.apart:
        if isinstance(attempt, Attempt) and not problem:
            mine = {file_name(rank) for rank, lead in enumerate(site.leads) if lead == axis.rank}  # this host's
            problem = _tried(lambda: attempt.prepare(manifest(), mine), attempt)
        texts = exchange(axis, problem, "exchange about the hosts' manifests of a checkpoint")
        problem = next((text for text in texts if text), "")
        if isinstance(attempt, Attempt) and not problem:
            problem = _tried(attempt.publish, attempt)
    elif attempt is not None and not problem:
        problem = _tried(lambda: attempt.commit(manifest()), attempt)
    if attempt is not None and problem and not attempt.abandon():
        problem = problem.replace(INVISIBLE, f"{attempt.final} is there, whole, but may not survive a power cut.")
    ends = exchange(axis, [problem, attempt.final.name if attempt else ""], "end of a checkpoint")
    failed = next((text for text, _ in ends if text), "")
    if failed:
        if isinstance(attempt, Attempt) and not problem:
            attempt.withdraw()  # another host could not rename
        raise CheckpointError(failed)
    return site.folder / str(ends[0][1])


def _tried(do: Callable[[], None], attempt: Attempt | UrlAttempt) -> str:
    try:
        do()
    except Exception as error:  # the other ranks wait to hear of it, whatever it is
        return words(error, attempt.writing)
    return ""
