"""How much memory can be had, of the host or of a device.

Ranks of a host share it: `is_short` tells whether together they ask for more than a share of what is free.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.tiers.host import free_host_nbytes


class MemoryRequest(NamedTuple):
    """What one rank wants of its host, and what it sees there; `free_nbytes` None: nothing is known."""

    host: str
    nbytes: int
    free_nbytes: int | None


def request(nbytes: int) -> MemoryRequest:
    return MemoryRequest(socket.gethostname(), nbytes, free_host_nbytes())


def device_free_nbytes(device: torch.device) -> int:
    """What can be allocated there, with what torch keeps for itself and does not use; 0 where nothing is known."""
    module: Any = torch.get_device_module(device)
    try:
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    except (AttributeError, RuntimeError):
        return 0


def short_of(everyone: Sequence[Sequence[Any]], share: float) -> dict[str, tuple[int, int]]:
    """Hosts whose ranks ask for more than that share of what is free: (asked, free) in bytes."""
    wanted: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, nbytes, seen in everyone:
        wanted[host] += nbytes
        if seen is not None:
            free[host] = min(seen, free.get(host, seen))
    return {host: (n, free[host]) for host, n in wanted.items() if host in free and n > share * free[host]}


def is_short(axis: Axis, nbytes: int, share: float) -> bool:
    """Whether this rank's host is. Every rank calls it."""
    mine = request(nbytes)
    return mine.host in short_of(exchange(axis, list(mine), "exchange about free memory"), share)
