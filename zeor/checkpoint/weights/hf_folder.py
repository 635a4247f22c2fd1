"""Plain safetensors as Hugging Face lays them out: which tensors a path holds, and a folder of them being written.

    out/model.safetensors                              where everything fits one file, else
    out/model-00001-of-00003.safetensors ... and out/model.safetensors.index.json

Reading: only names and places, of headers. An index may name files of its own folder only; a path that leads out of it
is refused. What is wrong is a ValueError that names the file.
Writing, in any order, visible all at once: names, dtypes and shapes come first, so every tensor has its place in its
file before any value is there; values are then put as they come, written by a thread, and let go. Everything is written
into a hidden folder, synced, and renamed into place: the folder itself, or into one that holds other things file by
file, the one that makes them a model last. Knows no model, no rank and no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import math
import os
import re
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.checkpoint.files.disk import DISK, Disk
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.hidden import Identity, identity_of, remove_path
from zeor.checkpoint.files.names import listed
from zeor.checkpoint.files.tensorfile import TensorEntry, make_header, read_header
from zeor.checkpoint.files.urls import place_of, shown

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ALIGNED = 8  # bytes: where the data begins, as safetensors itself does it
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_WAITING_NBYTES = 64 << 20  # values put and not written yet
_BY_THE_WAY = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}  # in a config.json
# What a reader of the folder would take for weights, or for a list of them: beside an export they would mix.
_WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*.bin", "tf_model*.h5", "flax_model*.msgpack")


def find_tensors(path: str | Path) -> dict[str, TensorEntry]:
    """Every tensor by its name in the file(s), in the order of the file or index."""
    file = _entry_file(Path(path))
    if file.name.endswith(".json"):
        return _from_index(file)
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{file} is not a safetensors file; zeor loads no pickle: save the weights as safetensors once, "
            "with save_pretrained or safetensors.torch.save_file."
        )
    return read_header(file)


def _entry_file(path: Path) -> Path:
    """The file to begin with: the path itself, or what a folder offers."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a folder with {WHOLE} or {INDEX}, or a .safetensors file.")
    for name in (WHOLE, INDEX):
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found[:10])
        raise ValueError(f"{path} holds no {INDEX} but several files ({names}); name the one to load.")
    pickled = [name for ending in ("*.bin", "*.pt", "*.pth") for name in sorted(path.glob(ending))]
    what = f"only {pickled[0].name}, a pickle, which zeor does not load" if pickled else "no safetensors file"
    raise ValueError(f"{path} holds {what}; a folder needs {WHOLE} or {INDEX}.")


def _from_index(index: Path) -> dict[str, TensorEntry]:
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        whole = isinstance(files, dict) and all(isinstance(name, str) for name in files.values())
    except OSError as error:
        raise ValueError(f"{index} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{index} is malformed: it must be a JSON object whose 'weight_map' gives a file per tensor.")
    headers = {name: read_header(_inside(index, name)) for name in dict.fromkeys(files.values())}
    entries = {}
    for tensor, name in files.items():
        if tensor not in headers[name]:
            raise ValueError(f"{index.parent / name} does not hold {tensor!r}, though {index.name} says so.")
        entries[tensor] = headers[name][tensor]
    return entries


def _inside(index: Path, name: str) -> Path:
    """A file of the index's own folder; links inside it may lead anywhere (caches are made of them)."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or ".." in parts:
        raise ValueError(f"{index} names the file {name!r}, which leads out of its folder; that is refused.")
    path = index.parent / name
    if not path.is_file():
        raise ValueError(f"{path} does not exist, though {index.name} names it.")
    return path


class Planned(NamedTuple):
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PlacedTensor(NamedTuple):
    file: str
    position: int  # of its first byte in the file
    planned: Planned


def local_folder(out: str | os.PathLike[str], who: str) -> Path:
    """`out` as a path; a URL would be taken for the name of a folder here."""
    text = os.fspath(out)
    scheme, found, _ = text.partition("://")
    if found and scheme not in ("file", "local"):
        raise CheckpointError(
            f"{who} writes a local folder, and {shown(text)!r} is a URL; give a folder of this machine and copy it "
            "from there."
        )
    return Path(place_of(text))


def parse_size(size: int | str) -> int:
    """Bytes of 5_000_000_000, "5GB" or "4.5 GiB"."""
    text = "" if isinstance(size, bool) else str(size)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if nbytes < 1:
        raise ValueError(f"max_file={size!r} is not a size; give bytes, or a text such as '5GB' or '500MiB'.")
    return nbytes


def divide(tensors: Sequence[Planned], max_nbytes: int) -> dict[str, list[Planned]]:
    """Which file each tensor goes to: as many as fit, in the order given; a larger one has a file of its own."""
    files: list[list[Planned]] = [[]]
    used = 0
    for tensor in tensors:
        if files[-1] and used + tensor.nbytes > max_nbytes:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += tensor.nbytes
    if len(files) == 1:
        return {WHOLE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": file for n, file in enumerate(files, 1)}


def check_free(out: Path, texts: Mapping[str, str]) -> None:
    """CheckpointError where an export would overwrite something in `out`, or mix with weights that lie there. Other
    files and folders (a Trainer's checkpoints, logs, a tokenizer) may stay. `texts`: files beside the weights."""
    if os.path.lexists(out) and not out.is_dir():
        raise CheckpointError(f"{out} exists already and is no folder; give another name or remove it.")
    here = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    found = [name for name in here if any(fnmatch.fnmatch(name, each) for each in _WEIGHTS)]
    found += [name for name in texts if name in here and not _says_the_same(out / name, texts[name])]
    if found:
        raise CheckpointError(
            f"{listed(found, most=4)} exists already in {out}, and an export would overwrite it or mix with it; "
            "give another folder, or move that away. Other files there may stay."
        )


def _says_the_same(path: Path, text: str) -> bool:
    """Of the model itself: who wrote it, and in which dtype, makes no other model."""
    try:
        both = [json.loads(path.read_bytes()), json.loads(text)]
    except (OSError, ValueError):
        return False
    for each in both:
        for name in _BY_THE_WAY & set(each if isinstance(each, dict) else ()):
            del each[name]
    return bool(both[0] == both[1])


class OutFiles:
    """The files of one export, being written. Raises OSError where the disk does; `abandon` then leaves nothing."""

    def __init__(self, out: Path, tensors: Sequence[Planned], max_nbytes: int, metadata: Mapping[str, str]):
        self._disk: Disk = DISK
        self._out = out
        self._joins = False  # a folder that holds other things
        self._writing = out.parent / f".{out.name}.writing-{secrets.token_hex(4)}"
        self._files = divide(tensors, max_nbytes)
        self._metadata = dict(metadata)
        self._places: dict[str, PlacedTensor] = {}
        self._fds: dict[str, int] = {}
        self._put_numel: dict[str, int] = {}
        self._texts: set[str] = set()  # names of other files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeor-export")
        self._jobs: deque[tuple[Future[None], int]] = deque()
        self._waiting_nbytes = 0
        self.total_nbytes = sum(tensor.nbytes for tensor in tensors)

    def begin(self) -> None:
        """The hidden folder and the header of every file."""
        if self._out.is_dir() and any(self._out.iterdir()):
            self._joins, self._writing = True, self._out / self._writing.name  # it may be a filesystem of its own
        self._disk.make_folder(self._writing)
        for name, tensors in self._files.items():
            # Wider dtypes come first, so that every tensor is aligned.
            ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
            start = make_header(ordered, _ALIGNED, self._metadata)
            self._fds[name] = self._disk.create(self._writing / name)
            self._disk.write(self._fds[name], [start], 0)
            position = len(start)
            for tensor in ordered:
                self._places[tensor.name] = PlacedTensor(name, position, tensor)
                position += tensor.nbytes

    def put(self, name: str, value: Tensor, start: int = 0) -> None:
        """Elements of a tensor from `start` on, in its dtype; the memory must not change any more."""
        place = self._places[name]
        assert value.dtype == place.planned.dtype, name
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        at = place.position + start * place.planned.dtype.itemsize
        self._put_numel[name] = self._put_numel.get(name, 0) + value.numel()
        job = self._thread.submit(self._disk.write, self._fds[place.file], [memoryview(raw.numpy())], at)  # type: ignore[arg-type]
        self._jobs.append((job, raw.numel()))
        self._waiting_nbytes += raw.numel()
        while self._waiting_nbytes > _MOST_WAITING_NBYTES:
            self._finish_one()

    def _finish_one(self) -> None:
        job, nbytes = self._jobs.popleft()
        job.result()
        self._waiting_nbytes -= nbytes

    def write_text(self, name: str, text: str) -> None:
        self._texts.add(name)
        fd = self._disk.create(self._writing / name)
        try:
            self._disk.write(fd, [text.encode()], 0)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def commit(self) -> None:
        """Every value is there: sync, and one rename makes the folder visible."""
        while self._jobs:
            self._finish_one()
        self._thread.shutdown()
        for name, place in self._places.items():
            assert self._put_numel.get(name, 0) == math.prod(place.planned.shape), f"{name} was not put whole"
        for name in list(self._fds):
            self._disk.sync(self._fds[name])
            self._disk.close(self._fds.pop(name))
        if len(self._files) > 1:
            weight_map = {tensor.name: file for file, tensors in self._files.items() for tensor in tensors}
            index = {"metadata": {"total_size": self.total_nbytes}, "weight_map": weight_map}
            self.write_text(INDEX, json.dumps(index, indent=2) + "\n")
        self._disk.sync_folder(self._writing)
        if self._joins:
            self._move_in()
        else:
            self._disk.rename(self._writing, self._out)  # an empty folder gives way to it
            self._disk.sync_folder(self._out.parent)

    def _move_in(self) -> None:
        """File by file. The last is the one without which the others are no model: what is read is all or nothing."""
        last = INDEX if len(self._files) > 1 else WHOLE
        names = [name for name in sorted(self._disk.names(self._writing)) if name != last]
        moved: dict[str, Identity | None] = {}
        try:
            for name in [*names, last]:
                if os.path.lexists(self._out / name):
                    if name in self._files or name == INDEX:  # it was not there when we looked
                        raise FileExistsError(errno.EEXIST, f"{name} was written there meanwhile")
                    self._disk.unlink(self._writing / name)  # a config that says the same: theirs stays
                    continue
                identity = identity_of(None, self._writing / name)
                self._disk.rename(self._writing / name, self._out / name)
                moved[name] = identity
            self._disk.sync_folder(self._out)
        except BaseException:
            for name, identity in moved.items():
                with contextlib.suppress(OSError):
                    if identity_of(None, self._out / name) == identity:  # and not another export's by now
                        self._disk.unlink(self._out / name)
            raise
        with contextlib.suppress(OSError):
            self._disk.remove_folder(self._writing)

    def abandon(self) -> None:
        """Remove what was written so far; what cannot be removed stays hidden."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                self._disk.close(fd)
        self._fds.clear()
        with contextlib.suppress(OSError, ValueError):  # ValueError: of a name that no file can have
            remove_path(self._disk, self._writing, own=self._texts.union(self._files, [INDEX]).__contains__)
