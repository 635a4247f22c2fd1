"""Attendance: a verb that every rank must call first waits until every rank has, and says who has not.

`if rank == 0: zeor.save(...)` used to end at a collective's timeout, minutes later, with an error about something
else. Here each rank leaves a note in the store that the process group was made with, and looks for the others' notes.
No collective is begun before all are there: where some do not come, nothing is under way, and training may go on.
A rank that died is found by its closed connection, and the error is the one that a collective would have raised.

    attend(mesh, "zeor.save")     after 5 s a warning that names the missing ranks, after 60 s AbsentRanks on this one
    a rank that comes later       AbsentRanks at once, since the others have given up
    a rank that is at another     AbsentRanks at once on all: "rank 1 is at zeor.export"
    one that has stepped less     the same: its slices are of another step
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm.asking import asker
from zeor.comm.mesh import Mesh
from zeor.comm.stuck import explain

WARN_SECONDS, PATIENCE_SECONDS = 5.0, 60.0
_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between two looks for notes
_FIRST_LOOK = 0.2  # seconds until ranks are looked for that died; then every second
_MOST_ASKED, _TAG = 8, 1 << 24

log = logging.getLogger("zeor")


class AbsentRanks(RuntimeError):
    """Not every rank called what every rank must call."""


# The n-th attendance on one rank of a group meets the n-th on every other.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def attend(mesh: Mesh, what: str, patience: float | None = None) -> None:
    """Return when every rank of the mesh is at `what` too; raise AbsentRanks where some are not within `patience`."""
    if mesh.world == 1 or mesh.fake or mesh.control is None:
        return
    count = _counts[mesh.control] = _counts.get(mesh.control, 0) + 1
    patience = min(PATIENCE_SECONDS, mesh.timeout) if patience is None else patience
    try:
        _Call(mesh, what, count).meet(patience)
    except dist.DistError as error:  # the store has died with the process that held it
        raise explain(mesh, f"waiting for every rank in {what}", error) from error


class _Call:
    """One rank's part in one attendance."""

    def __init__(self, mesh: Mesh, what: str, count: int) -> None:
        self.mesh, self.what, self.count = mesh, what, count
        self._ask = asker().ask
        self.base = f"zeor/attend/{mesh.control.group_name}"

    def meet(self, patience: float) -> None:
        if self._is_set(self._key("failed")):
            self._after_a_failure()
        self._set(self.mesh.rank, f"{self.what}\n{self.mesh.steps}")
        count = self._key("count")
        if self._ask(lambda store: store.add(count, 1)) == self.mesh.world:
            self._set("all", self._differences() or "-")
        self._wait(patience)
        told = self._get("all")
        if told != "-":
            raise AbsentRanks(f"{self.what}: every rank must call it, but {told}.")
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
                    self.what, self._missing(), self.mesh.rank,
                )  # fmt: skip
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _look_for_the_dead(self, turn: int) -> None:
        """To ask for a message of a rank that has closed its connections fails at once. One that lives never sends it:
        the number is used only here."""
        ranks = dist.get_process_group_ranks(self.mesh.control)
        for rank in self._missing()[:_MOST_ASKED]:
            try:
                dist.irecv(torch.empty(1), ranks[rank], group=self.mesh.control, tag=_TAG + self.count * 1000 + turn)
            except RuntimeError as error:
                raise explain(self.mesh, f"waiting for every rank in {self.what}", error) from error

    def _given_up(self, patience: float) -> AbsentRanks:
        missing = self._missing()
        text = f"every rank must call {self.what}; ranks {missing} did not within {patience:g} s"
        self._set("failed", text)
        ranks = dist.get_process_group_ranks(self.mesh.control)
        # What comm/stuck.py tells the others, where this rank now leaves them in a collective.
        name, note = f"zeor/stuck/{ranks[self.mesh.rank]}", f"{self.what}, which not every rank called"
        self._ask(lambda store: store.set(name, note))
        return AbsentRanks(f"{text[0].upper()}{text[1:]}. Call it outside of `if rank == 0:`.")

    def _after_a_failure(self) -> None:
        """The others gave up on this one. They may be at the next already, and this rank then joins them there."""
        text = self._get("failed")
        self.count += 1
        if not self._is_set(self._key("count")):
            raise AbsentRanks(f"{self.what} was given up by the other ranks: {text}.")
        _counts[self.mesh.control] = self.count

    def _differences(self) -> str:
        """Who is elsewhere; asked by the last one to come."""
        found = [self._get(rank).split("\n") for rank in range(self.mesh.world)]
        other = next((rank for rank, note in enumerate(found) if note != found[0]), None)
        if other is None:
            return ""
        (what, steps), (its_what, its_steps) = found[0], found[other]
        if what == its_what:
            what, its_what = f"{what} after {steps} calls of step()", f"{its_what} after {its_steps}"
        return f"rank 0 is at {what} and rank {other} at {its_what}"

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.mesh.world) if not self._is_set(self._key(rank))]

    def _forget_the_last(self) -> None:
        """All are here, so nobody is at the call before any more: its notes go."""
        self.count -= 1
        for name in [self.mesh.rank, *(("count", "all", "failed") if self.mesh.rank == 0 else ())]:
            self._delete(self._key(name))

    def _key(self, name: str | int) -> str:
        return f"{self.base}/{self.count}/{name}"

    def _is_set(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.check([key])))

    def _set(self, name: str | int, text: str) -> None:
        key = self._key(name)
        self._ask(lambda store: store.set(key, text))

    def _delete(self, key: str) -> None:
        self._ask(lambda store: store.delete_key(key))

    def _get(self, name: str | int) -> str:
        key = self._key(name)
        return str(self._ask(lambda store: store.get(key)).decode())
