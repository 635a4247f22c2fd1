"""How far this rank's clock is from rank 0's: a few round trips of small messages on the control group.

Processes of one host read one clock, so an offset that the way there and back could explain is taken for none. Between
hosts the error is less than the shortest round trip. Knows nothing of what is timed.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch
import torch.distributed as dist

from zeor.comm.axes import Axis
from zeor.comm.stuck import explain

_ROUNDS, _TAG = 5, 1 << 20


def offset_ns(axis: Axis) -> int:
    """What to take off `perf_counter_ns()` here to be on rank 0's clock. Every rank calls it."""
    if axis.size == 1 or axis.fake:
        return 0
    try:
        if axis.rank == 0:
            for rank in range(1, axis.size):
                _answer(axis, rank)
            return 0
        return _ask(axis)
    except RuntimeError as error:
        raise explain(axis, "comparison of clocks", error) from error


def _answer(axis: Axis, rank: int) -> None:
    asked = torch.zeros(1, dtype=torch.int64)
    for turn in range(_ROUNDS):
        dist.recv(asked, group=axis.control, group_src=rank, tag=_TAG + turn)
        dist.send(torch.tensor([perf_counter_ns()]), group=axis.control, group_dst=rank, tag=_TAG + turn)


def _ask(axis: Axis) -> int:
    found, theirs = [], torch.zeros(1, dtype=torch.int64)
    for turn in range(_ROUNDS):
        begin = perf_counter_ns()
        dist.send(theirs, group=axis.control, group_dst=0, tag=_TAG + turn)
        dist.recv(theirs, group=axis.control, group_src=0, tag=_TAG + turn)
        end = perf_counter_ns()
        found.append((end - begin, (begin + end) // 2 - int(theirs)))
    trip, offset = min(found)
    return offset if 2 * abs(offset) > trip + 1 else 0  # the clock was read somewhere on the way; 1: halves are cut off
