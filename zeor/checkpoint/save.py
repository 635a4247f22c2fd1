"""save(): every rank writes its part, then one rename makes all of it a checkpoint, or none.

1. Rank 0 makes a hidden folder; where there is no shared disk, a rank of every host does (per_host.py).
2. Every rank writes and syncs a file of its pieces.        3. All ranks tell what they wrote, or what went wrong.
4. Those ranks write the manifest and commit (commit.py).   5. All ranks hear how it ended.
A failure anywhere raises the same CheckpointError on every rank, and nothing of it stays visible.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeor.checkpoint import contents as parts
from zeor.checkpoint.contents import Contents
from zeor.checkpoint.files import per_host
from zeor.checkpoint.files.branches import Complete, line_of
from zeor.checkpoint.files.disk import DISK, Disk
from zeor.checkpoint.files.manifest import BUFFER, EXTRA, PARAM, Branch, FileInfo, Manifest, Piece, Stored, parse
from zeor.checkpoint.files.store import clean, complete, disk_of
from zeor.checkpoint.files.urls import Place
from zeor.checkpoint.files.writer import write_file
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
        self.line = line_of(engine)
        # Beside a drop-in optimizer a model may have parameters that nobody shards.
        sharded = {id(slot.param) for slot in engine.slots}
        self.plain_params = {name: p for name, p in model.named_parameters() if id(p) not in sharded}

    def apart(self, control: Any) -> Run:
        """The same ranks on another control group: what `write` needs in a thread of its own, and no model."""
        other = copy.copy(self)
        other.mesh = dataclasses.replace(self.mesh, control=control)
        del other.model, other.engine, other.steppers, other.plain_params
        return other


def collect(run: Run, extra: Mapping[str, Any] | None, data: Any) -> Contents:
    """Everything this rank writes; nothing is copied yet."""
    run.engine.drain()
    run.engine.unfilled.check()
    rank, found = run.mesh.rank, Contents()
    parts.add_parameters(found, run.engine, run.names)
    if rank == 0:
        for name, param in run.plain_params.items():
            found.add_whole((PARAM, name), param)
        for name, buffer in parts.persistent_buffers(run.model).items():
            found.add_whole((BUFFER, name), buffer)
    for number, stepper in enumerate(run.steppers):
        parts.add_optimizer(found, number, stepper, run.names)
    parts.add_rng(found, rank, run.mesh.device)
    if data is not None:
        found.values["data"] = found.encode(EXTRA, f"data of rank {rank}", parts.state_of_object(data, "data"))
    add_extra(found, run, extra or {})
    if rank == 0:
        found.values["model"] = _model(run)
    return found


def add_extra(found: Contents, run: Run, extra: Mapping[str, Any]) -> None:
    """Every rank's part of the averages in it, and rank 0's of the rest."""
    rank, plain_extra = run.mesh.rank, {}
    for key, value in extra.items():
        if isinstance(value, EMA):
            plain_extra[key] = parts.add_average(found, key, value, run.engine, run.names)
        elif rank == 0:
            plain_extra[key] = parts.state_of_object(value, f"extra[{key!r}]")
    if rank == 0:
        found.values["extra"] = found.encode(EXTRA, "extra", plain_extra)


def _model(run: Run) -> dict[str, Any]:
    """What rank 0 says of the model; taken when the save is called, for the model may change while it is written."""
    params = {
        run.names[id(slot.param)]: {"dtype": str(slot.dtype).removeprefix("torch."), "trains": slot.param.requires_grad}
        for slot in run.engine.slots
    }
    software = {"torch": torch.__version__, "python": platform.python_version(), "stage": run.engine.plan.stage}
    return {"params": params, "aliases": run.aliases, "software": software}


def write(
    run: Run,
    found: Contents,
    folder: Place,
    step: int,
    keep: int | None,
    disk: Disk = DISK,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Place:
    """The steps at the top of this file. Returns where the checkpoint is."""
    mesh, disk = run.mesh, disk_of(folder, disk)
    # 1.
    site = per_host.begin(mesh, disk, folder, step)
    try:
        final, branch = _write(run, found, disk, folder, site, progress)
    except BaseException:
        if site.attempt is not None:
            site.attempt.abandon()
        raise
    run.line.saved(folder, final, branch)
    if site.attempt is not None:
        _clean(disk, site.folder, keep, final)
    return final


def _write(
    run: Run, found: Contents, disk: Disk, folder: Place, site: per_host.Site, progress: Callable[[int], None]
) -> tuple[Place, Branch]:
    """Steps 2 to 5. Where the checkpoint is, and where it stands among others."""
    mesh, problem = run.mesh, ""
    # 2.
    name = per_host.file_name(mesh.rank)
    info: FileInfo | None = None
    try:
        if found.sources:
            info = write_file(disk, site.writing / name, found.sources, progress)
    except Exception as error:  # also what reading a device may raise: the other ranks wait to hear of it
        problem = per_host.words(error, site.writing / name)
    # 3.
    branch = vars(_next_branch(run, folder, site))
    told = {"problem": problem, "file": vars(info) if info else None, "branch": branch, **found.described()}
    everyone = exchange(mesh, told, "exchange about the files of a checkpoint")
    problem = next((rank["problem"] for rank in everyone if rank["problem"]), "")
    # 4. and 5.
    branch = {**everyone[0]["branch"], "order": max(rank["branch"]["order"] for rank in everyone)}
    agreed = Branch(**branch)
    return per_host.commit(mesh, site, lambda: _checked(_manifest(run, site, everyone, agreed)), problem), agreed


def _next_branch(run: Run, folder: Place, site: per_host.Site) -> Branch:
    """What this rank would say of where the checkpoint stands. Rank 0 decides, but for the order: no host may have one
    that is as large."""
    there: list[Complete] = []
    if site.attempt is not None:
        with contextlib.suppress(OSError):  # what cannot be read fails the save where that matters
            there = complete(site.folder)
        if run.mesh.rank == 0 and there:
            _warn_if_back(site.attempt.step, there[-1], folder)
    return run.line.next(folder, there)


def _warn_if_back(step: int, latest: Complete, folder: Place) -> None:
    """At the first save below the latest; from then on that one is the latest."""
    if step < latest.step:
        parts.log.warning(
            "zeor: step %d is saved to %s, where %s lies: the run went back, or another run uses this folder. The "
            "latest is now step %d, and what this run did not come from is deleted first (keep=). Save to another "
            "folder to keep it.", step, folder, latest.path.name, step,
        )  # fmt: skip


def _checked(manifest: Manifest) -> bytes:
    """Its bytes, believed no more than a reader will: what could not be loaded is not committed."""
    data = manifest.to_bytes()
    parse(data, "its manifest")
    return data


def _clean(disk: Disk, folder: Place, keep: int | None, new: Place) -> None:
    """The new checkpoint is safe; that an old one could not be deleted is no reason to stop training."""
    try:
        clean(disk, folder, keep, new)
    except OSError as error:
        parts.log.warning("zeor: an old checkpoint in %s could not be deleted: %s.", folder, error.strerror)


def _manifest(run: Run, site: per_host.Site, everyone: list[dict[str, Any]], branch: Branch) -> Manifest:
    assert site.attempt is not None
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
    state = _state([told["values"] for told in everyone])
    if site.apart:
        state["hosts"] = site.leads
    return Manifest(site.attempt.step, run.mesh.world, files, list(stored.values()), state, branch=branch)


def _state(values: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain values of all ranks, put together."""
    optimizers = []
    for number, first in enumerate(values[0].get("optimizers", [])):
        merged = {**first, "keys": {}, "scalars": {}}
        for rank in values:
            merged["keys"].update(rank["optimizers"][number]["keys"])
            merged["scalars"].update(rank["optimizers"][number]["scalars"])
        optimizers.append(merged)
    return {
        **values[0]["model"],
        "optimizers": optimizers,
        "rng": [rank.get("rng") for rank in values],
        "data": [rank.get("data") for rank in values],
        "extra": values[0].get("extra", {}),
    }
