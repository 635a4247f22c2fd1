"""When a collective fails or does not complete: which operation, on what, and who was missing.

The rank that gives up leaves a note in the store that the process group was made with, waits a
moment for the others' notes, and names the ranks that left none: those never reached the operation.
Ranks at different events are told apart before a collective begins (meeting.py), a rank that does not call a verb for
all ranks is named by attendance.py.
The store is asked with a time limit: the host that holds it may be frozen or cut off, and torch would wait for ever for
its answer. Questions go through one thread of this process. One that is not answered in time leaves that thread behind,
blocked, and every later question fails at once: whoever asked has an error to raise, and must be able to.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

import torch.distributed as dist

from zeor.comm.axes import Axis
from zeor.comm.launch.world import STORE_VARIABLE

GRACE_SECONDS = 3.0


_failed: list[str] = []


def has_failed() -> bool:
    """Whether a collective of this process has failed: then nobody may wait for other ranks for long."""
    return bool(_failed)


def explain(axis: Axis, label: str, error: BaseException) -> RuntimeError:
    """The error to raise instead of the backend's own."""
    axis.stuck = True
    _failed.append(label)
    text = str(error).splitlines()[0]
    timed_out = "timed out" in text.lower() or "timeout" in text.lower()
    what = f"did not complete within {axis.timeout:g} s" if timed_out else "failed"
    where = f"rank {axis.rank} of {axis.size}"
    if axis.known_as:
        where = f"rank {axis.known_as[axis.rank]}, between ranks {list(axis.known_as)} along {axis.name!r}"
    return RuntimeError(f"zeor: {label} {what} on {where}; {_missing(axis, label)}. The backend said: {text}")


def _missing(axis: Axis, label: str) -> str:
    try:
        notes = _exchange_notes(axis, label)
    except SilentStoreError:
        return (
            "the other ranks could not be asked, because the job's store does not answer: the host that holds it "
            f"({_holder()}) is frozen or cut off"
        )
    except Exception as error:  # the store has died with the process that held it
        return f"{_holder()} is gone: it holds the job's store, which cannot be reached ({type(error).__name__})"
    names = axis.known_as or range(axis.size)
    absent = [names[rank] for rank in range(axis.size) if rank not in notes]
    elsewhere = {names[rank]: note for rank, note in notes.items() if note != label}
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


def _exchange_notes(axis: Axis, label: str) -> dict[int, str]:
    """Each question has a time limit, and all of them together a little more."""
    ranks = dist.get_process_group_ranks(axis.control)
    names = {group_rank: f"zeor/stuck/{rank}" for group_rank, rank in enumerate(ranks)}
    patience = min(ANSWER_SECONDS, max(GRACE_SECONDS, axis.timeout))
    ask = asker().ask
    ask(lambda store: store.set(names[axis.rank], label), patience)
    notes: dict[int, str] = {}
    deadline = time.monotonic() + min(GRACE_SECONDS, axis.timeout / 2)
    while len(notes) < axis.size and time.monotonic() < deadline:
        for rank, name in names.items():
            note = None if rank in notes else ask(functools.partial(_read, name), patience)
            if note is not None:
                notes[rank] = note
        time.sleep(0.05)
    return notes


def _read(name: str, store: Any) -> str | None:
    return str(store.get(name).decode()) if store.check([name]) else None


# ---- asking the job's store


Question = tuple[Future[Any], Callable[[], Any]]  # where the answer goes, and what gives it
ANSWER_SECONDS = 10.0  # a healthy store answers in less than a millisecond


class SilentStoreError(RuntimeError):
    """The job's store does not answer."""


class Asker:
    """Questions to one store."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._asked: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._silent = False
        threading.Thread(target=_answer, args=(self._asked,), daemon=True, name="zeor-store").start()

    def ask(self, question: Callable[[Any], Any], seconds: float = ANSWER_SECONDS) -> Any:
        """What `question(store)` returns; SilentStoreError where it takes longer."""
        if self._silent:
            raise SilentStoreError(_silence(seconds))
        answer: Future[Any] = Future()
        self._asked.put((answer, lambda: question(self.store)))
        try:
            return answer.result(seconds)
        except NotInTime:
            self._silent = True
            raise SilentStoreError(_silence(seconds)) from None

    def leave(self) -> None:
        """No question comes any more: let the thread end."""
        self._asked.put(None)


def _silence(seconds: float) -> str:
    return (
        f"The job's store did not answer within {seconds:g} s: the host that holds it (rank 0's, or torchrun's first) "
        "is frozen or cut off."
    )


def _answer(asked: queue.SimpleQueue[Question | None]) -> None:
    while (pair := asked.get()) is not None:
        answer, question = pair
        try:
            answer.set_result(question())
        except BaseException as error:  # whatever it is, it belongs to the one who asked
            answer.set_exception(error)
        del pair, answer, question  # or they would live until the next question


_asker: Asker | None = None  # of the default process group that was last asked for


def asker() -> Asker:
    """Of the store that the default process group was made with."""
    global _asker
    store = dist.distributed_c10d._get_default_store()
    if _asker is None or _asker.store is not store:
        if _asker is not None:
            _asker.leave()
        _asker = Asker(store)
    return _asker
