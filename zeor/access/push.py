"""push: the whole weights out of a sharded model, bucket by bucket, to whoever generates with them.

    parameters, unit by unit --stream.py--> (LoRA added) --> one flat buffer, filled again and again --> send(bucket)

What lies in which bucket is planned from shapes alone, so all ranks know it and a bucket knows whether it is the last.
The ranks that send hold one bucket beside what is gathered of one unit; the others only pass on what they keep. How a
bucket gets to an engine is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeor.access.adapters import MERGED_NBYTES, Outside, add_product, without_adapters
from zeor.access.sharded import state_of
from zeor.access.stream import DEFAULT_NBYTES, iter_slots
from zeor.comm.agree import everywhere
from zeor.comm.attendance import attend
from zeor.memory.formats import cast_into
from zeor.model.wrapped import unwrapped
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.unit import Slot, Unit

ALIGNED = 64  # bytes: where a tensor of a bucket begins; every dtype may be viewed there
WHO = "zeor.push"
_WIDE = torch.float32  # in which 16-bit weights are added to


@dataclass(frozen=True)
class Bucket:
    """Some whole tensors, packed into one. `flat` is filled anew once send has returned: clone what is to be kept."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    flat: Tensor  # of bytes, where the model computes
    offsets: tuple[int, ...]  # of each tensor, in bytes of `flat`
    number: int
    last: bool

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of each, as views of `flat`."""
        where = zip(self.names, self.offsets, self.dtypes, self.shapes)
        return [(name, _view(self.flat, begin, dtype, shape)) for name, begin, dtype, shape in where]


class Part(NamedTuple):
    """One tensor of a bucket, before it has values. `slot` is None for a buffer of the model's."""

    name: str
    slot: Slot | None
    source: str  # its name in the sharded model
    dtype: torch.dtype
    shape: torch.Size
    begin: int  # in bytes of its bucket

    @property
    def end(self) -> int:
        return self.begin + self.dtype.itemsize * math.prod(self.shape)


@torch.no_grad()
def push(
    model: nn.Module, send: Callable[[Bucket], object], max_bytes: int | None = None, *,
    to: int | str = 0, dtype: torch.dtype | None = None, buffers: bool = False,
) -> None:  # fmt: skip
    """Hand all weights of a sharded model to `send`, whole and plain, in buckets of at most max_bytes: to an engine
    that generates with them. Every rank calls it, between steps.

        def send(bucket):                                  # names, dtypes, shapes; flat, or tensors: views of it
            engine.update_weights_from_tensor(bucket.tensors)
        zeor.push(model, send, dtype=torch.bfloat16)

    send       called for one bucket after the other. When it returns the bucket's memory is used again. What it raises
               ends the push on all ranks, and the model is as it was.
    max_bytes  of one bucket; None: 256 MiB, or what the largest parameter needs. Beside it a rank that sends holds, of
               what it does not keep anyway, at most one unit.
    to         the rank that sends, by its number in the model's mesh, or "all": each rank to an engine of its own.
    dtype      of floating-point tensors, such as torch.bfloat16; None: each parameter's own.
    buffers    persistent buffers too, as this rank has them.

    Names are the model's, and tied parameters come once. Of a peft model they are those of the model without adapters:
    LoRA is merged on the way (W + scale * B A, in fp32 or wider), the adapters themselves are not sent, and the model
    stays as it is. Values are the masters', rounded as zeor.export rounds them."""
    state = state_of(model)
    engine, inner = state.engine, unwrapped(model)
    axis = engine.axes.whole
    if engine.announcer.block is None:
        attend(axis, WHO)
    engine.announcer.announce(events.OTHER, WHO, meets=False)

    def plan() -> _Plan:
        engine.unfilled.check()
        if state.shown:
            raise RuntimeError(f"{WHO} was called inside zeor.full_params; call it outside.")
        if to != "all" and (not isinstance(to, int) or not 0 <= to < axis.size):
            raise ValueError(f"{WHO}(to={to!r}): give a rank from 0 to {axis.size - 1}, or 'all'.")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{WHO}(dtype={dtype}): give a floating-point dtype, or None for each parameter's own.")
        return _Plan(engine, inner, max_bytes, dtype, buffers)

    planned = everywhere(axis, plan, f"check of {WHO}", ValueError)
    _Sending(engine, planned, to in ("all", axis.rank)).run(send)


class _Plan:
    """What goes into which bucket: the same on every rank."""

    def __init__(
        self, engine: Engine, model: nn.Module, max_bytes: int | None, dtype: torch.dtype | None, buffers: bool
    ):  # fmt: skip
        self.outside = without_adapters(model)
        self._dtype = dtype
        parts = [self._of_slot(slot) for unit in engine.units for slot in in_order(unit) if slot.name in self.outside]
        self.buffers = dict(_persistent_buffers(model)) if buffers else {}
        parts += [self._part(name, None, name, value.dtype, value.shape) for name, value in self.buffers.items()]
        largest = max(parts, key=lambda part: part.end, default=None)
        needed = 0 if largest is None else largest.end
        self.max_nbytes = max(DEFAULT_NBYTES, needed) if max_bytes is None else max_bytes
        if largest is not None and needed > self.max_nbytes:
            raise ValueError(
                f"{WHO} cannot fill buckets of max_bytes={max_bytes}: {largest.name!r} alone takes {needed}; give at "
                "least that."
            )
        self.buckets = _packed(parts, self.max_nbytes)

    def _of_slot(self, slot: Slot) -> Part:
        return self._part(self.outside[slot.name].name, slot, slot.name, slot.dtype, torch.Size(slot.whole_shape))

    def _part(self, name: str, slot: Slot | None, source: str, dtype: torch.dtype, shape: torch.Size) -> Part:
        return Part(name, slot, source, self.dtype_of(dtype), shape, 0)

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """In which a tensor of this dtype is sent."""
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def _packed(parts: Sequence[Part], max_nbytes: int) -> list[list[Part]]:
    buckets: list[list[Part]] = []
    for part in parts:
        begin = -(-buckets[-1][-1].end // ALIGNED) * ALIGNED if buckets else 0
        if not buckets or begin + part.end > max_nbytes:
            buckets.append([])
            begin = 0
        buckets[-1].append(part._replace(begin=begin))
    return buckets


class _Sending:
    """One push, on one rank. `sends`: it is one of those that call send."""

    def __init__(self, engine: Engine, plan: _Plan, sends: bool):
        self._engine, self._plan, self._sends = engine, plan, sends
        self._slots = {slot.name: slot for slot in engine.slots}

    def run(self, send: Callable[[Bucket], object]) -> None:
        plan, axis, ledger = self._plan, self._engine.axes.whole, self._engine.ledger
        values = self._values()
        nbytes = max((bucket[-1].end for bucket in plan.buckets), default=0) if self._sends else 0
        flat = everywhere(axis, lambda: self._buffer(nbytes), f"making of a bucket of {WHO}", RuntimeError)
        ledger.add("push", nbytes)
        try:
            for number, parts in enumerate(plan.buckets):
                for part in parts:
                    value = next(values) if part.slot is not None else plan.buffers[part.source]
                    if self._sends:
                        cast_into(_view(flat, part.begin, part.dtype, part.shape).view(-1), value.reshape(-1))
                    del value
                bucket = _bucket(flat, parts, number, number == len(plan.buckets) - 1)
                do = (lambda bucket=bucket: send(bucket)) if self._sends else (lambda: None)
                everywhere(axis, do, f"bucket {number} of {WHO}", RuntimeError)
        finally:
            values.close()
            ledger.drop("push", nbytes)

    def _buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._engine.axes.device)

    def _values(self) -> Generator[Tensor, None, None]:
        """Of every parameter that is sent, in the order of the units. A unit's adapters are held while it is sent."""
        for unit in self._engine.units:
            yield from self._of_unit(unit)

    def _of_unit(self, unit: Unit) -> Generator[Tensor, None, None]:
        outside = self._plan.outside
        chosen = [slot for slot in in_order(unit) if slot.name in outside]
        factors = self._factors([outside[slot.name] for slot in chosen])
        ledger, held = self._engine.ledger, sum(factor.nbytes for factor in factors.values())
        ledger.add("push", held)
        try:
            for name, value in iter_slots(self._engine, chosen, 0, self._wanted):
                for product in outside[name].adds if self._sends else ():
                    made_nbytes = min(value.nbytes, MERGED_NBYTES)
                    ledger.add("push", made_nbytes)
                    add_product(value, product, factors)
                    ledger.drop("push", made_nbytes)
                yield value
                del value
        finally:
            ledger.drop("push", held)

    def _wanted(self, slot: Slot) -> torch.dtype:
        """As zeor.export: a wider dtype is asked of the masters themselves, a narrower one is cast here."""
        if self._plan.outside[slot.name].adds:
            return _wide(slot.dtype)
        return max(slot.dtype, self._plan.dtype_of(slot.dtype), key=lambda dtype: dtype.itemsize)

    def _factors(self, outside: Sequence[Outside]) -> dict[str, Tensor]:
        """What is added to parameters of one unit, wherever it lies."""
        names = {name for each in outside for name in each.factors}
        slots = [slot for slot in self._engine.slots if slot.name in names]
        if not slots:
            return {}
        found = iter_slots(self._engine, slots, 0, lambda slot: _wide(slot.dtype))
        return {name: value for name, value in found if self._sends}


def in_order(unit: Unit) -> list[Slot]:
    """Its parameters in the order in which they are streamed."""
    return [slot for lane in unit.lanes for slot in sorted(unit.members(lane), key=lambda slot: slot.index)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, _WIDE)


def _bucket(flat: Tensor, parts: Sequence[Part], number: int, last: bool) -> Bucket:
    names, dtypes = tuple(part.name for part in parts), tuple(part.dtype for part in parts)
    shapes, offsets = tuple(part.shape for part in parts), tuple(part.begin for part in parts)
    return Bucket(names, dtypes, shapes, flat[: parts[-1].end], offsets, number, last)


def _view(flat: Tensor, begin: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return flat[begin : begin + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)


def _persistent_buffers(model: nn.Module) -> Mapping[str, Tensor]:
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in module._buffers.items()
        if value is not None and name not in module._non_persistent_buffers_set
    }
