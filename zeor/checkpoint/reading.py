"""Reading ranges of a checkpoint's tensors, from whatever boxes they were written as, verified on the way.

A `Need` is a range of a flattened tensor and the host memory it goes to. `read_all` finds the pieces that cover the
needs, and reads them file by file in the order they lie there, only the blocks they touch. Knows a manifest
and files; no model, no rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zeor.checkpoint.blocks import BlockReader
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import MOST_MANIFEST_NBYTES, FileInfo, Manifest, Piece, Stored
from zeor.checkpoint.plain import DTYPES
from zeor.checkpoint.tensorfile import Entry, parse_header
from zeor.checkpoint.urls import Place
from zeor.layout.boxes import Box, boxes_of_range, intersection, start_of

Wanted = tuple[Stored, Piece, Box, Tensor]  # a box of a piece, and the memory it goes to


class Folder(Protocol):
    """What gives a checkpoint's files by name."""

    def __truediv__(self, name: str, /) -> Place: ...


@dataclass
class Need:
    """Elements [start, start + numel) of a stored tensor, flattened, into host memory of its dtype, which is there
    from the first look at it until it is dropped."""

    stored: Stored
    start: int
    numel: int
    _into: Tensor | None = None

    @property
    def into(self) -> Tensor:
        if self._into is None:
            self._into = torch.empty(self.numel, dtype=DTYPES[self.stored.dtype])
        return self._into

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.stored.dtype].itemsize

    def drop(self) -> None:
        self._into = None


def need(stored: Stored, start: int, numel: int) -> Need:
    return Need(stored, start, numel)


@dataclass
class _Read:
    """Bytes [begin, end) of a file hold, row-major, `box` of a piece's box: they go to `into`."""

    begin: int
    end: int
    piece: Piece
    box: Box
    into: Tensor

    @property
    def _is_one_run(self) -> bool:
        return self.end - self.begin == self.into.nbytes and self.into.is_contiguous()

    def span(self) -> Tensor:
        """Memory for the bytes: the place they go to, or one of its own where other rows lie between."""
        if self._is_one_run:
            return self.into.view(-1).view(torch.uint8)
        return torch.empty(self.end - self.begin, dtype=torch.uint8)

    def take(self, span: Tensor) -> None:
        """What was read, cut out of its span where that is not the place itself."""
        if self._is_one_run:
            return
        shape = self.piece.box.length
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        self.into.copy_(span.view(self.into.dtype).as_strided(self.box.length, strides))


def read_all(folder: Folder, manifest: Manifest, needs: Sequence[Need]) -> int:
    """Fill every need. Returns the bytes read; CheckpointError, naming a file, where anything is wrong."""
    wanted = wanted_by_file(needs)
    total = 0
    for file in sorted(wanted):
        info = manifest.files[file]
        total += _read_file(folder / info.name, info, manifest.block_nbytes, wanted[file])
    return total


def wanted_by_file(needs: Sequence[Need]) -> dict[int, list[Wanted]]:
    """The pieces that needs are made of, by the number of the file."""
    wanted: dict[int, list[Wanted]] = defaultdict(list)
    for each in needs:
        for piece, box, into in _cover(each):
            wanted[piece.file].append((each.stored, piece, box, into))
    return wanted


def spans(path: Place, info: FileInfo, block_nbytes: int, wanted: Sequence[Wanted]) -> list[tuple[int, int]]:
    """The bytes of a file that hold what is wanted of it; its header is read for that."""
    entries, _ = _verified_header(path, info, block_nbytes)
    return [(read.begin, read.end) for read in (_place(path, entries, *item) for item in wanted)]


def _cover(each: Need) -> Iterator[tuple[Piece, Box, Tensor]]:
    """The pieces a need is made of: (piece, the box taken of it, where that goes)."""
    stored, at = each.stored, 0
    for target in boxes_of_range(stored.shape, each.start, each.start + each.numel):
        room = each.into[at : at + target.numel].view(target.length)
        at += target.numel
        for piece in stored.pieces:
            both = intersection(target, piece.box)
            if both is not None:
                yield piece, both, room[both.relative_to(target).slices()]


def _read_file(
    path: Place, info: FileInfo, block_nbytes: int, wanted: list[Wanted]
) -> int:
    entries, header_nbytes = _verified_header(path, info, block_nbytes)
    reads = [_place(path, entries, *item) for item in wanted]
    spans = [read.span() for read in reads]
    with BlockReader(path, info, block_nbytes) as reader:
        reader.fill([(read.begin, read.end, _bytes_of(span)) for read, span in zip(reads, spans)])
        read_nbytes = header_nbytes + reader.read_nbytes
    for read, span in zip(reads, spans):
        read.take(span)
    return read_nbytes


def _verified_header(path: Place, info: FileInfo, block_nbytes: int) -> tuple[dict[str, Entry], int]:
    with BlockReader(path, info, block_nbytes) as reader:
        length = int.from_bytes(reader.bytes(0, 8), "little")
    if length > min(info.nbytes - 8, MOST_MANIFEST_NBYTES):
        raise CheckpointError(f"{path} is damaged: its header of {length} bytes is longer than it may be.")
    with BlockReader(path, info, block_nbytes) as reader:
        text = bytes(reader.bytes(8, 8 + length))
        read_nbytes = reader.read_nbytes
    try:
        return parse_header(path, text, info.nbytes), read_nbytes
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _entry_of(path: Place, entries: dict[str, Entry], stored: Stored, piece: Piece) -> Entry:
    entry = entries.get(stored.key(piece.box))
    if entry is None or entry.dtype != DTYPES[stored.dtype] or entry.shape != piece.box.length:
        raise CheckpointError(f"{path} lacks the piece of {stored.role} {stored.name!r} that the manifest lists.")
    return entry


def check_header(folder: Place, manifest: Manifest, number: int) -> None:
    """That a file holds every piece the manifest lists of it; CheckpointError, naming it, where not."""
    info = manifest.files[number]
    path = folder / info.name
    entries, _ = _verified_header(path, info, manifest.block_nbytes)
    for stored in manifest.tensors:
        for piece in stored.pieces:
            if piece.file == number:
                _entry_of(path, entries, stored, piece)


def _place(path: Place, entries: dict[str, Entry], stored: Stored, piece: Piece, box: Box, into: Tensor) -> _Read:
    """Where a box of a piece lies in its file: from its first byte to its last."""
    entry = _entry_of(path, entries, stored, piece)
    inner = box.relative_to(piece.box)
    last = Box(tuple(b + n - 1 for b, n in zip(inner.begin, inner.length)), (1,) * len(inner.begin))
    first_element, last_element = start_of(piece.box.length, inner), start_of(piece.box.length, last)
    itemsize = entry.dtype.itemsize
    begin = entry.begin + first_element * itemsize
    return _Read(begin, entry.begin + (last_element + 1) * itemsize, piece, inner, into)


def _bytes_of(host: Tensor) -> memoryview:
    return memoryview(host.numpy())  # type: ignore[arg-type]
