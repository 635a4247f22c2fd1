"""Reading ranges of a checkpoint's tensors, from whatever boxes they were written as, verified on the way.

A `Need` is a range of a flattened tensor and the memory it goes to. `read_all` finds the pieces that cover the
needs, and reads them file by file in the order they lie there, only the blocks they touch. Knows a manifest
and files; no model, no rank.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zeor.checkpoint.files.blocks import BlockReader
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import MOST_MANIFEST_NBYTES, FileInfo, Manifest, Stored, StoredPiece
from zeor.checkpoint.files.pages import empty_at
from zeor.checkpoint.files.plain import DTYPES
from zeor.checkpoint.files.tensorfile import TensorEntry, parse_header
from zeor.checkpoint.files.urls import Place
from zeor.layout.boxes import Box, boxes_of_range, intersection, start_of
from zeor.memory.pages import PAGE_NBYTES

_HOST = torch.device("cpu")


class Folder(Protocol):
    """What gives a checkpoint's files by name."""

    def __truediv__(self, name: str, /) -> Place: ...


@dataclass
class Need:
    """Elements [start, start + numel) of a stored tensor, flattened, into memory of its dtype, which is there from the
    first look at it until it is dropped."""

    stored: Stored
    start: int
    numel: int
    device: torch.device = _HOST  # where it is wanted
    staged_on_host: bool = False  # all the same
    boxes: Sequence[Box] | None = None  # these boxes, one after another, where it is no such range
    residue: int = 0  # of the bytes' place in a file, modulo a page
    _into: Tensor | None = None

    @property
    def into(self) -> Tensor:
        if self._into is None:
            self._into = self._allocate()
        return self._into

    @property
    def on_host(self) -> bool:
        return self.staged_on_host or self.device.type == "cpu"

    def _allocate(self) -> Tensor:
        dtype = DTYPES[self.stored.dtype]
        if not self.on_host:
            with contextlib.suppress(torch.OutOfMemoryError):
                return torch.empty(self.numel, dtype=dtype, device=self.device)
        return empty_at(self.nbytes, self.residue if self.residue % dtype.itemsize == 0 else 0).view(dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.stored.dtype].itemsize

    def drop(self) -> None:
        self._into = None


class Wanted(NamedTuple):
    """A box of a piece, and the part of a need it goes to: inside `target`, which begins at element `at`."""

    need: Need
    piece: StoredPiece
    box: Box
    target: Box
    at: int

    @property
    def begin_nbytes(self) -> int:
        """Where it goes to, from the beginning of the need."""
        begin = self.at + start_of(self.target.length, self.box.relative_to(self.target))
        return begin * DTYPES[self.need.stored.dtype].itemsize

    def into(self) -> Tensor:
        room = self.need.into[self.at : self.at + self.target.numel].view(self.target.length)
        return room[self.box.relative_to(self.target).slices()]


@dataclass
class _Read:
    """Bytes [begin, end) of a file hold, row-major, `box` of a piece's box: they go where `wanted` says."""

    begin: int
    end: int
    box: Box
    wanted: Wanted

    def span(self) -> Tensor:
        """Memory for the bytes: the place they go to, or one of its own where other rows lie between."""
        into = self.wanted.into()
        if self._is_one_run(into):
            return into.view(-1).view(torch.uint8)
        return torch.empty(self.end - self.begin, dtype=torch.uint8)

    def _is_one_run(self, into: Tensor) -> bool:
        return self.end - self.begin == into.nbytes and into.is_contiguous()

    def take(self, span: Tensor) -> None:
        """What was read, cut out of its span where that is not the place itself."""
        into = self.wanted.into()
        if self._is_one_run(into):
            return
        shape = self.wanted.piece.box.length
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        into.copy_(span.view(into.dtype).as_strided(self.box.length, strides))


def read_all(folder: Folder, manifest: Manifest, needs: Sequence[Need], alone: bool = False) -> int:
    """Fill every need. Returns the bytes read; CheckpointError, naming a file, where anything is wrong. `alone`: what
    this process reads no other does."""
    placed = _placed(folder, manifest, needs, alone)
    _align([read for reads in placed.values() for read in reads])
    total = 0
    for file in sorted(placed):
        info = manifest.files[file]
        with BlockReader(folder / info.name, info, manifest.block_nbytes, alone) as reader:
            spans = [read.span() for read in placed[file]]
            reader.fill([(read.begin, read.end, span) for read, span in zip(placed[file], spans)])
            total += reader.read_nbytes
        for read, span in zip(placed[file], spans):
            read.take(span)
    return total


def verify_all(folder: Folder, manifest: Manifest, needs: Sequence[Need]) -> None:
    """Read what needs are made of and keep nothing; the page cache may, for who reads it next."""
    placed = _placed(folder, manifest, needs)
    for file in sorted(placed):
        info = manifest.files[file]
        with BlockReader(folder / info.name, info, manifest.block_nbytes) as reader:
            for _ in reader.verify(reader.touched((read.begin, read.end) for read in placed[file])):
                pass


def _placed(folder: Folder, manifest: Manifest, needs: Sequence[Need], alone: bool = False) -> dict[int, list[_Read]]:
    """What is to be read, by file; every header is verified. No memory is taken for it."""
    found = {}
    for file, wanted in wanted_by_file(needs).items():
        info = manifest.files[file]
        path = folder / info.name
        entries = _verified_header(path, info, manifest.block_nbytes, alone)
        found[file] = [_place(path, entries, each) for each in wanted]
    return found


def _align(reads: Iterable[_Read]) -> None:
    """Let each need lie in memory as its largest part lies in a file: that part is then read without a copy."""
    largest: dict[int, int] = {}
    for read in reads:
        each, nbytes = read.wanted.need, read.end - read.begin
        if nbytes > largest.get(id(each), 0):
            largest[id(each)] = nbytes
            each.residue = (read.begin - read.wanted.begin_nbytes) % PAGE_NBYTES


def wanted_by_file(needs: Sequence[Need]) -> dict[int, list[Wanted]]:
    """The pieces that needs are made of, by the number of the file."""
    wanted: dict[int, list[Wanted]] = defaultdict(list)
    for each in needs:
        for item in _cover(each):
            wanted[item.piece.file].append(item)
    return wanted


def spans(path: Place, info: FileInfo, block_nbytes: int, wanted: Sequence[Wanted]) -> list[tuple[int, int]]:
    """The bytes of a file that hold what is wanted of it; its header is read for that."""
    entries = _verified_header(path, info, block_nbytes)
    return [(read.begin, read.end) for read in (_place(path, entries, item) for item in wanted)]


def _cover(each: Need) -> Iterator[Wanted]:
    """The pieces a need is made of."""
    stored, at = each.stored, 0
    targets = boxes_of_range(stored.shape, each.start, each.start + each.numel) if each.boxes is None else each.boxes
    for target in targets:
        for piece in stored.pieces:
            both = intersection(target, piece.box)
            if both is not None:
                yield Wanted(each, piece, both, target, at)
        at += target.numel


def _verified_header(path: Place, info: FileInfo, block_nbytes: int, alone: bool = False) -> dict[str, TensorEntry]:
    with BlockReader(path, info, block_nbytes, alone) as reader:
        text = reader.bytes(0, min(block_nbytes, info.nbytes))
        length = int.from_bytes(text[:8], "little")
        if length > min(info.nbytes - 8, MOST_MANIFEST_NBYTES):
            raise CheckpointError(f"{path} is damaged: its header of {length} bytes is longer than it may be.")
        if 8 + length > len(text):
            text += reader.bytes(len(text), 8 + length)
    try:
        return parse_header(path, text[8 : 8 + length], info.nbytes)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _entry_of(path: Place, entries: dict[str, TensorEntry], stored: Stored, piece: StoredPiece) -> TensorEntry:
    entry = entries.get(stored.key(piece.box))
    if entry is None or entry.dtype != DTYPES[stored.dtype] or entry.shape != piece.box.length:
        raise CheckpointError(f"{path} lacks the piece of {stored.role} {stored.name!r} that the manifest lists.")
    return entry


def check_header(folder: Place, manifest: Manifest, number: int) -> None:
    """That a file holds every piece the manifest lists of it; CheckpointError, naming it, where not."""
    info = manifest.files[number]
    path = folder / info.name
    entries = _verified_header(path, info, manifest.block_nbytes)
    for stored in manifest.tensors:
        for piece in stored.pieces:
            if piece.file == number:
                _entry_of(path, entries, stored, piece)


def _place(path: Place, entries: dict[str, TensorEntry], wanted: Wanted) -> _Read:
    """Where a box of a piece lies in its file: from its first byte to its last."""
    piece, box = wanted.piece, wanted.box
    entry = _entry_of(path, entries, wanted.need.stored, piece)
    inner = box.relative_to(piece.box)
    last = Box(tuple(b + n - 1 for b, n in zip(inner.begin, inner.length)), (1,) * len(inner.begin))
    first_element, last_element = start_of(piece.box.length, inner), start_of(piece.box.length, last)
    itemsize = entry.dtype.itemsize
    begin = entry.begin + first_element * itemsize
    return _Read(begin, entry.begin + (last_element + 1) * itemsize, inner, wanted)
