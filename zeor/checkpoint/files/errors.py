"""The one error of this folder that users meet: a checkpoint that cannot be trusted, written or found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zeor.comm.attendance import AbsentRanks, attend
from zeor.comm.mesh import Mesh


class CheckpointError(ValueError):
    """What was found, in which file, and what to do. Nothing of the running model has changed when it is raised
    by a load, unless it says so."""


def all_there(mesh: Mesh, what: str) -> None:
    """Every rank is at `what`, or CheckpointError says which are not; nothing has begun then."""
    steps = mesh.steps
    try:
        if what == "zeor.load":
            mesh.steps = 0  # whatever ranks have done before, they will have the same weights
        attend(mesh, what)
    except AbsentRanks as error:
        mesh.steps = steps
        raise CheckpointError(f"{error} Nothing was read or written.") from error


@contextlib.contextmanager
def lost_peers(mesh: Mesh, what: str, then: str) -> Iterator[None]:
    """A rank that died or never came: CheckpointError on those that waited for it. Its cause is what the exchange
    raised, which names the rank where that is known."""
    try:
        yield
    except RuntimeError as error:
        if not mesh.stuck:
            raise
        raise CheckpointError(f"{what} did not end on every rank. {error} {then}") from error
