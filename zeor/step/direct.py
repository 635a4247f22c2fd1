"""Gradients that need no reduce: a penalty's, which is computed on slices.

Note [Direct gradients]
~~~~~~~~~~~~~~~~~~~~~~~
What is computed on a slice is final where it is made: it is neither reduced nor divided by the world. It waits here
until the backward that reduces is over, and is added to the sum then, in one order whatever was reduced when. Where the
sum is one over items that carries 1 / count as a remembered factor (counts.py) it is added `count` times, and taken off
before the factor changes. Knows no lane; grads.py adds them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


class Direct:
    def __init__(self) -> None:
        self._waiting: dict[int, Tensor] = {}  # not in the sum yet, by parameter
        self._folded: dict[int, Tensor] = {}  # in the sum, and to be taken off again

    def __bool__(self) -> bool:
        """Something is not in the sum yet."""
        return bool(self._waiting)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._waiting.values()
        yield from self._folded.values()

    def collect(self, param: int, grad: Tensor) -> None:
        """Of the size of this rank's part of the parameter, or empty as that is."""
        held = self._waiting.get(param)
        self._waiting[param] = grad if held is None else held.add_(grad)

    def take(self, keep: bool) -> list[tuple[int, Tensor]]:
        """All of it, for the sum. `keep`: it may have to be taken off again."""
        taken, self._waiting = self._waiting, {}
        if keep:
            self._folded.update(taken)
        return list(taken.items())

    def take_back(self, param: int) -> Tensor | None:
        """What was added to the sum and is taken off again."""
        return self._folded.pop(param, None)

    def drop(self, param: int) -> None:
        self._waiting.pop(param, None)
        self._folded.pop(param, None)
