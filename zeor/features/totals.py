"""`total`: numbers summed over ranks, exactly, so that an evaluation over ranks is exact.

Numbers travel as text on a host group, whatever device the model is on: nothing here is for large tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zeor.comm.agree import exchange
from zeor.comm.axes import Axis, control_axis
from zeor.comm.launch.world import ensure_process_group
from zeor.comm.meeting import meet
from zeor.memory.device import default_device
from zeor.step import events


def total(*values: Any, mesh: Any = None) -> Any:
    """The sum over all ranks of each number: `correct, count = zeor.total(correct, count)`. Integers (and booleans)
    are added as integers, others as float64 without rounding in between; every rank gets the same plain numbers, a
    single one as itself, several as a tuple. Without a process group they are returned as they are. Inside
    zeor.join, ranks that have left count nothing."""
    mine = [_number(position, value) for position, value in enumerate(values)]
    ensure_process_group(default_device(), 600.0)
    host = control_axis(mesh)
    everyone = _everyone(host, mine)
    lengths = [len(each) for each in everyone]
    if len(set(lengths)) > 1:
        raise ValueError(f"zeor.total was given different numbers of values on the ranks: {lengths}.")
    sums = tuple(_sum(numbers) for numbers in zip(*everyone))
    return sums[0] if len(sums) == 1 else sums


def _everyone(host: Axis, mine: list[int | float]) -> list[list[int | float]]:
    """What each rank brought; a rank that only follows brings nothing."""
    if host.size == 1 or host.fake:
        return [mine]
    ranks = dist.get_process_group_ranks(host.control)
    for block in events.open_joins:
        if block.ranks == ranks:
            return [each for each in block.tell_total(mine) if each is not None]
    meet(host, "zeor.total")
    return exchange(host, mine, "exchange of zeor.total")


def _sum(numbers: tuple[int | float, ...]) -> int | float:
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    if all(math.isfinite(number) for number in numbers):
        return math.fsum(numbers)
    return float(sum(numbers))


def _number(position: int, value: Any) -> int | float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (bool, int)):
        return int(value)
    if isinstance(value, float):
        return value
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # numpy's
        return _number(position, value.item())
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"zeor.total adds up single numbers; value {position} is {found}.")
