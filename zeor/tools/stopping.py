"""Ctrl-C in `zeor train`: the ranks end their step, save where there is a place for it, and leave.

1. The parent's handler leaves a file. Ctrl-C reaches the parent alone, as each rank leads a session of its own.
2. Every rank looks for the file at the end of a step. zeor.preempt lets all of them save after the same one.
3. The parent says in one line what was saved, and exits as a shell expects of an interrupted program.
A second Ctrl-C ends the ranks at once. Nothing here prints a traceback.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import zeor

EXIT_CODE = 128 + signal.SIGINT


class Stopped(NamedTuple):
    """What a rank hands back in place of a result."""

    step: int
    path: str


@contextmanager
def file_at_ctrl_c(wanted: bool) -> Iterator[Path | None]:
    """A path where a file appears at the first Ctrl-C; the second raises KeyboardInterrupt. None, and the first one
    does, where nothing is `wanted`."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="zeor-train-") as folder:
        flag = Path(folder) / "stop"

        def note(number: int, frame: Any) -> None:
            if flag.exists():
                raise KeyboardInterrupt
            flag.touch()
            say("interrupted; it ends its step and saves. Press Ctrl-C again to leave at once.")

        before = signal.signal(signal.SIGINT, note)
        try:
            yield flag
        finally:
            signal.signal(signal.SIGINT, before)


class StepEnd:
    """What a rank does at the end of a step: nothing, without a folder."""

    def __init__(self, folder: Path | None, flag: Path | None, model: Any, optimizer: Any, **also: Any) -> None:
        self._flag, self._stop = flag, None
        if folder is not None:
            self._stop = zeor.preempt(folder, model, optimizer, signals="SIGTERM", exit_code=None, **also)

    def check(self, step: int) -> None:
        """Raise zeor.Preempted on every rank, after a save, where the parent was interrupted."""
        if self._stop is not None:
            if self._flag is not None and self._flag.exists():
                signal.raise_signal(signal.SIGTERM)
            self._stop.check(step)

    def close(self) -> None:
        if self._stop is not None:
            self._stop.close()


def interrupted(saved: Stopped | None, folder: Path | None) -> int:
    """Say what became of the run, and give the exit code."""
    if saved is not None:
        say(f"stopped after step {saved.step}, which is saved in {saved.path}; the same command goes on from there.")
    elif folder is not None:
        say(f"interrupted; nothing new was saved in {folder}.")
    else:
        say("interrupted; nothing was saved. With --save FOLDER it saves then, and goes on from there.")
    return EXIT_CODE


def say(text: str) -> None:
    print(f"zeor train: {text}", file=sys.stderr, flush=True)
