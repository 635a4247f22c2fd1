"""Reading ranges of a checkpoint's tensors, from whatever boxes they were written as, verified on the way.

A `Need` is a range of a flattened tensor and the host memory it goes to. `read_all` finds the pieces that cover the
needs, and reads them file by file in the order they lie there, only the blocks they touch. Knows a manifest
and files; no model, no rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeor.checkpoint.blocks import BlockReader
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import FileInfo, Manifest, Piece, Stored
from zeor.checkpoint.plain import DTYPES
from zeor.checkpoint.tensorfile import Entry, parse_header
from zeor.layout.boxes import Box, boxes_of_range, intersection, start_of


@dataclass
class Need:
    """Elements [start, start + into.numel()) of a stored tensor, flattened, into host memory of its dtype."""

    stored: Stored
    start: int
    into: Tensor


def need(stored: Stored, start: int, numel: int) -> Need:
    return Need(stored, start, torch.empty(numel, dtype=DTYPES[stored.dtype]))


@dataclass
class _Read:
    """Bytes [begin, end) of a file hold, row-major, `box` of a piece's box: they go to `into`."""

    begin: int
    end: int
    piece: Piece
    box: Box
    into: Tensor


def read_all(folder: Path, manifest: Manifest, needs: Sequence[Need]) -> int:
    """Fill every need. Returns the bytes read; CheckpointError, naming a file, where anything is wrong."""
    wanted: dict[int, list[tuple[Stored, Piece, Box, Tensor]]] = defaultdict(list)
    for each in needs:
        for piece, box, into in _cover(each):
            wanted[piece.file].append((each.stored, piece, box, into))
    total = 0
    for file in sorted(wanted):
        info = manifest.files[file]
        total += _read_file(folder / info.name, info, manifest.block_nbytes, wanted[file])
    return total


def _cover(each: Need) -> Iterator[tuple[Piece, Box, Tensor]]:
    """The pieces a need is made of: (piece, the box taken of it, where that goes)."""
    stored, at = each.stored, 0
    for target in boxes_of_range(stored.shape, each.start, each.start + each.into.numel()):
        room = each.into[at : at + target.numel].view(target.length)
        at += target.numel
        for piece in stored.pieces:
            both = intersection(target, piece.box)
            if both is not None:
                yield piece, both, room[both.relative_to(target).slices()]


def _read_file(
    path: Path, info: FileInfo, block_nbytes: int, wanted: list[tuple[Stored, Piece, Box, Tensor]]
) -> int:
    entries, header_nbytes = _verified_header(path, info, block_nbytes)
    reads = sorted((_place(path, entries, *item) for item in wanted), key=lambda read: (read.begin, read.end))
    with BlockReader(path, info, block_nbytes, [(read.begin, read.end) for read in reads]) as reader:
        for read in reads:
            _fill(reader, read)
        return header_nbytes + reader.read_nbytes


def _verified_header(path: Path, info: FileInfo, block_nbytes: int) -> tuple[dict[str, Entry], int]:
    with BlockReader(path, info, block_nbytes, [(0, 8)]) as reader:
        length = int.from_bytes(reader.bytes(0, 8), "little")
    if length > info.nbytes - 8:
        raise CheckpointError(f"{path} is damaged: its header is longer than the file.")
    with BlockReader(path, info, block_nbytes, [(8, 8 + length)]) as reader:
        text = bytes(reader.bytes(8, 8 + length))
        read_nbytes = reader.read_nbytes
    try:
        return parse_header(path, text, info.nbytes), read_nbytes
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _entry_of(path: Path, entries: dict[str, Entry], stored: Stored, piece: Piece) -> Entry:
    entry = entries.get(stored.key(piece.box))
    if entry is None or entry.dtype != DTYPES[stored.dtype] or entry.shape != piece.box.length:
        raise CheckpointError(f"{path} lacks the piece of {stored.role} {stored.name!r} that the manifest lists.")
    return entry


def check_header(folder: Path, manifest: Manifest, number: int) -> None:
    """That a file holds every piece the manifest lists of it; CheckpointError, naming it, where not."""
    info = manifest.files[number]
    path = folder / info.name
    entries, _ = _verified_header(path, info, manifest.block_nbytes)
    for stored in manifest.tensors:
        for piece in stored.pieces:
            if piece.file == number:
                _entry_of(path, entries, stored, piece)


def _place(path: Path, entries: dict[str, Entry], stored: Stored, piece: Piece, box: Box, into: Tensor) -> _Read:
    """Where a box of a piece lies in its file: from its first byte to its last."""
    entry = _entry_of(path, entries, stored, piece)
    inner = box.relative_to(piece.box)
    last = Box(tuple(b + n - 1 for b, n in zip(inner.begin, inner.length)), (1,) * len(inner.begin))
    first_element, last_element = start_of(piece.box.length, inner), start_of(piece.box.length, last)
    itemsize = entry.dtype.itemsize
    begin = entry.begin + first_element * itemsize
    return _Read(begin, entry.begin + (last_element + 1) * itemsize, piece, inner, into)


def _fill(reader: BlockReader, read: _Read) -> None:
    itemsize = read.into.element_size()
    if read.end - read.begin == read.box.numel * itemsize and read.into.is_contiguous():
        raw, done = read.into.view(-1).view(torch.uint8), 0
        for part in reader.parts(read.begin, read.end):
            raw[done : done + len(part)] = torch.frombuffer(part, dtype=torch.uint8)
            done += len(part)
        return
    # Rows with others between them: the span is read, and the box cut out of it.
    span = torch.frombuffer(reader.bytes(read.begin, read.end), dtype=torch.uint8).clone().view(read.into.dtype)
    shape = read.piece.box.length
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    read.into.copy_(span.as_strided(read.box.length, strides))
