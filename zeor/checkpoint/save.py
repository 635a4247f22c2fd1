"""save(): every rank writes its part, then one rename makes all of it a checkpoint, or none.

1. Rank 0 makes a hidden folder.        2. Every rank writes and syncs a file of its pieces.
3. All ranks tell what they wrote, or what went wrong.
4. Rank 0 writes the manifest and commits (commit.py).      5. All ranks hear how it ended.
A failure anywhere raises the same CheckpointError on every rank, and nothing of it stays visible.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeor.checkpoint import contents as parts
from zeor.checkpoint.commit import Attempt, clean
from zeor.checkpoint.contents import Contents
from zeor.checkpoint.disk import DISK, Disk
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import FileInfo, Manifest, Piece, Stored
from zeor.checkpoint.writer import write_file
from zeor.comm.agree import exchange
from zeor.comm.mesh import Mesh
from zeor.layout.boxes import Box
from zeor.optim.ema import EMA
from zeor.runtime.engine import Engine


class Run:
    """What a checkpoint is made of: the engine of a model, its optimizers, and the model's names."""

    def __init__(self, model: nn.Module, engine: Engine, steppers: Sequence[Any]):
        self.model, self.engine, self.steppers = model, engine, steppers
        self.names, self.aliases = parts.parameter_names(model)
        self.mesh: Mesh = engine.mesh
        # Beside a drop-in optimizer a model may have parameters that nobody shards.
        sharded = {id(slot.user) for slot in engine.slots}
        self.plain_params = {name: p for name, p in model.named_parameters() if id(p) not in sharded}


def collect(run: Run, extra: Mapping[str, Any] | None, data: Any) -> Contents:
    """Everything this rank writes; nothing is copied yet."""
    run.engine.drain()
    run.engine.unfilled.check()
    rank, found = run.mesh.rank, Contents()
    parts.add_parameters(found, run.engine, run.names)
    if rank == 0:
        for name, param in run.plain_params.items():
            found.add_whole((parts.PARAM, name), param)
        for name, buffer in parts.persistent_buffers(run.model).items():
            found.add_whole((parts.BUFFER, name), buffer)
    for number, stepper in enumerate(run.steppers):
        parts.add_optimizer(found, number, stepper, run.names)
    parts.add_rng(found, rank, run.mesh.device)
    if data is not None:
        found.values["data"] = found.encode(parts.EXTRA, f"data of rank {rank}", parts.state_of_object(data, "data"))
    plain_extra = {}
    for key, value in (extra or {}).items():
        if isinstance(value, EMA):
            plain_extra[key] = parts.add_average(found, key, value, run.engine, run.names)
        elif rank == 0:
            plain_extra[key] = parts.state_of_object(value, f"extra[{key!r}]")
    if rank == 0:
        found.values["extra"] = found.encode(parts.EXTRA, "extra", plain_extra)
    return found


def write(
    run: Run,
    found: Contents,
    folder: Path,
    step: int,
    keep: int | None,
    disk: Disk = DISK,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """The steps at the top of this file. Returns where the checkpoint is."""
    mesh = run.mesh
    # 1.
    attempt: Attempt | None = None
    problem, place = "", ""
    if mesh.rank == 0:
        try:
            attempt = Attempt(disk, folder, step)
            attempt.begin()
            place = str(attempt.writing)
        except OSError as error:
            problem = _words(error, folder)
    answers = exchange(mesh, [problem, place], "making of a checkpoint's folder")
    if answers[0][0]:
        raise CheckpointError(answers[0][0])
    writing = Path(answers[0][1])
    # 2.
    name = f"rank-{mesh.rank:05d}.safetensors"
    info: FileInfo | None = None
    try:
        if found.sources:
            info = write_file(disk, writing / name, found.sources, progress)
    except OSError as error:
        problem = _words(error, writing / name)
    # 3.
    told = {"problem": problem, "file": vars(info) if info else None, **found.described()}
    everyone = exchange(mesh, told, "exchange about the files of a checkpoint")
    problem = next((rank["problem"] for rank in everyone if rank["problem"]), "")
    # 4.
    if attempt is not None and not problem:
        try:
            attempt.commit(_manifest(run, step, everyone).to_bytes())
        except OSError as error:
            problem = _words(error, attempt.writing)
    if attempt is not None and problem:
        attempt.abandon()
    # 5.
    ends = exchange(mesh, [problem, str(attempt.final) if attempt else ""], "end of a checkpoint")
    if ends[0][0]:
        raise CheckpointError(ends[0][0])
    if attempt is not None:
        _clean(disk, folder, keep)
    return Path(ends[0][1])


def _clean(disk: Disk, folder: Path, keep: int | None) -> None:
    """The new checkpoint is safe; that an old one could not be deleted is no reason to stop training."""
    try:
        clean(disk, folder, keep)
    except OSError as error:
        parts.log.warning("zeor: an old checkpoint in %s could not be deleted: %s.", folder, error.strerror)


def _words(error: OSError, path: Path) -> str:
    return (
        f"The checkpoint could not be written to {path}: {error.strerror or error}. Nothing of it is visible; earlier "
        "checkpoints are as they were."
    )


def _manifest(run: Run, step: int, everyone: list[dict[str, Any]]) -> Manifest:
    files: list[FileInfo] = []
    index: dict[int, int] = {}
    for rank, told in enumerate(everyone):
        if told["file"]:
            index[rank] = len(files)
            files.append(FileInfo(**told["file"]))
    stored: dict[tuple[str, str], Stored] = {}
    for rank, told in enumerate(everyone):
        for role, name, shape, dtype, boxes in told["tensors"]:
            tensor = stored.setdefault((role, name), Stored(role, name, tuple(shape), dtype, []))
            assert (tensor.shape, tensor.dtype) == (tuple(shape), dtype), (role, name)
            tensor.pieces.extend(Piece(index[rank], Box(tuple(begin), tuple(length))) for begin, length in boxes)
    return Manifest(step, run.mesh.world, files, list(stored.values()), _state(run, [t["values"] for t in everyone]))


def _state(run: Run, values: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain values of all ranks, put together."""
    params = {
        run.names[id(slot.user)]: {"dtype": str(slot.dtype).removeprefix("torch."), "trains": slot.user.requires_grad}
        for slot in run.engine.slots
    }
    optimizers = []
    for number, first in enumerate(values[0].get("optimizers", [])):
        merged = {**first, "keys": {}, "scalars": {}}
        for rank in values:
            merged["keys"].update(rank["optimizers"][number]["keys"])
            merged["scalars"].update(rank["optimizers"][number]["scalars"])
        optimizers.append(merged)
    return {
        "params": params,
        "aliases": run.aliases,
        "optimizers": optimizers,
        "rng": [rank.get("rng") for rank in values],
        "data": [rank.get("data") for rank in values],
        "extra": values[0].get("extra", {}),
        "software": {"torch": torch.__version__, "python": platform.python_version(), "stage": run.engine.plan.stage},
    }
