"""Asking the job's store, with a time limit: the host that holds it may be frozen or cut off, and torch would wait for
ever for its answer.

Questions go through one thread of this process. One that is not answered in time leaves that thread behind, blocked,
and every later question fails at once: whoever asked has an error to raise, and must be able to.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

import torch.distributed as dist

ANSWER_SECONDS = 10.0  # a healthy store answers in less than a millisecond


class SilentStore(RuntimeError):
    """The job's store does not answer."""


class Asker:
    """Questions to one store."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._asked: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._silent = False
        threading.Thread(target=_answer, args=(self._asked,), daemon=True, name="zeor-store").start()

    def ask(self, question: Callable[[Any], Any], seconds: float = ANSWER_SECONDS) -> Any:
        """What `question(store)` returns; SilentStore where it takes longer."""
        if self._silent:
            raise SilentStore(_silence(seconds))
        answer: Future = Future()
        self._asked.put((answer, lambda: question(self.store)))
        try:
            return answer.result(seconds)
        except NotInTime:
            self._silent = True
            raise SilentStore(_silence(seconds)) from None

    def leave(self) -> None:
        """No question comes any more: let the thread end."""
        self._asked.put(None)


def _silence(seconds: float) -> str:
    return (
        f"The job's store did not answer within {seconds:g} s: the host that holds it (rank 0's, or torchrun's first) "
        "is frozen or cut off."
    )


def _answer(asked: queue.SimpleQueue) -> None:
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
