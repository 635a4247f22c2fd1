"""What a checkpoint holds, in numbers, and whether it is sound: what `zeor inspect` prints.

`describe` reads the manifest and the sizes of files alone. `verify` reads every byte: each block is hashed, each
header compared with the manifest. Needs no process group, changes nothing.
"""

from __future__ import annotations

import contextlib
import math
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from zeor.checkpoint.files.blocks import BlockReader
from zeor.checkpoint.files.commit import complete, read_manifest
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import NAME, PARAM, FileInfo, Manifest
from zeor.checkpoint.files.reading import check_header
from zeor.checkpoint.files.urls import Place, names_in


@dataclass
class Description:
    """One checkpoint; `problems` are sentences, none where it is sound as far as was looked."""

    path: Place
    manifest: Manifest | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.manifest.files) if self.manifest else 0


def describe(path: Place) -> Description:
    """The manifest, and whether every file is there in its size and no other is."""
    found = Description(path)
    try:
        found.manifest = read_manifest(path)
    except CheckpointError as error:
        found.problems.append(str(error))
        return found
    for file in found.manifest.files:
        problem = _size_problem(path / file.name, file)
        if problem:
            found.problems.append(problem)
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = names_in(path)
    known = {NAME, *(file.name for file in found.manifest.files)}
    found.problems += [f"{path / name} is not part of the checkpoint." for name in names if name not in known]
    return found


def _size_problem(path: Place, file: FileInfo) -> str:
    try:
        found = path.lstat()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}."
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is no plain file."
    return "" if found.st_size == file.nbytes else f"{path} has {found.st_size} bytes; its manifest says {file.nbytes}."


def verify(found: Description, progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Hash every block of every file; what is damaged joins the problems, one sentence per file."""
    if found.manifest is None:
        return
    for number, file in enumerate(found.manifest.files):
        path = found.path / file.name
        if _size_problem(path, file):
            progress(file.nbytes)
            continue  # `describe` has said so
        done = 0
        try:
            with BlockReader(path, file, found.manifest.block_nbytes, alone=True) as reader:
                for nbytes in reader.verify():
                    progress(nbytes)
                    done += nbytes
            check_header(found.path, found.manifest, number)
        except CheckpointError as error:
            found.problems.append(str(error))
            progress(file.nbytes - done)


def bytes_by_role(manifest: Manifest) -> dict[str, int]:
    """Bytes by role, the optimizers' entries one by one, the largest first."""
    counts: dict[str, int] = {}
    for tensor in manifest.tensors:
        counts[tensor.role] = counts.get(tensor.role, 0) + tensor.nbytes
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def parameter_counts(manifest: Manifest) -> tuple[int, int, int]:
    """(parameters as tensors, their elements, those of them that train)."""
    tensors = numel = trains = 0
    for tensor in manifest.tensors:
        if tensor.role == PARAM:
            count = math.prod(tensor.shape)
            tensors, numel = tensors + 1, numel + count
            trains += count if manifest.params.get(tensor.name, {}).get("trains") is True else 0
    return tensors, numel, trains


def checkpoints_of(folder: Place) -> list[Place]:
    """The folder itself where it is a checkpoint, else the complete ones in it, oldest first."""
    if (folder / NAME).is_file():
        return [folder]
    found = [each.path for each in complete(folder)]
    if not found:
        missing = "does not exist" if not folder.exists() else "holds no complete checkpoint"
        raise CheckpointError(f"{folder} {missing}; give a folder that zeor.save wrote to.")
    return found
