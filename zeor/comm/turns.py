"""A thread that does what it is asked, in the order it was asked: host work that nobody waits for yet.

It knows functions and nothing else. What it begins is begun in the same order on every rank, if every rank asks for the
same in the same order, however long each takes and whoever waits for what. So collectives of one group may be left to
one such thread.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """The thread begins with the first job, and ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def ask(self, job: Callable[[], T]) -> Future[T]:
        """Returns at once."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_play, args=(self._jobs,), daemon=True, name=self._name).start()
            weakref.finalize(self, self._jobs.put, None)
        answer: Future[T] = Future()
        self._jobs.put(_play_into(job, answer))
        return answer


def _play_into(job: Callable[[], T], answer: Future[T]) -> Callable[[], None]:
    def play() -> None:
        try:
            answer.set_result(job())
        except BaseException as error:  # whatever it is, it belongs to whoever waits for the answer
            answer.set_exception(error)

    return play


def _play(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or its tensors would live until the next one
