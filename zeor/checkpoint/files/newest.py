"""Using the latest checkpoint of a folder to which another job may save meanwhile.

That job may delete the one that is in use: then there is a newer one, and it is used instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from zeor.checkpoint.files import store
from zeor.checkpoint.files.branches import Complete, is_newer
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.urls import Place
from zeor.comm.agree import exchange
from zeor.comm.mesh import Mesh

_MOST_TRIES = 10  # newer checkpoints that come while one is used

_T = TypeVar("_T")

log = logging.getLogger("zeor")


def with_newest(mesh: Mesh, folder: Place, use: Callable[[], _T]) -> _T:
    """What every rank does with the latest checkpoint of a folder. Where it fails, and a newer one has come since it
    began, it is done again with that: the first one was most likely deleted meanwhile."""
    for tries in range(1, _MOST_TRIES + 1):
        before = store.latest(folder) if mesh.rank == 0 else None
        try:
            return use()
        except CheckpointError as error:
            if mesh.stuck or tries == _MOST_TRIES or not _has_newer(mesh, folder, before):
                raise
            if mesh.rank == 0:
                log.warning("zeor: %s A newer checkpoint has come meanwhile, which is taken instead.", error)
    raise AssertionError


def _has_newer(mesh: Mesh, folder: Place, before: Complete | None) -> bool:
    """Whether rank 0 sees one that was not there."""
    newer = mesh.rank == 0 and is_newer(store.latest(folder), before)
    return bool(exchange(mesh, newer, "look for a newer checkpoint")[0])
