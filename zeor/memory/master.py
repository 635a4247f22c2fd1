"""The master: the values an optimizer updates, for this rank's part of one lane.

Three ways to keep it, chosen by dtypes alone and all of them exact:

    compute   compute is as wide as the master: they are one memory
    split     compute is bf16, master fp32: only a 16-bit remainder is kept beside compute
    wide      anything else (fp16 compute): memory of its own; compute is a cast of it

`fetch()` makes `values` readable and writable; `spill()` lets compute follow and gives back what needs
not stay. Between the two, and only then, tensors made by `part()` may be used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeor.memory.buffers import FullBuffer, Ledger
from zeor.memory.formats import cast_into, join_into, split_into


class Master:
    def __init__(self, values: Tensor, compute: Tensor, ledger: Ledger):
        """`values`: master's dtype, one element for each of `compute`; adopted, not copied, where it stays."""
        self.dtype, self.compute, self._ledger = values.dtype, compute, ledger
        self.remainder: Tensor | None = None
        self._buffer: FullBuffer | None = None
        self._own: Tensor | None = None
        if values.data_ptr() == compute.data_ptr() and values.dtype == compute.dtype:
            self.format, self._own = "compute", compute
        elif compute.dtype == torch.bfloat16 and values.dtype == torch.float32:
            self.format = "split"
            self.remainder = torch.empty_like(compute, dtype=torch.int16)
            split_into(compute, self.remainder, values)
            self._buffer = FullBuffer(values.numel(), values.dtype, values.device, ledger, "master")
            self._buffer.free()
        else:
            self.format, self._own = "wide", values
            cast_into(compute, values)

    @property
    def numel(self) -> int:
        return self.compute.numel()

    @property
    def values(self) -> Tensor:
        """All values, flat; to be used between fetch and spill."""
        if self._own is not None:
            return self._own
        assert self._buffer is not None
        return self._buffer.flat

    def part(self, begin: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor over the values from `begin` on that stays valid as an object while they are away."""
        if self._buffer is not None:
            return self._buffer.tensor(begin, shape)
        return self.values[begin : begin + torch.Size(shape).numel()].view(shape)

    @torch.no_grad()
    def fetch(self) -> None:
        if self._buffer is not None and not self._buffer.inflated:
            assert self.remainder is not None
            self._buffer.inflate()
            join_into(self._buffer.flat, self.compute, self.remainder)

    @torch.no_grad()
    def spill(self) -> None:
        """Compute is only ever a cast of the master."""
        if self.format == "wide":
            cast_into(self.compute, self.values)
        elif self._buffer is not None and self._buffer.inflated:
            assert self.remainder is not None
            split_into(self.compute, self.remainder, self._buffer.flat)
            self._buffer.free()

    def leave(self) -> None:
        """After a fetch that changed nothing: give back what needs not stay."""
        if self._buffer is not None and self._buffer.inflated:
            self._buffer.free()

    @torch.no_grad()
    def store(self, begin: int, values: Tensor) -> None:
        """New values from `begin` on, into master and compute."""
        end = begin + values.numel()
        if self.remainder is not None:
            split_into(self.compute[begin:end], self.remainder[begin:end], values)
        else:
            self.values[begin:end].copy_(values)
            if self.format == "wide":
                cast_into(self.compute[begin:end], values)

    def nbytes(self) -> int:
        """Resident bytes beside compute."""
        kept = {"compute": None, "split": self.remainder, "wide": self._own}[self.format]
        return 0 if kept is None else kept.untyped_storage().nbytes()


def master_itemsize(master_dtype: torch.dtype, compute_dtype: torch.dtype) -> int:
    """Resident bytes per element beside compute, as `Master` will choose."""
    if master_dtype == compute_dtype:
        return 0
    if compute_dtype == torch.bfloat16 and master_dtype == torch.float32:
        return 2
    return master_dtype.itemsize
