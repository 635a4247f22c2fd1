"""A file of a checkpoint, read by ranges and verified block by block: what a rank does not need is not read.

A `BlockReader` is told beforehand which byte ranges will be wanted. Threads read and hash the blocks they touch
a little ahead, each block once; a block whose hash is not the manifest's is refused, naming the file.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import FileInfo, digest
from zeor.checkpoint.urls import Place, Url

_AHEAD = 8  # blocks in memory at a time, beside the one in use
_URL_THREADS = 8  # a store answers slowly, but many at once


class BlockReader:
    """Ranges must be asked for in the order they were announced, and the announced ones be sorted by begin."""

    def __init__(self, path: Place, info: FileInfo, block_nbytes: int, ranges: Sequence[tuple[int, int]]):
        self._path, self._info, self._block_nbytes = path, info, block_nbytes
        self.read_nbytes, self._lock = 0, threading.Lock()
        self._file: _LocalFile | _UrlFile = _UrlFile(path, info) if isinstance(path, Url) else _LocalFile(path, info)
        self._threads = ThreadPoolExecutor(self._file.threads, thread_name_prefix="zeor-load")
        self._left = deque(_blocks_of(ranges, block_nbytes))
        self._loading: dict[int, Future[memoryview]] = {}
        self._fill()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def parts(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes [begin, end) of the file, verified, in pieces."""
        first = begin // self._block_nbytes
        for index in [index for index in self._loading if index < first]:
            del self._loading[index]
        while begin < end:
            index = begin // self._block_nbytes
            self._fill()
            if index not in self._loading:  # two ranges meet, and the first of them was read to its end
                self._loading[index] = self._threads.submit(self._load, index)
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

    def fill(self, wants: Sequence[tuple[int, int, memoryview]]) -> None:
        """Bytes [begin, end) into memory of the caller's, for many ranges in any order, verified. A block that one
        range takes whole is read, and hashed, where it is to stay."""
        targets: dict[int, list[tuple[int, memoryview]]] = {}
        size = self._block_nbytes
        for begin, end, into in wants:
            for index in range(begin // size, -(-end // size)):
                low, high = max(begin, index * size), min(end, (index + 1) * size)
                targets.setdefault(index, []).append((low - index * size, into[low - begin : high - begin]))
        jobs = [self._threads.submit(self._deliver, index, targets[index]) for index in sorted(targets)]
        for job in jobs:
            job.result()

    def _deliver(self, index: int, targets: Sequence[tuple[int, memoryview]]) -> None:
        if len(targets) == 1 and len(targets[0][1]) == self._size(index):
            self._read(index, targets[0][1])
            return
        data = self._load(index)
        for at, into in targets:
            into[:] = data[at : at + len(into)]

    def _load(self, index: int) -> memoryview:
        data = memoryview(bytearray(self._size(index)))
        self._read(index, data)
        return data

    def _size(self, index: int) -> int:
        return min(self._block_nbytes, self._info.nbytes - index * self._block_nbytes)

    def _read(self, index: int, data: memoryview) -> None:
        """One block, verified."""
        begin, done = index * self._block_nbytes, 0
        while done < len(data):
            try:
                got = self._file.read_into(data[done:], begin + done)
            except OSError as error:
                raise CheckpointError(f"{self._path} cannot be read: {error.strerror}.") from error
            if got == 0:
                raise CheckpointError(f"{self._path} became shorter while it was read.")
            done += got
        if digest(data) != self._info.blocks[index]:
            raise CheckpointError(
                f"{self._path} is damaged: bytes {begin} to {begin + len(data)} do not match their hash. "
                "Load an earlier checkpoint."
            )
        with self._lock:
            self.read_nbytes += len(data)


class _LocalFile:
    threads = min(8, os.cpu_count() or 1)

    def __init__(self, path: Path, info: FileInfo):
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        found = os.fstat(self._fd).st_size
        if found != info.nbytes:
            self.close()
            raise CheckpointError(f"{path} has {found} bytes; its manifest says {info.nbytes}.")

    def read_into(self, data: memoryview, position: int) -> int:
        return os.preadv(self._fd, [data], position)

    def close(self) -> None:
        os.close(self._fd)


class _UrlFile:
    threads = _URL_THREADS

    def __init__(self, url: Url, info: FileInfo):
        self._url = url  # its size was looked at when the checkpoint was opened, and every block has a hash

    def read_into(self, data: memoryview, position: int) -> int:
        got = self._url.read_range(position, position + len(data))
        if len(got) > len(data):
            raise CheckpointError(f"{self._url} gave {len(got)} bytes where {len(data)} were asked for.")
        data[: len(got)] = got
        return len(got)

    def close(self) -> None:
        pass


def _blocks_of(ranges: Sequence[tuple[int, int]], block_nbytes: int) -> list[int]:
    """The blocks these ranges touch, each once, in order."""
    found: dict[int, None] = {}
    for begin, end in ranges:
        if begin < end:
            found.update(dict.fromkeys(range(begin // block_nbytes, (end - 1) // block_nbytes + 1)))
    return sorted(found)
