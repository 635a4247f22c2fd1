"""A file of a checkpoint, read by ranges and verified block by block: what a rank does not need is not read.

A `BlockReader` is told which byte ranges are wanted, and where they go. Threads read and hash the blocks these touch,
each block once; a block whose hash is not the manifest's is refused, naming the file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import FileInfo, digest
from zeor.checkpoint.urls import Place, Url

_URL_THREADS = 8  # a store answers slowly, but many at once


class BlockReader:
    def __init__(self, path: Place, info: FileInfo, block_nbytes: int):
        self._path, self._info, self._block_nbytes = path, info, block_nbytes
        self.read_nbytes, self._lock = 0, threading.Lock()
        self._file: _LocalFile | _UrlFile = _UrlFile(path, info) if isinstance(path, Url) else _LocalFile(path, info)
        self._threads = ThreadPoolExecutor(self._file.threads, thread_name_prefix="zeor-load")

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def bytes(self, begin: int, end: int) -> bytearray:
        whole = bytearray(end - begin)
        self.fill([(begin, end, memoryview(whole))])
        return whole

    def verify(self) -> Iterator[int]:
        """Read and hash every block; the bytes of each, one after the other."""

        def check(index: int) -> int:
            return len(self._load(index))

        yield from self._threads.map(check, range(len(self._info.blocks)))

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
