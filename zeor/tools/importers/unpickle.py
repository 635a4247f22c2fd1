"""Reads one pickle of others in a process of its own, and hands plain values over: JSON and safetensors.

    python -I ... zeor.tools.importers.unpickle torch|dcp SOURCE OUT [--allow-pickle]

`command.py` starts it, never imports it. Without --allow-pickle torch's safe loader reads. With it, zeor's own reader
does (torchfile.py), to which every name in a file means a stand-in of zeor's own (inert.py): nothing a file names is
imported or run. Once it has begun, this process starts no other and talks to none. OUT gets tree.json,
values.safetensors, or error.txt with one sentence.
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
from typing import Any

import torch
from torch import Tensor

from zeor.checkpoint.files import plain
from zeor.checkpoint.files.disk import DISK
from zeor.checkpoint.files.writer import Source, write_file
from zeor.tools.importers import torchfile
from zeor.tools.importers.inert import Record, RefusedError, Unpickler

TREE, VALUES, ERROR = "tree.json", "values.safetensors", "error.txt"
_MOST_VALUES = 20_000_000  # of a tree: a list that holds another twice, forty deep, is small in a file and endless here


def read_torch(path: Any, where: str, allow: bool) -> Any:
    """A file of torch.save: by torch's safe loader, or, where the user allows more, by zeor's own reader."""
    if not torchfile.is_torch(path):
        raise RefusedError(f"{where} is no PyTorch file, or is damaged: it is not what torch.save writes.")
    if allow:
        return _read(path, where)
    try:
        return _load(path)
    except pickle.UnpicklingError as error:
        reason = re.search(r"(?:GLOBAL|Unsupported \w+) ([\w.]+)", str(error))
        raise RefusedError(
            f"{where} is a pickle that torch's safe loader refuses{f' ({reason[1]})' if reason else ''}; pass "
            "--allow-pickle if you trust where it comes from."
        ) from error


def _read(path: Any, where: str) -> Any:
    try:
        return torchfile.load(path)
    except RefusedError as error:
        raise RefusedError(f"{where} is refused: {str(error)[:1].lower()}{str(error)[1:]}") from error


def _load(path: Any) -> Any:
    """A zip file by a map of it: where torch reads records it believes what the pickle says of their sizes."""
    if not isinstance(path, (str, Path)):
        path.seek(0)  # it may have been read before
        return torch.load(path, map_location="cpu", weights_only=True)
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


# ---- torch's distributed checkpoints


def read_dcp(folder: Path, allow: bool) -> Any:
    """The nested state dict of a DCP folder; tensors are callables with a shape and a dtype."""
    if not allow:
        raise RefusedError(
            f"{folder} is a torch DCP checkpoint, whose .metadata is a pickle; pass --allow-pickle if you trust where "
            "it comes from."
        )
    with open(folder / ".metadata", "rb") as file:
        metadata = Unpickler(file).load()
    stored: dict[str, list[tuple[Record, Record]]] = {}
    for index, info in _field(folder, metadata, "storage_data", dict).items():
        stored.setdefault(_field(folder, index, "fqn", str), []).append((index, info))
    paths = metadata.fields.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    entries = _field(folder, metadata, "state_dict_metadata", dict)
    root: dict[Any, Any] = {}
    for name in [name for name in {**paths, **entries} if name in entries]:  # the paths have the state dict's order
        if name not in stored:
            raise RefusedError(f"{folder} does not say where {str(name)[:80]!r} lies.")
        if isinstance(entries[name], Record) and "chunks" in entries[name].fields:
            value: Any = _Chunks(folder, name, entries[name], stored[name])
        else:
            value = _read(io.BytesIO(_bytes(folder, stored[name][0][1])), f"{name!r} of {folder}")
        path = paths.get(name)
        *above, last = path if isinstance(path, tuple) and path else (name,)
        into = root
        for part in above:  # nested dicts; a list is a dict of numbers until it is handed over
            into = into.setdefault(part, {})
        into[last] = value
    return root


def _field(folder: Path, record: Any, name: str, kind: Any) -> Any:
    """A field of an object in .metadata, of that kind or of these kinds."""
    found = record.fields.get(name) if isinstance(record, Record) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise RefusedError(f"{folder} could not be read: {name!r} in its .metadata is malformed or missing.")
    return found


class _Chunks:
    """A tensor in chunks, put together when it is asked for."""

    def __init__(self, folder: Path, name: str, entry: Record, stored: list[tuple[Record, Record]]):
        self._folder, self._name, self._stored = folder, name, stored
        properties = entry.fields.get("properties")
        kinds = properties.fields.get("") if isinstance(properties, Record) else None
        dtype = kinds[0] if isinstance(kinds, tuple) and kinds else None
        size = _field(folder, entry, "size", tuple)
        if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in size):
            raise RefusedError(f"{folder} could not be read: it does not say of which kind {name!r} is.")
        self.shape, self.dtype = size, dtype
        held = sum(_field(folder, info, "length", int) for _, info in stored)
        if math.prod(size) * dtype.itemsize > held:
            raise RefusedError(f"{folder} says that {name!r} has shape {size}, and holds {held:,} bytes of it.")

    def __call__(self) -> Tensor:
        whole = torch.zeros(self.shape, dtype=self.dtype)
        filled = 0
        for index, info in self._stored:
            part = _read(io.BytesIO(_bytes(self._folder, info)), f"{self._name!r} of {self._folder}")
            offset = index.fields.get("offset") or (0,) * whole.dim()
            if not isinstance(part, Tensor) or part.dim() != whole.dim() or len(offset) != whole.dim():
                raise RefusedError(f"{self._folder} holds a malformed part of {self._name!r}.")
            whole[tuple(slice(b, b + n) for b, n in zip(offset, part.shape))] = part.detach()
            filled += part.numel()
        if filled != whole.numel():
            raise RefusedError(f"{self._folder} holds {filled} of {whole.numel()} elements of {self._name!r}.")
        return whole


def _bytes(folder: Path, info: Any) -> bytes:
    name = _field(folder, info, "relative_path", str)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RefusedError(f"{folder} names the file {name!r}, which is no plain file name; that is refused.")
    if info.fields.get("transform_descriptors"):
        raise RefusedError(f"{folder} is compressed, which zeor cannot read; save it without extensions.")
    with open(folder / name, "rb") as file:
        file.seek(_field(folder, info, "offset", int))
        return file.read(max(0, _field(folder, info, "length", int)))


# ---- handing over


class HandOver:
    """A tree of anything as JSON; tensors become {"$stored": number}, one number for tensors that share memory."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._seen: dict[Any, str] = {}
        self._count = 0

    def plain(self, value: Any) -> Any:
        self._count += 1
        if self._count > _MOST_VALUES:
            raise RefusedError(f"The file holds more than {_MOST_VALUES:,} values, which no checkpoint does.")
        if isinstance(value, _Chunks):
            return self._store(id(value), value.dtype, value.shape, value)
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
    except RefusedError as error:
        (out / ERROR).write_text(str(error))
        return 1
    except Exception as error:  # whatever a foreign file does to a reader, the user gets a sentence
        (out / ERROR).write_text(f"{source} could not be read ({type(error).__name__}: {str(error)[:300]}).")
        return 1
    return 0


_FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn",
    "subprocess.Popen", "socket.connect", "socket.bind",
)  # fmt: skip


def _stay_alone(event: str, _: Any) -> None:
    """A second wall, should a file ever get past the stand-ins: Python itself starts nothing and calls nobody here."""
    if event in _FORBIDDEN:
        raise RefusedError(f"The file tried to use {event}, which is refused.")


if __name__ == "__main__":
    sys.addaudithook(_stay_alone)
    raise SystemExit(main(sys.argv[1:]))
