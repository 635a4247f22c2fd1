"""Gathers and reduces whose bytes are codes: encode, an exact verb over bytes, decode.

    gather   each rank encodes what it has; all ranks, that one too, take what decoding gives: the same values
    everywhere reduce   each rank encodes the others' parts of what it has; each decodes what it gets and sums it with
    its own part,
             which does not travel and stays exact, in rank order and in fp32 at least. Codes are never summed

Both are used as a verbs.Move is. The codes lie in memory of the ledger's. Blocks of codes begin anew with each fine
slice of a lane, so that they do not depend on how many slices travel together. This module knows flat tensors and an
axis; memory/codecs.py knows formats.

Note [Differences]
~~~~~~~~~~~~~~~~~~
Four bits or two are too few for weights, but enough for how far they have moved since they were last sent. Where all
ranks hold what was sent last, the owner sends the codes of the difference between what it has and that, and every rank
adds what they decode to. What rounding left out is part of the next difference, so nothing is lost for good. What ranks
hold then depends on the past: where it must not (a checkpoint was saved or loaded) new values travel exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.axes import Axis
from zeor.comm.feedback import Residual, forget_nonfinite
from zeor.memory.buffers import Ledger
from zeor.memory.codecs import DEVICE_CHUNK_NUMEL, HOST_CHUNK_NUMEL, Codec, Encoding
from zeor.memory.noise import Noise


@dataclass(frozen=True)
class Coded:
    """How a tensor travels. differs: see Note [Differences]. noise: of its first element, where it is rounded by
    chance. residual: of a reduce, what it has left out so far."""

    codec: Encoding
    slice_numel: int
    ledger: Ledger
    differs: bool = False
    noise: Noise | None = None
    residual: Residual | None = None

    def nbytes(self, numel: int) -> int:
        return self.codec.nbytes(self.slice_numel) * (numel // self.slice_numel) if numel else 0

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        return self.ledger.take("codes", nbytes, torch.uint8, device)

    def give(self, message: Tensor) -> None:
        self.ledger.give("codes", message)

    def slices(self, numel: int) -> list[tuple[slice, slice]]:
        """Of so many elements: (elements, bytes of their codes) of each fine slice."""
        length, each = self.slice_numel, self.codec.nbytes(self.slice_numel)
        count = numel // length if numel else 0
        return [(slice(i * length, (i + 1) * length), slice(i * each, (i + 1) * each)) for i in range(count)]

    def encode(self, message: Tensor, values: Tensor, first: int = 0, held: Tensor | None = None) -> None:
        """`first`: how many elements lie before them, for the noise. `held`: what they differ from."""
        if isinstance(self.codec, Codec) and values.numel():
            return self.codec.encode_each(self._by_slice(message), values, self.noise_at(first), held)
        for elements, codes in self.slices(values.numel()):
            self.codec.encode_into(message[codes], values[elements], self.noise_at(first + elements.start))

    def _by_slice(self, message: Tensor) -> Tensor:
        return message.view(-1, self.codec.nbytes(self.slice_numel))

    def noise_at(self, element: int) -> Noise | None:
        return None if self.noise is None else self.noise.beyond(element)

    def encode_kept(self, message: Tensor, values: Tensor, residual: Tensor, first: int) -> None:
        """The same of values and what was left out of those before: see feedback.py."""
        residual.add_(values)
        self.encode(message, residual, first)
        for elements, codes in self.slices(values.numel()):
            left, noise = residual[elements], self.noise_at(first + elements.start)
            for begin, end in _chunks(left):
                sent = torch.empty(end - begin, dtype=torch.float32, device=left.device)
                self.codec.decode_into(sent, message[codes], begin, noise)
                forget_nonfinite(left[begin:end].sub_(sent))

    def decode(self, values: Tensor, message: Tensor) -> None:
        if isinstance(self.codec, Codec) and values.numel():
            return self.codec.decode_each(values, self._by_slice(message))
        for elements, codes in self.slices(values.numel()):
            self.codec.decode_into(values[elements], message[codes])

    def add(self, values: Tensor, message: Tensor) -> None:
        """What is decoded to what `values` holds: see Note [Differences]."""
        assert isinstance(self.codec, Codec)
        messages, length = self._by_slice(message), self.slice_numel
        together = max(1, _chunk_numel(values) // length)  # slices that are one chunk
        for number in range(0, len(messages), together):
            some, into = messages[number : number + together], values[number * length : (number + together) * length]
            for begin, end in [(0, into.numel())] if len(some) > 1 else _chunks(into):
                moved = torch.empty(end - begin, dtype=torch.float32, device=into.device)
                if len(some) > 1:
                    self.codec.decode_each(moved, some)
                else:
                    self.codec.decode_into(moved, some[0], begin)
                if into.dtype == torch.float32:
                    into[begin:end].add_(moved)
                else:
                    into[begin:end].copy_(moved.add_(into[begin:end]))

    @torch.no_grad()
    def image(self, values: Tensor) -> Tensor:
        """What all ranks get of these values, where no difference is sent."""
        message = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.encode(message, values)
        found = torch.empty_like(values)
        self.decode(found, message)
        return found


class Gather:
    """SLICE -> FULL. As verbs.gather, of which `mine` may be a part of `full`."""

    def __init__(self, axis: Axis, full: Tensor, mine: Tensor, label: str, coded: Coded):
        self._axis, self._label, self._coded = axis, label, coded
        self._full: Tensor | None = full
        self._mine = mine
        self._row = coded.nbytes(mine.numel())
        self.messages = coded.take(axis.size * self._row, full.device)
        self.own = self.messages[axis.rank * self._row : (axis.rank + 1) * self._row]
        self._begun: Callable[[], verbs.Waited]
        axis.observer.traffic.shortened(axis.name, "gather", (mine.nbytes - self._row) * (axis.size - 1))

    @torch.no_grad()
    def encode(self) -> None:
        assert self._full is not None
        with self._axis.observer.coding("encode", self._label, self._axis.device, (self._row, self._mine.nbytes)):
            held = self._full.view(self._axis.size, -1)[self._axis.rank] if self._coded.differs else None
            self._coded.encode(self.own, self._mine, held=held)

    def start(self) -> Gather:
        self.encode()
        move = verbs.gather(self._axis, self.messages, self.own, self._label)
        self._begun = lambda: move
        return self

    def start_after(self, first: Callable[[], verbs.Waited]) -> Gather:
        """Of what another gather brings: see verbs.gather_after."""
        parts = verbs.Parts.of(self._axis, self.messages)
        then = lambda: _Then(first, self.encode)
        self._begun = verbs.gather_after(then, self._axis, self.messages, self.own, self._label, parts)
        return self

    def itself(self) -> Gather:
        return self

    @torch.no_grad()
    def wait(self, noted: bool = True) -> Tensor:
        if self._full is not None:
            self._begun().wait(noted)
            nbytes = self.messages.nbytes, self._full.nbytes
            with self._axis.observer.coding("decode", self._label, self._axis.device, nbytes):
                if not self._coded.differs:
                    self._coded.decode(self._full, self.messages)
                else:
                    self._coded.add(self._full, self.messages)
            self._coded.give(self.messages)
            self._full, self._mine = None, self._mine[:0]
        return self._mine


class _Then:
    """A move, and what is done when it is over."""

    def __init__(self, first: Callable[[], verbs.Waited], then: Callable[[], None]):
        self._first, self._then = first, then

    def wait(self, noted: bool = True) -> Tensor:
        found = self._first().wait(noted)
        self._then()
        return found


class Reduce:
    """PARTIAL -> SLICE, times `factor`. As verbs.reduce; `into` gives the memory for the sum. `first`: how many
    elements lie before those of `full`, for the noise."""

    def __init__(
        self, axis: Axis, full: Tensor, coded: Coded, factor: float, into: Callable[[], Tensor], first: int = 0
    ):
        self._axis, self._coded, self._factor, self._into = axis, coded, factor, into
        self._parts = full.view(axis.size, -1)
        self._row, self._first = coded.nbytes(self._parts.shape[1]), first
        self._left = None if coded.residual is None else coded.residual.block(first // full.numel())
        self._sent = coded.take(axis.size * self._row, full.device)
        self._received = coded.take(verbs.exchange_receives(axis, self._sent.numel()), full.device)
        self._sum: Tensor | None = None

    @torch.no_grad()
    def start(self, label: str) -> Reduce:
        axis, numel = self._axis, self._parts.shape[1]
        self._label = label
        others = axis.size - 1
        self._nbytes = self._row * others, numel * self._parts.itemsize * others
        with axis.observer.coding("encode", label, axis.device, self._nbytes):
            if self._left:
                self._encode_kept(self._left)
            else:
                self._encode()
        axis.observer.traffic.shortened(axis.name, "reduce", self._nbytes[1] - self._nbytes[0])
        self._move = verbs.exchange(axis, self._sent, self._received, label)
        return self

    def _encode(self) -> None:
        """For the ranks before this one, and for those behind it."""
        numel, rank = self._parts.shape[1], self._axis.rank
        for ranks in (slice(rank), slice(rank + 1, None)):
            first = self._first + (ranks.start or 0) * numel
            self._coded.encode(self._sent.view(-1, self._row)[ranks].flatten(), self._parts[ranks].flatten(), first)

    def _encode_kept(self, lefts: Sequence[Tensor | None]) -> None:
        numel = self._parts.shape[1]
        for rank, (part, message) in enumerate(zip(self._parts, self._sent.view(-1, self._row))):
            left, first = lefts[rank], self._first + rank * numel
            if left is not None:
                self._coded.encode_kept(message, part, left, first)
            elif rank != self._axis.rank:
                self._coded.encode(message, part, first)

    def arrives_within(self, seconds: float) -> bool:
        return self._sum is not None or self._move.arrives_within(seconds)

    @torch.no_grad()
    def wait(self) -> Tensor:
        if self._sum is None:
            self._move.wait()
            into = self._into()
            with self._axis.observer.coding("decode", self._label, self._axis.device, self._nbytes):
                if not self._sum_at_once(into):
                    self._sum_up(into, verbs.exchanged(self._axis, self._received))
            for message in (self._received, self._sent):
                self._coded.give(message)
            self._sum = into
            self._parts = self._parts[:0]
        return self._sum

    def _sum_at_once(self, into: Tensor) -> bool:
        """By one operation for each slice, where the device has it and messages lie by rank; else False."""
        codec, size = self._coded.codec, self._axis.size
        if not isinstance(codec, Codec) or self._received.numel() != size * self._row or not into.numel():
            return False
        messages, own = self._received.view(size, -1), self._parts[self._axis.rank]
        return all(
            codec.sum_each(into[elements], messages[:, codes], own[elements], self._axis.rank, self._factor)
            for elements, codes in self._coded.slices(into.numel())
        )

    def _sum_up(self, into: Tensor, messages: list[Tensor | None]) -> None:
        """In rank order, piece by piece; `into` may be this rank's own part."""
        own, wide = self._parts[self._axis.rank], torch.promote_types(into.dtype, torch.float32)
        before = self._first + self._axis.rank * into.numel()
        for elements, codes in self._coded.slices(into.numel()):
            out, mine, noise = into[elements], own[elements], self._coded.noise_at(before + elements.start)
            for begin, end in _chunks(out):
                total, piece = (torch.empty(end - begin, dtype=wide, device=out.device) for _ in range(2))
                found = total
                for rank, message in enumerate(messages):
                    here = piece if rank else total
                    if message is None:
                        here = mine[begin:end].to(wide)
                    else:
                        self._coded.codec.decode_into(here, message[codes], begin, noise)
                    found = torch.add(found, here, out=total) if rank else here
                if out.dtype == wide:
                    torch.mul(found, self._factor, out=out[begin:end])
                else:
                    out[begin:end].copy_(found * self._factor)


def _chunk_numel(flat: Tensor) -> int:
    return HOST_CHUNK_NUMEL if flat.device.type == "cpu" else DEVICE_CHUNK_NUMEL


def _chunks(flat: Tensor) -> list[tuple[int, int]]:
    size = _chunk_numel(flat)
    return [(begin, min(begin + size, flat.numel())) for begin in range(0, flat.numel(), size)]
