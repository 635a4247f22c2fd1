"""The exact verbs: gather, reduce, all_to_all, broadcast, and the small sums and maxima ranks agree by.

A verb starts its collective and returns a `Move`; `Move.wait()` finishes it. Waiting makes the
current stream wait on an accelerator, and the host on a CPU. Gathers and all-to-alls move bytes, so
they work for every dtype on every backend. This module knows flat tensors and a mesh, nothing else.

Note [Sums in rank order]
~~~~~~~~~~~~~~~~~~~~~~~~~
A reduce over Gloo, or with deterministic=True, is an all-to-all followed by a local sum in rank order,
accumulated in at least fp32 whatever the wire's dtype: the result does not depend on how a backend
cuts its messages, so it is the same bits at every stage, and each rank sends the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeor.comm.mesh import Mesh
from zeor.comm.stuck import explain

# The collectives were renamed: old names warn on torch 2.13, new ones are absent on 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HOST_PIECE_NUMEL = 1 << 16  # of a few parts together, what a core's own cache holds


class Move:
    """A collective under way. `wait()` finishes it and returns its result; calling it again is free."""

    def __init__(self, mesh: Mesh, label: str, works: Sequence[dist.Work], finish: Callable[[], Tensor]):
        self._mesh, self._label, self._works = mesh, label, list(works)
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._finish is not None:
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise explain(self._mesh, self._label, error) from error
            self._result = self._finish()
            # A Work object keeps its tensors alive, and the closure its buffers.
            self._works, self._finish = [], None
        assert self._result is not None
        return self._result

    def arrives_within(self, seconds: float) -> bool:
        """Whether wait() will hold the host no longer than that; on an accelerator it never does."""
        if all(work.is_completed() for work in self._works):
            return True
        if seconds and self._mesh.device.type != "cpu":
            return True
        if not seconds:
            return False
        try:
            for work in self._works:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return all(work.is_completed() for work in self._works)  # late, or failed: then wait() says how
        return True


class Parts(NamedTuple):
    """What a gather hands to the backend. A thread of the backend holds these tensors for a moment after the gather is
    finished; whoever counts the tensors over a buffer makes them once and keeps them."""

    rows: list[Tensor]  # one for each rank
    whole: Tensor  # all of them, as bytes

    @classmethod
    def of(cls, mesh: Mesh, full: Tensor) -> Parts:
        whole = _bytes(full)
        return cls(list(whole.view(mesh.world, -1)) if mesh.world > 1 else [], whole)


def gather(mesh: Mesh, full: Tensor, mine: Tensor, label: str, parts: Parts | None = None) -> Move:
    """SLICE -> FULL. `mine` may be this rank's part of `full` itself; `parts` are those of `full`, if at hand."""
    if mesh.world == 1:
        if full.data_ptr() != mine.data_ptr():
            full.copy_(mine)
        return Move(mesh, label, (), lambda: full)
    mesh.traffic.count("gather", mine.nbytes * (mesh.world - 1))
    parts = parts or Parts.of(mesh, full)
    own = parts.rows[mesh.rank] if parts.rows[mesh.rank].data_ptr() == mine.data_ptr() else _bytes(mine)
    if mesh.backend == "gloo" and mesh.device.type == "cpu":
        works = _start(mesh, label, lambda: _gather_by_broadcasts(mesh, parts.rows, own))
    else:
        works = _start(mesh, label, lambda: [_all_gather(parts.whole, own, group=mesh.gather, async_op=True)])
    return Move(mesh, label, works, lambda: full)


def _gather_by_broadcasts(mesh: Mesh, rows: list[Tensor], own: Tensor) -> list[dist.Work]:
    """Each rank's part to all others, in place. Gloo's own all-gather goes through a temporary of full size for each
    gather under way, and took twice as long (77 ms against 36 for 150 MB over two ranks)."""
    if rows[mesh.rank] is not own:
        rows[mesh.rank].copy_(own)
    sources = dist.get_process_group_ranks(mesh.gather)
    return [dist.broadcast(row, source, group=mesh.gather, async_op=True) for row, source in zip(rows, sources)]


def reduce_receives(mesh: Mesh, full_numel: int) -> int:
    """Elements of the buffer `reduce` receives into; see Note [Sums in rank order]."""
    return 0 if mesh.world == 1 else full_numel // mesh.world if mesh.native_reduce else full_numel


def reduce(mesh: Mesh, full: Tensor, received: Tensor, factor: float, label: str, in_place: bool = False) -> Move:
    """PARTIAL -> SLICE: the sum over ranks of this rank's part, times `factor`, in full's dtype.

    Neither `full` nor `received` (of `reduce_receives` elements) may be touched until the move is finished.
    The result is `full` itself in a world of one, `received` where the backend reduces; else memory of its own, or
    with `in_place` this rank's part of `full`.
    """
    if mesh.world == 1:
        return Move(mesh, label, (), lambda: full if factor == 1.0 else full.mul_(factor))
    slice_numel = full.numel() // mesh.world
    mesh.traffic.count("reduce", slice_numel * full.itemsize * (mesh.world - 1))
    if mesh.native_reduce:
        work = _start(mesh, label, lambda: _reduce_scatter(received, full, group=mesh.reduce, async_op=True))
        return Move(mesh, label, [work], lambda: received if factor == 1.0 else received.mul_(factor))
    work = _start(
        mesh,
        label,
        lambda: dist.all_to_all_single(_bytes(received), _bytes(full), group=mesh.reduce, async_op=True),
    )

    def finish() -> Tensor:
        own = full.view(mesh.world, -1)[mesh.rank]
        into = own if in_place else torch.empty_like(own)
        return _sum_in_rank_order(received.view(mesh.world, -1), factor, into)

    return Move(mesh, label, [work], finish)


def _sum_in_rank_order(parts: Tensor, factor: float, into: Tensor) -> Tensor:
    """See Note [Sums in rank order]. On a host piece by piece, so that a piece stays in the cache until it is done."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    size = HOST_PIECE_NUMEL if parts.device.type == "cpu" else max(1, into.numel())
    for begin in range(0, into.numel(), size):
        pieces, out = parts[:, begin : begin + size], into[begin : begin + size]
        total = out if wide == parts.dtype else torch.empty_like(out, dtype=wide)
        torch.add(pieces[0].to(wide), pieces[1], out=total)
        for piece in pieces[2:]:
            total.add_(piece)
        if factor != 1.0:
            total.mul_(factor)
        if total is not out:
            out.copy_(total)
    return into


def all_to_all(
    mesh: Mesh, received: Tensor, sent: Tensor, received_numels: Sequence[int], sent_numels: Sequence[int], label: str
) -> Move:
    """To every rank a part of its own: `sent` holds one for each rank, in rank order, and `received` becomes the parts
    the ranks sent here. Parts may be of any length, none included. Travels beside gathers, on the reduce group."""
    if mesh.world == 1:
        return Move(mesh, label, (), lambda: received.copy_(sent))
    assert sum(sent_numels) == sent.numel() and sum(received_numels) == received.numel()
    mesh.traffic.count("all_to_all", (sent.numel() - sent_numels[mesh.rank]) * sent.itemsize)
    into, out = ([numel * sent.itemsize for numel in numels] for numels in (received_numels, sent_numels))
    work = _start(
        mesh,
        label,
        lambda: dist.all_to_all_single(_bytes(received), _bytes(sent), into, out, group=mesh.reduce, async_op=True),
    )
    return Move(mesh, label, [work], lambda: received)


def broadcast(mesh: Mesh, tensor: Tensor, label: str, rank: int = 0) -> None:
    """One rank's values everywhere, at once."""
    if mesh.world == 1 or tensor.numel() == 0:
        return
    mesh.traffic.count("broadcast", tensor.nbytes if mesh.rank == rank else 0)
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    source = dist.get_global_rank(mesh.gather, rank)
    sent = flat if flat.dtype == torch.uint8 and flat.dim() == 1 else _bytes(flat.view(-1))  # see Parts
    work = _start(mesh, label, lambda: dist.broadcast(sent, source, group=mesh.gather, async_op=True))
    Move(mesh, label, [work], lambda: flat).wait()
    if flat is not tensor:
        tensor.copy_(flat)


def gather_vector(mesh: Mesh, vector: Tensor, label: str) -> Tensor:
    """Every rank's small vector as rows, in rank order: sums over it are the same bits on every rank."""
    if mesh.world == 1:
        return vector.unsqueeze(0)
    mesh.traffic.count("agree", vector.nbytes * (mesh.world - 1))
    rows = vector.new_empty(mesh.world, vector.numel())
    work = _start(
        mesh,
        label,
        lambda: _all_gather(rows.view(-1), vector.contiguous(), group=mesh.reduce, async_op=True),
    )
    return Move(mesh, label, [work], lambda: rows).wait()


def agree_max(mesh: Mesh, values: Tensor, label: str) -> Tensor:
    """The element-wise maximum of small host integers over ranks, in place, on the control group."""
    if mesh.world == 1:
        return values
    mesh.traffic.count("agree", values.nbytes)
    work = _start(mesh, label, lambda: dist.all_reduce(values, dist.ReduceOp.MAX, group=mesh.control, async_op=True))
    return Move(mesh, label, [work], lambda: values).wait()


def _start(mesh: Mesh, label: str, issue: Callable[[], Any]) -> Any:
    try:
        return issue()
    except RuntimeError as error:
        raise explain(mesh, label, error) from error


def _bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes: what moves without arithmetic needs no dtype."""
    return flat.view(torch.uint8)
