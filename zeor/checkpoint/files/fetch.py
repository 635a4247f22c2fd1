"""Files of a checkpoint that this rank's host does not have: the blocks that are needed, from ranks that have them.

1. The first block of each such file, then the rest of its header: it says where pieces lie.
2. The blocks of the pieces this rank needs.
Each block is verified as it comes, and put at its place in a file of the same length, with holes for what is not
needed; reading.py then reads that as it reads any. Every rank takes part, for others may need what it has.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeor.checkpoint.files.disk import DISK
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.hidden import Hidden
from zeor.checkpoint.files.manifest import digest
from zeor.checkpoint.files.names import name_of
from zeor.checkpoint.files.opening import Opened
from zeor.checkpoint.files.reading import Need, Wanted, spans, wanted_by_file
from zeor.checkpoint.files.urls import Place
from zeor.comm.agree import exchange, raise_first
from zeor.comm.axes import Axis
from zeor.comm.transfers import Transfer, move


class Files:
    """The files of a checkpoint, as this rank can read them: `files / name`."""

    def __init__(self, axis: Axis, opened: Opened):
        self._axis, self._opened = axis, opened
        self._path, self._manifest = opened.path, opened.manifest
        self._spool: Path | None = None
        self._hidden: Hidden | None = None  # the spool, where it lies beside the checkpoint
        self._have: dict[int, set[int]] = {}  # blocks, by file
        self._problem = ""

    def __truediv__(self, name: str) -> Place:
        return self._spool / name if self._spool is not None and not self._is_here(name) else self._path / name

    def __str__(self) -> str:
        return str(self._path)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._hidden is not None:
            with contextlib.suppress(OSError):  # what cannot be removed the next save removes
                self._hidden.remove()
        elif self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)

    def _is_here(self, name: str) -> bool:
        return not self._opened.holders or self._axis.rank in self._opened.holders[name]

    def fetch(self, needs: Iterable[Need]) -> None:
        """Every rank calls it. What it leaves unread of `needs`' memory stays unallocated."""
        if not self._opened.holders:
            return
        files, size = self._manifest.files, self._manifest.block_nbytes
        everything = wanted_by_file(list(needs))  # no memory is taken for it
        wanted = {number: items for number, items in everything.items() if not self._is_here(files[number].name)}
        # 1.
        self._round(lambda: {number: [0] for number in wanted})
        self._round(lambda: {number: range(1, -(-self._header_end(number) // size)) for number in wanted})
        # 2.
        self._round(lambda: {number: self._blocks(number, wanted[number]) for number in wanted})

    def _blocks(self, number: int, wanted: list[Wanted]) -> list[int]:
        info, size = self._manifest.files[number], self._manifest.block_nbytes
        found = spans(self / info.name, info, size, wanted)
        return sorted({block for begin, end in found for block in range(begin // size, -(-end // size))})

    def _header_end(self, number: int) -> int:
        """Where a file's header ends, as its first block says; no further than the file."""
        info = self._manifest.files[number]
        with open(self / info.name, "rb") as file:
            return min(8 + int.from_bytes(file.read(8), "little"), info.nbytes)

    # ---- one round

    def _round(self, asked: Callable[[], Mapping[int, Iterable[int]]]) -> None:
        """Fetch blocks, by file; what went wrong on any rank is raised on all."""
        new: list[list[Any]] = []
        try:
            for number, blocks in asked().items():
                new.append([number, [block for block in blocks if block not in self._have.get(number, ())]])
        except Exception as error:  # other ranks wait for what this one has
            new, self._problem = [], str(error)
        requests = exchange(self._axis, new, "requests for blocks of files")
        label = "fetching of a checkpoint's blocks from other hosts"
        move(self._axis, self._transfers(requests), self._read, self._take, label)
        raise_first(exchange(self._axis, self._problem, "exchange about fetched blocks"), CheckpointError)

    def _transfers(self, requests: list[list[tuple[int, list[int]]]]) -> list[Transfer]:
        """The same on every rank; ranks take turns, so that all are served at the same time."""
        by_rank = [[self._transfer(rank, n, b) for n, blocks in asked for b in blocks]
                   for rank, asked in enumerate(requests)]  # fmt: skip
        return [each for turn in itertools.zip_longest(*by_rank) for each in turn if each is not None]

    def _transfer(self, rank: int, number: int, block: int) -> Transfer:
        info, size = self._manifest.files[number], self._manifest.block_nbytes
        holders = self._opened.holders[info.name]
        return Transfer(holders[rank % len(holders)], rank, min(size, info.nbytes - block * size), (number, block))

    def _read(self, each: Transfer) -> Tensor:
        number, block = each.key
        path = self._path / self._manifest.files[number].name
        data = bytearray(each.nbytes)
        try:
            with open(str(path), "rb") as file:
                file.seek(block * self._manifest.block_nbytes)
                file.readinto(data)
        except OSError as error:
            self._problem = self._problem or f"{path} cannot be read: {error.strerror}."
        return torch.frombuffer(data, dtype=torch.uint8)

    def _take(self, each: Transfer, values: Tensor) -> None:
        number, block = each.key
        info = self._manifest.files[number]
        data = memoryview(values.numpy())  # type: ignore[arg-type]
        if digest(data) != info.blocks[block]:
            self._problem = self._problem or (
                f"{info.name}, as rank {each.source} has it, is damaged: block {block} does not match its hash. "
                "Load an earlier checkpoint."
            )
            return
        try:
            with open(self._spooled(number), "r+b") as file:
                file.seek(block * self._manifest.block_nbytes)
                file.write(data)
        except OSError as error:
            self._problem = self._problem or f"What is fetched from other hosts cannot be kept: {error.strerror}."
        self._have.setdefault(number, set()).add(block)

    def _spooled(self, number: int) -> Path:
        """The file that fetched blocks go to; beside the checkpoint, where room is, or with temporary files."""
        info = self._manifest.files[number]
        if self._spool is None:
            beside = Hidden(DISK, Path(self._path).parent, name_of(self._manifest.step, 0))
            try:
                beside.make()
                self._spool, self._hidden = beside.path, beside
            except OSError:
                with contextlib.suppress(OSError):
                    beside.remove()
                self._spool = Path(tempfile.mkdtemp(prefix="zeor-"))
        path = self._spool / info.name
        if not path.exists():
            with open(path, "wb") as file:
                os.truncate(file.fileno(), info.nbytes)
        return path
