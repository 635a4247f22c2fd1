"""Small host messages between all ranks of an axis, in log N rounds of messages from one rank to one other.

Gloo's own all-reduce and all-gather are rings: a rank waits for 2 (N - 1), or N - 1, messages one after the other. What
ranks agree by is small, so the number of messages in a row is what it costs. This module knows tensors of numbers and
an axis, and not what they mean; errors are the backend's own (agree.py and meeting.py explain them).

Note [Log N rounds]
~~~~~~~~~~~~~~~~~~~
    largest   in round k a rank sends what it knows to the rank 2^k places on, and hears from the one 2^k places back.
              Then it knows of 2^(k+1) ranks. It may hear of a rank twice, which does not change a maximum.
    rows      in round k a rank sends the rows it has to the rank 2^k places back, and gets those of the 2^k ranks that
              follow its own. The last round sends only what is missing.
Both take ceil(log2 N) messages per rank, for any N, and every rank ends with the same numbers.

A message's tag holds what it is for and its length, so messages of different lengths never meet: ranks that have come
apart wait for each other until the time is over, and are named; Gloo would end the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeor.comm.axes import Axis
from zeor.comm.turns import Turns

AGREE, MEET, ROWS, PASS = range(1, 5)  # what a message is for; attendance.py uses numbers from 2^24 on
_KINDS, _LONGEST = 8, 1 << 20


def largest(axis: Axis, values: Tensor, kind: int = AGREE) -> Tensor:
    """The element-wise maximum over ranks, in place: see Note [Log N rounds]."""
    heard, distance = torch.empty_like(values), 1
    while distance < axis.size:
        _swap(axis, values, axis.rank + distance, heard, axis.rank - distance, kind)
        torch.maximum(values, heard, out=values)
        distance *= 2
    return values


def rows(axis: Axis, vector: Tensor) -> Tensor:
    """Every rank's vector of one length, in rank order."""
    found = vector.new_empty(axis.size, vector.numel())  # first those of this rank and the ranks that follow it
    found[0] = vector.view(-1)
    known = 1
    while known < axis.size:
        count = min(known, axis.size - known)
        _swap(axis, found[:count], axis.rank - known, found[known : known + count], axis.rank + known, ROWS)
        known += count
    return found.roll(axis.rank, 0)


def _swap(axis: Axis, sent: Tensor, to: int, heard: Tensor, of: int, kind: int) -> None:
    """One message to a rank and one from a rank (modulo the size), of the same length."""
    tag = kind + _KINDS * min(sent.nbytes, _LONGEST)
    works = [
        dist.isend(sent, group=axis.control, group_dst=to % axis.size, tag=tag),
        dist.irecv(heard, group=axis.control, group_src=of % axis.size, tag=tag),
    ]
    for work in works:
        if work is not None:
            work.wait(timedelta(seconds=axis.timeout))  # an axis may be more patient than its group


# ---- answers that nobody waits for yet


class Channel:
    """Maxima over ranks of which some are not waited for: a thread plays their rounds, in the order they were asked
    for. Every rank asks for the same ones in the same order."""

    def __init__(self) -> None:
        self._turns = Turns("zeor-agree")
        self._last: Callable[[], Future[Tensor] | None] = lambda: None  # the last one started, while somebody holds it

    def start(self, axis: Axis, values: Tensor, kind: int = PASS) -> Future[Tensor]:
        """Returns at once."""
        answer = self._turns.ask(lambda: largest(axis, values, kind))
        self._last = weakref.ref(answer)
        return answer

    def ask(self, axis: Axis, values: Tensor, seconds: float | None = None, kind: int = PASS) -> Tensor:
        """Waits for the answer; with `seconds` only so long, then concurrent.futures.TimeoutError."""
        last = self._last()
        if seconds is None and (last is None or last.done()):
            return largest(axis, values, kind)
        return self.start(axis, values, kind).result(seconds)


# One for all models over the same ranks, whose messages would meet each other's.
_channels: weakref.WeakKeyDictionary[Any, Channel] = weakref.WeakKeyDictionary()


def channel_of(axis: Axis) -> Channel:
    if axis.control not in _channels:
        _channels[axis.control] = Channel()
    return _channels[axis.control]
