"""One safetensors file of pieces, written as it comes, hashed on the way.

    sources --read()--> host memory --blocks--> threads, each: copy to whole pages, hash, write past the page cache

What cannot be written so (the end of a file, a filesystem that has no direct writes) is hashed and written where it
lies. A device's tensors travel through a ring of staging buffers. Hashing and writing of different blocks overlap; the
file is synced before its description is returned. Knows nothing of models, ranks or manifests beyond the description
of a file.
"""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.manifest import BLOCK_NBYTES, FileInfo, new_hash
from zeor.checkpoint.files.pages import Scratch
from zeor.checkpoint.files.tensorfile import make_header
from zeor.checkpoint.files.urls import Place

_STAGING_NBYTES, _STAGINGS = 32 << 20, 3
_ALIGNED = 64  # where the data begins: as memory likes it
_THREADS = max(4, min(8, os.cpu_count() or 1))  # most of them wait for the disk
_MOST_JOBS = 16  # blocks read and not written yet


@dataclass(frozen=True)
class Source:
    """A tensor to be written; read() is called when its turn comes, and what it returns must not change until the
    file is written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_file(
    disk: Disk, path: Place, sources: Sequence[Source], progress: Callable[[int], None] = lambda nbytes: None
) -> FileInfo:
    """Write and sync a file; its description. Wider dtypes come first, so that every tensor is aligned."""
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)
    begin = make_header(((source.key, source.dtype, source.shape) for source in ordered), _ALIGNED)
    nbytes = len(begin) + sum(source.nbytes for source in ordered)
    fd, direct = disk.create(path), -1
    try:
        if nbytes >= BLOCK_NBYTES:
            disk.reserve(fd, nbytes)
            direct = disk.open_direct(path)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="zeor-save") as threads:
            blocks = _Blocks(disk, (fd, direct), threads, progress)
            blocks.feed(begin)
            staging = _Staging()
            for source in ordered:
                staging.feed(source, blocks)
            hashes = blocks.end()
        disk.sync(fd)
    finally:
        if direct >= 0:
            disk.close(direct)
        disk.close(fd)
    return FileInfo(path.name, blocks.nbytes, hashes)


class _Blocks:
    """Cuts what it is fed into blocks; each is hashed and written by one thread. `file`: its descriptor, and one of the
    same file past the page cache, or -1."""

    def __init__(self, disk: Disk, file: tuple[int, int], threads: ThreadPoolExecutor, progress: Callable[[int], None]):
        self._disk, (self._fd, self._direct), self._threads, self._progress = disk, file, threads, progress
        self._ring: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        if self._direct >= 0:
            for _ in range(_THREADS):
                self._ring.put(Scratch(BLOCK_NBYTES, pinned=False))
        self._parts: list[memoryview | bytes] = []
        self._held_nbytes = 0
        self._jobs: list[Future[str]] = []
        self._waited = 0
        self.nbytes = 0

    def feed(self, data: memoryview | bytes) -> None:
        """The memory must stay as it is until `settle`."""
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK_NBYTES - self._held_nbytes]
            self._parts.append(part)
            self._held_nbytes += len(part)
            self.nbytes += len(part)
            view = view[len(part) :]
            if self._held_nbytes == BLOCK_NBYTES:
                self._submit()

    def _submit(self) -> None:
        position, parts = self.nbytes - self._held_nbytes, self._parts
        self._jobs.append(self._threads.submit(self._job, parts, position, self._held_nbytes))
        self._parts, self._held_nbytes = [], 0
        if len(self._jobs) > _MOST_JOBS:
            self._jobs[-_MOST_JOBS].result()  # a temporary lives as long as its job

    def _job(self, parts: list[memoryview | bytes], position: int, nbytes: int) -> str:
        if self._direct >= 0 and nbytes == BLOCK_NBYTES:
            scratch = self._ring.get()
            try:
                found = self._write_pages(parts, position, scratch)
            finally:
                self._ring.put(scratch)
        else:
            found = _digest(parts)
            self._disk.write(self._fd, parts, position)
        self._progress(nbytes)
        return found

    def _write_pages(self, parts: list[memoryview | bytes], position: int, scratch: Scratch) -> str:
        """Gathered where a direct write can take it, and where its hash finds it at hand."""
        data, done = scratch.bytes.numpy(), 0
        for part in parts:
            np.copyto(data[done : done + len(part)], np.frombuffer(part, dtype=np.uint8))
            done += len(part)
        found = _digest([data.data])
        try:
            self._disk.write(self._direct, [data.data], position)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it wants more than pages
                raise
            self._disk.write(self._fd, [data.data], position)
        return found

    def settle(self) -> None:
        """Everything fed so far may be overwritten: full blocks are written, the begun one is copied."""
        if self._parts:
            self._parts = [b"".join(self._parts)]
        for job in self._jobs[self._waited :]:
            job.result()
        self._waited = len(self._jobs)

    def end(self) -> list[str]:
        if self._parts:
            self._submit()
        return [job.result() for job in self._jobs]


def _digest(parts: Sequence[memoryview | bytes]) -> str:
    hasher = new_hash()
    for part in parts:
        hasher.update(part)
    return str(hasher.hexdigest())


class _Staging:
    """Tensors as host bytes: in place on the host, through a ring of buffers from a device."""

    def __init__(self) -> None:
        self._ring: list[Tensor] = []
        self._turn = 0

    def feed(self, source: Source, blocks: _Blocks) -> None:
        tensor = source.read().detach()
        assert tensor.dtype == source.dtype and tensor.numel() == torch.Size(source.shape).numel(), source.key
        if not tensor.numel():
            return
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            blocks.feed(_bytes_of(flat))
            return
        for begin in range(0, flat.numel(), _STAGING_NBYTES):
            part = flat[begin : begin + _STAGING_NBYTES]
            blocks.feed(_bytes_of(self._next(blocks)[: part.numel()].copy_(part)))

    def _next(self, blocks: _Blocks) -> Tensor:
        if len(self._ring) < _STAGINGS:
            pin = torch.accelerator.is_available()
            self._ring.append(torch.empty(_STAGING_NBYTES, dtype=torch.uint8, pin_memory=pin))
            return self._ring[-1]
        if self._turn % _STAGINGS == 0:
            blocks.settle()  # every buffer of the ring was handed out
        self._turn += 1
        return self._ring[(self._turn - 1) % _STAGINGS]


def _bytes_of(host: Tensor) -> memoryview:
    """The memory of a flat tensor of bytes; the view keeps it alive."""
    return memoryview(host.numpy())  # type: ignore[arg-type]
