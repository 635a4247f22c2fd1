"""Extension: what a feature (release, join's counts, freezing, ...) adds to a step.

The core of a step knows no feature. It calls the methods below at fixed moments, of all extensions in the order the API
lists them; each does nothing unless the feature overrides it. Numbers that ranks must agree on once per backward travel
with the exchange that ends it, so that agreeing costs no message of its own. Where paths are settled nobody waits for
that exchange (Note [Settled paths] in settling.py), so a feature says what its numbers are for (`riding`):

    NOW         the answer is needed at once, and is the same in most steps
    COMPARED    a number and its negative, which must be equal on all ranks; a difference is heard one step late
    NEWS        zeros in most steps; heard one step late

    forward     meets, begin_forward, saw_input
    backward    check_backward, says, begin_backward, grads_begun, factor, unit_reduced, told, needs_answer, heard,
                grads_there, end_backward
    step        end_step
    the user    heed, edited, froze, drain, pause, resume
    an error    abandon
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from zeor.step.unit import Slot, Unit

NOW, COMPARED, NEWS = "now", "compared", "news"


class Extension:
    # ---- a forward

    def meets(self, train: bool, alone: bool) -> bool:
        """Whether this feature has a collective of its own when a forward begins."""
        return False

    def begin_forward(self, train: bool, alone: bool) -> None:
        """The model's forward begins (`alone`: that of one unit outside it); ranks have met."""

    def saw_input(self, value: Any) -> None:
        """What a training forward was given; where no forward is seen, a gradient."""

    # ---- a backward

    def check_backward(self) -> None:
        """A backward is about to begin; nothing has changed yet, and whoever cannot have it raises here."""

    def says(self) -> dict[str, Any]:
        """What ranks that only follow must know of the backward that begins."""
        return {}

    def begin_backward(self, said: dict[str, Any]) -> None:
        """A backward begins; ranks have not met yet. `said`: by all extensions."""

    def grads_begun(self) -> None:
        """What the user still has of earlier gradients will be added to; the rest is forgotten."""

    def factor(self) -> float | None:
        """By what the sum over ranks is multiplied; None: no opinion."""
        return None

    def unit_reduced(self, unit: Unit) -> None:
        """A unit's sum is there, in mid-backward or at its end."""

    riding: ClassVar[str] = NOW  # what the numbers are for that a feature tells
    tells: list[int] | None = None  # these numbers, where they are known without asking; else `told` is asked for them

    @property
    def told_count(self) -> int:
        """How many numbers `told` has; the same on every rank."""
        return 0

    def needs_answer(self) -> bool:
        """Whether this rank must hear before it goes on, whatever its numbers are."""
        return False

    def told(self) -> list[int]:
        """Numbers of this rank, for the exchange that ends a backward."""
        return []

    def heard(self, largest: Sequence[int]) -> None:
        """The largest of what each rank told."""

    def grads_there(self) -> None:
        """A backward is over, reduced or not."""

    def end_backward(self) -> None:
        """A backward that reduced is over."""

    def abandon(self) -> None:
        """A backward raised half-way."""

    # ---- the user

    def heed(self) -> None:
        """Gradients are about to be used: look at what the user did to them past zeor."""

    def edited(self, slot: Slot, verb: str) -> None:
        """The user changed a gradient in place, by this method of tensors."""

    def froze(self) -> None:
        """The user froze or unfroze a parameter on this rank."""

    def drain(self) -> None:
        """Somebody asks for weights or state as they rest: nothing may be under way."""

    def pause(self) -> None:
        """The model is shown as a plain one, for a while or for good."""

    def resume(self) -> None:
        """After `pause`: it is sharded again."""

    # ---- a step

    def end_step(self) -> None:
        """An optimizer has stepped."""


def overriding(extensions: Sequence[Extension], name: str) -> list[Callable[..., Any]]:
    """The method of this name of those extensions that do something in it."""
    plain = getattr(Extension, name)
    return [getattr(each, name) for each in extensions if getattr(type(each), name) is not plain]
