"""A file of a checkpoint, read by ranges and verified block by block: what a rank does not need is not read.

A `BlockReader` is told which byte ranges are wanted, and where they go. Threads read and hash the blocks these touch,
each block once; a block whose hash is not the manifest's is refused, naming the file.

    disk --direct read--> memory of the caller's, hashed there: whole pages that lie as they do in the file
    disk --direct read--> a small ring of scratch, hashed there --copy--> the rest; on a stream: a device
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeor.checkpoint.files.errors import CheckpointError, readable
from zeor.checkpoint.files.manifest import FileInfo, new_hash
from zeor.checkpoint.files.pages import Bytes, Scratch, address_of, fits
from zeor.checkpoint.files.urls import Place, Url
from zeor.memory.pages import PAGE_NBYTES

_URL_THREADS = 8  # a store answers slowly, but many at once
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_MOST_PARTS = 256  # below every system's IOV_MAX
_PROBES = 5  # pages of a file, asked for to see whether it is in the page cache

Target = tuple[int, Bytes | Tensor]  # a place in a block, and the memory that wants what begins there


class BlockReader:
    """`alone`: no other process reads the same blocks, so that the page cache need not keep them."""

    def __init__(self, path: Place, info: FileInfo, block_nbytes: int, alone: bool = False):
        self._path, self._info, self._block_nbytes = path, info, block_nbytes
        self.read_nbytes, self._lock = 0, threading.Lock()
        self._file: _LocalFile | _UrlFile
        self._file = _UrlFile(path, info) if isinstance(path, Url) else _LocalFile(path, info, alone)
        self._threads = ThreadPoolExecutor(self._file.threads, thread_name_prefix="zeor-load")
        self._ring: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        self._ring_count = 0
        self._stream: torch.Stream | None = None

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def bytes(self, begin: int, end: int) -> bytes:
        whole = torch.empty(end - begin, dtype=torch.uint8)
        self.fill([(begin, end, whole)])
        return whole.numpy().tobytes()

    def verify(self, indices: Iterable[int] | None = None) -> Iterator[int]:
        """Read and hash every block, or those; the bytes of each, one after the other."""
        self._grow(False)

        def check(index: int) -> int:
            self._deliver(index, ())
            return self._size(index)

        yield from self._threads.map(check, range(len(self._info.blocks)) if indices is None else indices)

    def touched(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """The blocks that byte ranges lie in."""
        size = self._block_nbytes
        return sorted({index for begin, end in ranges for index in range(begin // size, -(-end // size))})

    def fill(self, wants: Sequence[tuple[int, int, Tensor]]) -> None:
        """Bytes [begin, end) into flat bytes of the caller's, on the host or a device, for many ranges in any order,
        verified. What goes to the host is read, and hashed, where it is to stay, as far as pages allow."""
        targets: dict[int, list[Target]] = {}
        size, on_device = self._block_nbytes, None
        for begin, end, tensor in wants:
            into: Bytes | Tensor = tensor
            if tensor.device.type == "cpu":
                into = tensor.numpy()
            else:
                on_device = tensor.device
            for index in range(begin // size, -(-end // size)):
                low, high = max(begin, index * size), min(end, (index + 1) * size)
                targets.setdefault(index, []).append((low - index * size, into[low - begin : high - begin]))
        if on_device is not None:
            self._stream = self._stream or torch.Stream(on_device)
            self._stream.wait_stream(torch.accelerator.current_stream(on_device))  # who had this memory -> the copies
        self._grow(on_device is not None)
        jobs = [self._threads.submit(self._deliver, index, targets[index]) for index in sorted(targets)]
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            wait(jobs)
            if self._stream is not None:
                self._stream.synchronize()  # the copies -> whoever reads, or frees, what they fill

    def _grow(self, pinned: bool) -> None:
        """Scratch for every thread; twice that where a block is still on its way while the next one is read."""
        wanted = self._file.threads * (2 if pinned else 1)
        nbytes = min(self._block_nbytes, -(-self._info.nbytes // PAGE_NBYTES) * PAGE_NBYTES)
        for _ in range(self._ring_count, wanted):
            self._ring.put(Scratch(nbytes, pinned))
        self._ring_count = max(self._ring_count, wanted)

    def _deliver(self, index: int, targets: Sequence[Target]) -> None:
        scratch = self._ring.get()
        try:
            scratch.wait()
            through = scratch.bytes.numpy()
            parts, copies = _parts(self._size(index), targets, through)
            self._read(index, parts)
            for at, into in copies:
                if isinstance(into, np.ndarray):
                    np.copyto(into, through[at : at + len(into)])
                else:
                    scratch.send(at, into, self._stream)
        finally:
            self._ring.put(scratch)

    def _size(self, index: int) -> int:
        return min(self._block_nbytes, self._info.nbytes - index * self._block_nbytes)

    def _read(self, index: int, parts: list[Bytes]) -> None:
        """One block into memory that it fills exactly, verified; the last one may be read into more."""
        begin, nbytes, done = index * self._block_nbytes, self._size(index), 0
        hasher, left = new_hash(), parts
        while done < nbytes:
            with readable(self._path):
                got = self._file.read_into(left, begin + done)
            if got == 0:
                raise CheckpointError(f"{self._path} became shorter while it was read.")
            done, left = done + got, _after(left, got)
        for part in parts:
            hasher.update(part[:nbytes].data)
            nbytes -= min(nbytes, len(part))
        if hasher.hexdigest() != self._info.blocks[index]:
            raise CheckpointError(
                f"{self._path} is damaged: bytes {begin} to {begin + self._size(index)} do not match their hash. "
                "Load an earlier checkpoint."
            )
        with self._lock:
            self.read_nbytes += self._size(index)


def _parts(nbytes: int, targets: Sequence[Target], through: Bytes) -> tuple[list[Bytes], list[Target]]:
    """Memory that takes a block, part by part, and what must be copied from `through` afterwards. Whole pages that lie
    in a target as they lie in the block go there at once. Where two targets want the same bytes nothing does: what goes
    to one is not in `through` for the other."""
    ordered = sorted(targets, key=lambda target: target[0])
    if any(later[0] < at + len(into) for (at, into), later in pairwise(ordered)):
        return [through[: -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES]], [target for target in ordered if len(target[1])]
    parts: list[Bytes] = []
    copies: list[Target] = []
    done = 0  # bytes of the block that have a place
    for at, into in ordered:
        if not isinstance(into, np.ndarray):
            copies.append((at, into))
            continue
        begin, end = -(-at // PAGE_NBYTES) * PAGE_NBYTES, (at + len(into)) // PAGE_NBYTES * PAGE_NBYTES
        if begin >= end or (address_of(into) - at) % PAGE_NBYTES:
            copies.append((at, into))
            continue
        if begin > done:
            parts.append(through[done:begin])
        parts.append(into[begin - at : end - at])
        done = end
        copies += [(at, into[: begin - at]), (end, into[end - at :])]
    if done < nbytes:
        parts.append(through[done : -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES])
    return parts, [(at, into) for at, into in copies if len(into)]


def _after(parts: list[Bytes], nbytes: int) -> list[Bytes]:
    """What is left of parts of which the first bytes are filled."""
    left = []
    for part in parts:
        if nbytes < len(part):
            left.append(part[nbytes:])
        nbytes -= min(nbytes, len(part))
    return left


class _LocalFile:
    """Read past the page cache where that works, unless it has the bytes already."""

    threads = 8  # most of them wait for the disk

    def __init__(self, path: Path, info: FileInfo, alone: bool):
        self._fd, self._direct, self._is_direct = -1, -1, False
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with readable(path):
            self._fd = os.open(path, flags)
        found = os.fstat(self._fd).st_size
        if found != info.nbytes:
            self.close()
            raise CheckpointError(f"{path} has {found} bytes; its manifest says {info.nbytes}.")
        if alone and not self._is_cached(info.nbytes):
            try:
                self._direct = os.open(path, flags | getattr(os, "O_DIRECT", 0))
                self._is_direct = True
            except OSError:
                pass  # a filesystem that has no direct reads

    def read_into(self, parts: list[Bytes], position: int) -> int:
        into = [part.data for part in parts[:_MOST_PARTS]]
        if self._is_direct and fits(parts, position):
            try:
                return os.preadv(self._direct, into, position)
            except OSError:
                self._is_direct = False  # it wants more than pages; if it was the disk, the plain read will tell
        return os.preadv(self._fd, into, position)

    def _is_cached(self, nbytes: int) -> bool:
        """Whether the page cache seems to have the file: some of its pages are asked for, if that costs no waiting."""
        try:
            for probe in range(_PROBES):
                position = (nbytes - 1) * probe // _PROBES // PAGE_NBYTES * PAGE_NBYTES
                if not _NOWAIT or os.preadv(self._fd, [bytearray(PAGE_NBYTES)], position, _NOWAIT) <= 0:
                    return False
        except OSError:
            return False
        return True

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)


class _UrlFile:
    threads = _URL_THREADS

    def __init__(self, url: Url, info: FileInfo):
        self._url, self._nbytes = url, info.nbytes  # which was looked at when the checkpoint was opened

    def read_into(self, parts: list[Bytes], position: int) -> int:
        data = parts[0]
        got = self._url.read_range(position, min(position + len(data), self._nbytes))
        if len(got) > len(data):
            raise CheckpointError(f"{self._url} gave {len(got)} bytes where {len(data)} were asked for.")
        data[: len(got)] = np.frombuffer(got, dtype=np.uint8)
        return len(got)

    def close(self) -> None:
        pass
