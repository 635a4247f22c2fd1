"""Reads one pickle of others in a process of its own, and hands plain values over: JSON and safetensors.

    python -I ... zeor.tools.unpickle torch|dcp SOURCE OUT [--allow-pickle]

`importing.py` starts it, never imports it. torch's safe loader comes first. What that refuses is read only with
--allow-pickle, by an unpickler that makes an inert stand-in of every class and function it does not know: nothing a
file names is run. OUT gets tree.json, values.safetensors, or error.txt with one sentence.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeor.checkpoint import plain
from zeor.checkpoint.disk import DISK
from zeor.checkpoint.writer import Source, write_file

TREE, VALUES, ERROR = "tree.json", "values.safetensors", "error.txt"
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "int", "float", "bool", "str", "bytes", "complex"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2"},
    "torch.nn.parameter": {"Parameter"},
    "torch.serialization": {"_get_layout"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"scalar", "_reconstruct"},
    "numpy._core.multiarray": {"scalar", "_reconstruct"},
    "_codecs": {"encode"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


_LEGACY = bytes.fromhex("6cfc9c46f9206aa85019")  # the number with which files began before they were zip files
_LEGACY_NBYTES = 32  # where it lies


class Refused(Exception):
    """One sentence for the user."""


class StandIn:
    """In the place of an object of unknown class; it does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...


def _data_alone(data: Any, *_: Any) -> Any:
    """A parameter with attributes: the attributes are whatever the file says, so they stay behind."""
    return data


def _base_alone(make: Any, _: Any, arguments: Any, __: Any) -> Any:
    """A tensor of some subclass: only what it is made of, by a function that is known."""
    return make(*arguments) if make in (torch._utils._rebuild_tensor_v2, _data_alone) else StandIn()


_INSTEAD = {
    ("torch._utils", "_rebuild_parameter"): _data_alone,
    ("torch._utils", "_rebuild_parameter_with_state"): _data_alone,
    ("torch._tensor", "_rebuild_from_type_v2"): _base_alone,
}


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INSTEAD:
            return _INSTEAD[module, name]
        if name in _KNOWN.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        if module == _METADATA and name.isidentifier():
            import torch.distributed.checkpoint.metadata as metadata

            found = getattr(metadata, name, None)
            if isinstance(found, type) and found.__module__ == _METADATA:
                return found
        return type(name.rpartition(".")[2] or "StandIn", (StandIn,), {"__module__": module})


def read_torch(path: Any, where: str, allow: bool) -> Any:
    """A file of torch.save: by the safe loader, or by the stand-ins where that refuses and the user allows it."""
    try:
        return _load(path, weights_only=True)
    except Exception as error:
        if not _is_torch(path):
            raise Refused(f"{where} is no PyTorch file, or is damaged: it is not what torch.save writes.") from error
        if not isinstance(error, pickle.UnpicklingError):
            raise
        if not allow:
            reason = re.search(r"(?:GLOBAL|Unsupported \w+) ([\w.]+)", str(error))
            raise Refused(
                f"{where} is a pickle that torch's safe loader refuses{f' ({reason[1]})' if reason else ''}; pass "
                "--allow-pickle if you trust where it comes from."
            ) from error
    return _load(path, weights_only=False, pickle_module=_GUARDED)


_GUARDED = SimpleNamespace(Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load())
_GUARDED.__name__ = "zeor.tools.unpickle"


def _is_torch(path: Any) -> bool:
    """A zip file with its end, or the format before: what is neither fails in the reader in many odd ways."""
    if zipfile.is_zipfile(path):
        return True
    if isinstance(path, (str, Path)):
        with open(path, "rb") as file:
            start = file.read(_LEGACY_NBYTES)
    else:
        path.seek(0)
        start = path.read(_LEGACY_NBYTES)
    return _LEGACY in start


def _load(path: Any, **options: Any) -> Any:
    if not isinstance(path, (str, Path)):
        path.seek(0)  # it may have been read before
        return torch.load(path, map_location="cpu", **options)
    try:
        return torch.load(path, map_location="cpu", mmap=True, **options)
    except (RuntimeError, ValueError):  # the format before zip files
        return torch.load(path, map_location="cpu", **options)


# ---- torch's distributed checkpoints


def read_dcp(folder: Path, allow: bool) -> Any:
    """The nested state dict of a DCP folder; tensors are callables with a shape and a dtype."""
    if not allow:
        raise Refused(
            f"{folder} is a torch DCP checkpoint, whose .metadata is a pickle; pass --allow-pickle if you trust where "
            "it comes from."
        )
    with open(folder / ".metadata", "rb") as file:
        metadata = Unpickler(file).load()
    stored: dict[str, list[Any]] = {}
    for index, info in metadata.storage_data.items():
        stored.setdefault(index.fqn, []).append((index, info))
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    told = metadata.state_dict_metadata  # by the rank that wrote it; the state dict's own order is that of the paths
    root: dict[Any, Any] = {}
    for name, entry in [(name, told[name]) for name in {**paths, **told} if name in told]:
        if name not in stored:
            raise Refused(f"{folder} does not say where {name!r} lies.")
        if hasattr(entry, "chunks"):
            value: Any = _Chunks(folder, name, entry, stored[name])
        else:
            value = read_torch(io.BytesIO(_bytes(folder, stored[name][0][1])), f"{name!r} of {folder}", allow)
        _set(root, tuple(paths.get(name) or (name,)), value)
    return root


class _Chunks:
    """A tensor in chunks, put together when it is asked for."""

    def __init__(self, folder: Path, name: str, entry: Any, stored: list[Any]):
        self._folder, self._name, self._stored = folder, name, stored
        self.shape, self.dtype = tuple(entry.size), entry.properties.dtype

    def __call__(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        filled = 0
        for index, info in self._stored:
            data = io.BytesIO(_bytes(self._folder, info))
            part = torch.load(data, map_location="cpu", weights_only=True)
            where = tuple(slice(b, b + n) for b, n in zip(index.offset or (0,) * part.dim(), part.shape))
            whole[where] = part
            filled += part.numel()
        if filled != whole.numel():
            raise Refused(f"{self._folder} holds {filled} of {whole.numel()} elements of {self._name!r}.")
        return whole


def _bytes(folder: Path, info: Any) -> bytes:
    name = str(info.relative_path)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise Refused(f"{folder} names the file {name!r}, which is no plain file name; that is refused.")
    if getattr(info, "transform_descriptors", None):
        raise Refused(f"{folder} is compressed, which zeor cannot read; save it without extensions.")
    with open(folder / name, "rb") as file:
        file.seek(info.offset)
        return file.read(info.length)


def _set(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Into nested dicts; a list is a dict of numbers until `hand_over`."""
    for part in path[:-1]:
        root = root.setdefault(part, {})
    root[path[-1]] = value


# ---- handing over


class HandOver:
    """A tree of anything as JSON; tensors become {"$stored": number}, one number for tensors that share memory."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._seen: dict[Any, str] = {}

    def plain(self, value: Any) -> Any:
        if isinstance(value, _Chunks):
            return self._store(id(value), value.dtype, value.shape, value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            value = torch.from_numpy(value)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Mapping):
            if value and sorted(value, key=str) == sorted(range(len(value)), key=str):
                value = {key: value[key] for key in sorted(value)}
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.plain(item) for key, item in value.items()}
            keys = [key if isinstance(key, (str, int)) else str(key) for key in value]
            return {"$pairs": [[key, self.plain(item)] for key, item in zip(keys, value.values())]}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.plain(item) for item in value]
        if isinstance(value, bool) or value is None or type(value) in (int, str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        return f"<{type(value).__module__}.{type(value).__name__}>"

    def _tensor(self, value: Tensor) -> Any:
        value = value.detach()
        if value.layout is not torch.strided or value.is_quantized or plain.dtype_name(value.dtype) not in plain.DTYPES:
            return f"<tensor of {value.dtype}>"
        if value.dim() == 0 and not value.is_complex():
            return plain.encode(value, "a value")
        shared = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype) if value.numel() else id(value)
        return self._store(shared, value.dtype, tuple(value.shape), lambda: value)

    def _store(self, key: Any, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], Tensor]) -> Any:
        if key not in self._seen:
            self._seen[key] = str(len(self.sources))
            self.sources.append(Source(self._seen[key], dtype, shape, read))
        return {"$stored": self._seen[key]}


def main(arguments: list[str]) -> int:
    kind, source, out = arguments[0], Path(arguments[1]), Path(arguments[2])
    allow = "--allow-pickle" in arguments[3:]
    try:
        value = read_dcp(source, allow) if kind == "dcp" else read_torch(source, str(source), allow)
        over = HandOver()
        tree = over.plain(value)
        write_file(DISK, out / VALUES, over.sources)
        (out / TREE).write_text(json.dumps(tree))
    except Refused as error:
        (out / ERROR).write_text(str(error))
        return 1
    except Exception as error:  # whatever a foreign file does to a reader, the user gets a sentence
        (out / ERROR).write_text(f"{source} could not be read ({type(error).__name__}: {str(error)[:300]}).")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
