"""A file of a checkpoint, read by ranges and verified block by block: what a rank does not need is not read.

A `BlockReader` is told beforehand which byte ranges will be wanted. Threads read and hash the blocks they touch
a little ahead, each block once; a block whose hash is not the manifest's is refused, naming the file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import FileInfo, digest

_AHEAD = 8  # blocks in memory at a time, beside the one in use


class BlockReader:
    """Ranges must be asked for in the order they were announced, and the announced ones be sorted by begin."""

    def __init__(self, path: Path, info: FileInfo, block_nbytes: int, ranges: Sequence[tuple[int, int]]):
        self._path, self._info, self._block_nbytes = path, info, block_nbytes
        self.read_nbytes = 0
        self._fd = _open(path, info)
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="zeor-load")
        self._left = deque(_blocks_of(ranges, block_nbytes))
        self._loading: dict[int, Future[memoryview]] = {}
        self._fill()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._fd)

    def parts(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes [begin, end) of the file, verified, in pieces."""
        first = begin // self._block_nbytes
        for index in [index for index in self._loading if index < first]:
            del self._loading[index]
        while begin < end:
            index = begin // self._block_nbytes
            self._fill()
            block, at = self._loading[index].result(), begin - index * self._block_nbytes
            part = block[at : at + end - begin]
            yield part
            begin += len(part)
            if begin < end:
                del self._loading[index]

    def bytes(self, begin: int, end: int) -> bytearray:
        whole = bytearray()
        for part in self.parts(begin, end):
            whole += part
        return whole

    def _fill(self) -> None:
        while self._left and len(self._loading) <= _AHEAD:
            index = self._left.popleft()
            self._loading[index] = self._threads.submit(self._load, index)

    def _load(self, index: int) -> memoryview:
        begin = index * self._block_nbytes
        size = min(self._block_nbytes, self._info.nbytes - begin)
        data = memoryview(bytearray(size))
        done = 0
        while done < size:
            try:
                got = os.preadv(self._fd, [data[done:]], begin + done)
            except OSError as error:
                raise CheckpointError(f"{self._path} cannot be read: {error.strerror}.") from error
            if got == 0:
                raise CheckpointError(f"{self._path} became shorter while it was read.")
            done += got
        if digest(data) != self._info.blocks[index]:
            raise CheckpointError(
                f"{self._path} is damaged: bytes {begin} to {begin + size} do not match their hash. "
                "Load an earlier checkpoint."
            )
        self.read_nbytes += size
        return data


def _open(path: Path, info: FileInfo) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    found = os.fstat(fd).st_size
    if found != info.nbytes:
        os.close(fd)
        raise CheckpointError(f"{path} has {found} bytes; its manifest says {info.nbytes}.")
    return fd


def _blocks_of(ranges: Sequence[tuple[int, int]], block_nbytes: int) -> list[int]:
    """The blocks these ranges touch, each once, in order."""
    found: dict[int, None] = {}
    for begin, end in ranges:
        if begin < end:
            found.update(dict.fromkeys(range(begin // block_nbytes, (end - 1) // block_nbytes + 1)))
    return sorted(found)
