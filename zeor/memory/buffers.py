"""Buffers that come and go, and the ledger that knows how many bytes of them are alive.

A `FullBuffer` is one storage under many tensors. `free()` gives the memory back while every tensor
over it stays valid as an object; `inflate()` allocates it anew, under the same tensors.

Note [Lent]
~~~~~~~~~~~
Reading memory that was given back crashes, and anybody may keep a tensor over it in any place: a hook's dictionary, an
attribute of a custom Function's ctx, a graph of second order, a numpy array. So a buffer that is freed is only *away*
(whoever needs it gathers it again, into the same storage). Its memory is given back when nobody but the engine looks
at it, and torch counts who does:

1. tensors and arrays over the memory (a bare UntypedStorage in Python's hands is not seen): the use count of the
   storage, against what the engine itself holds, which is counted when the parameters have just been laid there and
   nobody can have another tensor yet, and when the engine itself makes another that it keeps (`owning`);
2. what C++ holds of a parameter itself (a graph that saved it without our hooks): the use count of the parameter,
   against the one that Python holds and the one of autograd's accumulator.

Both counts can only be too high for a moment (a thread of a backend, a debugger, a hook that runs): that costs memory
until the next sweep, at the next free or at the end of a pass. They cannot be too low, because every tensor over a
storage holds a reference to it. A parameter that Python holds counts for nothing: it is `Away` (param.py) and asks
before it is read. What autograd saves of a unit is no tensor: see Note [What autograd saves] in step/saved.py.

Whoever looks at lent memory sees what he would see in plain PyTorch: it is never written while he could read it (a
gather into it is waited for at once), and after a step it is filled anew (`Lent` in step/lent.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from zeor.memory.pages import LARGE_NBYTES, mapped

_use_count = Tensor._use_count  # type: ignore[attr-defined]  # not in torch's stubs


class Ledger:
    """Counts transient bytes by kind, and their peak, as they are allocated and freed."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self.peaks: dict[str, int] = {}  # the most of each kind
        self._idle: list[Tensor] = []  # see Note [Idle blocks]
        self._blocks: dict[int, Tensor] = {}  # handed out, by address
        self._reused: dict[Tensor, tuple[int, int]] = {}  # by block: its storage, and how often that is held while idle
        self._waiting: list[FullBuffer] = []  # freed, and somebody still looks at them: see Note [Lent]

    def add(self, kind: str, nbytes: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + nbytes
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self.peaks[kind] = max(self.peaks.get(kind, 0), self.live[kind])

    def drop(self, kind: str, nbytes: int) -> None:
        self.add(kind, -nbytes)
        assert self.live[kind] >= 0, f"{kind}: freed twice"

    def reset_peak(self) -> None:
        self.peak_nbytes, self.peaks = self.live_nbytes, dict(self.live)

    def sweep(self) -> None:
        """Give back what nobody looks at any more: see Note [Lent]."""
        if self._waiting:
            self._waiting = [buffer for buffer in self._waiting if not buffer.give_back()]

    def wait_for(self, buffer: FullBuffer) -> None:
        """Somebody looks at a freed buffer: it is given back by a later sweep."""
        if buffer not in self._waiting:
            self._waiting.append(buffer)

    # Note [Idle blocks]
    # On a host, allocating and freeing megabytes at a time tears holes into the heap between longer-lived
    # tensors and touches new pages; an accelerator's allocator caches by itself. So blocks that came and went
    # are kept on the host and handed out again, the smallest that fits. Where none fits, the largest idle one is
    # given up for one of the size asked for. So there are never more blocks than were ever in use at once, and each
    # exchange makes their sum larger: after a few steps none is made any more.

    def take(self, kind: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer, to be given back by `give`."""
        nbytes = numel * dtype.itemsize
        self.add(kind, nbytes)
        if device.type != "cpu" or numel == 0:
            return torch.empty(numel, dtype=dtype, device=device)
        found, given_up = _choose(self._idle, nbytes)
        self._idle = [block for block in self._idle if block is not found and block is not given_up]
        block = _new_block(nbytes) if found is None else found
        self._blocks[block.data_ptr()] = block
        return block[:nbytes].view(dtype)

    def give(self, kind: str, flat: Tensor) -> None:
        """The buffer is no longer used by anybody."""
        self.drop(kind, flat.nbytes)
        block = self._blocks.pop(flat.data_ptr(), None)
        if block is not None:
            self._idle.append(block)

    def forget_idle(self) -> None:
        """Give idle blocks back to the system."""
        self._idle = []
        self._reused = {}

    def reuse(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer that is handed out again once nobody holds a tensor or an array over it; not counted here."""
        nbytes = numel * dtype.itemsize
        if device.type != "cpu" or numel == 0:
            return torch.empty(numel, dtype=dtype, device=device)
        free = [block for block, (key, own) in self._reused.items() if torch._C._storage_Use_Count(key) == own]
        found, given_up = _choose(free, nbytes)
        if given_up is not None:
            del self._reused[given_up]
        if found is None:
            found = _new_block(nbytes)
            key = found.untyped_storage()._cdata
            self._reused[found] = key, torch._C._storage_Use_Count(key)
        return found[:nbytes].view(dtype)


def _choose(idle: Sequence[Tensor], nbytes: int) -> tuple[Tensor | None, Tensor | None]:
    """The block to be used, or None and the one to be given up for a new one: see Note [Idle blocks]."""
    fitting = [block for block in idle if block.numel() >= nbytes]
    if fitting:
        return min(fitting, key=Tensor.numel), None
    return None, max(idle, key=Tensor.numel, default=None)


def _new_block(nbytes: int) -> Tensor:
    if nbytes < LARGE_NBYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    return lasting(nbytes, torch.uint8, torch.device("cpu"))


def lasting(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer of zeros that stays: on a host in pages of its own, so that the heap is left to what comes and
    goes, and has no holes between buffers that never move."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.zeros(numel, dtype=dtype, device=device)
    return mapped(nbytes).view(dtype)


class FullBuffer:
    """A flat tensor whose memory can be freed and brought back. Its bytes count as `kind` in the ledger."""

    by_storage: ClassVar[dict[int, weakref.ref[FullBuffer]]] = {}  # those that can be freed, by their storage

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, ledger: Ledger | None, kind: str = "compute"
    ):
        self.kind = kind
        # What can be freed must be torch's own memory; what stays need not be.
        self.flat = torch.empty(numel, dtype=dtype, device=device) if ledger else lasting(numel, dtype, device)
        self.nbytes = numel * dtype.itemsize
        self._storage = self.flat.untyped_storage()
        self._key = self._storage._cdata
        self._ledger = ledger  # None: this buffer is resident and never freed
        self.inflated = True  # its values are here, or on their way
        self.ready = True  # its values are here
        self.asks: Callable[[], None] | None = None  # brings it, when autograd needs it and it is away
        self.params: Sequence[Tensor] = ()  # those that lie over it
        self.offsets: Sequence[int] = ()
        self.wrappers: Mapping[int, Tensor] = {}  # DTensors around some of them, by number
        self._own_uses = 0
        if ledger is not None:
            ledger.add(self.kind, self.nbytes)
            key, table = self._key, FullBuffer.by_storage
            table[key] = weakref.ref(self, lambda _: table.pop(key, None))

    def watch(self, params: Sequence[Tensor], offsets: Sequence[int], wrappers: Mapping[int, Tensor] = {}) -> None:
        """These parameters have just been laid over it, and nobody but the engine has another tensor over it. Of a
        DTensor `params` has the local tensor, and `wrappers` the parameter."""
        self.params, self.offsets, self.wrappers = params, offsets, wrappers
        self._own_uses = torch._C._storage_Use_Count(self._key)

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Tensors over it that are made inside, and kept, are the engine's own (an optimizer's segments, where the
        master is compute itself), so they do not make it lent."""
        before = torch._C._storage_Use_Count(self._key)
        yield
        self._own_uses += torch._C._storage_Use_Count(self._key) - before

    def inflate(self) -> None:
        assert self._ledger is not None
        if not self.inflated:
            self.inflated = True
            if self._storage.size() != self.nbytes:
                self._storage.resize_(self.nbytes)
                self._ledger.add(self.kind, self.nbytes)

    def free(self) -> None:
        assert self._ledger is not None
        if self.inflated and self.nbytes:
            self.inflated = self.ready = False
            self._ledger.sweep()
            if not self.give_back():
                self._ledger.wait_for(self)

    def give_back(self) -> bool:
        """Whether there was nothing to give back, or nobody looks at it: see Note [Lent]."""
        if self.inflated or self._ledger is None or self._storage.size() == 0:
            return True
        if self.lent or not self._storage.resizable():  # a numpy array over it has fixed its size for good
            return False
        self._storage.resize_(0)
        self._ledger.drop(self.kind, self.nbytes)
        return True

    @property
    def lent(self) -> bool:
        """Somebody but the engine looks at its memory: see Note [Lent]."""
        if not self.params:
            return False  # nobody is ever given a tensor over it
        if torch._C._storage_Use_Count(self._key) > self._own_uses:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            held = (*self.params, *self.wrappers.values()) if self.wrappers else self.params
            return any(_use_count(param) > 1 + param.requires_grad for param in held)

    def let_go(self) -> None:
        """Not this buffer's any more: its memory lives as long as a tensor over it does."""
        self.params, self.wrappers, self.asks = (), {}, None
        if self._ledger is not None and self.inflated:
            self._ledger.drop(self.kind, self.nbytes)
            self._ledger = None

    def tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor over this storage with a version counter of its own: filling the buffer does not
        look like an in-place change to autograd, so tensors saved before a free stay usable after it."""
        away = self._storage.size() != self.nbytes
        if away:
            self._storage.resize_(self.nbytes)  # set_ grows a storage that is too small, behind the ledger's back
        made = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
        made.set_(self._storage, offset, shape)  # type: ignore[call-overload]  # the stub knows three more
        if away:
            self._storage.resize_(0)
        return made
