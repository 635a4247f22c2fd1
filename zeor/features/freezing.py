"""Which parameters train: what the user set, what all ranks agree on, and the move of a parameter that is unfrozen.

`requires_grad` of a view counts at once for autograd. What the ranks do together (lanes, reduces) follows only when
all of them are known to want the same. This module knows neither hooks nor optimizers: both are told.

Note [Freezing and unfreezing]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. A parameter frozen at `shard` lies in a lane without gradients. Unfrozen, it moves to a new trainable lane and the
   rest of its old lane closes ranks, so that what stays frozen never has a byte of gradient or state. Its master is
   exact: the frozen lane kept its value in its own dtype (keys.py). All its gradients, and the optimizer's
   state, begin there.
2. A parameter frozen later keeps its lane, its gradient (until the user drops it) and the optimizer's state. A lane of
   which nothing trains is not reduced.
3. The move is a collective, so ranks must agree before it. While anything is frozen, every training forward begins
   with one small agreement on who trains (where paths are settled, only after a change). While nothing is, nothing can
   move: a change is confirmed with the end of backward. Ranks that differ raise, all of them, naming the parameter.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.comm.axes import Axes
from zeor.step.events import Announcer
from zeor.step.extension import COMPARED, Extension
from zeor.step.settling import Settling
from zeor.step.unit import Slot


class Watcher(Protocol):
    def thawed(self, slots: Sequence[Slot]) -> None:
        """These parameters have moved to a trainable lane."""


class Freezing(Extension):
    """Who trains in one engine. `move` brings parameters that are unfrozen to trainable lanes."""

    riding, told_count = COMPARED, 2

    def __init__(
        self, axes: Axes, slots: Sequence[Slot], announcer: Announcer, settling: Settling,
        move: Callable[[Sequence[Slot]], None],
    ):  # fmt: skip
        self._axes, self._slots, self._announcer, self._move = axes, slots, announcer, move
        self._settling = settling
        self._watchers: list[weakref.ref[Watcher]] = []
        self._changed = True
        self._adopt()

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(weakref.ref(watcher))

    def froze(self) -> None:
        self._changed, self.tells = True, None

    # ---- agreement

    def meets(self, train: bool, alone: bool) -> bool:
        """A training forward begins with an agreement."""
        return train and self._agrees

    @property
    def _agrees(self) -> bool:
        """See step 3 of the Note. Where paths are settled, only a rank that has changed something asks."""
        return self._some_frozen and (self._changed or not self._settling.settled)

    def needs_answer(self) -> bool:
        return self._changed

    def begin_forward(self, train: bool, alone: bool) -> None:
        if train:
            self.settle()

    def settle(self) -> None:
        """A training forward begins: see step 3 of the Note."""
        if not self._agrees:
            return
        axis = self._axes.everyone
        if axis.size > 1 and not axis.fake:
            numbers = torch.tensor(self.told(), dtype=torch.int32)
            self._compare(verbs.agree_max(axis, numbers, "agreement on which parameters train").tolist())
        self._adopt()

    def told(self) -> list[int]:
        number = self._fingerprint() if self._changed else self._agreed
        return [number, -number]

    def _fingerprint(self) -> int:
        return zlib.crc32(bytes(slot.trains for slot in self._slots)) & 0x7FFFFFFF

    def heard(self, largest: Sequence[int]) -> None:
        """The end of backward. What must move waits for the next forward."""
        self._compare(largest)
        if not self._some_frozen:
            self._adopt()

    def _compare(self, largest: Sequence[int]) -> None:
        if largest[0] == -largest[1]:
            return
        slots = self._slots
        mine = "".join("1" if slot.trains else "0" for slot in slots)
        everyone = exchange(self._axes.everyone, mine, "comparison of which parameters train")
        told = {rank: flags for rank, flags in enumerate(everyone) if rank not in self._announcer.left}
        for number, slot in enumerate(slots):
            ranks = {flags[number]: rank for rank, flags in told.items()}
            if len(ranks) > 1:
                raise RuntimeError(
                    f"Parameter {slot.name!r} trains on rank {ranks['1']} and is frozen on rank {ranks['0']}; call "
                    "requires_grad_ alike on every rank."
                )
            flag = "1" in ranks
            if slot.trains != flag:  # this rank is out of data and only follows
                slot.param.requires_grad_(flag)

    def _adopt(self) -> None:
        """What every rank is known to want holds from here on."""
        if not self._changed:
            return
        self._changed = False
        slots = self._slots
        self._agreed = self._fingerprint()
        self.tells = [self._agreed, -self._agreed]
        self._some_frozen = any(not slot.trains and slot.dtype.is_floating_point for slot in slots)
        thawed = [slot for slot in slots if slot.trains and slot.lane.grads is None]
        if thawed:
            self._move(thawed)
            for watcher in filter(None, (ref() for ref in self._watchers)):
                watcher.thawed(thawed)
        for slot in slots:
            if slot.lane.grads is not None:
                slot.lane.grads.agree(slot.index, slot.trains)
