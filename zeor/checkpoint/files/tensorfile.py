"""One safetensors file, read by range: a header that is checked in full, then any elements of any tensor.

    | 8 bytes: header length n | n bytes of JSON | data: tensors end to end, row-major, little-endian |

Reads go through `preadv` into memory of the caller's, not through a memory map: a mapped page counts as this
process's memory, and a rank must not grow by more than it keeps. Knows nothing of models, folders or ranks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeor.checkpoint.files.errors import readable

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000  # as the format says
_PIECE_NBYTES = 16 << 20  # staging of one read: long enough for a disk, short beside any slice worth sharding


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # of its first byte, counted from the start of the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], aligned: int, metadata: Mapping[str, str] | None = None
) -> bytes:
    """What a file of these begins with: names, dtypes and shapes. Padded, so that the data begins at a multiple."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % aligned)
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file by name. ValueError, naming the file, unless header and data fit exactly."""
    with readable(path, ValueError), open(path, "rb") as file:
        file_nbytes = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH_NBYTES)
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_NBYTES or length > min(_MAX_HEADER_NBYTES, file_nbytes - _LENGTH_NBYTES):
            raise ValueError(f"{path} is not a whole safetensors file: its header is cut short or malformed.")
        text = file.read(length)
    return parse_header(path, text, file_nbytes)


def parse_header(path: Any, text: bytes, file_nbytes: int) -> dict[str, TensorEntry]:
    """The same for the JSON text of a header."""
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)
    data_begin = _LENGTH_NBYTES + len(text)
    entries = {name: _entry(path, name, value, data_begin) for name, value in header.items()}
    _check_cover(path, entries, data_begin, file_nbytes)
    return entries


def _entry(path: Path, name: str, value: Any, data_begin: int) -> TensorEntry:
    try:
        kind, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        whole = isinstance(kind, str) and isinstance(shape, list)
        whole = whole and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{path} has a malformed header: the entry of {name!r} lacks a dtype, shape or offsets.")
    if kind not in DTYPES:
        raise ValueError(f"{path} holds {name!r} as {kind!r}, a dtype zeor cannot read.")
    entry = TensorEntry(path, DTYPES[kind], tuple(shape), data_begin + begin)
    if end - begin != entry.numel * entry.dtype.itemsize:
        raise ValueError(
            f"{path} has a malformed header: {name!r} of shape {entry.shape} in {kind} cannot take {end - begin} bytes."
        )
    return entry


def _check_cover(path: Path, entries: dict[str, TensorEntry], data_begin: int, file_nbytes: int) -> None:
    """Tensors lie end to end and fill the file: nothing is cut off, nothing overlaps, nothing hides between."""
    position = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].numel)):
        if entry.begin != position:
            raise ValueError(f"{path} has a malformed header: {name!r} overlaps its neighbour or leaves a gap.")
        position += entry.numel * entry.dtype.itemsize
    if position != file_nbytes:
        raise ValueError(
            f"{path} is {'truncated' if file_nbytes < position else 'longer than its header says'}: its header "
            f"describes {position} bytes, the file has {file_nbytes}."
        )


class Reader:
    """Reads ranges of tensors; keeps one file open and one staging buffer."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fd = -1
        self._staging = torch.empty(0, dtype=torch.uint8)
        self.read_nbytes = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._close()

    def pieces(self, entry: TensorEntry, start: int, numel: int) -> Iterator[tuple[int, Tensor]]:
        """Elements [start, start + numel) of the flattened tensor, a piece at a time: (elements before it, piece).
        A piece is overwritten by the next."""
        itemsize = entry.dtype.itemsize
        step = max(1, _PIECE_NBYTES // itemsize)
        for done in range(0, numel, step):
            count = min(step, numel - done)
            if self._staging.numel() < count * itemsize:
                self._staging = torch.empty(count * itemsize, dtype=torch.uint8)
            raw = self._staging[: count * itemsize]
            self._fill(entry, entry.begin + (start + done) * itemsize, raw)
            yield done, raw.view(entry.dtype)

    def whole(self, entry: TensorEntry) -> Tensor:
        """A tensor of its own."""
        flat = torch.empty(entry.numel, dtype=entry.dtype)
        self._fill(entry, entry.begin, flat.view(torch.uint8))
        return flat.view(entry.shape)

    def _fill(self, entry: TensorEntry, position: int, raw: Tensor) -> None:
        memory = memoryview(raw.numpy())  # type: ignore[arg-type]
        while len(memory):
            with readable(entry.path, ValueError):
                got = os.preadv(self._open(entry.path), [memory], position)
            if got == 0:
                raise ValueError(f"{entry.path} became shorter while it was read.")
            memory, position = memory[got:], position + got
            self.read_nbytes += got

    def _open(self, path: Path) -> int:
        if path != self._path:
            self._close()
            self._fd, self._path = os.open(path, os.O_RDONLY), path
        return self._fd

    def _close(self) -> None:
        if self._path is not None:
            os.close(self._fd)
            self._path = None
