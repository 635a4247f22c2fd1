"""The progress of a long save: a line on rank 0 every ten seconds, with bytes and speed."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

EVERY_SECONDS = 10.0

log = logging.getLogger("zeor")


class SaveProgress:
    """Within it, `add` counts the bytes of rank 0's file that are written; any thread may call it."""

    def __init__(self, what: str, total_nbytes: int, shown: bool) -> None:
        self._what, self._total_nbytes, self._shown = what, total_nbytes, shown
        self._done_nbytes = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._begin = time.monotonic()

    def __enter__(self) -> SaveProgress:
        if self._shown:
            threading.Thread(target=self._watch, daemon=True, name="zeor-progress").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
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
