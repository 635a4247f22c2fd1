"""What autograd saves in a unit's forward: of parameters a handle, never their memory.

Note [What autograd saves]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Where parameters are freed between uses, backward needs a unit when a node reads one of its parameters, and at no other
time. Which output led there (a loss kept as an attribute, a hook's activations, any container) does not matter.

1. While a forward runs, torch's hooks for saved tensors are ours. A tensor over a unit's memory (the parameter, its
   transpose, any view) is saved as a `SavedRef`: which buffer, which part of it, which version. Anything else is saved
   as it is. Where hooks of another's are on top (checkpointing's, save_on_cpu's) they see everything, as
   without zeor: a checkpoint counts what is saved, in a forward that may begin before or after ours did.
2. Reading a handle in backward demands the unit: it is gathered by the walk of that backward (order.py), if the
   gradient of an output has not brought it before. So ranks agree on the order of gathers, and may differ in what
   they need. Autograd runs nodes by falling sequence number, so a side branch comes at its unit's turn.
3. Whoever holds a parameter's memory in any other way (a tensor on a ctx, hooks of another's, a graph of second
   order) holds it: see Note [Lent] in memory/buffers.py.

So every byte that a node reads is gathered by 2 or was never given back by 3: there is no third way to hold a tensor.
Hooks take autograd's own check of versions off; it is done here, with the same words.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from zeor.memory.buffers import FullBuffer
from zeor.memory.placed import is_placed, local_tensor, wrapped

_buffer_of = FullBuffer.by_storage.get
_top = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]  # not in torch's stubs


class SavedRef(tuple[FullBuffer, torch.Size, tuple[int, ...], int, int]):
    """(buffer, size, stride, offset, version): a part of a unit's memory, for as long as a graph lives. It holds
    none of it."""

    __slots__ = ()

    def tensor(self) -> Tensor:
        buffer, size, stride, offset, version = self
        if not buffer.params:  # its parameters live elsewhere by now, and its memory is nobody's but the graph's
            return buffer.flat.as_strided(size, stride, offset)
        param = buffer.params[bisect_right(buffer.offsets, offset) - 1]
        with torch._C.DisableTorchFunctionSubclass():
            if param._version != version:
                _refuse(param, version)
        if not buffer.ready:
            assert buffer.asks is not None
            buffer.asks()
        # Of the parameter, whose version counter it shares: a graph of second order saves it as it is.
        return param.detach().as_strided(size, stride, offset)


class SavedPlaced(tuple[SavedRef, Any]):
    """(handle of its local tensor, layout): the same of a DTensor. The version is the parameter's."""

    __slots__ = ()

    def tensor(self) -> Tensor:
        (buffer, size, stride, offset, version), spec = self
        if buffer.params:
            index = bisect_right(buffer.offsets, offset) - 1
            param = buffer.wrappers[index]
            with torch._C.DisableTorchFunctionSubclass():
                if param._version != version:
                    _refuse(param, version)
            version = buffer.params[index]._version
        local = tuple.__new__(SavedRef, (buffer, size, stride, offset, version)).tensor()
        found: Tensor = wrapped(spec, local)
        return found


def handle(tensor: Tensor) -> SavedRef | SavedPlaced | None:
    """For a tensor over memory that is freed between uses; None for any other."""
    if is_placed(tensor):
        ref = _handle(local_tensor(tensor), tensor._version)
        return None if ref is None else tuple.__new__(SavedPlaced, (ref, tensor._spec))  # type: ignore[attr-defined]
    return _handle(tensor, tensor._version)


def _handle(tensor: Tensor, version: int) -> SavedRef | None:
    try:
        ref = _buffer_of(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and the like have no storage
        return None
    buffer = None if ref is None else ref()
    if buffer is None or not buffer.params or (tensor.is_complex() and (tensor.is_conj() or tensor.is_neg())):
        return None
    if tensor.dtype is not buffer.flat.dtype:
        return None  # a view of other bits: it holds the memory
    return tuple.__new__(SavedRef, (buffer, tensor.size(), tensor.stride(), tensor.storage_offset(), version))


def _pack(tensor: Tensor) -> Any:
    # Detached: an output of the very node that saves it would hold itself.
    return handle(tensor) or (tensor.detach(), tensor._version)


def _unpack(saved: Any) -> Tensor:
    if type(saved) in (SavedRef, SavedPlaced):
        found: Tensor = saved.tensor()
        return found
    tensor: Tensor
    tensor, version = saved
    if tensor._version != version:
        _refuse(tensor, version)
    return tensor


def _refuse(tensor: Tensor, version: int) -> NoReturn:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead."
    )


def begin() -> bool:
    """A forward begins: from here on ours see what is saved. False where hooks are there already, or may not be (inside
    torch.func): what is saved then holds its memory."""
    if _top(False) is not None or not _enabled():
        return False
    _push(_pack, _unpack)
    return True


def end() -> None:
    _pop()


@contextmanager
def on_top() -> Iterator[None]:
    """Inside, ours see what is saved, whoever's hooks are there."""
    _push(_pack, _unpack)
    try:
        yield
    finally:
        _pop()
