"""The master: the values an optimizer updates, for this rank's part of one lane.

Four ways to keep it, chosen by dtypes and by who updates it, all of them exact:

    compute   compute is as wide as the master: they are one memory
    split     compute is bf16, master fp32: only a 16-bit remainder is kept beside compute
    wide      anything else (fp16 compute, an update on the host): memory of its own; compute is a cast of it
    coded     compute is 8-bit codes, which the lane makes when all ranks' updates are done (step/coded.py): memory of
              its own, and compute is left alone

`fetch()` makes `values` readable and writable on the device; `spill()` lets compute follow and gives back what needs
not stay. Between the two, and only then, tensors made by `part()` may be used. Where anything of it rests on another
tier (rest.py) these two bring it and take it back whole; the update in training goes chunk by chunk instead
(optim/streaming/streaming.py), and may be under way: `pending` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from zeor.memory.buffers import FullBuffer, Ledger
from zeor.memory.float8 import CODES
from zeor.memory.formats import cast_into, join_into, split_into
from zeor.tiers.rest import Rest

Home = Callable[[int, torch.dtype, str], Rest]  # (numel, dtype, what it is) -> an array where the master rests


class Pending(Protocol):
    """An update under way beside the computation."""

    def hold(self) -> None:
        """The computation, from here on, sees what it leaves on the device."""

    def wait(self) -> None:
        """The host waits until everything is where it rests."""


class Master:
    def __init__(self, values: Tensor, compute: Rest, ledger: Ledger, home: Home | None = None, wide: bool = False):
        """`values`: on the device, in the master's dtype, one for each element of `compute`; adopted, not copied,
        where they stay. `wide`: kept as they are, whatever compute is."""
        self.dtype, self.compute = values.dtype, compute
        self.remainder: Rest | None = None
        self.pending: Pending | None = None
        self._device = values.device
        self._buffer: FullBuffer | None = None
        self.own: Rest | None = None  # the values themselves at rest, where they are not split
        same = values.dtype == compute.dtype and (values.data_ptr() == compute.tensor.data_ptr() or compute.away)
        if same and not wide:
            self.format, self.own = "compute", compute
        elif compute.dtype == torch.bfloat16 and values.dtype == torch.float32 and not wide:
            self.format = "split"
            kept = home or _beside(values)
            self.remainder = kept(values.numel(), torch.int16, "remainder")
        else:
            self.format = "coded" if compute.dtype in CODES else "wide"
            self.own = Rest(values) if home is None else home(values.numel(), values.dtype, "master")
        if self.away or self.format == "split":
            self._buffer = FullBuffer(values.numel(), values.dtype, values.device, ledger, "master")
            self._buffer.free()
        self.store(0, values)

    @property
    def away(self) -> bool:
        """Something of it rests on another tier."""
        return any(rest.away for rest in self.arrays().values())

    def arrays(self) -> dict[str, Rest]:
        """What an update reads and writes: compute and remainder, compute and master, or the master alone."""
        if self.remainder is not None:
            return {"compute": self.compute, "remainder": self.remainder}
        assert self.own is not None
        alone = self.format in ("compute", "coded")
        return {"master": self.own} if alone else {"compute": self.compute, "master": self.own}

    def move(self, home: Home) -> None:
        """The remainder to another tier. Anything else stays where it was made: segments lie over it."""
        if self.remainder is not None:
            self.settle()
            made = home(self.numel, torch.int16, "remainder-moved")
            made.tensor.copy_(self.remainder.tensor)
            self.remainder = made

    @property
    def numel(self) -> int:
        return self.compute.tensor.numel()

    @property
    def values(self) -> Tensor:
        """All values, flat; to be used between fetch and spill."""
        if self._buffer is not None:
            return self._buffer.flat
        assert self.own is not None
        return self.own.tensor

    def part(self, begin: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor over the values from `begin` on that stays valid as an object while they are away."""
        if self._buffer is not None:
            return self._buffer.tensor(begin, shape)
        return self.values[begin : begin + torch.Size(shape).numel()].view(shape)

    def hold(self) -> None:
        """The computation, from here on, sees what an update under way leaves on the device."""
        if self.pending is not None:
            self.pending.hold()

    def settle(self) -> None:
        """No update is under way."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    @torch.no_grad()
    def fetch(self) -> None:
        self.settle()
        if self._buffer is not None and not self._buffer.inflated:
            self._buffer.inflate()
            self.read(0, self._buffer.flat)

    @torch.no_grad()
    def read(self, begin: int, into: Tensor) -> None:
        """The values from `begin` on, into memory of the caller's on the device; nothing else is fetched."""
        self.settle()
        part = slice(begin, begin + into.numel())
        if self.remainder is not None:
            arrays = (self.compute, self.remainder)
            compute, remainder = (rest.read(part.start, part.stop).to(into.device) for rest in arrays)
            join_into(into, compute, remainder)
        else:
            assert self.own is not None
            into.copy_(self.own.read(part.start, part.stop))

    @torch.no_grad()
    def spill(self) -> None:
        """Compute is only ever a cast of the master."""
        if self._buffer is None:
            if self.format == "wide":
                self._cast(0, self.values)
        elif self._buffer.inflated:
            self.store(0, self._buffer.flat)
            self._buffer.free()

    def leave(self) -> None:
        """After a fetch that changed nothing: give back what needs not stay."""
        if self._buffer is not None and self._buffer.inflated:
            self._buffer.free()

    @torch.no_grad()
    def store(self, begin: int, values: Tensor) -> None:
        """New values from `begin` on, into master and compute."""
        self.settle()
        part = slice(begin, begin + values.numel())
        if self.remainder is not None:
            if not self.away:
                split_into(self.compute.tensor[part], self.remainder.tensor[part], values)
                return
            compute = torch.empty_like(values, dtype=self.compute.dtype)
            remainder = torch.empty_like(values, dtype=torch.int16)
            split_into(compute, remainder, values)
            self.compute.tensor[part].copy_(compute)
            self.remainder.tensor[part].copy_(remainder)
            return
        assert self.own is not None
        if self.own.tensor.data_ptr() != values.data_ptr():
            self.own.tensor[part].copy_(values)
        if self.format == "wide":
            self._cast(begin, values)

    def _cast(self, begin: int, values: Tensor) -> None:
        into = self.compute.tensor[begin : begin + values.numel()]
        if into.device == values.device:
            cast_into(into, values)
        else:
            compute = torch.empty_like(values, dtype=self.compute.dtype)
            cast_into(compute, values)
            into.copy_(compute)

    def nbytes(self) -> int:
        """Resident bytes beside compute, on whatever tier."""
        kept = self.remainder if self.remainder is not None else None if self.format == "compute" else self.own
        return 0 if kept is None else kept.tensor.untyped_storage().nbytes() if kept.tier == "device" else kept.nbytes


def _beside(values: Tensor) -> Home:
    return lambda numel, dtype, _: Rest(torch.empty(numel, dtype=dtype, device=values.device))


def master_itemsize(master_dtype: torch.dtype, compute_dtype: torch.dtype) -> int:
    """Resident bytes per element beside compute, as `Master` will choose."""
    if master_dtype == compute_dtype:
        return 0
    if compute_dtype == torch.bfloat16 and master_dtype == torch.float32:
        return 2
    return master_dtype.itemsize
