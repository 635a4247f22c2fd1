"""Where a pass over the data stands, counted over all ranks together, and the one seed all ranks draw from.

An epoch has one order, the same on every rank; ranks take turns in it. So "the first `consumed` items of this
epoch are done" says everything, on any number of ranks: the rest is dealt out anew. Knows neither samplers,
streams nor loaders.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zeor.data.history import History
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

    def end(self, finished: Pass) -> None:
        if self.running is finished:
            self.running = None

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


def check_state(state: Any, wanted: dict[str, Any]) -> tuple[int, int]:
    """(epoch, consumed) of a saved state; ValueError where it belongs to other data or another order.

    Between epochs nothing of the order is left to continue, so there data and settings may have changed.
    """
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
    return int(state["epoch"]), int(state["consumed"])


def seed_now(history: History) -> int:
    """The number to draw from; the ranks agree on it now if they have not."""
    return history.seed.now() if isinstance(history.seed, Seed) else history.seed


def take_state(position: Position, state: Any, settings: dict[str, Any]) -> tuple[int, int]:
    """Send a position where a saved state says; returns (epoch, consumed). A seed that nobody gave is the saved one."""
    seed = position.history.seed
    if isinstance(seed, Seed) and isinstance(state, dict):
        settings = {**settings, "seed": state.get("seed")}
    found = check_state(state, settings)
    if isinstance(seed, Seed):
        seed.adopt(state.get("seed"))
    position.go_to(*found)
    return found


def part_numel(numel: int, world: int, drop_last: bool) -> int:
    """How many of `numel` items each rank gets: the same number on all."""
    return numel // world if drop_last else -(-numel // world)


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
