"""Where a pass over the data stands, counted over all ranks together, and the one seed all ranks draw from.

An epoch has one order, the same on every rank; ranks take turns in it. So "the first `consumed` items of this
epoch are done" says everything, on any number of ranks: the rest is dealt out anew. Knows neither samplers,
streams nor loaders.
`zeor.data.shard(loader)` makes a new object each time. Written inside `for epoch in ...` it would begin epoch 0 again
and again; so a `History` remembers beside the user's own object, for as long as that lives, how many epochs were begun.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zeor.data.seeds import Seed

VERSION = 1


@dataclass(eq=False)
class Pass:
    """One pass: items [start, ...) of an epoch's order. `handed` of them are with the users of all ranks."""

    epoch: int
    start: int
    handed: int = 0

    @property
    def consumed(self) -> int:
        return self.start + self.handed


class Position:
    """The next pass, and the running one until it ends. Tells the history, which says where to begin."""

    def __init__(self, history: History | None = None) -> None:
        self.history = History(0) if history is None else history
        self.epoch, self.start = self.history.next
        self.running: Pass | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next pass is `epoch`, from its first item; or from where a loaded position says, if it is in it."""
        if epoch != self.epoch:
            self.start = 0
        self.epoch, self.running = epoch, None
        self.history.sent_to(epoch, self.start)

    def begin(self) -> Pass:
        """Start the next pass; the one after it will be the next epoch's."""
        self.running = Pass(self.epoch, self.start)
        self.history.begun(self.epoch)
        self.epoch, self.start = self.epoch + 1, 0
        return self.running

    @property
    def continues(self) -> bool:
        """Whether the next pass, or the one just begun, goes on in the middle of an epoch."""
        return (self.running.start if self.running else self.start) > 0

    def now(self) -> tuple[int, int]:
        """(epoch, items of it consumed by all ranks together)."""
        return (self.running.epoch, self.running.consumed) if self.running else (self.epoch, self.start)

    def go_to(self, epoch: int, consumed: int) -> None:
        self.epoch, self.start, self.running = epoch, consumed, None
        self.history.sent_to(epoch, consumed)


def take_state(position: Position, state: Any, wanted: dict[str, Any]) -> tuple[int, int]:
    """Send a position where a saved state says; returns (epoch, consumed). A seed that nobody gave is the saved one.
    ValueError where the state belongs to other data or another order.

    Between epochs nothing of the order is left to continue, so there data and settings may have changed.
    """
    seed = position.history.seed
    if isinstance(seed, Seed) and isinstance(state, dict):
        wanted = {**wanted, "seed": state.get("seed")}
    if not isinstance(state, dict) or state.get("zeor_data") != VERSION:
        raise ValueError(f"This is no position that zeor.data (version {VERSION}) saved: {state!r:.80}")
    if state["kind"] != wanted["kind"]:
        raise ValueError(f"The position was saved for {state['kind']}, and this loader reads {wanted['kind']}.")
    for name, value in wanted.items():
        if state["consumed"] and state.get(name) != value:
            raise ValueError(
                f"The position was saved in the middle of an epoch with {name}={state.get(name)!r}, and here {name} is "
                f"{value!r}: the epoch cannot be continued; use the same data and settings, or set_epoch() to start "
                "an epoch instead of loading this."
            )
    epoch, consumed = int(state["epoch"]), int(state["consumed"])  # first: a bad one changes nothing
    if isinstance(seed, Seed):
        seed.agreed = state.get("seed")  # the run goes on in the order that it began
    position.go_to(epoch, consumed)
    return position.epoch, position.start


def seed_now(history: History) -> int:
    """The number to draw from; the ranks agree on it now if they have not."""
    return history.seed.now() if isinstance(history.seed, Seed) else history.seed


def part_numel(numel: int, world: int, drop_last: bool) -> int:
    """How many of `numel` items each rank gets: the same number on all."""
    return numel // world if drop_last else -(-numel // world)


@contextmanager
def kept(generator: torch.Generator | None) -> Iterator[None]:
    """Whatever is drawn inside, after it the generator is as it was."""
    state = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch (CPU), random and numpy inside, and put them back as they were after."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach every GPU's generator too
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


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
