"""How ranks compare what must be equal: text exchanged on the control group, never pickles.

`shard()` sends one line per thing that must be the same on all ranks (plan, parameters, optimizer
groups). First only a digest travels; the lines follow when digests differ, to name the first one.
How ranks see that all are at the same event: meeting.py. That all have called a verb: attendance.py. That all succeed
or raise: together.py. In which order they gather: step/order.py.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm.mesh import Mesh
from zeor.comm.stuck import explain


def exchange(mesh: Mesh, value: Any, label: str) -> list[Any]:
    """Every rank's JSON value, in rank order."""
    if mesh.world == 1:
        return [value]
    try:
        return _exchange(mesh, value)
    except RuntimeError as error:
        raise explain(mesh, label, error) from error


def _exchange(mesh: Mesh, value: Any) -> list[Any]:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    lengths = [torch.zeros_like(length) for _ in range(mesh.world)]
    dist.all_gather(lengths, length, group=mesh.control)
    longest = int(max(lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in range(mesh.world)]
    dist.all_gather(parts, padded, group=mesh.control)
    return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, lengths)]


def same_everywhere(mesh: Mesh, what: str, lines: list[str]) -> None:
    """Raise on every rank, naming the first rank and the first line that differ from rank 0's."""
    if mesh.world == 1 or mesh.fake:
        return
    label = f"comparison of the ranks' {what}"
    digests = exchange(mesh, hashlib.sha256("\n".join(lines).encode()).hexdigest(), label)
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    everyone = exchange(mesh, lines, label)
    raise ValueError(f"The ranks' {what} differ: {first_difference(everyone[0], everyone[odd], odd)}.")


def first_difference(ours: list[str], theirs: list[str], rank: int, first: int = 0) -> str:
    """Between rank `first` and rank `rank`."""
    for a, b in zip(ours, theirs):
        if a != b:
            return f"rank {first} has {a}, rank {rank} has {b}"
    if len(ours) > len(theirs):
        return f"rank {first} has {ours[len(theirs)]}, rank {rank} has nothing there"
    return f"rank {rank} has {theirs[len(ours)]}, rank {first} has nothing there"
