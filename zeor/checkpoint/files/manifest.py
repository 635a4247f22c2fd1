"""The manifest: one JSON file that says what a checkpoint holds, and the check that it can be true.

    {"hash": "<xxh3-128 of the canonical text of what follows>", "manifest": {...}}

Canonical: sorted keys, no spaces, ASCII. Every file is listed with its size and the hash of each block of
`block_nbytes` (the last may be shorter), so that a reader can verify just the blocks it reads. Every tensor is
listed by role and name, with its shape, dtype and the boxes that files hold of it; boxes must tile the
shape. `parse` believes nothing: whatever it returns is consistent in itself. See docs/checkpoints.md.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.plain import DTYPES
from zeor.layout.boxes import Box, tile

FORMAT, VERSION = "zeor checkpoint", 1
NAME = "manifest.json"
RESIDUAL = "residual"  # of gradients that were not sent yet: see contents.add_residuals
PARAM, BUFFER, RNG, EXTRA = "param", "buffer", "rng", "extra"  # roles of tensors; for an optimizer's see `role_of`
BLOCK_NBYTES = 4 << 20
MOST_MANIFEST_NBYTES = 1 << 28
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_HASH = re.compile(r"[0-9a-f]{32}")
_MOST_BYTES = MOST_ORDER = 1 << 60
_MOST_BLOCK_NBYTES = 1 << 26  # a reader holds several blocks: what a manifest says must not cost more than that


def new_hash() -> Any:
    """XXH3, 128 bits: as fast as memory. Imported where it is used: training without checkpoints needs it not."""
    import xxhash

    return xxhash.xxh3_128()


def digest(data: Any) -> str:
    hasher = new_hash()
    hasher.update(data)
    return str(hasher.hexdigest())


def role_of(number: int, key: Iterable[str | int]) -> str:
    """The role of the entry `key` in the state of optimizer `number`."""
    return f"optimizer.{number}.{'/'.join(map(str, key))}"


@dataclass(frozen=True)
class FileInfo:
    name: str
    nbytes: int
    blocks: list[str]  # hash of each block


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, in a file under the key that `Stored.key` gives."""

    file: int
    box: Box


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint: what it is, and where its pieces lie."""

    role: str  # param, buffer, optimizer.N.KEY, ema.N, residual, rng, extra
    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: list[StoredPiece]

    def key(self, box: Box) -> str:
        """The name of a piece inside its safetensors file."""
        return f"{self.role}/{self.name}@{','.join(map(str, box.begin))}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Branch:
    """Where a checkpoint stands among others: a run that goes back to an earlier one begins another branch."""

    id: str  # random, of this checkpoint
    order: int  # larger than that of every one that was in the folder before; microseconds since 1970, if possible
    parent: str = ""  # id of the checkpoint that the run loaded, or saved before this one
    parent_name: str = ""  # of its folder


@dataclass(frozen=True)
class Manifest:
    step: int
    world: int
    files: list[FileInfo]
    tensors: list[Stored]
    state: dict[str, Any] = field(default_factory=dict)  # plain JSON: optimizers, data, extra, ...
    block_nbytes: int = BLOCK_NBYTES
    branch: Branch | None = None  # None: written before there were any

    @functools.cached_property
    def params(self) -> dict[str, dict[str, Any]]:
        """What `state` says of each parameter (dtype, whether it trains), where that is well-formed."""
        params = self.state.get("params")
        return {k: v for k, v in params.items() if isinstance(v, dict)} if isinstance(params, dict) else {}

    def by_key(self) -> dict[tuple[str, str], Stored]:
        return {(tensor.role, tensor.name): tensor for tensor in self.tensors}

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "hash": "xxh3_128",
            "block_nbytes": self.block_nbytes,
            "step": self.step,
            "world": self.world,
            "files": [{"name": f.name, "nbytes": f.nbytes, "blocks": f.blocks} for f in self.files],
            "tensors": [_tensor_json(tensor) for tensor in self.tensors],
            "state": self.state,
        }
        if self.branch is not None:
            body["branch"] = vars(self.branch)
        return _signed(_canonical(body))


# The canonical text begins with this, so that the branch is known without reading a manifest whole.
_HEAD = re.compile(rb'\{"hash":"[0-9a-f]{32}","manifest":\{"block_nbytes":[0-9]+,(?:"branch":(\{[^{}]*\}),)?"files":\[')
HEAD_NBYTES = 4096


def branch_in(head: bytes) -> Branch | None:
    """What the first HEAD_NBYTES of a manifest say of its branch. ValueError where they are damaged; more is not
    verified here, for who loads a checkpoint parses it."""
    match = _HEAD.match(head)
    if not match:
        raise ValueError("no beginning of a manifest")
    return _Parser("it").branch(json.loads(match[1])) if match[1] else None


def _signed(text: bytes) -> bytes:
    return b'{"hash":"' + digest(text).encode() + b'","manifest":' + text + b"}\n"


def _tensor_json(tensor: Stored) -> dict[str, Any]:
    pieces = [[p.file, list(p.box.begin), list(p.box.length)] for p in tensor.pieces]
    shape = list(tensor.shape)
    return {"role": tensor.role, "name": tensor.name, "shape": shape, "dtype": tensor.dtype, "pieces": pieces}


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


# ---- reading


def parse(data: bytes, where: str) -> Manifest:
    """A manifest that is consistent in itself, or CheckpointError naming `where` and what is wrong."""
    if len(data) > MOST_MANIFEST_NBYTES:
        raise CheckpointError(f"{where} is {len(data)} bytes long, more than a manifest may be.")
    try:
        body = json.loads(data)["manifest"]
        fits = data == _signed(_canonical(body))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a manifest of a zeor checkpoint ({type(error).__name__}).") from error
    if not fits:
        raise CheckpointError(f"{where} does not match its own hash: it was changed or damaged after it was written.")
    try:
        return _Parser(where).manifest(body)
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where} is malformed: {type(error).__name__} {error}.") from error


class _Parser:
    """Field by field; `self.wrong(...)` says which."""

    def __init__(self, where: str):
        self._where = where

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where} is malformed: {what}.")

    def count(self, value: Any, what: str, least: int = 0) -> int:
        if type(value) is not int or not least <= value <= _MOST_BYTES:
            raise self.wrong(f"{what} is {str(value)[:40]!r}")
        return value

    def text(self, value: Any, what: str) -> str:
        if type(value) is not str or not value or len(value) > 4096:
            raise self.wrong(f"{what} is {str(value)[:40]!r}")
        return value

    def manifest(self, body: dict[str, Any]) -> Manifest:
        if body["format"] != FORMAT or body["hash"] != "xxh3_128":
            raise self.wrong("it is of another format")
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{self._where} has format version {str(body['version'])[:20]}; this zeor reads version {VERSION}. "
                "Use the zeor that wrote it, or a newer one."
            )
        block_nbytes = self.count(body["block_nbytes"], "block_nbytes", least=4096)
        if block_nbytes > _MOST_BLOCK_NBYTES:
            raise self.wrong(f"block_nbytes is {block_nbytes}, more than {_MOST_BLOCK_NBYTES}")
        files = [self.file(entry, block_nbytes) for entry in body["files"]]
        if len({file.name for file in files}) != len(files):
            raise self.wrong("a file is listed twice")
        tensors = [self.tensor(entry, len(files)) for entry in body["tensors"]]
        if len({(tensor.role, tensor.name) for tensor in tensors}) != len(tensors):
            raise self.wrong("a tensor is listed twice")
        self.check_sizes(files, tensors)
        state = body["state"]
        if not isinstance(state, dict):
            raise self.wrong("its state is no object")
        step, world = self.count(body["step"], "step"), self.count(body["world"], "world", least=1)
        branch = self.branch(body["branch"]) if "branch" in body else None
        return Manifest(step, world, files, tensors, state, block_nbytes, branch)

    def branch(self, entry: dict[str, Any]) -> Branch:
        found = Branch(**entry)
        named = [type(value) is str for value in (found.id, found.parent, found.parent_name)]
        if not all(named) or not _HASH.fullmatch(found.id) or (found.parent and not _HASH.fullmatch(found.parent)):
            raise self.wrong("its branch is none")
        if found.parent_name and not _FILE_NAME.fullmatch(found.parent_name):
            raise self.wrong(f"its branch comes from {found.parent_name[:40]!r}")
        self.count(found.order, "the order of its branch", least=1)
        return found

    def file(self, entry: dict[str, Any], block_nbytes: int) -> FileInfo:
        name, nbytes = self.text(entry["name"], "a file's name"), self.count(entry["nbytes"], "a file's size", least=8)
        if not _FILE_NAME.fullmatch(name) or ".." in name or not name.endswith(".safetensors"):
            raise self.wrong(f"a file is named {name[:60]!r}, which is no plain file name of a checkpoint")
        blocks = entry["blocks"]
        if type(blocks) is not list or len(blocks) != -(-nbytes // block_nbytes):
            raise self.wrong(f"{name!r} does not have one hash per block")
        if not all(type(block) is str and _HASH.fullmatch(block) for block in blocks):
            raise self.wrong(f"a hash of {name!r} is no hash")
        return FileInfo(name, nbytes, blocks)

    def tensor(self, entry: dict[str, Any], file_count: int) -> Stored:
        role, name = self.text(entry["role"], "a tensor's role"), self.text(entry["name"], "a tensor's name")
        shape = tuple(self.count(n, f"a size of {name!r}") for n in entry["shape"])
        if len(shape) > 32 or math.prod(filter(None, shape)) > _MOST_BYTES:
            raise self.wrong(f"{name!r} has an absurd shape")
        if entry["dtype"] not in DTYPES:
            raise self.wrong(f"{name!r} has the unknown dtype {str(entry['dtype'])[:40]!r}")
        pieces = []
        for file, begin, length in entry["pieces"]:
            if self.count(file, f"a file of {name!r}") >= file_count:
                raise self.wrong(f"a piece of {name!r} lies in no listed file")
            box = Box(*(tuple(self.count(n, f"a piece of {name!r}") for n in part) for part in (begin, length)))
            pieces.append(StoredPiece(file, box))
        if not tile(shape, [piece.box for piece in pieces]):
            raise self.wrong(f"the pieces of {role} {name!r} overlap, leave a gap, or lie outside its shape {shape}")
        return Stored(role, name, shape, entry["dtype"], pieces)

    def check_sizes(self, files: list[FileInfo], tensors: list[Stored]) -> None:
        """No file is shorter than what is said to lie in it."""
        held = [0] * len(files)
        for tensor in tensors:
            for piece in tensor.pieces:
                held[piece.file] += piece.box.numel * DTYPES[tensor.dtype].itemsize
        for file, nbytes in zip(files, held):
            if nbytes > file.nbytes:
                raise self.wrong(f"{file.name!r} of {file.nbytes} bytes is said to hold {nbytes}")
