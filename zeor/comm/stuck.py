"""When a collective fails or does not complete: which operation, on what, and who was missing.

The rank that gives up leaves a note in the store that the process group was made with, waits a
moment for the others' notes, and names the ranks that left none: those never reached the operation.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from zeor.comm.mesh import Mesh

GRACE_SECONDS = 3.0


def explain(mesh: Mesh, label: str, error: BaseException) -> RuntimeError:
    """The error to raise instead of the backend's own."""
    mesh.stuck = True
    text = str(error).splitlines()[0]
    timed_out = "timed out" in text.lower() or "timeout" in text.lower()
    what = f"did not complete within {mesh.timeout:g} s" if timed_out else "failed"
    return RuntimeError(
        f"zeor: {label} {what} on rank {mesh.rank} of {mesh.world}; {_missing(mesh, label)}. The backend said: {text}"
    )


def _missing(mesh: Mesh, label: str) -> str:
    try:
        notes = _exchange_notes(mesh, label)
    except Exception as error:  # the store may have died with the rank that held it
        return f"the other ranks could not be asked ({type(error).__name__}: the job's store is gone)"
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


def _exchange_notes(mesh: Mesh, label: str) -> dict[int, str]:
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(mesh.control)
    names = {group_rank: f"zeor/stuck/{rank}" for group_rank, rank in enumerate(ranks)}
    store.set(names[mesh.rank], label)
    notes: dict[int, str] = {}
    deadline = time.monotonic() + min(GRACE_SECONDS, mesh.timeout / 2)
    while len(notes) < mesh.world and time.monotonic() < deadline:
        for rank, name in names.items():
            if rank not in notes and store.check([name]):
                notes[rank] = store.get(name).decode()
        time.sleep(0.05)
    return notes
