"""Attendance: a verb that every rank must call first waits until every rank has, and says who has not.

`if rank == 0: zeor.save(...)` used to end at a collective's timeout, minutes later, with an error about something
else. Here each rank leaves a note in the store that the process group was made with, and looks for the others' notes.
No collective is begun before all are there: where some do not come, nothing is under way, and training may go on.
A rank that died is found by its closed connection, and the error is the one that a collective would have raised.

    attend(axis, "zeor.save")     after 5 s a warning that names the missing ranks, after 60 s AbsentRanksError here
    a rank that comes later       AbsentRanksError at once, since the others have given up
    a rank that is at another     AbsentRanksError at once on all: "rank 1 is at zeor.export"
    one that has stepped less     the same: its slices are of another step
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm.axes import Axis
from zeor.comm.stuck import asker, explain

WARN_SECONDS, PATIENCE_SECONDS = 5.0, 60.0
_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between two looks for notes
_FIRST_LOOK = 0.2  # seconds until ranks are looked for that died; then every second
_MOST_ASKED, _TAG = 8, 1 << 24

log = logging.getLogger("zeor")


class AbsentRanksError(RuntimeError):
    """Not every rank called what every rank must call."""


# The n-th attendance on one rank of a group meets the n-th on every other.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def attend(axis: Axis, what: str) -> None:
    """Return when every rank of the mesh is at `what` too; AbsentRanksError where some do not come in time."""
    if axis.size == 1 or axis.fake or axis.control is None:
        return
    count = _counts[axis.control] = _counts.get(axis.control, 0) + 1
    try:
        _Call(axis, what, count).meet(min(PATIENCE_SECONDS, axis.timeout))
    except dist.DistError as error:  # the store has died with the process that held it
        raise explain(axis, f"waiting for every rank in {what}", error) from error


class _Call:
    """One rank's part in one attendance."""

    def __init__(self, axis: Axis, what: str, count: int) -> None:
        self.axis, self.what, self.count = axis, what, count
        self._ask = asker().ask
        self.base = f"zeor/attend/{axis.control.group_name}"

    def meet(self, patience: float) -> None:
        if self._is_set(self._key("failed")):
            self._after_a_failure()
        self._set(self.axis.rank, f"{self.what}\n{self.axis.steps}")
        count = self._key("count")
        if self._ask(lambda store: store.add(count, 1)) == self.axis.size:
            self._set("all", self._differences() or "-")
        self._wait(patience)
        told = self._get("all")
        if told != "-":
            raise AbsentRanksError(f"{self.what}: every rank must call it, but {told}.")
        self._forget_the_last()

    def _wait(self, patience: float) -> None:
        begun, pause, warned, looked = time.monotonic(), _SHORTEST, False, 0
        while not self._is_set(self._key("all")):
            waited = time.monotonic() - begun
            if waited >= looked + _FIRST_LOOK:
                self._look_for_the_dead(looked)
                looked += 1
            if waited >= patience:
                raise self._given_up(patience)
            if waited >= WARN_SECONDS and not warned:
                warned = True
                log.warning(
                    "zeor: %s waits for ranks %s on rank %d; every rank must call it.",
                    self.what, self._missing(), self.axis.rank,
                )  # fmt: skip
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _look_for_the_dead(self, turn: int) -> None:
        """To ask for a message of a rank that has closed its connections fails at once. One that lives never sends it:
        the number is used only here."""
        ranks = dist.get_process_group_ranks(self.axis.control)
        for rank in self._missing()[:_MOST_ASKED]:
            try:
                dist.irecv(torch.empty(1), ranks[rank], group=self.axis.control, tag=_TAG + self.count * 1000 + turn)
            except RuntimeError as error:
                raise explain(self.axis, f"waiting for every rank in {self.what}", error) from error

    def _given_up(self, patience: float) -> AbsentRanksError:
        missing = self._missing()
        text = f"every rank must call {self.what}; ranks {missing} did not within {patience:g} s"
        self._set("failed", text)
        ranks = dist.get_process_group_ranks(self.axis.control)
        # What comm/stuck.py tells the others, where this rank now leaves them in a collective.
        name, note = f"zeor/stuck/{ranks[self.axis.rank]}", f"{self.what}, which not every rank called"
        self._ask(lambda store: store.set(name, note))
        return AbsentRanksError(f"{text[0].upper()}{text[1:]}. Call it outside of `if rank == 0:`.")

    def _after_a_failure(self) -> None:
        """The others gave up on this one. They may be at the next already, and this rank then joins them there."""
        text = self._get("failed")
        self.count += 1
        if not self._is_set(self._key("count")):
            raise AbsentRanksError(f"{self.what} was given up by the other ranks: {text}.")
        _counts[self.axis.control] = self.count

    def _differences(self) -> str:
        """Who is elsewhere; asked by the last one to come."""
        found = [self._get(rank).split("\n") for rank in range(self.axis.size)]
        other = next((rank for rank, note in enumerate(found) if note != found[0]), None)
        if other is None:
            return ""
        (what, steps), (its_what, its_steps) = found[0], found[other]
        if what == its_what:
            what, its_what = f"{what} after {steps} calls of step()", f"{its_what} after {its_steps}"
        return f"rank 0 is at {what} and rank {other} at {its_what}"

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.axis.size) if not self._is_set(self._key(rank))]

    def _forget_the_last(self) -> None:
        """All are here, so nobody is at the call before any more: its notes go."""
        self.count -= 1
        names = [self.axis.rank, *(("count", "all", "failed") if self.axis.rank == 0 else ())]
        keys = [self._key(name) for name in names]
        self._ask(lambda store: [store.delete_key(key) for key in keys])

    def _key(self, name: str | int) -> str:
        return f"{self.base}/{self.count}/{name}"

    def _is_set(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.check([key])))

    def _set(self, name: str | int, text: str) -> None:
        key = self._key(name)
        self._ask(lambda store: store.set(key, text))

    def _get(self, name: str | int) -> str:
        key = self._key(name)
        return str(self._ask(lambda store: store.get(key)).decode())
