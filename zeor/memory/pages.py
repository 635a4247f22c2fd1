"""Fresh host memory in pages of its own, large ones where the system has them.

Memory that stays for long, or is large, leaves the heap to what comes and goes. Large pages spare most of the faults of
fresh memory and most look-ups of its addresses. The pages are private: what a forked process writes is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import torch
from torch import Tensor

PAGE_NBYTES = 4096
LARGE_PAGE_NBYTES = 2 << 20
LARGE_NBYTES = 4 << 20  # from here on large pages are asked for


def mapped(nbytes: int, residue: int = 0) -> Tensor:
    """Zeros, as bytes, whose address is `residue` modulo a page. OSError or ValueError: the system gives no more
    mappings."""
    if nbytes < LARGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(_fresh(residue + nbytes), dtype=torch.uint8, count=nbytes, offset=residue)
    # It begins in the first page of a large one. What of the mapping lies before, nobody touches: it takes no memory.
    # The rest behind the last whole large page is of small ones, so that none is taken in vain.
    room = _fresh(nbytes + LARGE_PAGE_NBYTES + PAGE_NBYTES)
    begin = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % LARGE_PAGE_NBYTES
    large_nbytes = (residue + nbytes) // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES
    with contextlib.suppress(OSError):  # a system without large pages
        room.madvise(mmap.MADV_HUGEPAGE, begin, large_nbytes)
    return torch.frombuffer(room, dtype=torch.uint8, count=nbytes, offset=begin + residue)


def _fresh(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back(memory: Tensor) -> None:
    """These bytes are wanted no more: they become zeros, and their whole pages go back to the system until they are
    written anew."""
    begin = memory.data_ptr()
    first, end = -(-begin // PAGE_NBYTES) * PAGE_NBYTES, (begin + memory.numel()) // PAGE_NBYTES * PAGE_NBYTES
    dont_need = getattr(mmap, "MADV_DONTNEED", None)
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" and dont_need is not None else None
    given = first < end and libc is not None
    if given and libc is not None:
        given = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), dont_need) == 0
    # Other kinds of memory (shared, of a file) keep what is in them.
    memory[: first - begin if given else memory.numel()].zero_()
    memory[end - begin if given else memory.numel() :].zero_()
