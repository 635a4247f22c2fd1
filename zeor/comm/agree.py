"""How ranks compare what must be equal, and succeed or fail together: by text on the control group, never pickles.

`shard()` sends one line per thing that must be the same on all ranks (plan, parameters, optimizer
groups). First only a digest travels; the lines follow when digests differ, to name the first one. `together` and
`everywhere`: each rank does its part and tells the others how it went, so no rank waits for one that has given up.
How ranks see that all are at the same event: meeting.py. That all have called a verb: attendance.py. In which order
they gather: step/order.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeor.comm import small
from zeor.comm.axes import Axis
from zeor.comm.stuck import explain


def exchange(axis: Axis, value: Any, label: str) -> list[Any]:
    """Every rank's JSON value, in rank order; in an imagined world, this rank's alone."""
    if axis.size == 1 or axis.fake:
        return [value]
    try:
        return _exchange(axis, value)
    except RuntimeError as error:
        raise explain(axis, label, error) from error


def _exchange(axis: Axis, value: Any) -> list[Any]:
    data = json.dumps(value).encode()
    longest = int(small.largest(axis, torch.tensor([len(data)])))
    padded = torch.frombuffer(bytearray(data.ljust(max(1, longest))), dtype=torch.uint8)  # JSON may end in spaces
    return [json.loads(row.numpy().tobytes()) for row in small.rows(axis, padded)]


def numbers_of(axis: Axis, number: float, label: str) -> list[float]:
    """Every rank's number, in rank order, so that a sum over it is the same bits everywhere."""
    if axis.size == 1 or axis.fake:
        return [number]
    try:
        found: list[float] = small.rows(axis, torch.tensor([number], dtype=torch.float64)).view(-1).tolist()
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    return found


def is_same(axis: Axis, data: bytes, label: str) -> bool:
    """Whether every rank has the same bytes. All ranks get the same answer, in one short message each way."""
    if axis.size == 1 or axis.fake:
        return True
    digest = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.int32).to(torch.int64)
    try:
        most, least = small.largest(axis, torch.stack([digest, -digest]))
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    return bool((most == -least).all())


def same_everywhere(axis: Axis, what: str, lines: list[str]) -> None:
    """Raise on every rank, naming the first rank and the first line that differ from rank 0's."""
    if axis.size == 1 or axis.fake:
        return
    label = f"comparison of the ranks' {what}"
    if is_same(axis, "\n".join(lines).encode(), label):
        return
    everyone = exchange(axis, lines, label)
    odd = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    raise ValueError(f"The ranks' {what} differ: {first_difference(everyone[0], everyone[odd], odd)}.")


def first_difference(ours: list[str], theirs: list[str], rank: int, first: int = 0) -> str:
    """Between rank `first` and rank `rank`."""
    for a, b in zip(ours, theirs):
        if a != b:
            return f"rank {first} has {a}, rank {rank} has {b}"
    if len(ours) > len(theirs):
        return f"rank {first} has {ours[len(theirs)]}, rank {rank} has nothing there"
    return f"rank {rank} has {theirs[len(ours)]}, rank {first} has nothing there"


# ---- succeeding or failing together


def raise_first(texts: Sequence[str], kind: type[Exception]) -> None:
    """Raise what went wrong on the first rank that has a text. `texts`: one per rank, "" where all went well. `kind`:
    the error that a rank raises for what went wrong elsewhere."""
    for rank, text in enumerate(texts):
        if text:
            raise kind(text if all(texts) else f"On rank {rank}: {text}")


def together(axis: Axis, do: Callable[[], Any], label: str, kind: type[Exception]) -> Any:
    """Every rank does it. Where it raises a `kind` on any rank, all ranks raise the first such error."""
    result, problem = None, ""
    try:
        result = do()
    except kind as error:
        problem = str(error)
    raise_first(_problems(axis, problem, label), kind)
    return result


def everywhere(axis: Axis, do: Callable[[], Any], label: str, kind: type[Exception]) -> Any:
    """Every rank does it. A rank that fails raises its own error, and the others a `kind` that says what it was."""
    result, failed, problem = None, None, ""
    try:
        result = do()
    except Exception as error:  # whatever it is (a user's object may raise anything), the other ranks must hear it
        failed = error
        problem = str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
    everyone = _problems(axis, problem, label)
    if failed is not None:
        raise failed
    raise_first(everyone, kind)
    return result


def _problems(axis: Axis, problem: str, label: str) -> list[str]:
    """What went wrong on each rank; nothing where all went well, which one short message tells."""
    if axis.size == 1 or axis.fake:
        return [problem]
    try:
        failed = bool(small.largest(axis, torch.tensor([bool(problem)])))
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    return exchange(axis, problem, label) if failed else []
