"""Preemption: a signal becomes a checkpoint on every rank and a clean exit, at the end of a step.

1. The signal's handler only notes the time.     2. At the end of each step the ranks tell each other, in one exchange
of 24 bytes on the host, whether any of them has such a note: all see it in the same step, whoever was signalled.
3. Every rank saves.     4. Every rank leaves, by SystemExit or by Preempted.
From the note on a watch thread ends the process when the time is over: what was saved before stands.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeor.checkpoint import api
from zeor.checkpoint.contents import Contents
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.urls import Place
from zeor.checkpoint.run import TrainingRun, run_of
from zeor.checkpoint.save import add_extra
from zeor.checkpoint.saver import saver_of
from zeor.comm import small
from zeor.comm.agree import everywhere
from zeor.comm.meeting import meet
from zeor.comm.stuck import explain

AnySignal = str | int  # its name or number

TOO_LATE = 1  # the exit code when the time was over

log = logging.getLogger("zeor")


class Preempted(Exception):  # noqa: N818 (public, and no error)
    """The run was told to stop, and has saved itself."""

    def __init__(self, path: Place, step: int) -> None:
        super().__init__(f"The run was told to stop; step {step} is saved in {path}.")
        self.path, self.step = path, step


@dataclass(frozen=True)
class What:
    """What is saved, and where."""

    folder: str | os.PathLike[str]
    model: nn.Module
    optimizer: Any
    extra: Mapping[str, Any] | None
    data: Any
    keep: int | None

    def check(self, run: TrainingRun) -> None:
        """Raise what a save would, now. A loader's state_dict() is not called: torchdata's begins an epoch then."""
        api.checked("zeor.preempt", self.folder, self.extra, self.data, self.keep)
        add_extra(Contents(), run, self.extra or {})


class Preemption:
    """See zeor.preempt. Made armed; `close()`, or the end of a `with`, gives the signals back."""

    def __init__(
        self, what: What, signals: AnySignal | Iterable[AnySignal], within: float | None, exit_code: int | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("zeor.preempt must be called on the main thread: Python handles signals there only.")
        run = run_of(what.model, what.optimizer)
        self._what, self._within, self._exit_code = what, within, exit_code
        self._before: dict[signal.Signals, Any] = {}
        self._noted: float | None = None  # when the signal came, by time.monotonic()
        self._over: threading.Event | None = None  # of the watch
        self._saved = False
        for each in self._checked(run, signals):
            self._before[each] = signal.signal(each, self._note)

    def _checked(self, run: TrainingRun, signals: AnySignal | Iterable[AnySignal]) -> list[signal.Signals]:
        """The signals. What is wrong on one rank is raised on all: none trains on with others that have gone."""

        def check() -> list[signal.Signals]:
            if self._within is not None and not self._within > 0:
                raise ValueError(f"zeor.preempt(within={self._within!r}): give seconds, more than 0, or None.")
            self._what.check(run)
            many = signals if isinstance(signals, Iterable) and not isinstance(signals, str) else [signals]
            return list(dict.fromkeys(map(_signal, many)))  # each once

        return list(everywhere(run.everyone, check, "agreement on the arguments of zeor.preempt", CheckpointError))

    def close(self) -> None:
        """Give the signals back to who had them before."""
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        if self._over is not None:
            self._over.set()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _note(self, number: int, frame: Any) -> None:
        """The handler. Later signals change nothing: the first one set the time."""
        if self._noted is None:
            self._noted = time.monotonic()
            self._watch()

    # ---- steps 2 to 4

    def check(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """At the end of every step, on every rank: `step` is how many are done. Returns at once, unless some rank was
        told to stop; then it saves and does not return. `extra` is added to what zeor.preempt was given."""
        api.check_step("check", step)
        api.check_extra("check", extra)
        waited = self._agree(step)
        if waited is None:
            return
        if self._noted is None:  # another rank was told, that long ago
            self._noted = time.monotonic() - waited
            self._watch()
        log.warning("zeor: told to stop; saving step %d.", step)
        what, both = self._what, {**(self._what.extra or {}), **(extra or {})}
        saver_of(run_of(what.model, what.optimizer)).pass_over_last(step)
        path = api.save(what.folder, what.model, what.optimizer, step=step, extra=both, data=what.data, keep=what.keep)
        self._saved = True
        if self._exit_code is None:
            self.close()
            raise Preempted(path, step)
        # The signals stay ours: one more of them must not break off what the program does on its way out.
        log.warning("zeor: step %d is saved in %s; leaving.", step, path)
        sys.exit(self._exit_code)

    def _agree(self, step: int) -> float | None:
        """Seconds since the first signal on any rank; None: there was none. The same on every rank. Steps that differ
        are refused here, long before a save would have to."""
        waited = 0.0 if self._noted is None else max(time.monotonic() - self._noted, 1e-6)
        axis = run_of(self._what.model, self._what.optimizer).everyone
        if axis.size > 1:
            meet(axis, "the check of zeor.preempt")
            most = torch.tensor([waited, step, -step], dtype=torch.float64)
            try:
                small.largest(axis, most)
            except RuntimeError as error:
                raise explain(axis, "agreement on whether to stop", error) from error
            waited, largest, least = most.tolist()
            if largest != -least:
                raise ValueError(
                    f"The ranks check different steps, from step={-least:.0f} to step={largest:.0f}; give the same one "
                    "on every rank."
                )
        return waited or None

    # ---- the time that is left

    def _watch(self) -> None:
        if self._within is None:
            return
        assert self._noted is not None
        self._over = threading.Event()
        left = max(0.0, self._noted + self._within - time.monotonic())
        threading.Thread(target=self._leave_after, args=(self._over, left), daemon=True, name="zeor-preempt").start()

    def _leave_after(self, over: threading.Event, seconds: float) -> None:
        """Not by an exception: the main thread may stand in a collective or a write that never ends."""
        if over.wait(seconds):
            return
        if not self._saved:
            log.error(
                "zeor: no checkpoint within %g s of the signal; leaving without it. Earlier ones are as they were.",
                self._within,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._exit_code or 0 if self._saved else TOO_LATE)


def preempt(  # noqa: PLR0913 (public: each option is a keyword)
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    keep: int | None = 3,
    signals: AnySignal | Iterable[AnySignal] = "SIGTERM",
    within: float | None = None,
    exit_code: int | None = 0,
) -> Preemption:
    """Turn SIGTERM into a checkpoint on every rank and a clean exit. Every rank calls it, once, and then in its loop:

        stop = zeor.preempt("checkpoints", model, optimizer, extra={"scheduler": scheduler}, data=loader, within=60)
        for step, batch in enumerate(loader, start=first_step + 1):
            ...
            stop.check(step)  # the end of a step

    check() costs one exchange of 24 bytes between the hosts. When any rank was signalled, all of them save as
    zeor.save does and leave after the same step.

    signals     that, or those, that mean stop; ("SIGTERM", "SIGUSR1") for SLURM with --signal=USR1@120. They take the
                place of earlier handlers until close().
    within      seconds from the signal to the exit; None: as long as it takes. A step or a save that lasts longer ends
                the process with exit code 1, and the checkpoints of before stand.
    exit_code   of the processes; None: raise zeor.Preempted on every rank instead of leaving.
    """
    if isinstance(extra, Mapping):
        extra = dict(extra)  # as it is now
    return Preemption(What(folder, model, optimizer, extra, data, keep), signals, within, exit_code)


def _signal(given: Any) -> signal.Signals:
    try:
        found = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        raise ValueError(f"zeor.preempt(signals=...): {given!r} is no signal; give names such as 'SIGTERM'.") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(
            f"zeor.preempt(signals=...): {found.name} ends or stops a process without asking it; give one that can be "
            "handled, such as 'SIGTERM'."
        )
    return found
