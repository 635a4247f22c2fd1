"""What this rank writes of a training run: which boxes of which tensors, and the plain values beside them.

Every rank writes the part of each parameter that lies in its own slice, at every stage, so that each element is
written once. The same for the optimizers' state; what an owner keeps whole the owner writes. Nothing here knows
files; nothing is read from a device before a `Source` is asked for it. The list of what a checkpoint contains is
`collect` in save.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeor.checkpoint.files import plain
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import PARAM, RESIDUAL, Stored, role_of
from zeor.checkpoint.files.writer import Source
from zeor.layout import Segment
from zeor.layout.boxes import Box, boxes_of_range
from zeor.optim.parts.pieces import Piece
from zeor.spec.lane_spec import RESIDUAL as KEPT_DTYPE
from zeor.step.lane import Lane
from zeor.step.unit import Slot

COMPLETE = "complete"  # every parameter that trains has state or an entry without any: what is missing was lost


@dataclass
class WrittenTensor:
    """A tensor this rank writes boxes of."""

    shape: tuple[int, ...]
    dtype: str
    boxes: list[Box] = field(default_factory=list)


class Contents:
    """Collected on one rank; `described()` is what the other ranks must hear of it."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.written: dict[tuple[str, str], WrittenTensor] = {}
        self.values: dict[str, Any] = {}

    def add_boxes(
        self, what: tuple[str, str], shape: tuple[int, ...], dtype: torch.dtype, boxes: Sequence[Box], read: _Once
    ) -> None:
        """Boxes of a tensor, which `read` gives one after another."""
        tensor = self.written.setdefault(what, WrittenTensor(shape, plain.dtype_name(dtype)))
        stored = Stored(*what, shape, tensor.dtype, [])
        at = 0
        for box in boxes:
            end = at + box.numel
            self.sources.append(Source(stored.key(box), dtype, box.length, functools.partial(read, at, end)))
            tensor.boxes.append(box)
            at = end

    def add_whole(self, what: tuple[str, str], value: Tensor) -> None:
        value = value.detach()
        boxes = boxes_of_range(value.shape, 0, value.numel())
        self.add_boxes(what, tuple(value.shape), value.dtype, boxes, _Once(value.numel(), lambda: value.reshape(-1)))

    def encode(self, role: str, name: str, value: Any) -> Any:
        """JSON for a value; its large tensors are written under this role."""

        def store(where: str, tensor: Tensor) -> str:
            while (role, where) in self.written:  # {"a/b": ...} beside {"a": {"b": ...}}
                where += "'"
            self.add_whole((role, where), tensor)
            return where

        return plain.encode(value, name, store)

    def described(self) -> dict[str, Any]:
        tensors = [
            [role, name, list(t.shape), t.dtype, [[list(b.begin), list(b.length)] for b in t.boxes]]
            for (role, name), t in self.written.items()
        ]
        return {"tensors": tensors, "values": self.values}


class _Once:
    """Reads a flat tensor when its first part is asked for, and lets go of it with the last."""

    def __init__(self, numel: int, read: Callable[[], Tensor]):
        self.numel, self._read = numel, read
        self._flat: Tensor | None = None

    def __call__(self, begin: int, end: int) -> Tensor:
        if self._flat is None:
            self._flat = self._read()
        flat = self._flat
        if end == self.numel:
            self._flat = None
        return flat[begin:end]


# ---- parameters and buffers


def writers(slots: Sequence[Slot], coords: Sequence[int]) -> dict[str, Slot]:
    """The parameters, by name, of which this rank writes its slice. `coords`: its place along mesh dimensions that are
    not ours; of ranks there with the same elements the first one writes."""
    return {slot.name: slot for slot in slots if slot.counts_on(coords)}


def add_parameters(contents: Contents, slots: Sequence[Slot], names: Mapping[int, str]) -> None:
    """The exact value of every parameter, in this rank's slice of it. `names`: by id of the user's parameter."""
    for slot in slots:
        lane = slot.lane
        dtype = lane.key.master_dtype or lane.key.compute_dtype
        for segment in lane.layout.segments_in(lane.fine):
            if segment.param == slot.index:
                read = _Once(segment.numel, functools.partial(exact_part, lane, segment))
                boxes = slot.boxes(segment.start, segment.start + segment.numel)
                contents.add_boxes((PARAM, names[id(slot.param)]), slot.whole_shape, dtype, boxes, read)


def add_residuals(contents: Contents, slots: Sequence[Slot], names: Mapping[int, str]) -> None:
    """What wires have left out of sums of gradients, in this rank's slice. It is read after it was flushed, which a
    save does once all ranks are known to come to it: see Note [Residuals] in step/grad_wires.py."""
    for slot in slots:
        lane, grads = slot.lane, slot.lane.grads
        if grads is None or not grads.keeps:
            continue
        for segment in lane.layout.segments_in(lane.fine):
            if segment.param == slot.index:
                read = _Once(segment.numel, functools.partial(grads.flushed, segment))
                boxes = slot.boxes(segment.start, segment.start + segment.numel)
                contents.add_boxes((RESIDUAL, names[id(slot.param)]), slot.whole_shape, KEPT_DTYPE, boxes, read)


def exact_part(lane: Lane, segment: Segment) -> Tensor:
    """The exact values of a segment of this rank's fine slice, flat: the memory itself, or a temporary."""
    if lane.master is None:
        begin = segment.offset + lane.fine.within(lane.kept).begin
        return lane.read_mine(begin, begin + segment.numel)
    offset = segment.offset + lane.fine.within(lane.updated).begin
    segment = Segment(segment.param, segment.start, segment.numel, offset)
    end = segment.offset + segment.numel
    own = lane.master.own
    if own is not None and not own.away:
        return own.tensor[segment.offset : end]
    into = torch.empty(segment.numel, dtype=lane.master.dtype, device=lane.axes.device)
    lane.read_master(segment, into)
    return into


# ---- optimizers


def add_optimizer(
    contents: Contents, number: int, stepper: Any, written: Mapping[str, Slot], names: Mapping[int, str]
) -> None:
    """Its groups by parameter name, its counters, its element-wise state in this rank's part, an owner's whole. Of
    parameters that are `written` here."""
    keys: dict[str, list[str | int]] = {}
    scalars: dict[str, list[Any]] = {}
    with_state: set[str] = set()
    owned = stepper.owners.owned if stepper.owners.cut else {}
    for piece in stepper.state.pieces():
        if piece.name not in written:
            continue
        slot = written[piece.name]
        name, role = names[id(slot.param)], role_of(number, piece.key)
        with_state.add(name)
        keys[role] = list(piece.key)
        if piece.begin is not None and id(slot.param) not in owned:
            _add_elements(contents, (role, name), slot, piece)
        elif piece.begin is not None:  # its owner has all of it, in each set of ranks that share the update
            if _writes_wholes(slot.lane):
                contents.add_whole((role, name), piece.value.view(slot.shape))
        elif isinstance(piece.value, Tensor) and piece.value.dim() > 0:
            if _writes_wholes(slot.lane):
                contents.add_whole((role, name), piece.value)
        else:
            value = plain.encode(piece.value, f"{piece.key} of {name!r}")
            scalars.setdefault(name, []).append([list(piece.key), value])
    for param in (param for group in stepper.optimizer.param_groups for param in group["params"]):
        is_mine = stepper.segments.of(param) is not None and stepper.segments.slots[id(param)].name in written
        if is_mine and names[id(param)] not in with_state:
            scalars[names[id(param)]] = []  # it has had no gradient yet: see COMPLETE
    contents.values.setdefault("optimizers", []).append(
        {
            "class": type(stepper.optimizer).__name__,
            COMPLETE: True,
            "groups": [_group(group, names) for group in stepper.optimizer.param_groups],
            "keys": keys,
            "scalars": scalars,
        }
    )


def _writes_wholes(lane: Lane) -> bool:
    """Whether this rank is the first of those that keep the same state."""
    cut = lane.spec.table.cut("update")
    return all(axis in cut or place == 0 for axis, place in enumerate(lane.axes.coords))


def _add_elements(contents: Contents, what: tuple[str, str], slot: Slot, piece: Piece) -> None:
    """Where several ranks have the same, only this rank's fine slice is written. What rests in a file is read past its
    map: a file that something else shortens while a checkpoint is written makes that fail, and no more."""
    assert piece.begin is not None
    first, last = piece.begin, piece.begin + piece.value.numel()
    if slot.lane.fine != slot.lane.updated:
        mine = [s for s in slot.lane.layout.segments_in(slot.lane.fine) if s.param == slot.index]
        if not mine:
            return
        first, last = mine[0].start, mine[0].start + mine[0].numel
    begin, end, value, read = first - piece.begin, last - piece.begin, piece.value, piece.read
    flat = _Once(end - begin, lambda: value[begin:end] if read is None else read(begin, end))
    contents.add_boxes(what, slot.whole_shape, value.dtype, slot.boxes(first, last), flat)


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {
        "params": [names[id(param)] for param in group["params"]],
        "settings": plain.encode(settings, "a group's settings"),
    }


def add_average(
    contents: Contents, key: str, average: Any, written: Mapping[str, Slot], names: Mapping[int, str]
) -> dict[str, int]:
    """A zeor.ema, cut like the parameters. Returns its plain state."""
    for piece in average.pieces():
        if piece.name not in written:
            continue
        slot = written[piece.name]
        read = _Once(piece.value.numel(), lambda value=piece.value: value)  # type: ignore[misc]
        boxes = slot.boxes(piece.begin, piece.begin + piece.value.numel())
        contents.add_boxes((f"ema.{key}", names[id(slot.param)]), slot.whole_shape, piece.value.dtype, boxes, read)
    return {"updates": average.updates}


# ---- everything else


def state_of_object(value: Any, where: str) -> Any:
    """A scheduler, scaler or loader is saved by its state_dict(); anything else by itself."""
    if hasattr(value, "state_dict") and not isinstance(value, (Mapping, nn.Module)):
        return value.state_dict()
    if isinstance(value, nn.Module):
        raise CheckpointError(f"{where} is a module; give its state_dict(), or save it as a model of its own.")
    return value
