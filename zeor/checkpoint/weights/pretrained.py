"""load_pretrained: weights from safetensors into a model, each rank reading the bytes of its own segments.

1. Find what the files hold and what the model wants, and match them by name, or by what transformers makes of them
   (conversions.py). Nothing changes yet.
2. All ranks agree that it fits everywhere and that they see the same files; else all raise the same sentence.
3. Unit by unit: read segments through the master, and gather where compute rests FULL.
4. All ranks agree that every read succeeded; only then do parameters count as filled.

Works on sharded models, on the meta device or with values, and on plain ones. Files are understood in hf_folder.py and
tensorfile.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeor.checkpoint.files.tensorfile import Reader
from zeor.checkpoint.weights.conversions import WeightSource, as_model_names, pieces, remember, whole
from zeor.checkpoint.weights.hf_folder import find_tensors
from zeor.checkpoint.weights.live import LiveModel
from zeor.checkpoint.weights.matching import Match, Rename, Target, match
from zeor.checkpoint.weights.naming import Naming, naming_of, state_around
from zeor.comm import verbs
from zeor.comm.agree import exchange, raise_first, same_everywhere
from zeor.comm.axes import Axis
from zeor.layout.boxes import Box
from zeor.memory import device as devices
from zeor.step import events
from zeor.step.lane import Lane
from zeor.step.unit import Slot

ROWS_NUMEL = 1 << 24  # of rows that are read whole for a part of each, at a time


class UnmatchedKeys(NamedTuple):
    """What did not match, as torch's load_state_dict reports it; both empty with strict=True."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, rename: Rename | None = None
) -> UnmatchedKeys:
    """Load safetensors (a file, or a folder as Hugging Face lays it out: one file, or many with an index) into a
    sharded model, on the meta device or not, or into a plain one. Each rank reads the bytes of its own part alone.

    Values enter through the fp32 master. `rename(name_in_file)` gives the model's name, or None to leave it out. Names
    that are missing or unexpected raise on every rank before anything changes; with strict=False they are returned, as
    load_state_dict does. Tensors of another shape always raise. One name of a tied parameter suffices. Files that
    transformers converts for its own models while it loads (experts in one parameter, older names) are converted by its
    own table, one parameter at a time."""
    state = state_around(model)
    if state is not None and state.shown:
        raise RuntimeError("zeor.load_pretrained cannot load inside zeor.full_params; close that first.")
    if state is not None:
        state.engine.announce(events.OTHER, "zeor.load_pretrained")
    live = LiveModel(state.engine, naming_of(model, state)) if state is not None else None
    if live is not None:
        live.learn_names()
    return _load(model, live, Path(path), strict, rename)


def _load(model: nn.Module, live: LiveModel | None, path: Path, strict: bool, rename: Rename | None) -> UnmatchedKeys:
    """The steps at the top of this file."""
    axis = live.everyone if live is not None else Axis(0, 1, torch.device("cpu"))
    found, problem, held = None, "", {}
    entries: dict[str, WeightSource] = {}
    naming = live.naming if live is not None else Naming()
    targets = naming.targets(model)
    known = [*dict.fromkeys([*(name for target in targets for name in target.names), *naming.known])]
    try:
        held = find_tensors(path)
        # A rename= of the user's says all: nothing is converted beside it.
        entries = as_model_names(model, known, held) if rename is None else {**held}
        found = match(targets, entries, rename, str(path), strict, naming.known)
    except Exception as error:  # whatever it is (the user's rename may raise anything), the other ranks must hear it
        problem = str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
    _agree(axis, problem, "exchange about the files to load")
    assert found is not None
    of_model = naming.pipeline is None  # each stage of a pipeline takes others, of the same files
    taken = {target.name: entry for target, entry in found.pairs} if of_model else entries
    same_everywhere(axis, "files to load", [f"{name}: {e.shape}, {e.dtype}" for name, e in taken.items()])
    with Reader() as reader, torch.no_grad():
        problem = _load_sharded(live, found, reader) if live is not None else _load_plain(found, reader)
    _agree(axis, problem, "exchange about loaded files")
    if live is not None:
        for slot in _entries_by_slot(live.slots, found):
            live.unfilled.fill(slot)
    if rename is None:
        remember(model, held, known)
    return UnmatchedKeys(found.missing, found.unexpected)


def _agree(axis: Axis, problem: str, label: str) -> None:
    """Raise on every rank what any rank found wrong; the first rank's sentence is everybody's."""
    raise_first(exchange(axis, problem, label), ValueError)


def _entries_by_slot(slots: Iterable[Slot], found: Match) -> dict[Slot, WeightSource]:
    entries = {id(target.tensor): entry for target, entry in found.pairs if not target.is_buffer}
    return {slot: entries[id(slot.param)] for slot in slots if id(slot.param) in entries}


# ---- into a sharded model


def _load_sharded(live: LiveModel, found: Match, reader: Reader) -> str:
    """Step 3. Once a read has failed this rank only keeps the others company; returns what failed."""
    live.drain()
    entries, problem = _entries_by_slot(live.slots, found), ""
    for unit in live.units:
        for lane in unit.lanes:
            mine = {slot.index: entries[slot] for slot in unit.slots if slot.lane is lane and slot in entries}
            if not mine:
                continue
            members = {slot.index: slot for slot in unit.slots if slot.lane is lane}
            problem = problem or _attempt(_read_lane, lane, mine, members, reader)
            live.publish(unit, lane)
    for lane in dict.fromkeys(slot.lane for slot in entries):
        lane.changed()  # a graph made before is stale
    for target, entry in found.pairs:
        if target.is_buffer:
            value = torch.empty_like(target.tensor, device=live.everyone.device)
            problem = problem or _attempt(_read_whole, value, entry, reader)
            verbs.broadcast(live.holders, value, f"broadcast of buffer {target.name!r}")
            _put_buffer(target, value)
    return problem


def _read_lane(lane: Lane, entries: dict[int, WeightSource], members: dict[int, Slot], reader: Reader) -> None:
    for segment in lane.segments:
        if segment.param not in entries:
            continue
        entry, slot = entries[segment.param], members[segment.param]
        if slot.placed is None:
            for done, values in pieces(reader, entry, segment.start, segment.numel):
                lane.store_part(segment.offset + done, values)
            continue
        offset = segment.offset
        for box in slot.boxes(segment.start, segment.start + segment.numel):
            for values in _box(reader, entry, slot.whole_shape, box):
                lane.store_part(offset, values)
                offset += values.numel()


def _box(reader: Reader, entry: WeightSource, shape: tuple[int, ...], box: Box) -> Iterator[Tensor]:
    """The elements of a box, in order, some rows at a time. Rows are read whole."""
    inner = math.prod(shape[1:])
    most = max(1, ROWS_NUMEL // max(1, inner))
    first, count = (box.begin[0], box.length[0]) if shape else (0, 1)
    for row in range(first, first + count, most):
        rows = min(most, first + count - row)
        values = torch.cat([part for _, part in pieces(reader, entry, row * inner, rows * inner)])
        inside = tuple(slice(b, b + n) for b, n in zip(box.begin[1:], box.length[1:]))
        yield values.view(rows, *shape[1:])[(slice(None), *inside)].reshape(-1)


def _read_whole(value: Tensor, entry: WeightSource, reader: Reader) -> None:
    value.copy_(whole(reader, entry))


def _attempt(read: Callable[..., None], *args: Any) -> str:
    """Nothing, or what failed."""
    try:
        read(*args)
    except ValueError as error:
        return f"{error} The model is partly loaded: load again, or discard it."
    return ""


def _put_buffer(target: Target, value: Tensor) -> None:
    for module, attr in target.owners:
        buffer = module._buffers[attr]
        if buffer is None or buffer.is_meta:
            module._buffers[attr] = value
        else:
            buffer.copy_(value)


# ---- into a plain model


def _load_plain(found: Match, reader: Reader) -> str:
    attempts = (_attempt(_read_plain, target, entry, reader) for target, entry in found.pairs)
    return next(filter(None, attempts), "")


def _read_plain(target: Target, entry: WeightSource, reader: Reader) -> None:
    tensor = target.tensor
    if target.is_buffer:
        place = devices.default_device() if tensor.is_meta else tensor.device
        _put_buffer(target, whole(reader, entry).to(place, tensor.dtype))
        return
    if tensor.is_meta:
        real = torch.empty_like(tensor, device=devices.default_device())
        made = nn.Parameter(real, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)
    if not tensor.is_contiguous():
        tensor.copy_(whole(reader, entry))
        return
    for done, values in pieces(reader, entry, 0, entry.numel):
        tensor.view(-1)[done : done + values.numel()].copy_(values)
