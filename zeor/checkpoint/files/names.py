"""The names that zeor writes in a folder of checkpoints; nothing of another name is read, counted or deleted.

step-000000000200, step-000000000200.1    a checkpoint: its step, and which attempt at it
  manifest.json, rank-00000.safetensors   what is in it
.writing-step-..., .removing-step-...     hidden.py's
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from zeor.checkpoint.files.manifest import NAME

# ASCII digits, as few as zeor writes: \d would match those of other scripts, and 0001 would be 1 under another name.
_STEP = r"step-((?:[0-9]{12}|[1-9][0-9]{12,}))(?:\.([1-9][0-9]*))?"
FINAL = re.compile(_STEP)
HIDDEN = re.compile(r"\.(writing|removing)-" + _STEP + r"((?:-[A-Za-z0-9]+)+)(\.lock)?")
_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors")


class Numbers(NamedTuple):
    step: int
    attempt: int


def name_of(step: int, attempt: int) -> str:
    return f"step-{step:012d}" + (f".{attempt}" if attempt else "")


def numbers_of(name: str) -> Numbers | None:
    """What the name of a checkpoint says; None where it is no such name."""
    match = FINAL.fullmatch(name)
    return Numbers(int(match[1]), int(match[2] or 0)) if match else None


def is_own_file(name: str) -> bool:
    """Whether zeor writes a file of this name into a checkpoint."""
    return name == NAME or _FILE.fullmatch(name) is not None


def listed(names: Sequence[str], most: int = 10) -> str:
    """Names in a sentence: the first of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
