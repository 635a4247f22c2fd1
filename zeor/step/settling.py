"""Whether ranks wait for the exchange that ends a pass, or know its answer in advance.

Note [Settled paths]
~~~~~~~~~~~~~~~~~~~~
A pass ends with an exchange (Note [Rounds] in order.py): the largest of what each rank told. Most models do the same in
every step, and then the answer is always the same. So once it has been for some steps, nobody waits for it:

1. Each rank keeps the numbers of the last answer as the *pattern*. A rank whose own numbers are the pattern is
   *regular*. It sends its numbers, goes on as if the answer were the pattern, and looks at the true answer at the end
   of the next backward, when it has long been there.
2. A rank whose numbers differ waits for the answer at once. Where it is the pattern all the same (this rank skipped a
   unit that others used) everybody was right. Where it is not, and no rank was regular, all have waited and know it.
   Else the regular ranks were wrong: this rank raises at once, the others at the latest at the end of their next
   backward, before a second wrong step (or in a collective that this rank does not come to any more).
3. Numbers are of three kinds. Those that an answer is needed for (units that are left to reduce, who has a gradient)
   make the pattern. Numbers that must be equal on all ranks (settings, the count of steps) are compared late. News
   (a gradient that is not finite) is heard late, and then all wait again for some steps.
4. A forward's exchange only serves ranks that need a unit out of turn, so it is left out. A rank that needs one all the
   same asks and waits, for half as long as for a collective: where all ranks do, they go on together, and else it
   raises. Which passes there were is compared with the numbers of backward.

paths="auto": after five steps in which all ranks told the same, asked for nothing, and had a gradient for everything
that trains. So a model with conditional paths does not settle by chance. "static": after the first such step, whatever
has no gradient. "dynamic": never. Inside `zeor.join`, and where buffers change in every step, every exchange is waited
for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.axes import Axes

STEPS = {"auto": 5, "static": 1}
OWN = 5  # numbers that this module adds: the passes there were and the pattern (both signs), and who is regular


class Told(NamedTuple):
    """What a rank tells at the end of a backward, by kind: see step 3 of the Note."""

    now: list[int]
    compared: list[int]
    news: list[int]

    @property
    def numbers(self) -> list[int]:
        return [*self.now, *self.compared, *self.news]

    def cut(self, numbers: Sequence[int]) -> Told:
        """Numbers of the same lengths."""
        now, compared = len(self.now), len(self.now) + len(self.compared)
        return Told(list(numbers[:now]), list(numbers[now:compared]), list(numbers[compared:]))


class DivergedError(RuntimeError):
    """Ranks whose paths were settled have told different things."""


class Settling:
    """Of one engine with this many units. `how`: the plan's paths=."""

    def __init__(self, axes: Axes, how: str, count: int):
        self._axes, self._count = axes, count
        alone = axes.everyone.size == 1 or axes.everyone.fake
        self._steps = 0 if alone else STEPS.get(how, 0)  # 0: never
        self._needs_all = how == "auto"
        self.settled = False
        self._same = 0  # backwards in a row in which all ranks told the same and asked for nothing
        self._asked = False  # a rank asked for a unit out of turn, or took a path of its own, since the last of them
        self._passes = 0  # a fingerprint of the passes since then
        self._pattern: list[int] = []
        self._late: tuple[Callable[[], Tensor], Told] | None = None
        axes.when_replaced(self.forget)

    # ---- exchanges

    def exchange(self, numbers: list[int], label: str, patient: bool = True) -> list[int]:
        """The largest of each number. Not `patient`: only a rank that has left the settled path comes here."""
        axis = self._axes.everyone
        patience = None if patient else axis.timeout / 2
        values = torch.tensor(numbers, dtype=torch.int32)
        try:
            found: list[int] = verbs.agree_in_turn(axis, values, label, patience).tolist()
        except NotInTime:
            axis.stuck = True  # a message of this rank's is still out
            raise self._diverged("it needs a unit out of turn, and the other ranks do not") from None
        if not patient and len(numbers) > 1 + self._count and found[-1]:  # a regular rank takes no part in a round
            raise self._diverged("it needs a unit out of turn, and not every other rank does")
        self._asked |= any(found[: 1 + self._count])
        return found

    def note_pass(self, kind: str, same: bool = True) -> None:
        """A pass that only gathers is over. `same`: all ranks took the same path, as far as is known."""
        self._passes = zlib.crc32(kind.encode(), self._passes) & 0x7FFFFFFF
        self._asked |= not same

    def unsettle(self) -> None:
        """On every rank: from here on answers are waited for."""
        self.settled, self._same = False, 0

    def forget(self) -> None:
        """The groups are others: what was under way on the old ones is lost."""
        self._late = None
        self.unsettle()
        self._begin_anew()

    # ---- the end of a backward that reduces

    def tells(self, told: Told, regular: bool = False) -> list[int]:
        """All that a rank tells."""
        passes, pattern = self._passes, hash(tuple(told.now)) & 0x7FFFFFFF
        return [*told.numbers, passes, -passes, pattern, -pattern, int(regular)]

    def foretell(self, told: Told) -> bool:
        """Whether the answer is known in advance; then these numbers are on their way: step 1 of the Note."""
        if not self.settled or told.now != self._pattern:
            return False
        numbers = [*[0] * (1 + self._count), *self.tells(told, regular=True)]
        values = torch.tensor(numbers, dtype=torch.int32)
        label = "agreement that ended the backward before"
        self._late = (verbs.agree_later(self._axes.everyone, values, label), told)
        self._begin_anew()
        return True

    def heard(
        self, told: Told, numbers: Sequence[int], has_all: Callable[[Sequence[int]], bool]
    ) -> tuple[Told, bool]:
        """The answer that this rank has waited for: step 2 of the Note; and whether it is to hear of differences and
        news in it one backward later, as regular ranks do. `has_all`: everything that trains has a gradient, by these
        numbers."""
        answer, own, later = told.cut(numbers[:-OWN]), numbers[-OWN:], False
        if self.settled and own[4]:
            if not self._is_foreseen(answer, own):
                raise self._diverged("what it tells at the end of a backward is not what the other ranks count on")
            known = torch.tensor([*[0] * (1 + self._count), *numbers])
            self._late, later = (lambda: known, told), True
        elif self.settled:
            if answer.now != self._pattern or any(answer.news):
                self.unsettle()
        elif self._steps:
            same = own[0] == -own[1] and own[2] == -own[3] and not self._asked and not any(answer.news)
            self._same = self._same + 1 if same and (has_all(answer.now) or not self._needs_all) else 0
            self.settled, self._pattern = self._same >= self._steps, answer.now
        self._begin_anew()
        return answer, later

    def look_back(self) -> Told | None:
        """The answer of the last backward, where it was not waited for. DivergedError where it was not as foretold."""
        if self._late is None:
            return None
        (wait, told), self._late = self._late, None
        numbers: list[int] = wait().tolist()
        asked, numbers = numbers[: 1 + self._count], numbers[1 + self._count :]
        answer = told.cut(numbers[:-OWN])
        if any(asked) or not self._is_foreseen(answer, numbers[-OWN:]):
            self.unsettle()
            raise self._diverged("another rank told something else at the end of the backward before")
        if any(answer.news):
            self.unsettle()
        return answer

    def _is_foreseen(self, answer: Told, own: Sequence[int]) -> bool:
        return answer.now == self._pattern and own[0] == -own[1]

    def _begin_anew(self) -> None:
        self._passes, self._asked = 0, False

    def _diverged(self, what: str) -> DivergedError:
        axis = self._axes.everyone
        return DivergedError(
            f"The ranks did the same in every step so far, so rank {axis.rank} of {axis.size} did not wait for the "
            f"others to say so, and now {what}. Where ranks may take different paths, pass zeor.shard(..., "
            "paths='dynamic'); load the last checkpoint, as the last step may be wrong."
        )
