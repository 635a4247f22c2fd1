"""Bytes from rank to rank, by a list that every rank knows: a host's memory, over the control group.

Each rank walks the part of the list that concerns it in the order of the list, a window at a time: the first
transfer that is not done yet is always posted at both its ends, so nothing waits in a circle. Knows nothing of
what the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeor.comm.axes import Axis
from zeor.comm.stuck import explain

_WINDOW = 8  # transfers posted at a time


class Transfer(NamedTuple):
    source: int
    target: int
    nbytes: int
    key: Any = None  # what it is, to `read` and `take`


def move(
    axis: Axis,
    transfers: Sequence[Transfer],
    read: Callable[[Transfer], Tensor],
    take: Callable[[Transfer, Tensor], None],
    label: str,
) -> None:
    """Every rank calls it with the same list. `read` gives what this rank sends, `take` gets what was sent to it;
    neither may raise: other ranks wait for the rest."""
    # small.py leaves multiples of 8 to others.
    mine = [(8 * tag, each) for tag, each in enumerate(transfers) if axis.rank in (each.source, each.target)]
    try:
        for begin in range(0, len(mine), _WINDOW):
            _move(axis, mine[begin : begin + _WINDOW], read, take)
    except RuntimeError as error:
        raise explain(axis, label, error) from error


def _move(
    axis: Axis,
    window: Sequence[tuple[int, Transfer]],
    read: Callable[[Transfer], Tensor],
    take: Callable[[Transfer, Tensor], None],
) -> None:
    posted: list[tuple[Any, Transfer, Tensor]] = []
    for tag, each in window:
        if each.source == axis.rank:
            data = read(each)
            posted.append((dist.isend(data, group=axis.control, group_dst=each.target, tag=tag), each, data))
        else:
            data = torch.empty(each.nbytes, dtype=torch.uint8)
            posted.append((dist.irecv(data, group=axis.control, group_src=each.source, tag=tag), each, data))
    for work, each, data in posted:
        work.wait()
        if each.target == axis.rank:
            take(each, data)


def as_tensor(data: bytes) -> Tensor:
    """A copy of it that may be sent."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def broadcast_bytes(axis: Axis, data: bytes | None, source: int, label: str) -> bytes:
    """What `source` gives, on every rank."""
    if axis.size == 1:
        assert data is not None
        return data
    try:
        length = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(length, group=axis.control, group_src=source)
        held = torch.empty(int(length), dtype=torch.uint8)
        if data:
            held = as_tensor(data)
        if len(held):
            dist.broadcast(held, group=axis.control, group_src=source)
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    return held.numpy().tobytes()
