"""Flat tensors from the ranks that have their elements to those that want them, in messages of bounded length.

A rank copies what it has itself, and is sent the rest. Tensors move in groups, one after another: a group is complete
on every rank, and taken, before the next one begins. Nothing is ever whole on a rank that does not want it whole.

Note [What a move takes]
~~~~~~~~~~~~~~~~~~~~~~~~
Beside what comes to rest a rank holds one group, GROUP_NBYTES of what it wants (or a single tensor, where that is
larger), and two buffers of MESSAGE_NBYTES. In a window each rank sends every other at most MESSAGE_NBYTES / ranks, so
what it sends and what it receives both fit. No rank may leave the loop alone, as others wait for its messages: what
goes wrong on one rank is kept, the rest of its messages hold anything, and all ranks hear of it in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.axes import Axis
from zeor.replan.ranges import ALIGN_NBYTES, Part, Placed, Range, Ranges, length, stream, windows

MESSAGE_NBYTES = 32 << 20
GROUP_NBYTES = 256 << 20


@dataclass
class Wanted:
    """Some elements that this rank wants. `take` gets them, flat, as `dtype`, on `device`."""

    range: Range
    device: torch.device
    take: Callable[[Tensor], None]
    dtype: torch.dtype | None = None  # None: as they come
    into: Tensor | None = None


@dataclass
class Moved:
    """One flat tensor. `has`, `wants`: by rank what it sends, and what it is to be sent; each element is sent by one
    rank. `most_numel`: on the rank that wants the most, what it has included. `own`: what this rank need not be sent,
    and `read(begin, end)` of it; a sender reads too."""

    dtype: torch.dtype
    has: Sequence[Ranges]
    wants: list[Ranges]
    most_numel: int = 0
    own: Ranges = ()
    read: Callable[[int, int], Tensor] | None = None
    wanted: list[Wanted] = field(default_factory=list)

    @property
    def most_nbytes(self) -> int:
        return self.most_numel * self.dtype.itemsize


class Mover:
    """Moves tensors over one axis. Buffers are made at once, so that it fails before anything is sent, or not at all.
    `problem`: the first thing that went wrong here."""

    def __init__(self, axis: Axis):
        self._axis = axis
        self._cap = max(MESSAGE_NBYTES // max(axis.size, 1) // ALIGN_NBYTES, 1) * ALIGN_NBYTES
        alone = axis.size == 1 or axis.fake
        size = 0 if alone else self._cap * axis.size
        self._alone = alone
        self._sent = torch.empty(size, dtype=torch.uint8, device=axis.device)
        self._received = torch.empty_like(self._sent)
        self.problem: Exception | None = None

    @torch.no_grad()
    def move(self, tensors: Sequence[Moved], taken: Callable[[], None]) -> None:
        """`taken` is called after each group."""
        for group in _groups(tensors):
            self._try(lambda group=group: _begin(group))  # type: ignore[misc]  # a default in a lambda
            if not self._alone:
                self._exchange(group)
            self._try(lambda group=group: _finish(group, taken))  # type: ignore[misc]

    def _try(self, do: Callable[[], None]) -> None:
        if self.problem is None:
            try:
                do()
            except Exception as error:  # whatever it is: the other ranks wait for this one's messages
                self.problem = error

    def _exchange(self, group: Sequence[Moved]) -> None:
        axis, rank = self._axis, self._axis.rank
        sizes = [each.dtype.itemsize for each in group]
        others = [other for other in range(axis.size) if other != rank]
        out = {to: self._windows([t.has[rank] for t in group], [t.wants[to] for t in group], sizes) for to in others}
        into = {of: self._windows([t.has[of] for t in group], [t.wants[rank] for t in group], sizes) for of in others}
        most = max((len(found) for found in (*out.values(), *into.values())), default=0)
        label = "exchange of state under another plan"
        count = int(verbs.agree_max(axis, torch.tensor([most]), f"{label}: how many messages"))
        for number in range(count):
            sending = [_at(out.get(other, []), number) for other in range(axis.size)]
            coming = [_at(into.get(other, []), number) for other in range(axis.size)]
            sent_numels = [length(window, sizes) for window in sending]
            received_numels = [length(window, sizes) for window in coming]
            sent, received = self._sent[: sum(sent_numels)], self._received[: sum(received_numels)]
            self._try(lambda: _fill(group, zip(sending, sent.split(sent_numels))))  # noqa: B023 (called at once)
            verbs.all_to_all(axis, received, sent, received_numels, sent_numels, label).wait()
            self._try(lambda: _store(group, zip(coming, received.split(received_numels))))  # noqa: B023

    def _windows(self, has: Sequence[Ranges], wants: Sequence[Ranges], sizes: Sequence[int]) -> list[list[Placed]]:
        return list(windows(stream(has, wants), sizes, self._cap))


def _at(found: Sequence[list[Placed]], number: int) -> list[Placed]:
    return found[number] if number < len(found) else []


def _groups(tensors: Sequence[Moved]) -> Iterator[list[Moved]]:
    """The same on every rank."""
    group: list[Moved] = []
    nbytes = 0
    for each in tensors:
        if group and nbytes + each.most_nbytes > GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(each)
        nbytes += each.most_nbytes
    if group:
        yield group


def _begin(group: Sequence[Moved]) -> None:
    """Memory for what this rank wants, with what it has itself. What it has in the very same cut is not copied."""
    for tensor in group:
        for wanted in tensor.wanted:
            begin, end = wanted.range
            if tensor.read is not None and [wanted.range] == list(tensor.own):  # of more, too much memory would stay
                found = tensor.read(begin, end)
                if found.device == wanted.device:
                    wanted.into = found
                    continue
            wanted.into = torch.zeros(end - begin, dtype=tensor.dtype, device=wanted.device)
            for own in tensor.own:
                first, last = max(own.begin, begin), min(own.end, end)
                if first < last and tensor.read is not None:
                    wanted.into[first - begin : last - begin].copy_(tensor.read(first, last))


def _fill(group: Sequence[Moved], messages: Iterator[tuple[list[Placed], Tensor]]) -> None:
    for window, message in messages:
        for (number, begin, end), at in window:
            tensor = group[number]
            assert tensor.read is not None
            size = tensor.dtype.itemsize
            message[at : at + (end - begin) * size].view(tensor.dtype).copy_(tensor.read(begin, end))


def _store(group: Sequence[Moved], messages: Iterator[tuple[list[Placed], Tensor]]) -> None:
    for window, message in messages:
        for part, at in window:
            tensor = group[part.tensor]
            nbytes = (part.end - part.begin) * tensor.dtype.itemsize
            _spread(tensor, part, message[at : at + nbytes].view(tensor.dtype))


def _spread(tensor: Moved, part: Part, values: Tensor) -> None:
    """To every place on this rank that wants them."""
    for wanted in tensor.wanted:
        first, last = max(wanted.range.begin, part.begin), min(wanted.range.end, part.end)
        if first < last:
            assert wanted.into is not None
            at = wanted.range.begin
            wanted.into[first - at : last - at].copy_(values[first - part.begin : last - part.begin])


def _finish(group: Sequence[Moved], taken: Callable[[], None]) -> None:
    for tensor in group:
        for wanted in tensor.wanted:
            assert wanted.into is not None
            wanted.take(wanted.into if wanted.dtype is None else wanted.into.to(wanted.dtype))
            wanted.into = None
    taken()
