"""Announcing: before a rank does something that all ranks must do together, it says so.

Over Gloo ranks then meet (comm/meeting.py). Inside `zeor.join` the block that is open tells the others (join.py). The
engine and its parts name their events here and know nothing else of joining.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from zeor.comm.axes import Axes
from zeor.comm.meeting import begin_meeting, meet
from zeor.memory.view import Held

TRAIN, EVAL, ENTRY = "train", "eval", "entry"
BACKWARD, BACKWARD_KEPT, AGREEMENT = "backward", "backward_kept", "agreement"
NORM, STEP, GRADS, FULL, TOTAL, OTHER = "norm", "step", "grads", "full", "total", "other"

# How each is called in a sentence.
SAID = {
    TRAIN: "a forward with gradients",
    EVAL: "a forward without gradients",
    ENTRY: "a method that zeor.shard was given",
    BACKWARD: "a backward",
    BACKWARD_KEPT: "a backward inside zeor.no_sync",
    AGREEMENT: "an agreement of a backward",
    NORM: "the norms of the gradients",
    STEP: "a step of an optimizer",
    GRADS: "the gathering of a gradient",
    FULL: "zeor.full_params",
    TOTAL: "zeor.total",
    OTHER: "something that all ranks must take part in",
}
EVENTS = tuple(SAID)
# These say all by their name; of the others, ranks that only follow must know more.
NEEDS_NO_DETAIL = (TRAIN, EVAL, AGREEMENT)

# What the user's code does to a gradient; other verbs are names of in-place methods.
DROP, SCALE = "drop", "scale"


class OpenJoin(Protocol):
    """An open `zeor.join`, as the parts of an engine see it; join.py implements it."""

    ranks: list[int]  # that take part, in the default process group
    left: list[int]  # that had run out of data at the last announcement
    playing: bool  # this rank is one of them, and only follows

    @property
    def active(self) -> int:
        """How many ranks still compute."""

    def announce(self, by: Announcer, event: str, detail: Any = None) -> list[Any]: ...

    def event(self, by: Announcer, event: str, detail: Any) -> AbstractContextManager[None]:
        """An event that is played as a whole: what is announced inside it is part of it."""

    def note_edit(self, held: Held, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """This rank's code changed a gradient."""

    def tell_total(self, numbers: list[int | float]) -> list[Any]: ...


open_joins: list[OpenJoin] = []


class Announcer:
    """Speaks for one engine."""

    def __init__(self, axes: Axes, number: int):
        self._axes, self._number = axes, number  # number: the same on every rank for the same model
        self.block: OpenJoin | None = None  # inside zeor.join
        self.parked = False  # the model's bytes are off the device: see replan/park.py

    @property
    def playing(self) -> bool:
        """This rank only follows the others: see Note [Joining] in join.py."""
        return self.block is not None and self.block.playing

    @property
    def left(self) -> list[int]:
        """Ranks that have run out of data."""
        return [] if self.block is None else self.block.left

    @property
    def active(self) -> int:
        """How many ranks compute."""
        return self._axes.everyone.size if self.block is None else self.block.active

    def check_here(self, what: str) -> None:
        """RuntimeError while the model is parked."""
        if self.parked:
            raise RuntimeError(f"{what} while the model is parked; call zeor.unpark(model, optimizer) first.")

    def announce(self, event: str, detail: Any = None, meets: bool = True) -> None:
        """Before anything that all ranks must do together. `meets`: it has collectives, and ranks have not met for it
        yet; see Note [Meeting] in comm/meeting.py."""
        if self.parked:
            self.check_here(f"This model came to {SAID[event]}")
        if self.block is not None:
            self.block.announce(self, event, detail)
        elif open_joins and self._axes.everyone.size > 1:
            raise RuntimeError(
                f"This model comes to {SAID[event]} inside a zeor.join that knows only of other models, so a rank that "
                "is out of data could not follow; name all of them: zeor.join([model, other])."
            )
        elif meets:
            what = detail if event == OTHER and isinstance(detail, str) else SAID[event]
            begin = begin_meeting if event == BACKWARD else meet  # gradients are computed before the first is sent
            begin(self._axes.everyone, what, self._number)

    def announced(self, event: str, detail: Any = None) -> AbstractContextManager[None]:
        """The same for an event that is played as a whole, with all that is inside it."""
        if self.block is not None:
            return self.block.event(self, event, detail)
        self.announce(event)
        return nullcontext()

    def edited(self, held: Held, verb: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """The user changed a gradient: ranks that only follow must hear of it."""
        if self.block is not None and not self.block.playing:
            self.block.note_edit(held, verb, args, kwargs or {})
