"""The exact verbs: gather, reduce, all_to_all, broadcast, and the small sums and maxima ranks agree by.

A verb starts its collective and returns a `Move`; `Move.wait()` finishes it. Waiting makes the
current stream wait on an accelerator, and the host on a CPU. Gathers and all-to-alls move bytes, so
they work for every dtype on every backend. Each verb tells the axis' observer the bytes that this rank sends, and
when it is waited for; which verbs a step calls: step/schedule.py. This module knows flat tensors and an axis.

Note [Sums in rank order]
~~~~~~~~~~~~~~~~~~~~~~~~~
A reduce over Gloo, or with deterministic=True, is an all-to-all followed by a local sum in rank order,
accumulated in at least fp32 whatever the wire's dtype: the result does not depend on how a backend
cuts its messages, so it is the same bits at every stage, and each rank sends the minimum. Over Gloo on a host
this rank's own part stays where it is; an all-to-all would copy it into the received ones.

Note [Asking Gloo whether a collective is done]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`Work.is_completed` of Gloo waits for the work's lock without giving Python's own (the GIL) back. Under torch.profiler
Gloo's thread ends a work with that lock held, and takes over the thread state of whoever started it; hooks on saved
tensors are part of it, and copying them needs the GIL. Then both wait for ever (seen with torch 2.13). The work's
future is done a moment earlier and is asked without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeor.comm import small
from zeor.comm.axes import Axis
from zeor.comm.meeting import finish_meeting
from zeor.comm.observe import Record
from zeor.comm.stuck import explain

# The collectives were renamed: old names warn on torch 2.13, new ones are absent on 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HOST_PIECE_NUMEL = 1 << 16  # of a few parts together, what a core's own cache holds


class Move:
    """A collective under way. `wait()` finishes it and returns its result; calling it again is free."""

    def __init__(
        self,
        axis: Axis,
        label: str,
        works: Sequence[dist.Work],
        finish: Callable[[], Tensor],
        record: Record | None = None,
    ):
        self._axis, self._label, self._works, self._record = axis, label, list(works), record
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._finish is not None:
            waited = None if self._record is None else self._begin_wait(self._record)
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise explain(self._axis, self._label, error) from error
            if self._record is not None:
                self._end_wait(self._record, waited)
            self._result = self._finish()
            # A Work object keeps its tensors alive, and the closure its buffers.
            self._works, self._finish = [], None
        assert self._result is not None
        return self._result

    def arrives_within(self, seconds: float) -> bool:
        """Whether wait() will hold the host no longer than that; on an accelerator it never does."""
        if self._done() or (seconds and self._axis.device.type != "cpu"):
            return True
        if not seconds:
            return False
        waited = None if self._record is None else self._begin_wait(self._record)
        try:
            for work in self._works:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return self._done()  # late, or failed: then wait() says how
        finally:
            if waited is not None:
                self._axis.observer.arrived(waited)
        return True

    def _done(self) -> bool:
        """See Note [Asking Gloo whether a collective is done]."""
        if self._axis.backend == "gloo":
            return all(work.get_future().done() for work in self._works)
        return all(work.is_completed() for work in self._works)

    def _begin_wait(self, record: Record) -> Record | None:
        """None where the host has nothing to wait for; on an accelerator only its stream can tell."""
        if not self._axis.observer.on or (self._axis.device.type == "cpu" and self._done()):
            return None
        return self._axis.observer.waits(record.verb, self._label)

    def _end_wait(self, record: Record, waited: Record | None) -> None:
        if waited is not None:
            self._axis.observer.arrived(waited)
        self._axis.observer.arrived(record)
        self._record = None


class Parts(NamedTuple):
    """What a gather hands to the backend. A thread of the backend holds these tensors for a moment after the gather is
    finished; whoever counts the tensors over a buffer makes them once and keeps them."""

    rows: list[Tensor]  # one for each rank
    whole: Tensor  # all of them, as bytes

    @classmethod
    def of(cls, axis: Axis, full: Tensor) -> Parts:
        whole = _bytes(full)
        return cls(list(whole.view(axis.size, -1)) if axis.size > 1 else [], whole)


def gather(axis: Axis, full: Tensor, mine: Tensor, label: str, parts: Parts | None = None) -> Move:
    """SLICE -> FULL. `mine` may be this rank's part of `full` itself; `parts` are those of `full`, if at hand."""
    if axis.size == 1:
        if full.data_ptr() != mine.data_ptr():
            full.copy_(mine)
        return Move(axis, label, (), lambda: full)
    record = axis.observer.sent("gather", mine.nbytes * (axis.size - 1), label, axis.name)
    parts = parts or Parts.of(axis, full)
    own = parts.rows[axis.rank] if parts.rows[axis.rank].data_ptr() == mine.data_ptr() else _bytes(mine)
    if axis.backend == "gloo" and axis.device.type == "cpu":
        return _start(axis, label, lambda: _gather_by_broadcasts(axis, parts.rows, own), lambda: full, record)
    issue = lambda: _all_gather(parts.whole, own, group=axis.gather, async_op=True)
    return _start(axis, label, issue, lambda: full, record)


def _gather_by_broadcasts(axis: Axis, rows: list[Tensor], own: Tensor) -> list[dist.Work]:
    """Each rank's part to all others, in place. Gloo's own all-gather goes through a temporary of full size for each
    gather under way, and took twice as long (77 ms against 36 for 150 MB over two ranks)."""
    if rows[axis.rank] is not own:
        rows[axis.rank].copy_(own)
    sources = dist.get_process_group_ranks(axis.gather)
    return [dist.broadcast(row, source, group=axis.gather, async_op=True) for row, source in zip(rows, sources)]


def reduce_receives(axis: Axis, full_numel: int) -> int:
    """Elements of the buffer `reduce` receives into; see Note [Sums in rank order]."""
    if axis.size == 1:
        return 0
    slice_numel = full_numel // axis.size
    return slice_numel if axis.native_reduce else full_numel - slice_numel if _keeps_own(axis) else full_numel


def _keeps_own(axis: Axis) -> bool:
    """Whether a reduce leaves this rank's own part where it is: see Note [Sums in rank order]."""
    return axis.backend == "gloo" and axis.device.type == "cpu"


def reduce(
    axis: Axis, full: Tensor, received: Tensor, factor: float, label: str, into: Callable[[], Tensor] | None = None
) -> Move:
    """PARTIAL -> SLICE: the sum over ranks of this rank's part, times `factor`, in full's dtype.

    Neither `full` nor `received` (of `reduce_receives` elements) may be touched until the move is finished.
    The result is `full` itself in a world of one, `received` where the backend reduces; else the memory that `into`
    gives when the parts are there (None: new memory), which may be this rank's part of `full`.
    """
    if axis.size == 1:
        return Move(axis, label, (), lambda: full if factor == 1.0 else full.mul_(factor))
    slice_numel = full.numel() // axis.size
    record = axis.observer.sent("reduce", slice_numel * full.itemsize * (axis.size - 1), label, axis.name)
    if axis.native_reduce:
        scaled = lambda: received if factor == 1.0 else received.mul_(factor)
        issue = lambda: _reduce_scatter(received, full, group=axis.reduce, async_op=True)
        return _start(axis, label, issue, scaled, record)

    own = full.view(axis.size, -1)[axis.rank]
    parts = list(received.view(axis.size - _keeps_own(axis), slice_numel))
    if _keeps_own(axis):
        parts.insert(axis.rank, own)

    def finish() -> Tensor:
        return _sum_in_rank_order(parts, factor, torch.empty_like(own) if into is None else into())

    return _start(axis, label, lambda: _exchange_parts(axis, full, received), finish, record)


def _exchange_parts(axis: Axis, full: Tensor, received: Tensor) -> list[dist.Work]:
    """Each rank's part of `full` to that rank."""
    whole, into, rank = _bytes(full), _bytes(received), axis.rank
    if not _keeps_own(axis):
        return [dist.all_to_all_single(into, whole, group=axis.reduce, async_op=True)]
    nbytes = whole.numel() // axis.size
    before, after = [nbytes if other < rank else 0 for other in range(axis.size)], [0] * axis.size
    after[rank + 1 :] = [nbytes] * (axis.size - rank - 1)
    lower, upper = whole[: nbytes * rank], whole[nbytes * (rank + 1) :]
    of_lower, of_upper = into[: nbytes * rank], into[nbytes * rank :]
    if axis.size == 2:
        sent, splits = (lower, before) if rank else (upper, after)
        return [dist.all_to_all_single(into, sent, splits, splits, group=axis.reduce, async_op=True)]
    # An all-to-all takes one stretch of memory, and this rank's own part lies between those of the others.
    return [
        dist.all_to_all_single(of_upper, lower, after, before, group=axis.reduce, async_op=True),
        dist.all_to_all_single(of_lower, upper, before, after, group=axis.reduce, async_op=True),
    ]


def _sum_in_rank_order(parts: Sequence[Tensor], factor: float, into: Tensor) -> Tensor:
    """See Note [Sums in rank order]. On a host piece by piece, so that a piece stays in the cache until it is done.
    `into` may be one of the parts."""
    wide = torch.promote_types(into.dtype, torch.float32)
    size = HOST_PIECE_NUMEL if into.device.type == "cpu" else max(1, into.numel())
    overwritten = any(part.data_ptr() == into.data_ptr() for part in parts[2:])
    for begin in range(0, into.numel(), size):
        out = into[begin : begin + size]
        pieces = [part[begin : begin + size] for part in parts]
        total = out if wide == into.dtype and not overwritten else torch.empty_like(out, dtype=wide)
        torch.add(pieces[0].to(wide), pieces[1], out=total)
        for piece in pieces[2:]:
            total.add_(piece)
        if factor != 1.0:
            total.mul_(factor)
        if total is not out:
            out.copy_(total)
    return into


def all_to_all(
    axis: Axis, received: Tensor, sent: Tensor, received_numels: Sequence[int], sent_numels: Sequence[int], label: str
) -> Move:
    """To every rank a part of its own: `sent` holds one for each rank, in rank order, and `received` becomes the parts
    the ranks sent here. Parts may be of any length, none included. Travels beside gathers, on the reduce group."""
    if axis.size == 1:
        return Move(axis, label, (), lambda: received.copy_(sent))
    assert sum(sent_numels) == sent.numel() and sum(received_numels) == received.numel()
    record = axis.observer.sent("all_to_all", (sent.numel() - sent_numels[axis.rank]) * sent.itemsize, label, axis.name)
    into, out = ([numel * sent.itemsize for numel in numels] for numels in (received_numels, sent_numels))
    issue = lambda: dist.all_to_all_single(_bytes(received), _bytes(sent), into, out, group=axis.reduce, async_op=True)
    return _start(axis, label, issue, lambda: received, record)


def broadcast(axis: Axis, tensor: Tensor, label: str, rank: int = 0) -> None:
    """One rank's values everywhere, at once."""
    if axis.size == 1 or tensor.numel() == 0:
        return
    record = axis.observer.sent("broadcast", tensor.nbytes if axis.rank == rank else 0, label, axis.name)
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    source = dist.get_global_rank(axis.gather, rank)
    sent = flat if flat.dtype == torch.uint8 and flat.dim() == 1 else _bytes(flat.view(-1))  # see Parts
    issue = lambda: dist.broadcast(sent, source, group=axis.gather, async_op=True)
    _start(axis, label, issue, lambda: flat, record).wait()
    if flat is not tensor:
        tensor.copy_(flat)


def gather_vector(axis: Axis, vector: Tensor, label: str) -> Tensor:
    """Every rank's small vector as rows, in rank order: sums over it are the same bits on every rank."""
    if axis.size == 1:
        return vector.unsqueeze(0)
    record = axis.observer.sent("agree", vector.nbytes * (axis.size - 1), label, axis.name)
    if axis.meets and axis.device.type == "cpu":
        return _exchanged(axis, label, record, lambda: small.rows(axis, vector.contiguous()))
    rows = vector.new_empty(axis.size, vector.numel())
    issue = lambda: _all_gather(rows.view(-1), vector.contiguous(), group=axis.reduce, async_op=True)
    return _start(axis, label, issue, lambda: rows, record).wait()


def agree_max(axis: Axis, values: Tensor, label: str) -> Tensor:
    """The element-wise maximum of small host integers over ranks, in place, on the control group."""
    if axis.size == 1 or axis.fake:
        return values
    record = axis.observer.sent("agree", values.nbytes, label, axis.name)
    return _exchanged(axis, label, record, lambda: small.largest(axis, values))


def agree_in_turn(axis: Axis, values: Tensor, label: str, seconds: float | None = None) -> Tensor:
    """The same, after what `agree_later` has started; waits at most so long, then concurrent.futures.TimeoutError."""
    record = axis.observer.sent("agree", values.nbytes, label, axis.name)
    return _exchanged(axis, label, record, lambda: small.channel_of(axis).ask(axis, values, seconds))


def agree_later(axis: Axis, values: Tensor, label: str) -> Callable[[], Tensor]:
    """The same, not waited for: what is returned does that."""
    record = axis.observer.sent("agree", values.nbytes, label, axis.name)
    answer = small.channel_of(axis).start(axis, values)
    return lambda: _exchanged(axis, label, record, answer.result)


def _exchanged(axis: Axis, label: str, record: Record | None, exchange: Callable[[], Tensor]) -> Tensor:
    """What the host waits for."""
    finish_meeting(axis)
    waited = None if record is None else axis.observer.waits(record.verb, label)
    try:
        return exchange()
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    finally:
        for each in (waited, record):
            if each is not None:
                axis.observer.arrived(each)


def _start(
    axis: Axis, label: str, issue: Callable[[], Any], finish: Callable[[], Tensor], record: Record | None
) -> Move:
    if axis.meeting is not None:
        finish_meeting(axis)
    try:
        works = issue()
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    return Move(axis, label, works if isinstance(works, list) else [works], finish, record)


def _bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes: what moves without arithmetic needs no dtype."""
    return flat.view(torch.uint8)
