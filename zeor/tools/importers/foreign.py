"""What an importer finds in a checkpoint of others, in words that zeor's format has, and how that is written.

A `Value` is a tensor that is read when it is written, so that no importer ever holds a model. `write` makes a
checkpoint of one file, by the same hidden folder, sync and rename as zeor.save. Knows no foreign format.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.checkpoint.files import plain
from zeor.checkpoint.files.branches import Lineage
from zeor.checkpoint.files.commit import Attempt, abandoned_on_error, complete
from zeor.checkpoint.files.disk import DISK
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import BUFFER, PARAM, Manifest, Stored, StoredPiece, role_of
from zeor.checkpoint.files.tensorfile import Reader, TensorEntry
from zeor.checkpoint.files.writer import Source, write_file
from zeor.layout.boxes import whole

_DROPPED = ("params", "param_names")


class Value(NamedTuple):
    """A tensor to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    source: str = ""  # equal for tensors that share memory

    def __repr__(self) -> str:
        return f"a tensor of shape {self.shape}"


def value_here(tensor: Tensor) -> Value:
    return Value(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def value_of(entry: TensorEntry, source: str) -> Value:
    return Value(entry.shape, entry.dtype, lambda: joined([(entry, 0, entry.numel)]).view(entry.shape), source)


def joined(ranges: Sequence[tuple[TensorEntry, int, int]]) -> Tensor:
    """Elements (from, count) of flattened tensors in files, end to end."""
    flat = torch.empty(sum(count for *_, count in ranges), dtype=ranges[0][0].dtype)
    at = 0
    with Reader() as reader:
        for entry, start, count in ranges:
            for done, values in reader.pieces(entry, start, count):
                flat[at + done : at + done + values.numel()] = values
            at += count
    return flat


@dataclass
class Foreign:
    """One training run of others. State of the optimizer is by parameter name: {entry: Value or number}."""

    params: dict[str, Value]
    buffers: dict[str, Value] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    own_dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # where params are masters of something narrower
    groups: list[dict[str, Any]] | None = None  # each with "params": names, beside its settings
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    step: int = 0
    notes: list[str] = field(default_factory=list)  # what was left out, for the user


def write(found: Foreign, folder: Path, kind: str) -> Path:
    """Make a checkpoint of it in `folder`. Returns where it is."""
    sources, tensors = [], []
    for stored, value in _tensors(found):
        tensors.append(stored)
        for piece in stored.pieces:
            sources.append(Source(stored.key(piece.box), value.dtype, value.shape, value.read))
    attempt = Attempt(DISK, folder, found.step)
    try:
        with abandoned_on_error(attempt):
            attempt.begin()
            info = write_file(DISK, attempt.writing / "rank-00000.safetensors", sources)
            branch = Lineage().next(folder, complete(folder))
            attempt.commit(Manifest(found.step, 1, [info], tensors, _state(found, kind), branch=branch).to_bytes())
    except OSError as error:
        raise CheckpointError(f"The checkpoint could not be written to {folder}: {error.strerror or error}.") from error
    return attempt.final


def _tensors(found: Foreign) -> Iterator[tuple[Stored, Value]]:
    named = [(PARAM, name, value) for name, value in found.params.items()]
    named += [(BUFFER, name, value) for name, value in found.buffers.items()]
    for name, entries in found.state.items():
        named += [(role_of(0, key), name, value) for key, value in _leaves(entries) if isinstance(value, Value)]
    for role, name, value in named:
        pieces = [StoredPiece(0, whole(value.shape))] if math.prod(value.shape) else []
        yield Stored(role, name, value.shape, plain.dtype_name(value.dtype), pieces), value


def _leaves(value: Any, key: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict) and (value or not key):
        for name, part in value.items():
            yield from _leaves(part, (*key, name))
    elif isinstance(value, list) and value:
        for index, part in enumerate(value):
            yield from _leaves(part, (*key, index))
    else:
        yield key, value


def _state(found: Foreign, kind: str) -> dict[str, Any]:
    trained = {name for group in found.groups for name in group["params"]} if found.groups is not None else None
    params = {
        name: {
            "dtype": plain.dtype_name(found.own_dtypes.get(name, value.dtype)),
            "trains": value.dtype.is_floating_point and (trained is None or name in trained),
        }
        for name, value in found.params.items()
    }
    optimizers = [_optimizer(found)] if found.groups is not None else []
    software = {"torch": torch.__version__, "python": platform.python_version(), "imported": kind}
    return {
        "params": params, "aliases": found.aliases, "optimizers": optimizers, "rng": [], "data": [], "extra": {},
        "software": software,
    }  # fmt: skip


def _optimizer(found: Foreign) -> dict[str, Any]:
    keys: dict[str, list[str | int]] = {}
    scalars: dict[str, list[Any]] = {}
    for name, entries in found.state.items():
        for key, value in _leaves(entries):
            if isinstance(value, Value):
                keys[role_of(0, key)] = list(key)
            else:
                scalars.setdefault(name, []).append([list(key), plain.encode(value, f"{key} of {name!r}")])
    groups = []
    for group in found.groups or ():
        settings = {key: value for key, value in group.items() if key not in _DROPPED}
        groups.append({"params": group["params"], "settings": plain.encode(settings, "a group's settings")})
    return {"class": "imported", "groups": groups, "keys": keys, "scalars": scalars}
