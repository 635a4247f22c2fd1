"""A folder of plain safetensors files as Hugging Face lays them out, filled in any order, visible all at once.

    out/model.safetensors                              where everything fits one file, else
    out/model-00001-of-00003.safetensors ... and out/model.safetensors.index.json

Names, dtypes and shapes are told first, so every tensor has its place in its file before any value is there; values
are then put as they come, written by a thread, and let go. Everything is written into a hidden folder beside `out`,
synced, and renamed into place. Knows no model, no rank and no checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.checkpoint.commit import remove_tree
from zeor.checkpoint.disk import DISK, Disk
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.folder import INDEX, WHOLE
from zeor.checkpoint.tensorfile import DTYPES
from zeor.checkpoint.urls import place_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_WAITING_NBYTES = 64 << 20  # values put and not written yet


class Planned(NamedTuple):
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    file: str
    position: int  # of its first byte in the file
    planned: Planned


def local_folder(out: str | os.PathLike[str], who: str) -> Path:
    """`out` as a path; a URL would be taken for the name of a folder here."""
    text = os.fspath(out)
    scheme, found, _ = text.partition("://")
    if found and scheme not in ("file", "local"):
        raise CheckpointError(
            f"{who} writes a local folder, and {text!r} is a URL; give a folder of this machine and copy it from there."
        )
    return Path(place_of(text))


def parse_size(size: int | str) -> int:
    """Bytes of 5_000_000_000, "5GB" or "4.5 GiB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size)) if not isinstance(size, bool) else None
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if nbytes < 1:
        raise ValueError(f"max_file={size!r} is not a size; give bytes, or a text such as '5GB' or '500MiB'.")
    return nbytes


def divide(tensors: Sequence[Planned], max_nbytes: int) -> dict[str, list[Planned]]:
    """Which file each tensor goes to: as many as fit, in the order given; a larger one has a file of its own."""
    files: list[list[Planned]] = [[]]
    used = 0
    for tensor in tensors:
        if files[-1] and used + tensor.nbytes > max_nbytes:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += tensor.nbytes
    if len(files) == 1:
        return {WHOLE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": file for n, file in enumerate(files, 1)}


def header(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> bytes:
    """What a file of these begins with; padded, so that the data is aligned."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.nbytes]
        table[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class OutFiles:
    """The files of one export, being written. Raises OSError where the disk does; `abandon` then leaves nothing."""

    def __init__(self, out: Path, tensors: Sequence[Planned], max_nbytes: int, metadata: Mapping[str, str]):
        self._disk: Disk = DISK
        self._out = out
        self._writing = out.parent / f".{out.name}.writing-{secrets.token_hex(4)}"
        self._files = divide(tensors, max_nbytes)
        self._metadata = dict(metadata)
        self._places: dict[str, Place] = {}
        self._fds: dict[str, int] = {}
        self._put_numel: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeor-export")
        self._jobs: deque[tuple[Future[None], int]] = deque()
        self._waiting_nbytes = 0
        self.total_nbytes = sum(tensor.nbytes for tensor in tensors)

    def begin(self) -> None:
        """The hidden folder and the header of every file."""
        self._disk.make_folder(self._writing)
        for name, tensors in self._files.items():
            # Wider dtypes come first, so that every tensor is aligned.
            ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
            start = header(ordered, self._metadata)
            self._fds[name] = self._disk.create(self._writing / name)
            self._disk.write(self._fds[name], [start], 0)
            position = len(start)
            for tensor in ordered:
                self._places[tensor.name] = Place(name, position, tensor)
                position += tensor.nbytes

    def put(self, name: str, value: Tensor, start: int = 0) -> None:
        """Elements of a tensor from `start` on, in its dtype; the memory must not change any more."""
        place = self._places[name]
        assert value.dtype == place.planned.dtype, name
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        at = place.position + start * place.planned.dtype.itemsize
        self._put_numel[name] = self._put_numel.get(name, 0) + value.numel()
        job = self._thread.submit(self._write, self._fds[place.file], raw, at)
        self._jobs.append((job, raw.numel()))
        self._waiting_nbytes += raw.numel()
        while self._waiting_nbytes > _MOST_WAITING_NBYTES:
            self._finish_one()

    def _write(self, fd: int, raw: Tensor, at: int) -> None:
        self._disk.write(fd, [memoryview(raw.numpy())], at)  # type: ignore[arg-type]

    def _finish_one(self) -> None:
        job, nbytes = self._jobs.popleft()
        job.result()
        self._waiting_nbytes -= nbytes

    def write_text(self, name: str, text: str) -> None:
        fd = self._disk.create(self._writing / name)
        try:
            self._disk.write(fd, [text.encode()], 0)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def commit(self) -> None:
        """Every value is there: sync, and one rename makes the folder visible."""
        while self._jobs:
            self._finish_one()
        self._thread.shutdown()
        for name, place in self._places.items():
            assert self._put_numel.get(name, 0) == math.prod(place.planned.shape), f"{name} was not put whole"
        for name in list(self._fds):
            self._disk.sync(self._fds[name])
            self._disk.close(self._fds.pop(name))
        if len(self._files) > 1:
            weight_map = {tensor.name: file for file, tensors in self._files.items() for tensor in tensors}
            index = {"metadata": {"total_size": self.total_nbytes}, "weight_map": weight_map}
            self.write_text(INDEX, json.dumps(index, indent=2) + "\n")
        self._disk.sync_folder(self._writing)
        self._disk.rename(self._writing, self._out)  # an empty folder gives way to it
        self._disk.sync_folder(self._out.parent)

    def abandon(self) -> None:
        """Remove what was written so far; what cannot be removed stays hidden."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                self._disk.close(fd)
        self._fds.clear()
        with contextlib.suppress(OSError, ValueError):  # ValueError: of a name that no file can have
            remove_tree(self._disk, self._writing)
