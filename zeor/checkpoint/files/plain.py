"""Plain values as JSON and back, exactly: what a manifest keeps beside tensors.

    None, bool, int, finite float, str, list, dict with str keys    themselves
    nan, inf             {"$float": "nan"}
    tuple                {"$tuple": [...]}
    dict, other keys     {"$pairs": [[key, value], ...]}
    tensor, small        {"$tensor": {"dtype": "float32", "shape": [...], "values": [...]}}
    tensor, large        {"$stored": "extra/path"}: its values lie in a file of the checkpoint

Floats travel by Python's repr, which gives back the same bits. Nothing is ever evaluated; what is not in this
table is refused by name when it is saved, and a malformed value when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zeor.checkpoint.files.errors import CheckpointError

SMALL_NUMEL = 16
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64,
    )
}  # fmt: skip
_TAGS = ("$float", "$tuple", "$pairs", "$tensor", "$stored")
_MOST_DEPTH = 64
_MOST_BITS = 4096  # of an integer; beyond about three times that Python reads none from text


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def encode(value: Any, where: str, store: Callable[[str, Tensor], str] | None = None, depth: int = 0) -> Any:
    """JSON for a value; `store(name, tensor)` takes tensors too large to be written out, and says under which name.
    `where` names the value."""
    if depth >= _MOST_DEPTH:
        raise CheckpointError(f"{where[:80]} is nested too deep for a checkpoint, or holds itself.")
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, store)
    if value is None or type(value) is str:
        return value
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise CheckpointError(
                f"{where} is an integer of {value.bit_length()} bits, which a checkpoint cannot hold."
            )
        return value if isinstance(value, bool) else int(value)  # an enum, say
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]", store, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {key: encode(item, f"{where}/{key}", store, depth + 1) for key, item in value.items()}
        below = depth + 1
        pairs = [[encode(k, where, None, below), encode(v, f"{where}/{k}", store, below)] for k, v in value.items()]
        return {"$pairs": pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; give numbers, strings, lists, dicts or "
        "tensors (a state_dict(), not the object)."
    )


def _encode_tensor(value: Tensor, where: str, store: Callable[[str, Tensor], str] | None) -> Any:
    name = dtype_name(value.dtype)
    if name not in DTYPES or value.layout is not torch.strided:
        raise CheckpointError(f"{where} is a tensor of {value.dtype}, {value.layout}, which a checkpoint cannot hold.")
    value = value.detach()
    if (value.numel() > SMALL_NUMEL or value.is_complex()) and store is not None:
        return {"$stored": store(where, value)}
    listed = value.to("cpu", torch.float64) if value.is_floating_point() else value.cpu()
    values = [encode(item, where) for item in listed.reshape(-1).tolist()] if not value.is_complex() else None
    if values is None:
        raise CheckpointError(f"{where} is a small complex tensor, which a checkpoint cannot hold.")
    return {"$tensor": {"dtype": name, "shape": list(value.shape), "values": values}}


def decode(value: Any, stored: Callable[[str], Tensor], depth: int = 0) -> Any:
    """The value again. `stored(name)` gives a tensor that lies in a file."""
    if depth > _MOST_DEPTH:
        raise CheckpointError("A value in the manifest is nested too deep.")
    if isinstance(value, list):
        return [decode(item, stored, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if tag not in _TAGS:
        return {key: decode(item, stored, depth + 1) for key, item in value.items()}
    try:
        return _decode_tagged(tag, value[tag], stored, depth)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The manifest holds a malformed {tag!r} value.") from error


def _decode_tagged(tag: str, inner: Any, stored: Callable[[str], Tensor], depth: int) -> Any:
    if tag == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if tag == "$tuple":
        return tuple(decode(item, stored, depth + 1) for item in _list(inner))
    if tag == "$pairs":
        return {decode(k, stored, depth + 1): decode(v, stored, depth + 1) for k, v in _list(inner)}
    return stored(inner) if tag == "$stored" else _decode_tensor(inner, stored, depth)


def _decode_tensor(inner: Any, stored: Callable[[str], Tensor], depth: int) -> Tensor:
    shape, values = _list(inner["shape"]), _list(inner["values"])
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(values):
        raise TypeError
    dtype = DTYPES[inner["dtype"]]
    exact = torch.float64 if dtype.is_floating_point else dtype  # by default torch would round to float32
    return torch.tensor([decode(v, stored, depth + 1) for v in values], dtype=exact).to(dtype).reshape(shape)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value
