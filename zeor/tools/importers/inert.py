"""Stand-ins: what the names in a pickle of others mean here. Nothing a file names is imported, called or changed.

A pickle is a program: it calls what it names, makes objects of classes without their constructors, hands them whatever
state it holds, and sets attributes on anything that takes them. So no class and no function of anybody else is given
to it, not even harmless ones: numpy.dtype believes the flags in its state, and an array of forged objects runs what its
bytes say. Every name means something of this file's own:

    torch.FloatStorage, torch.float32               kinds of number
    torch._utils._rebuild_tensor and its like       a `TensorPart`: numbers only, checked when a tensor is made of it
    numpy's dtype, _reconstruct, scalar, ...        a `NumpyKind`, a `NumpyArray`: numbers, of the kinds in `_NUMBERS`
    dicts, sets and their like                      plain ones
    torch.distributed.checkpoint's dataclasses      a `Record` of its fields
    anything else                                   a `StandIn`, which does nothing

What a file can reach has no attributes that could be set: `__slots__`, and a `__setstate__` that checks or refuses.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")  # numpy's codes
_MOST_DIMENSIONS = 64
_EXPANDED_NBYTES = 1 << 30  # a tensor may be larger than the file it is in (one value, expanded), but not without end


class RefusedError(Exception):
    """One sentence for the user."""


class StandIn:
    """In the place of an object of unknown class; it does nothing."""

    __slots__ = ()

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...


def stand_in(module: str, name: str) -> type[StandIn]:
    return type(name.rpartition(".")[2] or "StandIn", (StandIn,), {"__module__": module, "__slots__": ()})


class Function:
    """What a file may call. It cannot be changed by one."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise RefusedError("It sets attributes of a function, which no checkpoint does.")


class Dict(dict[Any, Any]):
    """An OrderedDict, defaultdict or Counter: a dict in the order of the file. Attributes (a state dict's `_metadata`)
    stay behind: one that is called "items" would be asked in the place of the method."""

    __slots__ = ()

    def __init__(self, *given: Any):
        super().__init__()
        if given and isinstance(given[0], (dict, list, tuple)):  # else a defaultdict's factory
            super().update(given[0])

    def __setstate__(self, _: Any) -> None: ...


class Record:
    """An object of a dataclass, as its fields. A state that is no dict is the field ""."""

    __slots__ = ("fields",)

    def __new__(cls, *_: Any, **__: Any) -> Record:
        made = object.__new__(cls)
        made.fields = {}
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state) if isinstance(state, dict) else {"": state}


# ---- torch's tensors


class Storage:
    """Bytes of a file, as numbers of one kind. `data`: flat, of uint8, in memory that is ours to the last byte."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: Tensor, dtype: torch.dtype):
        self.data, self.dtype = data, dtype

    def __setstate__(self, _: Any) -> None:
        raise RefusedError("It sets the state of a storage, which no checkpoint does.")


class TensorPart:
    """A tensor as a file tells it: where in a storage its elements lie. `tensor()` believes nothing."""

    __slots__ = ("_dtype", "_offset", "_shape", "_storage", "_stride")

    def __init__(self, storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any):
        self._storage, self._offset, self._shape, self._stride, self._dtype = storage, offset, shape, stride, dtype

    def __setstate__(self, _: Any) -> None: ...

    def tensor(self) -> Tensor:
        shape, stride, offset = _sizes(self._shape), _sizes(self._stride), _sizes((self._offset,))[0]
        if len(shape) != len(stride) or not isinstance(self._storage, Storage):
            raise RefusedError("It holds a malformed tensor.")
        data, dtype = self._storage.data, self._dtype
        held, numel = data.numel() // dtype.itemsize, math.prod(shape)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride)) if numel else 0
        if last >= held and numel:
            raise RefusedError(f"It holds a tensor whose last element is number {last} of a storage of {held}.")
        if numel > held and numel * dtype.itemsize > _EXPANDED_NBYTES:
            raise RefusedError(f"It holds a tensor of {numel:,} elements over a storage of {held}.")
        if not numel:
            return torch.empty(shape, dtype=dtype)
        flat = data[: held * dtype.itemsize]
        typed = flat.ne(0) if dtype == torch.bool else flat.view(dtype)  # a byte that is neither 0 nor 1 is no bool
        return typed.as_strided(shape, stride, offset)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
        raise RefusedError("It holds a tensor without a shape.")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise RefusedError("It holds a tensor whose sizes are no numbers of elements.")
    return tuple(value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Any:
    return TensorPart(storage, offset, shape, stride, storage.dtype) if isinstance(storage, Storage) else StandIn()


def _tensor_of_kind(storage: Any, offset: Any, shape: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any) -> Any:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        return StandIn()
    return TensorPart(storage, offset, shape, stride, dtype)


def _first(data: Any, *_: Any) -> Any:
    """A parameter: its hooks and attributes are whatever the file says, so they stay behind."""
    return data


def _base_alone(make: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """A tensor of some subclass: only what it is made of, by a function of this file."""
    is_ours = make in (_TENSOR, _TENSOR_V3, _FIRST) and isinstance(arguments, tuple)
    return make(*arguments) if is_ours else StandIn()


_TENSOR, _TENSOR_V3, _FIRST = Function(_tensor), Function(_tensor_of_kind), Function(_first)


class StorageKind(NamedTuple):
    """torch.FloatStorage and its like."""

    dtype: torch.dtype


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
_KINDS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


# ---- numpy's arrays and numbers


class NumpyKind:
    """numpy.dtype: a code, and an order of bytes. Of its state nothing else is looked at, its flags least of all."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any):
        self.code, self.order = str(code) if isinstance(code, str) else "", "|"

    def __setstate__(self, state: Any) -> None:
        plain = isinstance(state, tuple) and len(state) > 4 and state[1] in ("<", ">", "|", "=")
        if not plain or any(part is not None for part in state[2:5]):  # a part of an array, names, fields
            self.code = ""
        else:
            self.order = state[1]

    @property
    def numbers(self) -> np.dtype[Any] | None:
        return np.dtype(self.order.replace("|", "=") + self.code) if self.code in _NUMBERS else None


class NumpyArray:
    """numpy.ndarray: filled by its state, where that is numbers."""

    __slots__ = ("values",)

    def __init__(self, values: Any = None):
        self.values: np.ndarray[Any, Any] | None = values

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise RefusedError("It holds a malformed numpy array.")
        self.values = _array(state[1], state[2], state[4], "F" if state[3] else "C")


def _array(shape: Any, kind: Any, raw: Any, order: Any) -> Any:
    """The numbers; None for an array of anything else."""
    if not isinstance(kind, NumpyKind) or kind.numbers is None or not isinstance(raw, (bytes, bytearray)):
        return None
    sizes = _sizes(shape)
    if math.prod(sizes) * kind.numbers.itemsize != len(raw):
        raise RefusedError(f"It holds a numpy array of shape {sizes} and {len(raw)} bytes.")
    values = np.frombuffer(bytes(raw), dtype=kind.numbers).astype(kind.numbers.newbyteorder("="))  # a copy
    if values.dtype == np.bool_:
        values = np.frombuffer(bytes(raw), dtype=np.uint8) != 0
    return values.reshape(sizes, order="F" if order == "F" else "C")


def _scalar(kind: Any, raw: Any = None, *_: Any) -> Any:
    if isinstance(kind, NumpyKind) and kind.code[:1] == "U" and isinstance(raw, bytes) and len(raw) % 4 == 0:
        return raw.decode("utf-32-be" if kind.order == ">" else "utf-32-le", "replace").rstrip("\0")
    values = _array((), kind, raw, "C") if isinstance(raw, bytes) else None
    return StandIn() if values is None else values.item()


# ---- Python's own


def _bytes(text: Any = "", encoding: Any = "latin1", *_: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise RefusedError("It encodes text in a way that no checkpoint does.")
    return text.encode("latin1")


def _set(given: Any = (), *_: Any) -> Any:
    return set(given) if isinstance(given, (list, tuple, set, frozenset)) else set()


def _complex(real: Any = 0.0, imaginary: Any = 0.0, *_: Any) -> Any:
    is_one = isinstance(real, (int, float)) and isinstance(imaginary, (int, float))
    return complex(real, imaginary) if is_one else StandIn()


def _known() -> Mapping[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor"): _TENSOR,
        ("torch._utils", "_rebuild_tensor_v2"): _TENSOR,
        ("torch._utils", "_rebuild_tensor_v3"): _TENSOR_V3,
        ("torch._utils", "_rebuild_parameter"): _FIRST,
        ("torch._utils", "_rebuild_parameter_with_state"): _FIRST,
        ("torch._tensor", "_rebuild_from_type_v2"): Function(_base_alone),
        ("torch.tensor", "_rebuild_from_type_v2"): Function(_base_alone),
        ("torch", "Size"): Function(lambda given=(), *_: _sizes(given)),
        ("numpy", "dtype"): Function(lambda code="", *_: NumpyKind(code)),
        ("_codecs", "encode"): Function(_bytes),
    }
    for name in ("OrderedDict", "defaultdict", "Counter"):
        found["collections", name] = Dict
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray", "_reconstruct"] = Function(lambda *_: NumpyArray())
        found[f"{core}.multiarray", "scalar"] = Function(_scalar)
        from_buffer = Function(lambda raw, kind, shape, order="C", *_: NumpyArray(_array(shape, kind, raw, order)))
        found[f"{core}.numeric", "_frombuffer"] = from_buffer
    for own in ("builtins", "__builtin__"):  # as Python 2, and pickles of protocol 2, name it
        found[own, "set"] = Function(_set)
        found[own, "frozenset"] = Function(lambda given=(), *_: frozenset(_set(given)))
        found[own, "bytes"] = Function(_bytes)
        found[own, "bytearray"] = Function(
            lambda given=b"", *how: given if isinstance(given, bytes) else _bytes(given, *how)
        )
        found[own, "complex"], found[own, "dict"] = Function(_complex), Dict
    for module in ("torch", "torch.cuda", "torch.storage"):
        found.update({(module, name): StorageKind(dtype) for name, dtype in _STORAGES.items()})
    found.update({("torch", name): dtype for name, dtype in _KINDS.items()})
    return found


_KNOWN = _known()
_RECORDS = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata",
            "ChunkStorageMetadata", "StorageMeta", "_StorageInfo")  # fmt: skip


class Unpickler(pickle.Unpickler):
    """Reads a pickle whose names mean what this file says. Of storages a reader of files knows: torchfile.py."""

    def __init__(self, file: Any):
        super().__init__(file, encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module.startswith("torch.distributed.") and name in _RECORDS:
            return Record
        return stand_in(module, name)

    def persistent_load(self, _: Any) -> Any:
        raise RefusedError("It speaks of a storage where there can be none.")


def settled(value: Any) -> Any:
    """What was read as plain values and tensors; a stand-in stays one. A tree that holds itself has no end: Python
    raises RecursionError."""
    return _Settling().value(value)


class _Settling:
    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # by id: what it was, and what it is

    def value(self, value: Any) -> Any:
        if not isinstance(value, (TensorPart, NumpyArray, dict, list, tuple, set, frozenset)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = (value, self._value(value))
        return self._done[id(value)][1]

    def _value(self, value: Any) -> Any:
        if isinstance(value, TensorPart):
            return value.tensor()
        if isinstance(value, NumpyArray):
            is_plain = value.values is not None and value.values.dtype.kind in "fiub"
            return torch.from_numpy(value.values) if is_plain else stand_in("numpy", "ndarray")()
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.value, value)) if type(value) in (list, tuple) else StandIn()
        return frozenset(map(self.value, value))
