"""Reads a file of torch.save without torch.load: its pickle by inert.py, its storages by their places in the file.

    zip       NAME/data.pkl, a pickle; NAME/data/0, NAME/data/1, ...: the bytes of storages, never compressed
    before    a number, a version, a word about the system, the pickle, the names of storages, then their bytes

torch.load hands a pickle classes of its own, and believes what it says of how large a storage is. Here every size is
compared with what the file holds, and a tensor is made by numbers alone.
"""

from __future__ import annotations

import io
import mmap
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeor.tools.importers.inert import RefusedError, StandIn, Storage, StorageKind, Unpickler, settled

_LEGACY = bytes.fromhex("6cfc9c46f9206aa85019")  # the number with which files began before they were zip files
_LEGACY_NBYTES = 32  # where it lies
_LOCAL_HEADER = 30
_ENCRYPTED = 1


def is_torch(path: Any) -> bool:
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


def load(path: Any) -> Any:
    """The value in a file, given by its path or as io.BytesIO, as plain values, tensors and stand-ins. Tensors of a
    zip file lie in a private map of it."""
    if isinstance(path, io.BytesIO):
        path.seek(0)
        return settled(_zip(path, bytearray(path.getvalue())) if zipfile.is_zipfile(path) else _before(path))
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(path):
            return settled(_before(file))
        return settled(_zip(file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))


# ---- zip files


def _zip(file: Any, data: mmap.mmap | bytearray) -> Any:
    file.seek(0)
    records = zipfile.ZipFile(file).NameToInfo
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if not pickles:
        raise RefusedError("It is a zip file without a data.pkl: it is not what torch.save writes.")
    folder = pickles[0].partition("/")[0]
    if f"{folder}/byteorder" in records:
        begin, end = _place(data, records[f"{folder}/byteorder"])
        if data[begin:end] != sys.byteorder.encode():
            raise RefusedError(
                "Its numbers are in another order of bytes than this machine's; import it on one like that."
            )
    begin, end = _place(data, records[pickles[0]])
    return _OfZip(io.BytesIO(data[begin:end]), data, records, folder).load()


def _place(data: mmap.mmap | bytearray, info: zipfile.ZipInfo) -> tuple[int, int]:
    """From where to where a record lies in a file."""
    header = data[info.header_offset : info.header_offset + _LOCAL_HEADER] if info.header_offset >= 0 else b""
    if len(header) != _LOCAL_HEADER or header[:4] != b"PK\3\4":
        raise RefusedError(f"Its record {info.filename[:80]!r} is not where it says.")
    begin = info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", header[26:30]))
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED or info.file_size != info.compress_size:
        raise RefusedError(f"Its record {info.filename[:80]!r} is compressed, which torch.save never does.")
    if begin + info.file_size > len(data):
        raise RefusedError(f"Its record {info.filename[:80]!r} ends beyond the file.")
    return begin, begin + info.file_size


class _OfZip(Unpickler):
    def __init__(self, file: Any, data: mmap.mmap | bytearray, records: dict[str, zipfile.ZipInfo], folder: str):
        super().__init__(file)
        self._data, self._records, self._folder = data, records, folder
        self._known: dict[str, Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, key, numel = _parsed(pid)
        if kind is None:
            return StandIn()
        if key not in self._known:
            info = self._records.get(f"{self._folder}/data/{key}")
            if info is None:
                raise RefusedError(f"It lacks the record of storage {key[:80]!r}.")
            begin, end = _place(self._data, info)
            self._known[key] = _bytes_of(self._data, begin, end)
        data = self._known[key]
        if numel * kind.itemsize > data.numel():
            held = data.numel()
            raise RefusedError(f"It says {numel:,} numbers of storage {key[:80]!r}, which holds {held:,} bytes.")
        return Storage(data[: numel * kind.itemsize], kind)


def _bytes_of(data: mmap.mmap | bytearray, begin: int, end: int) -> Tensor:
    if begin == end:
        return torch.empty(0, dtype=torch.uint8)
    if begin % 16:  # no kind of number may lie like that; torch.save puts records at multiples of 64
        return torch.frombuffer(bytearray(data[begin:end]), dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=end - begin)


def _parsed(pid: Any) -> tuple[torch.dtype | None, str, int]:
    """The kind (None: one without numbers), key and number of elements of a storage."""
    well_formed = isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"
    if not well_formed or not isinstance(pid[2], str) or type(pid[4]) is not int or not 0 <= pid[4] < 1 << 62:
        raise RefusedError("It speaks of a malformed storage.")
    return pid[1].dtype if isinstance(pid[1], StorageKind) else None, pid[2], pid[4]


# ---- the format before


def _before(file: Any) -> Any:
    file.seek(0, io.SEEK_END)
    nbytes = file.tell()
    file.seek(0)
    for _ in range(3):  # the number, the version, the system
        Unpickler(file).load()
    reader = _OfBefore(file, nbytes)
    value = reader.load()
    keys = Unpickler(file).load()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise RefusedError("Its list of storages is malformed.")
    for key in keys:
        reader.fill(file, key)
    return value


class _OfBefore(Unpickler):
    """Storages are filled when the pickle has been read: their bytes lie behind it."""

    def __init__(self, file: Any, nbytes: int):
        super().__init__(file)
        self._left = nbytes
        self._known: dict[str, Storage] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module":  # a class and its source
            return pid[1]
        kind, key, numel = _parsed(pid)
        if kind is None:
            raise RefusedError("It holds a storage of a kind that zeor does not know.")
        if key not in self._known:
            self._left -= numel * kind.itemsize
            if self._left < 0:
                raise RefusedError(f"It says {numel:,} numbers of storage {key[:80]!r}, more than the file can hold.")
            self._known[key] = Storage(torch.zeros(numel * kind.itemsize, dtype=torch.uint8), kind)
        whole, view = self._known[key], pid[5] if len(pid) == 6 else None
        if view is None:
            return whole
        if not isinstance(view, tuple) or len(view) != 3 or not all(type(n) is int and n >= 0 for n in view[1:]):
            raise RefusedError("It speaks of a malformed part of a storage.")
        begin, end = view[1] * kind.itemsize, (view[1] + view[2]) * kind.itemsize
        return Storage(whole.data[begin:end], kind)

    def fill(self, file: Any, key: str) -> None:
        storage = self._known.get(key)
        if storage is None:
            raise RefusedError(f"It holds storage {key[:80]!r}, of which it says nothing.")
        numel, data = int.from_bytes(file.read(8), "little"), storage.data
        if numel * storage.dtype.itemsize != data.numel() or file.readinto(data.numpy().data) != data.numel():
            raise RefusedError(f"Storage {key[:80]!r} is not as long as it says.")
