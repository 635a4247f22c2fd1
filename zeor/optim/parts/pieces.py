"""Pieces: an optimizer's state told without world size or stage, to be saved and put back anywhere.

`KeptState.pieces()` yields what this rank keeps, `KeptState.put(pieces)` takes any pieces and keeps what belongs here:
feeding every rank the pieces of all ranks of an earlier run, of whatever world and stage, restores its state. Each
element of a parameter's state is in the pieces of exactly one rank at stages 1 to 3; at stage 0 every rank has all.

A piece with `begin` holds elements [begin, begin + numel) of the flattened parameter: one value for each of them (a
range of a flattened array is at most 2 * dimensions - 1 boxes of the array). A piece without it holds a whole: a
counter, or a matrix of another shape that an owner keeps; ranks that hold parts of one parameter repeat counters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeor.layout import Segment
from zeor.step.unit import Slot

Key = tuple[str | int, ...]  # ("exp_avg",), or ("factors", 0) where state is nested
Read = Callable[[int, int], Tensor]  # elements [begin, end) of a piece


class Piece(NamedTuple):
    name: str  # of the parameter, as in the model
    key: Key
    begin: int | None
    value: Any  # a plain tensor, or a number, a string, None, or a list or dict with nothing in it
    read: Read | None = None  # where the tensor is a map of a file: how to look at it without the map


def pieces_of(
    slot: Slot, mine: nn.Parameter, where: Segment, state: dict[str, Any], reads: Mapping[str, Read]
) -> Iterator[Piece]:
    """The state of what this rank steps on: the elements of `slot` that `where` says. `reads`: of entries in files."""
    for key, value in leaves(state):
        if isinstance(value, Tensor) and type(value) is not Tensor:
            raise RuntimeError(
                f"The optimizer keeps {'/'.join(map(str, key))!r} of {slot.name!r} as a {type(value).__name__}, whose "
                "blocks belong to this rank's part of it alone, so it cannot be taken to pieces; use the optimizer's "
                "state_dict(), which loads on the same ranks."
            )
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == mine.shape:
            read = reads.get(str(key[0])) if len(key) == 1 else None
            yield Piece(slot.name, key, where.start, value.detach().reshape(-1), read)
        elif isinstance(value, Tensor) and value.dim() > 0 and where.numel != slot.lane.layout.numels[slot.index]:
            raise RuntimeError(
                f"The optimizer keeps {'/'.join(map(str, key))!r} of {slot.name!r} in shape {tuple(value.shape)}, made "
                "for this rank's part of it alone, so it cannot be taken to pieces; use the optimizer's state_dict(), "
                "which loads on the same ranks."
            )
        else:
            yield Piece(slot.name, key, None, value)


def put_piece(piece: Piece, mine: Tensor, where: Segment, state: dict[str, Any], adopt: bool = False) -> None:
    """What of a piece lies in `where`, into the state of `mine`; elements nobody has put yet are zero. `adopt`: its
    memory may become the state's own."""
    if piece.begin is None:
        put_leaf(state, piece.key, piece.value.clone() if isinstance(piece.value, Tensor) else copy.copy(piece.value))
        return
    if adopt and (piece.begin, piece.value.numel()) == (where.start, where.numel):
        put_leaf(state, piece.key, piece.value.to(mine.device).view(mine.shape))
        return
    begin = max(piece.begin, where.start)
    end = min(piece.begin + piece.value.numel(), where.start + where.numel)
    if begin >= end:
        return
    have = _get(state, piece.key)
    if not isinstance(have, Tensor) or have.shape != mine.shape:
        have = torch.zeros(mine.shape, dtype=piece.value.dtype, device=mine.device)
        put_leaf(state, piece.key, have)
    have.view(-1)[begin - where.start : end - where.start] = piece.value[begin - piece.begin : end - piece.begin]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The plain tensors a state entry is made of, through lists, dicts and subclasses."""
    for _, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            if type(leaf) is not Tensor and hasattr(leaf, "__tensor_flatten__"):
                for name in leaf.__tensor_flatten__()[0]:
                    yield from tensors_in(getattr(leaf, name))
            else:
                yield leaf


def leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The places of a nested state, and what lies there."""
    if isinstance(value, dict) and (value or not key):
        for name, part in value.items():
            yield from leaves(part, (*key, name))
    elif isinstance(value, (list, tuple)) and value:
        for index, part in enumerate(value):
            yield from leaves(part, (*key, index))
    else:
        yield key, value


def _get(state: Any, key: Key) -> Any:
    for part in key:
        if isinstance(state, list):
            state = state[part] if isinstance(part, int) and len(state) > part else None
        else:
            state = state.get(part) if isinstance(state, dict) else None
    return state


def put_leaf(state: Any, key: Key, value: Any) -> None:
    """Into nested dicts and lists, which are made on the way: an integer is an index into a list."""
    for part, following in zip(key, (*key[1:], None)):
        if isinstance(part, int):
            state.extend([None] * (part + 1 - len(state)))
        if following is None:
            state[part] = value
            return
        below = state[part] if isinstance(part, int) else state.get(part)
        if not isinstance(below, (dict, list)):
            below = [] if isinstance(following, int) else {}
            state[part] = below
        state = below
