"""Buffers that come and go, and the ledger that knows how many bytes of them are alive.

A `FullBuffer` is one storage under many tensors. `free()` gives the memory back while every tensor
over it stays valid as an object; `inflate()` allocates it anew. That is what lets autograd's saved
tensors live through a unit's absence: they point at the storage, not at the bytes. Reading a freed
buffer crashes, so none of these tensors is ever handed to a user while it can be freed.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Ledger:
    """Counts transient bytes by kind, and their peak, as they are allocated and freed."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.live_nbytes = 0
        self.peak_nbytes = 0

    def add(self, kind: str, nbytes: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + nbytes
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)

    def drop(self, kind: str, nbytes: int) -> None:
        self.add(kind, -nbytes)
        assert self.live[kind] >= 0, f"{kind}: freed twice"

    def reset_peak(self) -> None:
        self.peak_nbytes = self.live_nbytes


class FullBuffer:
    """A flat tensor of a whole lane whose memory can be freed and brought back."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, ledger: Ledger | None = None):
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes = numel * dtype.itemsize
        self._storage = self.flat.untyped_storage()
        self._ledger = ledger  # None: this buffer is resident and never freed
        if ledger is not None:
            ledger.add("compute", self.nbytes)

    @property
    def inflated(self) -> bool:
        return self._storage.size() == self.nbytes

    def inflate(self) -> None:
        assert self._ledger is not None
        if not self.inflated:
            self._storage.resize_(self.nbytes)
            self._ledger.add("compute", self.nbytes)

    def free(self) -> None:
        assert self._ledger is not None
        if self.inflated and self.nbytes:
            self._storage.resize_(0)
            self._ledger.drop("compute", self.nbytes)

    def tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor over this storage with a version counter of its own: filling the buffer does not
        look like an in-place change to autograd, so tensors saved before a free stay usable after it."""
        return torch.empty(0, dtype=self.flat.dtype, device=self.flat.device).set_(  # type: ignore[call-overload]
            self._storage, offset, shape
        )
