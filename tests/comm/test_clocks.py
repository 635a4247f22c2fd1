"""Clocks of ranks: one host's is one clock, and another's offset is found."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from zeor.comm import clocks
from zeor.comm.axes import Axis, control_axis

SECOND = 1_000_000_000


def measured(shift: int) -> int:
    """With a clock that is ahead by so many nanoseconds on rank 1."""
    ahead = shift if dist.get_rank() == 1 else 0
    with patch.object(clocks, "perf_counter_ns", lambda: time.perf_counter_ns() + ahead):
        return clocks.offset_ns(control_axis(None))


def test_processes_of_one_host_read_one_clock(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(measured, 3, 0) == [0, 0, 0]


def test_another_host_s_clock_is_brought_in_line(ranks: Callable[..., list[Any]]) -> None:
    first, second, third = ranks(measured, 3, 3600 * SECOND)
    assert first == 0 and third == 0
    assert abs(second - 3600 * SECOND) < 60 * SECOND


def test_a_rank_alone_asks_nobody() -> None:
    assert clocks.offset_ns(Axis(0, 1, torch.device("cpu"))) == 0
