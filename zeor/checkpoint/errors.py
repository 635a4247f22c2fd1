"""The one error of this folder that users meet: a checkpoint that cannot be trusted, written or found."""

from __future__ import annotations


class CheckpointError(ValueError):
    """What was found, in which file, and what to do. Nothing of the running model has changed when it is raised
    by a load."""
