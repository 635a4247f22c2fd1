"""save(): every rank writes its part, then one rename makes all of it a checkpoint, or none.

0. Every rank finds out what it writes, and all agree to save, or all raise.
1. Rank 0 makes a hidden folder; where there is no shared disk, a rank of every host does (per_host.py).
2. Every rank writes and syncs a file of its pieces.        3. All ranks tell what they wrote, or what went wrong.
4. Those ranks write the manifest and commit: files/commit.py says when a save is complete.  5. All ranks hear how it
ended. What is saved is decided in `collect` here.
A failure anywhere raises the same CheckpointError on every rank, and nothing of it stays visible.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeor.checkpoint import contents as parts
from zeor.checkpoint import room
from zeor.checkpoint.extras import rng_state
from zeor.checkpoint.files import manifest as manifests
from zeor.checkpoint.files import per_host
from zeor.checkpoint.files.branches import Complete, Lineage
from zeor.checkpoint.files.commit import abandoned_on_error, complete
from zeor.checkpoint.files.disk import DISK, Disk
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import BUFFER, EXTRA, PARAM, RNG, Branch, FileInfo, Manifest, Stored, StoredPiece
from zeor.checkpoint.files.store import clean, disk_of
from zeor.checkpoint.files.urls import Place, shown
from zeor.checkpoint.files.writer import Source, write_file
from zeor.checkpoint.joined import joined
from zeor.checkpoint.run import TrainingRun
from zeor.comm.agree import exchange, raise_first
from zeor.comm.axes import Axis
from zeor.layout.boxes import Box
from zeor.optim.ema import EMA
from zeor.step.unit import Slot

EVERY_SECONDS = 10.0  # a line about a save that goes on

log = logging.getLogger("zeor")


class SaveProgress:
    """A line on rank 0 every ten seconds of a long save, with bytes and speed. Within it, `add` counts the bytes of
    rank 0's file that are written; any thread may call it."""

    def __init__(self, what: str, total_nbytes: int, shown: bool) -> None:
        self._what, self._total_nbytes, self._shown = what, total_nbytes, shown
        self._done_nbytes = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._begin = time.monotonic()

    def __enter__(self) -> SaveProgress:
        if self._shown:
            threading.Thread(target=self._watch, daemon=True, name="zeor-progress").start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done_nbytes += nbytes

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            log.info("zeor: %s", self.line(time.monotonic() - self._begin))

    def line(self, seconds: float) -> str:
        done, total = self._done_nbytes / 1e9, self._total_nbytes / 1e9
        rest = "" if done < total else "; waiting for the disk and the other ranks"
        speed = done / max(seconds, 1e-9)
        return f"{self._what}: {done:.2f} of rank 0's {total:.2f} GB written in {seconds:.0f} s, {speed:.2f} GB/s{rest}"


class Destination(NamedTuple):
    folder: Place
    step: int
    keep: int | None

    @property
    def lost_words(self) -> tuple[str, str]:
        """What is said where a rank is lost on the way."""
        then = "What is visible in the folder is whole; earlier checkpoints are as they were."
        return f"Saving step {self.step} to {shown(str(self.folder))}", then


class SaveRequest(NamedTuple):
    """What one rank asks to be saved, and where to."""

    to: Destination
    extra: Mapping[str, Any] | None
    data: Any
    error: BaseException | None = None  # why this rank cannot save: the others must hear it
    busy: bool = False  # the save before is under way, and this one is not to wait for it


def save(run: TrainingRun, request: SaveRequest) -> Place:
    """All the steps at the top of this file. Every rank calls it. Returns where the checkpoint is."""
    found, _ = agree(run, request)
    return write(run.everyone, run.lineage, found, request.to)


# ---- step 0


def agree(
    run: TrainingRun, request: SaveRequest, copy_nbytes: Callable[[Sequence[Source]], int] = lambda sources: 0
) -> tuple[parts.Contents, list[Any]]:
    """What this rank writes, once every rank knows that; what is wrong on one of them is raised on all. Also, for
    room.short_of, what each rank asks of its host's memory: `copy_nbytes` of what it writes."""
    found, error = parts.Contents(), request.error
    if error is None and not request.busy:
        try:
            found = collect(run, request.extra, request.data)
        except Exception as failure:
            error = failure
    words = "" if error is None else str(error) or type(error).__name__
    step = request.to.step if error is None else None
    mine = [words, request.busy, list(room.request(copy_nbytes(found.sources))), step]
    answers = exchange(run.everyone, mine, "agreement to save a checkpoint")
    if error is not None:
        raise error
    raise_first([answer[0] for answer in answers], CheckpointError)
    if any(answer[1] for answer in answers):
        raise CheckpointError(
            "The checkpoint before this one is still being written; save less often, wait() for it first, or "
            "let the call wait (busy='wait')."
        )
    steps = [answer[3] for answer in answers]
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        raise CheckpointError(
            f"The ranks save different steps: rank 0 gives step={steps[0]}, rank {other} gives step={steps[other]}; "
            "give the same one on every rank. Nothing was written."
        )
    assert step is not None
    run.begin_anew(step)
    return found, [answer[2] for answer in answers]


def collect(run: TrainingRun, extra: Mapping[str, Any] | None, data: Any) -> parts.Contents:
    """Everything this rank writes; nothing is copied yet."""
    run.drain()
    run.unfilled.check()
    rank, found = run.everyone.rank, parts.Contents()
    written = _written(run)
    parts.add_parameters(found, list(written.values()), run.names)
    parts.add_residuals(found, list(written.values()), run.names)
    if run.holders.rank == 0:
        for name, param in run.plain_params.items():
            found.add_whole((PARAM, name), param)
        for name in run.naming.written_buffers:
            found.add_whole((BUFFER, name), run.buffers[name])
    for number, stepper in enumerate(run.steppers):
        parts.add_optimizer(found, number, stepper, written, run.names)
    found.values["rng"] = found.encode(RNG, f"rank {rank}", rng_state(run.everyone.device))
    found.values["reads"] = run.shards.rank if run.reads_data else None  # which part of the data
    if data is not None and found.values["reads"] is not None:
        found.values["data"] = found.encode(EXTRA, f"data of rank {rank}", parts.state_of_object(data, "data"))
    add_extra(found, run, extra or {})
    if run.holders.rank == 0:
        found.values["model"] = _model(run)
    return found


def _written(run: TrainingRun) -> dict[str, Slot]:
    """The parameters of which this rank writes its part, by the name of their slot."""
    slots = [slot for slot in run.slots if id(slot.param) not in run.naming.copies]
    return parts.writers(slots, run.tensor_coords)


def add_extra(found: parts.Contents, run: TrainingRun, extra: Mapping[str, Any]) -> None:
    """Every rank's part of the averages in it, and rank 0's of the rest."""
    rank, plain_extra, written = run.everyone.rank, {}, _written(run)
    for key, value in extra.items():
        if isinstance(value, EMA):
            plain_extra[key] = parts.add_average(found, key, value, written, run.names)
        elif rank == 0:
            plain_extra[key] = parts.state_of_object(value, f"extra[{key!r}]")
    if rank == 0:
        found.values["extra"] = found.encode(EXTRA, "extra", plain_extra)


def _model(run: TrainingRun) -> dict[str, Any]:
    """What the first rank of a model, or of some stages of one, says of it; taken when the save is called, for the
    model may change while it is written."""
    params = {
        run.names[id(slot.param)]: {"dtype": str(slot.dtype).removeprefix("torch."), "trains": slot.param.requires_grad}
        for slot in run.slots
    }
    software = {"torch": torch.__version__, "python": platform.python_version(), "stage": run.stage}
    found: dict[str, Any] = {"params": params, "aliases": run.aliases, "software": software}
    if any(slot.lane.grads is not None and slot.lane.grads.keeps for slot in run.slots):
        found["averaged_over"] = run.averaged_over  # what sums of residuals are to be divided by
        if run.counts_items:
            found["counted"] = True
    if run.engine.plan.wire is not None:
        found["run_steps"] = run.everyone.standing.run_steps  # by which a warm-up ends
    wire = run.chosen_wire()
    if wire is not None:
        found["wire"] = wire
    if run.divided:
        found["divided"] = run.divided
    if run.stages:
        found["stages"] = run.stages
    return {"first": run.naming.first_stage, "said": found}


# ---- steps 1 to 5


def write(axis: Axis, lineage: Lineage, found: parts.Contents, to: Destination, disk: Disk = DISK) -> Place:
    """Write what was found and make it a checkpoint. Returns where that is. Knows no model: any thread may call it."""
    disk, total_nbytes = disk_of(to.folder, disk), sum(source.nbytes for source in found.sources)
    with SaveProgress(f"saving step {to.step} to {to.folder}", total_nbytes, axis.rank == 0) as progress:
        # 1.
        site = per_host.begin(axis, disk, to.folder, to.step)
        with abandoned_on_error(site.attempt):
            # 2.
            info, problem = _write_file(axis, disk, site, found, progress.add)
            # 3.
            branch = vars(_next_branch(axis, lineage, to.folder, site))
            mine = {"problem": problem, "file": vars(info) if info else None, "branch": branch, **found.described()}
            everyone = exchange(axis, mine, "exchange about the files of a checkpoint")
            problem = next((rank["problem"] for rank in everyone if rank["problem"]), "")
            order = max(rank["branch"]["order"] for rank in everyone)
            agreed = Branch(**{**everyone[0]["branch"], "order": order})
            # 4. and 5.
            final = per_host.commit(axis, site, lambda: _checked(_manifest(site, everyone, agreed)), problem)
        lineage.saved(to.folder, final, agreed)
        if site.attempt is not None:
            _clean(disk, site.folder, to.keep, final)
        return final


def _write_file(
    axis: Axis, disk: Disk, site: per_host.Site, found: parts.Contents, progress: Callable[[int], None]
) -> tuple[FileInfo | None, str]:
    """This rank's file, or what went wrong with it."""
    path = site.writing / per_host.file_name(axis.rank)
    try:
        return write_file(disk, path, found.sources, progress) if found.sources else None, ""
    except Exception as error:  # also what reading a device may raise: the other ranks wait to hear of it
        return None, per_host.words(error, path)


def _next_branch(axis: Axis, lineage: Lineage, folder: Place, site: per_host.Site) -> Branch:
    """What this rank would say of where the checkpoint stands. Rank 0 decides, but for the order: no host may have one
    that is as large."""
    there: list[Complete] = []
    if site.attempt is not None:
        with contextlib.suppress(OSError):  # what cannot be read fails the save where that matters
            there = complete(site.folder)
        if axis.rank == 0 and there:
            _warn_if_back(site.attempt.step, there[-1], folder)
    return lineage.next(folder, there)


def _warn_if_back(step: int, latest: Complete, folder: Place) -> None:
    """At the first save below the latest; from then on that one is the latest."""
    if step < latest.step:
        log.warning(
            "zeor: step %d is saved to %s, where %s lies: the run went back, or another run uses this folder. The "
            "latest is now step %d, and what this run did not come from is deleted first (keep=). Save to another "
            "folder to keep it.", step, folder, latest.path.name, step,
        )  # fmt: skip


def _checked(manifest: Manifest) -> bytes:
    """Its bytes, believed no more than a reader will: what could not be loaded is not committed."""
    data = manifest.to_bytes()
    manifests.parse(data, "its manifest")
    return data


def _clean(disk: Disk, folder: Place, keep: int | None, new: Place) -> None:
    """The new checkpoint is safe; that an old one could not be deleted is no reason to stop training."""
    try:
        clean(disk, folder, keep, new)
    except OSError as error:
        log.warning("zeor: an old checkpoint in %s could not be deleted: %s.", folder, error.strerror)


def _manifest(site: per_host.Site, everyone: list[dict[str, Any]], branch: Branch) -> Manifest:
    assert site.attempt is not None
    files: list[FileInfo] = []
    index: dict[int, int] = {}
    for rank, each in enumerate(everyone):
        if each["file"]:
            index[rank] = len(files)
            files.append(FileInfo(**each["file"]))
    stored: dict[tuple[str, str], Stored] = {}
    for rank, each in enumerate(everyone):
        for role, name, shape, dtype, boxes in each["tensors"]:
            tensor = stored.setdefault((role, name), Stored(role, name, tuple(shape), dtype, []))
            assert (tensor.shape, tensor.dtype) == (tuple(shape), dtype), (role, name)
            tensor.pieces.extend(StoredPiece(index[rank], Box(tuple(begin), tuple(length))) for begin, length in boxes)
    state = joined([each["values"] for each in everyone])
    if site.apart:
        state["hosts"] = site.leads
    return Manifest(site.attempt.step, len(everyone), files, list(stored.values()), state, branch=branch)
