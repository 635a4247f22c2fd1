"""The one error of this folder that users meet: a checkpoint that cannot be trusted, written or found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from zeor.comm.attendance import AbsentRanksError, attend
from zeor.comm.axes import Axis


class CheckpointError(ValueError):
    """What was found, in which file, and what to do. Nothing of the running model has changed when it is raised
    by a load, unless it says so."""


@contextlib.contextmanager
def readable(path: Any, kind: type[ValueError] = CheckpointError) -> Iterator[None]:
    """What the system says of a file or folder that cannot be read, in one sentence."""
    try:
        yield
    except OSError as error:  # a lost mount, a folder of somebody else
        raise kind(f"{path} cannot be read: {error.strerror}.") from error


def all_there(axis: Axis, what: str) -> None:
    """Every rank is at `what`, or CheckpointError says which are not; nothing has begun then."""
    steps = axis.steps
    try:
        if what == "zeor.load":
            axis.steps = 0  # whatever ranks have done before, they will have the same weights
        attend(axis, what)
    except AbsentRanksError as error:
        axis.steps = steps
        raise CheckpointError(f"{error} Nothing was read or written.") from error


@contextlib.contextmanager
def lost_peers(axis: Axis, what: str, then: str) -> Iterator[None]:
    """A rank that died or never came: CheckpointError on those that waited for it. Its cause is what the exchange
    raised, which names the rank where that is known."""
    try:
        yield
    except RuntimeError as error:
        if not axis.stuck:
            raise
        raise CheckpointError(f"{what} did not end on every rank. {error} {then}") from error
