"""Host memory for the host tier: zero-filled, page-aligned, pinned to the byte beside an accelerator.

    HostArena --reserve--> one mapping of whole pages, pinned as one  --take--> flat tensors, cut by hand

torch rounds pinned memory up to a power of two; here pages are mapped by hand and then registered with the driver,
so that nothing is lost but the rest of a page per tensor. Tensors begin at a page, as O_DIRECT needs. Memory is
given back when the last tensor over it is gone, and is never unmapped while registered. Knows nothing of lanes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import ClassVar

import torch
from torch import Tensor

from zeor.memory import device
from zeor.memory.pages import LARGE_PAGE_NBYTES, PAGE_NBYTES

_GIB = 1 << 30
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")

log = logging.getLogger("zeor")


def room_nbytes(numel: int, dtype: torch.dtype) -> int:
    """What `HostArena.take(numel, dtype)` takes: whole pages."""
    return -(-numel * dtype.itemsize // PAGE_NBYTES) * PAGE_NBYTES


class HostArena:
    """Host memory taken piece by piece and kept. `reserve` first where the sum is known: one mapping is pinned
    faster than many. Where memory cannot be pinned a warning says so once, and plain memory serves."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._refused = self._closed = False
        self._blocks: list[_Block] = []
        self._left: Tensor | None = None  # of what was reserved
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Allocated, whether taken or only reserved."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks if block.is_mapped)

    @property
    def pinned(self) -> bool:
        """Whether memory comes pinned: asked for, and never refused so far."""
        return self._pin and not self._refused

    def reserve(self, nbytes: int) -> None:
        """Allocate (and pin) room for takes to come, all at once; of an earlier reserve what is left is dropped."""
        nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        with self._lock:
            self._check_open()
            self._left = None
            self._left = self._allocate(nbytes) if nbytes else None

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros that begins at a page."""
        if numel < 0:
            raise ValueError(f"{numel} elements of host memory were asked for; a tensor has 0 or more.")
        room = room_nbytes(numel, dtype)
        with self._lock:
            self._check_open()
            if not room:
                return torch.empty(0, dtype=dtype)
            if self._left is not None and room <= self._left.numel():
                taken, self._left = self._left[:room], self._left[room:]
            else:
                taken = self._allocate(room)
        return taken[: numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unpin everything. Tensors taken stay valid, as plain memory, until they are gone."""
        with self._lock:
            self._closed, self._left = True, None
            for block in self._blocks:
                block.unpin()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This HostArena is closed and gives no more memory; make a new one.")

    def _allocate(self, nbytes: int) -> Tensor:
        """All of a new block."""
        self._blocks = [block for block in self._blocks if block.is_mapped]
        free_nbytes = free_host_nbytes()
        if free_nbytes is not None and nbytes > free_nbytes:
            raise _too_little(nbytes, free_nbytes, "")
        try:
            block, memory = _Block.mapped(nbytes)
        except (OSError, MemoryError) as error:
            raise _too_little(nbytes, free_host_nbytes(), f" ({error})") from error
        self._blocks.append(block)
        if self.pinned:
            why_not = block.pin(memory)
            if why_not is not None:
                self._refused = True
                log.warning(
                    "zeor: host memory could not be pinned (%s, %.2f GiB); plain memory serves from here on, and copies"
                    " to and from the device are slower.", why_not, nbytes / _GIB,
                )  # fmt: skip
        return memory


class _Block:
    """Pages mapped by hand. A finalizer on the buffer under the tensors unpins before the pages are unmapped:

    tensors -> buffer -> pages;   finalizer of the buffer -> block, pages
    """

    # Pinned pages are not there in a forked child: unmapping "them" would unmap what came to lie in their place.
    _kept_by_children: ClassVar[list[mmap.mmap]] = []

    def __init__(self, pages: mmap.mmap, begin: int, nbytes: int) -> None:
        self.begin, self.nbytes = begin, nbytes
        self.is_mapped, self.is_pinned = True, False
        self._pages: mmap.mmap | None = pages
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a finalizer may run inside any call, on any thread

    @classmethod
    def mapped(cls, nbytes: int) -> tuple[_Block, Tensor]:
        """Fresh pages, all of them there: faulted in by all of torch's threads, large ones where there are."""
        # Room to begin at a large page; what is not touched takes no memory.
        slack = LARGE_PAGE_NBYTES if nbytes >= LARGE_PAGE_NBYTES else 0
        pages = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = memoryview(pages)
        with torch.inference_mode(False):
            whole = torch.frombuffer(buffer, dtype=torch.uint8)
            begin = -whole.data_ptr() % LARGE_PAGE_NBYTES if slack else 0
            block, memory = cls(pages, begin, nbytes), whole[begin : begin + nbytes]
            weakref.finalize(buffer, block._release)
            if slack and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a system without large pages
                    pages.madvise(mmap.MADV_HUGEPAGE, begin, nbytes // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES)
            memory.zero_()
        return block, memory

    def pin(self, memory: Tensor) -> str | None:
        why_not = device.pin(memory)
        self.is_pinned = why_not is None
        if self.is_pinned and self._pages is not None and hasattr(mmap, "MADV_DONTFORK"):
            # A fork would copy pinned pages at once: a loader's worker would take as much memory again.
            self._pages.madvise(mmap.MADV_DONTFORK)
        return why_not

    def unpin(self) -> None:
        with self._lock:
            if not self.is_pinned or self._pages is None or os.getpid() != self._owner:
                return
            self.is_pinned = False
            with torch.inference_mode(False):
                whole = torch.frombuffer(self._pages, dtype=torch.uint8)
            device.unpin(whole[self.begin : self.begin + self.nbytes])

    def _release(self) -> None:
        """The buffer is gone (or the process ends): unpin; the pages are unmapped with their last holder."""
        if os.getpid() != self._owner:
            if self.is_pinned and self._pages is not None:
                self._kept_by_children.append(self._pages)
        else:
            self.unpin()
        self.is_mapped, self._pages = False, None


def _too_little(nbytes: int, free_nbytes: int | None, why: str) -> RuntimeError:
    free = "an unknown amount" if free_nbytes is None else f"{free_nbytes / _GIB:.2f} GiB"
    return RuntimeError(
        f"Not enough host memory: {nbytes / _GIB:.2f} GiB are needed at once, {free} can be had{why}; keep more on "
        "the device or on disk (offload=zeor.Offload(...), host_budget=), use a smaller format (moments='int8'), raise "
        "the container's limit, or run fewer ranks on this host."
    )


def free_host_nbytes() -> int | None:
    """What can be allocated on this host without swapping, limits of containers included; None: nothing is known."""
    kib = _number(_PROC / "meminfo", "MemAvailable:")
    return min([*_free_of_groups(), *([] if kib is None else [kib * 1024])], default=None)


def _number(file: Path, name: str) -> int | None:
    """What stands behind a name in a file of the system's; None: nothing does."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.split(maxsplit=1)[:1] == [name]:
                return int(line.split()[1])
    return None


def _free_of_groups() -> Iterator[int]:
    """What each control group around this process leaves it: its own, and those above, each with a limit of its own."""
    for folder in _group_folders():
        for limit, used, kept in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max": no limit
                limit_nbytes = int((folder / limit).read_text())
                left_nbytes = limit_nbytes - int((folder / used).read_text())
                # Cached files make way for memory that is asked for.
                cached_nbytes = sum(_number(folder / "memory.stat", name) or 0 for name in kept)
                yield max(0, left_nbytes + min(cached_nbytes, limit_nbytes))


def _group_folders() -> set[Path]:
    """Where the limits stand: inside a container at the top, else below by the process's own path; both versions."""
    roots = {"": [_CGROUP, _CGROUP / "unified"], "memory": [_CGROUP / "memory"]}
    folders = {root for those in roots.values() for root in those}
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for root in roots.get("memory" if "memory" in controllers.split(",") else controllers, []):
                inner = PurePosixPath(path.lstrip("/"))
                folders |= {root / part for part in (inner, *inner.parents)}
    return folders
