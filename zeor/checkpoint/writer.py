"""One safetensors file of pieces, written as it comes, hashed on the way.

    sources --read()--> host memory --blocks--> a few threads, each: hash, then write at its place

Host tensors are hashed and written where they lie; a device's travel through a ring of staging buffers. Hashing
and writing of different blocks overlap; the file is synced before its description is returned. Knows nothing of
models, ranks or manifests beyond the description of a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from zeor.checkpoint.disk import Disk
from zeor.checkpoint.manifest import BLOCK_NBYTES, FileInfo, new_hash
from zeor.checkpoint.tensorfile import DTYPES
from zeor.checkpoint.urls import Place

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STAGING_NBYTES, _STAGINGS = 32 << 20, 3
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


def header(sources: Sequence[Source]) -> bytes:
    """What a safetensors file of these begins with; padded, so that the data is aligned."""
    table, position = {}, 0
    for source in sources:
        end = position + source.nbytes
        entry = {"dtype": _NAMES[source.dtype], "shape": list(source.shape), "data_offsets": [position, end]}
        table[source.key], position = entry, end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    disk: Disk, path: Place, sources: Sequence[Source], progress: Callable[[int], None] = lambda nbytes: None
) -> FileInfo:
    """Write and sync a file; its description. Wider dtypes come first, so that every tensor is aligned."""
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)
    fd = disk.create(path)
    try:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="zeor-save") as threads:
            blocks = _Blocks(disk, fd, threads, progress)
            blocks.feed(header(ordered))
            staging = _Staging()
            for source in ordered:
                staging.feed(source, blocks)
            hashes = blocks.end()
        disk.sync(fd)
    finally:
        disk.close(fd)
    return FileInfo(path.name, blocks.nbytes, hashes)


class _Blocks:
    """Cuts what it is fed into blocks; each is hashed and written by one thread."""

    def __init__(self, disk: Disk, fd: int, threads: ThreadPoolExecutor, progress: Callable[[int], None]):
        self._disk, self._fd, self._threads, self._progress = disk, fd, threads, progress
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
        hasher = new_hash()
        for part in parts:
            hasher.update(part)
        self._disk.write(self._fd, parts, position)
        self._progress(nbytes)
        return hasher.hexdigest()

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
