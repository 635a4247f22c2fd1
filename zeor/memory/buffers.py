"""Buffers that come and go, and the ledger that knows how many bytes of them are alive.

A `FullBuffer` is one storage under many tensors. `free()` gives the memory back while every tensor
over it stays valid as an object; `inflate()` allocates it anew. That is what lets autograd's saved
tensors live through a unit's absence: they point at the storage, not at the bytes. Reading a freed
buffer crashes, so none of these tensors is ever handed to a user while it can be freed.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


class Ledger:
    """Counts transient bytes by kind, and their peak, as they are allocated and freed."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self._idle: list[Tensor] = []  # see Note [Idle blocks]
        self._lent: dict[int, Tensor] = {}
        self._largest_nbytes = 0

    def add(self, kind: str, nbytes: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + nbytes
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)

    def drop(self, kind: str, nbytes: int) -> None:
        self.add(kind, -nbytes)
        assert self.live[kind] >= 0, f"{kind}: freed twice"

    def reset_peak(self) -> None:
        self.peak_nbytes = self.live_nbytes

    # Note [Idle blocks]
    # On a host, allocating and freeing megabytes at a time tears holes into the heap between longer-lived
    # tensors and touches new pages; an accelerator's allocator caches by itself. So blocks that came and went
    # are kept on the host, all of the size of the largest asked for, and handed out again.

    def take(self, kind: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer, to be given back by `give`."""
        nbytes = numel * dtype.itemsize
        self.add(kind, nbytes)
        if device.type != "cpu" or numel == 0:
            return torch.empty(numel, dtype=dtype, device=device)
        fitting = [block for block in self._idle if block.numel() >= nbytes]
        block = min(fitting, key=Tensor.numel) if fitting else None
        if block is None:
            self._idle.clear()  # too small for what is asked for now, so they would stay too small
            self._largest_nbytes = max(self._largest_nbytes, nbytes)
            block = torch.empty(self._largest_nbytes, dtype=torch.uint8)
        else:
            self._idle = [other for other in self._idle if other is not block]
        self._lent[block.data_ptr()] = block
        return block[:nbytes].view(dtype)

    def give(self, kind: str, flat: Tensor) -> None:
        """The buffer is no longer used by anybody."""
        self.drop(kind, flat.nbytes)
        block = self._lent.pop(flat.data_ptr(), None)
        if block is not None:
            self._idle.append(block)


def lasting(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer of zeros that stays: on a host in pages of its own, so that the heap is left to what comes and
    goes, and has no holes between buffers that never move."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype)


class FullBuffer:
    """A flat tensor whose memory can be freed and brought back. Its bytes count as `kind` in the ledger."""

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, ledger: Ledger | None, kind: str = "compute"
    ):
        self.kind = kind
        # What can be freed must be torch's own memory; what stays need not be.
        self.flat = torch.empty(numel, dtype=dtype, device=device) if ledger else lasting(numel, dtype, device)
        self.nbytes = numel * dtype.itemsize
        self._storage = self.flat.untyped_storage()
        self._ledger = ledger  # None: this buffer is resident and never freed
        if ledger is not None:
            ledger.add(self.kind, self.nbytes)

    @property
    def inflated(self) -> bool:
        return self._storage.size() == self.nbytes

    def inflate(self) -> None:
        assert self._ledger is not None
        if not self.inflated:
            self._storage.resize_(self.nbytes)
            self._ledger.add(self.kind, self.nbytes)

    def free(self) -> None:
        assert self._ledger is not None
        if self.inflated and self.nbytes:
            self._storage.resize_(0)
            self._ledger.drop(self.kind, self.nbytes)

    def let_go(self) -> None:
        """Not this buffer's any more: its memory lives as long as a tensor over it does."""
        if self._ledger is not None and self.inflated:
            self._ledger.drop(self.kind, self.nbytes)
            self._ledger = None

    def tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor over this storage with a version counter of its own: filling the buffer does not
        look like an in-place change to autograd, so tensors saved before a free stay usable after it."""
        away = not self.inflated
        if away:
            self.inflate()  # set_ grows a storage that is too small, behind the ledger's back
        made = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
        made.set_(self._storage, offset, shape)  # type: ignore[call-overload]
        if away:
            self.free()
        return made
