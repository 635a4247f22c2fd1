"""What a user's loader has been through: its seed, and the epoch that comes next.

`zeor.data.shard(loader)` makes a new object each time. Written inside `for epoch in ...` it would begin epoch 0 again
and again; so how many epochs were begun is remembered beside the user's own object, for as long as that lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from zeor.data.seeds import Seed


class History:
    """Shared by everything that shard() made from one loader with the same options."""

    def __init__(self, seed: int | Seed) -> None:
        self.seed = seed
        self.next = (0, 0)  # epoch, and items of it that are done already

    def begun(self, epoch: int) -> None:
        self.next = max(self.next, (epoch + 1, 0))

    def sent_to(self, epoch: int, start: int) -> None:
        self.next = (epoch, start)


# By identity: a user's object may define == and no hash.
_histories: dict[int, tuple[weakref.ref[Any], dict[Hashable, History]]] = {}


def history_of(data: Any, options: Hashable, seed: Callable[[], int | Seed]) -> History:
    """The history of `data` sharded with these options; a new one, with `seed()`, at the first time."""
    number = id(data)
    if number not in _histories:
        try:
            _histories[number] = (weakref.ref(data, lambda _: _histories.pop(number, None)), {})
        except TypeError:  # no weak reference to it, and so no memory of it
            return History(seed())
    known = _histories[number][1]
    if options not in known:
        known[options] = History(seed())
    return known[options]
