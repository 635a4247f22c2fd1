"""Which checkpoint of a folder is the latest, which go first, and what a run has come from.

    1000 --- 2000 --- 3000          the run went back: it loaded 1000 and saved 1100
         \\-- 1100 --- 1200          the latest is 1200, and 2000 and 3000 go before any of its own

Each manifest names the checkpoint that its run loaded or saved before (its parent), and has an order: larger than those
of all that were there. The latest is the one with the largest order, that which was written last. Checkpoints without
one, of an older zeor, come before all that have one, by their steps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zeor.checkpoint.files.manifest import MOST_ORDER, Branch, Manifest, branch_in
from zeor.checkpoint.files.urls import Place

_MOST_NAME = 100  # of a parent: as long as a manifest lets it be


class Complete(NamedTuple):
    """A checkpoint that has a manifest."""

    step: int
    attempt: int
    path: Place
    branch: Branch | None = None
    damaged: bool = False  # its manifest does not even begin like one


def with_head(each: Complete, head: bytes) -> Complete:
    """What the beginning of its manifest says."""
    try:
        return each._replace(branch=branch_in(head))
    except (ValueError, TypeError, KeyError):
        return each._replace(damaged=True)


def ordered(found: Iterable[Complete]) -> list[Complete]:
    """The latest is the last. A damaged one stands where its step is, so that it is refused, not forgotten."""
    found = list(found)

    def key(each: Complete) -> tuple[int, int, int, str]:
        order = each.branch.order if each.branch else 0
        if each.damaged:
            before = [other.branch.order for other in found if other.branch and other[:2] <= each[:2]]
            order = max(before, default=0)
        return order, each.step, each.attempt, each.branch.id if each.branch else ""

    return sorted(found, key=key)


def is_newer(one: Complete | None, other: Complete | None) -> bool:
    """Whether `one` was written after `other`."""
    if one is None or other is None:
        return one is not None
    return one[:3] != other[:3] and ordered([one, other])[-1] is one


def surplus(found: Sequence[Complete], keep: int | None, new: str) -> list[Complete]:
    """What goes where `keep` may stay, of checkpoints in their order. The one named `new` stays whatever its step, then
    those that it came from, then others, the later the longer. One that was written after the new one stays too: where
    two jobs write to a folder, neither deletes what the other one does not know of."""
    if keep is None:
        return []
    newest = next((each for each in found if each.path.name == new), None)
    others = [each for each in found if each is not newest]
    if newest is not None:
        keep -= 1
    line = _ancestors(found, newest)
    ranked = sorted(others, key=lambda each: each.branch is not None and each.branch.id in line)
    return [each for each in ranked[: max(0, len(ranked) - keep)] if not _is_later(each.branch, newest)]


def _is_later(branch: Branch | None, newest: Complete | None) -> bool:
    if branch is None or newest is None or newest.branch is None:
        return False
    return (branch.order, branch.id) > (newest.branch.order, newest.branch.id)


def _ancestors(found: Sequence[Complete], newest: Complete | None) -> set[str]:
    """The ids of what a checkpoint came from, as far back as they are there."""
    branches = {each.branch.id: each.branch for each in found if each.branch}
    line: set[str] = set()
    at = newest.branch.parent if newest is not None and newest.branch else ""
    while at in branches and at not in line:
        line.add(at)
        at = branches[at].parent
    return line


# ---- of a run


class Lineage:
    """What the next checkpoint of a run comes from."""

    def __init__(self) -> None:
        self._loaded = Branch("", 0)
        self._saved: dict[str, Branch] = {}  # by folder: a second one, for the best say, is a line of its own

    def loaded(self, path: Place, manifest: Manifest) -> None:
        """From now on what the run saves comes from this one."""
        self._saved.clear()
        found = manifest.branch or Branch("", 0)
        self._loaded = Branch(found.id, found.order, parent_name=path.name)

    def saved(self, folder: Place, path: Place, branch: Branch) -> None:
        self._saved[str(folder)] = Branch(branch.id, branch.order, parent_name=path.name)

    def next(self, folder: Place, there: Sequence[Complete]) -> Branch:
        """For a checkpoint in a folder where these are; hosts that share nothing agree on the largest order."""
        last = self._saved.get(str(folder), self._loaded)
        known = max([last.order, *(each.branch.order for each in there if each.branch)])
        name = last.parent_name if last.id and _is_plain(last.parent_name) else ""
        order = max(time.time_ns() // 1000, min(known + 1, MOST_ORDER))
        return Branch(secrets.token_hex(16), order, last.id, name)


def _is_plain(name: str) -> bool:
    plain = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    return plain and len(name) <= _MOST_NAME and name[0] not in "-."
