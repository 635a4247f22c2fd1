"""When a collective fails or does not complete: which operation, on what, and who was missing.

The rank that gives up leaves a note in the store that the process group was made with, waits a
moment for the others' notes, and names the ranks that left none: those never reached the operation.
Ranks at different events are told apart before a collective begins (meeting.py), a rank that does not call a verb for
all ranks is named by attendance.py.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch.distributed as dist

from zeor.comm.asking import ANSWER_SECONDS, SilentStore, asker
from zeor.comm.launch.world import STORE_VARIABLE
from zeor.comm.mesh import Mesh

GRACE_SECONDS = 3.0


_failed: list[str] = []


def has_failed() -> bool:
    """Whether a collective of this process has failed: then nobody may wait for other ranks for long."""
    return bool(_failed)


def explain(mesh: Mesh, label: str, error: BaseException) -> RuntimeError:
    """The error to raise instead of the backend's own."""
    mesh.stuck = True
    _failed.append(label)
    text = str(error).splitlines()[0]
    timed_out = "timed out" in text.lower() or "timeout" in text.lower()
    what = f"did not complete within {mesh.timeout:g} s" if timed_out else "failed"
    return RuntimeError(
        f"zeor: {label} {what} on rank {mesh.rank} of {mesh.world}; {_missing(mesh, label)}. The backend said: {text}"
    )


def _missing(mesh: Mesh, label: str) -> str:
    try:
        notes = _exchange_notes(mesh, label)
    except SilentStore:
        return (
            "the other ranks could not be asked, because the job's store does not answer: the host that holds it "
            f"({_holder()}) is frozen or cut off"
        )
    except Exception as error:  # the store has died with the process that held it
        return f"{_holder()} is gone: it holds the job's store, which cannot be reached ({type(error).__name__})"
    absent = [rank for rank in range(mesh.world) if rank not in notes]
    elsewhere = {rank: note for rank, note in notes.items() if note != label}
    parts = []
    if absent:
        parts.append(
            f"rank {', '.join(map(str, absent))} did not take part (it crashed, is busy, took another path, or has "
            "ended its loop: where ranks have unequal numbers of batches, loop inside `with zeor.join(model):`)"
        )
    for rank, note in elsewhere.items():
        parts.append(f"rank {rank} was at {note}")
    return "; ".join(parts) or "all ranks were there"


def _holder() -> str:
    """Who holds the store: see torch's rendezvous by environment, and launch.py."""
    if STORE_VARIABLE in os.environ:
        return "the process that called zeor.launch"
    return "torchrun's first host" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def _exchange_notes(mesh: Mesh, label: str) -> dict[int, str]:
    """Each question has a time limit, and all of them together a little more."""
    ranks = dist.get_process_group_ranks(mesh.control)
    names = {group_rank: f"zeor/stuck/{rank}" for group_rank, rank in enumerate(ranks)}
    patience = min(ANSWER_SECONDS, max(GRACE_SECONDS, mesh.timeout))
    ask = asker().ask
    ask(lambda store: store.set(names[mesh.rank], label), patience)
    notes: dict[int, str] = {}
    deadline = time.monotonic() + min(GRACE_SECONDS, mesh.timeout / 2)
    while len(notes) < mesh.world and time.monotonic() < deadline:
        for rank, name in names.items():
            note = None if rank in notes else ask(functools.partial(_read, name), patience)
            if note is not None:
                notes[rank] = note
        time.sleep(0.05)
    return notes


def _read(name: str, store: Any) -> str | None:
    return str(store.get(name).decode()) if store.check([name]) else None
