"""Which tensors a path holds: one safetensors file, or an index over several, as Hugging Face lays them out.

Only names and places: nothing is read but headers. An index may name files of its own folder only; a path that
leads out of it is refused. What is wrong is a ValueError that names the file.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from zeor.checkpoint.files.tensorfile import TensorEntry, read_header

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
