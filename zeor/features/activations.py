"""Inputs of recomputed units, in host memory between forward and backward: `zeor.shard(..., recompute="offload")`.

`Kept` holds the arguments of one call; large floating tensors among them become `Shelved`s, whose values lie in memory
cut from the `Shelf`'s blocks (pinned where there is an accelerator). On a CPU the same code runs with plain copies.

Note [To the host and back]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
All copies are queued on one side stream; the host waits for none.
1. Out: compute stream (writer of the input) -> side stream copies -> event. The input is held until two later calls
   have sent theirs; then the compute stream waits for its event and it is let go. So whatever is allocated in its
   place is written after the copy has read it, and no more than two inputs wait.
2. Back: device memory is taken on the compute stream, the side stream waits for that stream (last reader of the memory
   -> copy) and copies -> event; the compute stream waits for it where the input is used. When a call's recomputation
   begins, the copy of the call before it is started. An input that is still held is used as it is.
3. A block's part is given back when nothing can ask for it again, that is when its `Shelved` dies with the graph: after
   backward, when a loss is dropped, after an exception. Copies into and out of a part are ordered by the one stream.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch._dynamo.disable, less the import of the compiler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

LEAST_NBYTES = 1 << 20  # smaller tensors are not worth a copy
BLOCK_NBYTES, MOST_NBYTES = 64 << 20, 1 << 30  # pinned memory comes in powers of two: take such blocks and cut them
_ALIGN = 512
HELD_CALLS = 2  # that may still be on their way out


class Part:
    """A range of a block."""

    def __init__(self, shelf: Shelf, block: int, begin: int, end: int):
        self._shelf, self._range = shelf, (block, begin, end)
        self.bytes = shelf.blocks[block][begin:end]

    def __del__(self) -> None:
        self._shelf.given.append(self._range)  # one atomic step: this may run in autograd's thread


class Shelf:
    """Host memory for the inputs of one model's calls, and the stream that moves them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.blocks: list[Tensor] = []
        self.given: deque[tuple[int, int, int]] = deque()
        self._free: list[list[tuple[int, int]]] = []  # by block, sorted ranges
        self._recent: deque[list[weakref.ref[Shelved]]] = deque()  # by call: inputs that may still be held
        self.calls: list[weakref.ref[Sent]] = []  # in the order of forward
        self._seen: dict[int, StorageWeakRef] = {}  # memory that some living call has sent away
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._pins = self._stream is not None

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for block in self.blocks)

    # ---- host memory

    def cut(self, nbytes: int) -> Part:
        self._take_back()
        need = -(-nbytes // _ALIGN) * _ALIGN
        for block, ranges in enumerate(self._free):
            for position, (begin, end) in enumerate(ranges):
                if end - begin >= need:
                    ranges[position : position + 1] = [(begin + need, end)] if end - begin > need else []
                    return Part(self, block, begin, begin + need)
        several = min(4 * need, MOST_NBYTES)  # so that little is lost at a block's end
        size = 1 << (max(need, several, BLOCK_NBYTES) - 1).bit_length()
        self.blocks.append(self._allocate(size))
        self._free.append([(need, size)] if size > need else [])
        return Part(self, len(self.blocks) - 1, 0, need)

    def _allocate(self, nbytes: int) -> Tensor:
        if self._pins:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                logging.getLogger("zeor").warning(
                    "zeor: %.1f MiB of host memory could not be pinned for offloaded inputs (%s); plain memory is "
                    "used from now on, which is slower to copy.",
                    nbytes / 2**20,
                    str(error).splitlines()[0],
                )
        return torch.empty(nbytes, dtype=torch.uint8)

    def _take_back(self) -> None:
        """Free ranges, neighbours joined."""
        touched = set()
        while self.given:
            block, begin, end = self.given.popleft()
            self._free[block].append((begin, end))
            touched.add(block)
        for block in touched:
            joined: list[tuple[int, int]] = []
            for begin, end in sorted(self._free[block]):
                if joined and joined[-1][1] == begin:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((begin, end))
            self._free[block] = joined

    # ---- calls

    def put(self, value: Any) -> Shelved | None:
        return Shelved(self, value) if is_worth_sending(value, self.device, self._seen) else None

    def note(self, call: Sent) -> None:
        """A call has sent its inputs away; see point 1 of Note [To the host and back]."""
        self.calls = [*(ref for ref in self.calls if ref() is not None), weakref.ref(call)]
        living = ((key, ref) for key, ref in self._seen.items() if not ref.expired())
        self._seen = dict(living)
        self._recent.append([weakref.ref(away) for away in call.aways])
        if len(self._recent) > HELD_CALLS:
            for ref in self._recent.popleft():
                away = ref()
                if away is not None:
                    away.let_go()

    def before(self, call: Sent) -> Sent | None:
        """The living call before this one."""
        found = None
        for ref in self.calls:
            each = ref()
            if each is call:
                return found
            found = each if each is not None else found
        return None

    # ---- moving; see Note [To the host and back]

    def compute_stream(self) -> Any:
        return None if self._stream is None else torch.accelerator.current_stream(self.device)

    @contextmanager
    def aside(self, compute: Any) -> Iterator[Any]:
        """Inside, work is queued on the side stream, behind all that the compute stream has; yields what to call for
        an event at its end."""
        if self._stream is None:
            yield lambda: None
            return
        self._stream.wait_stream(compute)
        with self._stream:
            yield self._stream.record_event


def is_worth_sending(value: Any, device: torch.device, seen: dict[int, StorageWeakRef]) -> bool:
    """Large, floating, dense, of this device, and nobody else's: parameters stay, and so does what several calls are
    given (an encoder's output, rotary tables): it would be kept by one and copied by all. `seen`: what some call was
    given; this is added."""
    if type(value) is not Tensor or value.device != device:
        return False
    if not value.is_floating_point() or value.nbytes < LEAST_NBYTES:
        return False
    if value.layout is not torch.strided or torch.empty_like(value, device="meta").stride() != value.stride():
        return False
    if (value.is_leaf and value.requires_grad) or value.is_inference():
        return False
    storage = value.untyped_storage()
    before = seen.get(storage._cdata)
    if before is not None and not before.expired():
        return False
    seen[storage._cdata] = StorageWeakRef(storage)
    return True


class Shelved:
    """One tensor's values on the host."""

    def __init__(self, shelf: Shelf, tensor: Tensor):
        self._shelf = shelf
        self._held: Tensor | None = None  # the tensor itself, while its copy is under way
        self._arriving: Tensor | None = None
        self._home: Any = None  # the stream that device memory was taken on
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._requires_grad = tensor.requires_grad
        self._owner = weakref.ref(tensor if tensor._base is None else tensor._base)
        self._version = tensor._version
        self._part = shelf.cut(tensor.nbytes)
        self._host = self._part.bytes[: tensor.nbytes].view(tensor.dtype)
        self._copy(self._host, _flat(tensor))
        if self._event is not None:
            self._held = tensor.detach()

    @torch.no_grad()
    def _copy(self, into: Tensor, source: Tensor) -> None:
        """On the side stream, behind all that the compute stream has to do."""
        self._home = self._shelf.compute_stream()
        with self._shelf.aside(self._home) as record:
            into.copy_(source, non_blocking=True)
            self._event = record()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.let_go()

    def let_go(self) -> None:
        """Of device memory. Copy -> whoever is given this memory next."""
        if self._held is not None or self._arriving is not None:
            if self._event is not None:
                self._home.wait_event(self._event)
            self._held = self._arriving = None

    def check(self) -> None:
        owner = self._owner()
        if owner is not None and owner._version != self._version:
            raise RuntimeError(
                f"An input of a recomputed unit, of shape {tuple(self._shape)}, was changed in place in the unit or "
                "after it, and backward needs it as it was; change a copy, or name in recompute=[...] other units."
            )

    def start(self) -> None:
        """Bring it, without waiting."""
        if self._held is None and self._arriving is None:
            device = self._shelf.device
            self._arriving = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=device)
            self._copy(_flat(self._arriving), self._host)

    def fetch(self) -> Tensor:
        """The values, on the compute stream. Asked again (retain_graph), they are copied again."""
        self.check()
        self.start()
        here = self._arriving if self._held is None else self._held
        assert here is not None
        self.let_go()
        return here.requires_grad_(self._requires_grad)


def _flat(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor, as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Keeper(Protocol):
    """Where calls send what they keep: a Shelf, or the planner's in its place."""

    def put(self, value: Any) -> Shelved | None: ...
    def note(self, call: Sent) -> None: ...
    def before(self, call: Sent) -> Sent | None: ...


class Sent:
    """What one call has sent away. It lives as long as the graph that may ask for it."""

    def __init__(self, shelf: Keeper):
        self._shelf = shelf
        self.aways: list[Shelved] = []

    def send(self, value: Any) -> Any:
        """A Shelved in the place of a tensor that the shelf takes; anything else as it is."""
        away = self._shelf.put(value)
        if away is None:
            return value
        self.aways.append(away)
        return away

    @_disable_dynamo
    def all_sent(self) -> None:
        if self.aways:
            self._shelf.note(self)

    def check(self) -> None:
        """Raise where a tensor is no more what was sent."""
        for away in self.aways:
            away.check()

    def start(self) -> None:
        for away in self.aways:
            away.start()

    def begin_backward(self) -> None:
        """This call's tensors are needed now, those of the call before it soon."""
        self.start()
        before = self._shelf.before(self)
        if before is not None:
            before.start()


class Kept(Sent):
    """The arguments of one call, for its forward and for each recomputation."""

    def __init__(self, shelf: Keeper, arguments: Any):
        super().__init__(shelf)
        self._first = arguments
        sent: dict[int, Any] = {}  # what was one object stays one

        def once(value: Any) -> Any:
            if id(value) not in sent:
                sent[id(value)] = self.send(value)
            return sent[id(value)]

        self._arguments = tree_map(once, arguments)
        self.all_sent()

    def inputs(self) -> Any:
        """As they were given, for forward; then, for each recomputation, brought from the host."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self.begin_backward()
        here = {away: away.fetch() for away in self.aways}
        return tree_map(lambda value: here[value] if isinstance(value, Shelved) else value, self._arguments)


class Packed(Sent):
    """What autograd saves of a call whose forward is a compiled graph: the compiler has decided what that is, its
    inputs above all. Unlike arguments, it may hold parameters under other names: `ours` is their memory."""

    def __init__(self, shelf: Keeper, ours: set[int]):
        super().__init__(shelf)
        self._ours, self._begun = ours, False

    @_disable_dynamo
    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @_disable_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return self.send(tensor) if plain and tensor.untyped_storage()._cdata not in self._ours else tensor

    @_disable_dynamo
    def _unpack(self, value: Any) -> Any:
        if not isinstance(value, Shelved):
            return value
        if not self._begun:
            self._begun = True
            self.begin_backward()
        return value.fetch()
