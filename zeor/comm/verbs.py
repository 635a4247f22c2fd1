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

Note [Messages]
~~~~~~~~~~~~~~~
Gloo has one connection to each other rank in a group, and a rank sends data only once the other has said that it waits
for them. Gloo's all-to-all posts its send first. So where one rank comes late, its data go off at once, and that it
waits for the other's is said behind them: each way in turn, at half the speed of a link that carries both at once.
Broadcasts on one group do the same at random, and over more than two ranks their trees cross a link more often than
needed. So between hosts (`Axis.apart`) large parts go as messages from rank to rank, and every rank says what it waits
for before it sends: both ways at once and no temporary. A message's tag is its length, so messages of different lengths
never meet, as in small.py. On one host, and for small parts, collectives cost less. docs/notes/links.md has figures.

A message cannot be asked whether it has arrived, and waiting for one with a limit closes the connection. So one byte to
each rank follows them in a collective (the mark). A connection keeps its order, so where the mark is done the messages
are. Only questions go to it: it may come late, behind the messages of later moves, and wait() does not wait for it.
Whoever drops a move without waiting must not drop its messages: Gloo would look for their memory for ever (`_left`).

Note [Asking Gloo whether a collective is done]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`Work.is_completed` of Gloo waits for the work's lock without giving Python's own (the GIL) back. Under torch.profiler
Gloo's thread ends a work with that lock held, and takes over the thread state of whoever started it; hooks on saved
tensors are part of it, and copying them needs the GIL. Then both wait for ever (seen with torch 2.13). The work's
future is done a moment earlier and is asked without a lock.
"""

from __future__ import annotations

import concurrent.futures
import functools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeor.comm import small
from zeor.comm.axes import Axis
from zeor.comm.meeting import finish_meeting
from zeor.comm.observe import Record
from zeor.comm.stuck import explain
from zeor.comm.turns import Turns
from zeor.tiers.streams import SideStream

# The collectives were renamed: old names warn on torch 2.13, new ones are absent on 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HOST_PIECE_NUMEL = 1 << 16  # of a few parts together, what a core's own cache holds
SUM_PIECE_NUMEL = 1 << 22  # of a sum that every rank gets, at a time
MESSAGE_NBYTES = 1 << 16  # parts of at least so many bytes go as messages between hosts: see Note [Messages]

_left: list[Move] = []  # dropped with messages under way


class Move:
    """A collective under way. `wait()` finishes it and returns its result; calling it again is free."""

    def __init__(
        self,
        axis: Axis,
        label: str,
        works: Sequence[dist.Work],
        finish: Callable[[], Tensor],
        record: Record | None = None,
        asked: Sequence[dist.Work] | None = None,
    ):
        """`asked` can tell whether `works` are done; None: they do so themselves."""
        self._axis, self._label, self._works, self._record = axis, label, list(works), record
        self._asked = self._works if asked is None else list(asked)
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self, noted: bool = True) -> Tensor:
        """`noted`: the computation waits, so an observer hears of it."""
        if self._finish is not None:
            waited = None if self._record is None or not noted else self._begin_wait(self._record)
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise explain(self._axis, self._label, error) from error
            if self._record is not None:
                self._end_wait(self._record, waited)
            self._result = self._finish()
            # A Work object keeps its tensors alive, and the closure its buffers.
            self._works, self._asked, self._finish = [], [], None
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
            for work in self._asked:
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
            return all(work.get_future().done() for work in self._asked)
        return all(work.is_completed() for work in self._asked)

    def __del__(self) -> None:
        if self._works and self._asked is not self._works and not self._done():
            _left[:] = [move for move in _left if not move._done()]
            _left.append(self)

    def _begin_wait(self, record: Record) -> Record | None:
        """None where the host has nothing to wait for; on an accelerator only its stream can tell."""
        if not self._axis.observer.on or (self._axis.device.type == "cpu" and self._done()):
            return None
        return self._axis.observer.waits(record.verb, self._label, self._axis.name)

    def _end_wait(self, record: Record, waited: Record | None) -> None:
        if waited is not None:
            self._axis.observer.arrived(waited)
        self._axis.observer.arrived(record)
        self._record = None


class Waited(Protocol):
    """What a Move is to whoever waits for it."""

    def wait(self, noted: bool = True) -> Tensor: ...


class Marked(NamedTuple):
    """Messages that were issued, and the collective that tells whether they have arrived: see Note [Messages]."""

    works: list[dist.Work]
    mark: dist.Work


Issued = dist.Work | list[dist.Work] | Marked  # what a verb has started


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
    _let_pass(axis)
    return _start(axis, label, _gathering(axis, parts or Parts.of(axis, full), mine), lambda: full, record)


def gather_after(
    first: Callable[[], Waited], axis: Axis, full: Tensor, mine: Tensor, label: str, parts: Parts
) -> Callable[[], Move]:
    """A gather of what another one brings, begun when that one is over; what is returned gives it. Where the host must
    wait for that a thread does, so that other ranks get this one's part whatever this one does meanwhile."""
    record = axis.observer.sent("gather", mine.nbytes * (axis.size - 1), label, axis.name)

    def begin() -> Move:
        if axis.device.type != "cpu":
            torch.accelerator.set_device_index(axis.device.index)
        first().wait(noted=False)
        if record is not None:
            record.begin = perf_counter_ns()
        issue = _gathering(axis, parts, mine)
        return _start(axis, label, issue, lambda: full, record, meets=False)  # ranks met before the first one

    if axis.fake or (axis.backend != "gloo" and axis.device.type != "cpu"):
        with SideStream(axis.device)():  # it waits, and not the computation
            second = begin()
        return lambda: second
    turn = _turns.ask(begin)
    _asked[axis.gather] = turn
    return lambda: _in_turn(axis, label, turn)


_turns = Turns("zeor-gather")
_asked: weakref.WeakKeyDictionary[Any, Future[Move]] = weakref.WeakKeyDictionary()  # the last one, by group


def _in_turn(axis: Axis, label: str, turn: Future[Move]) -> Move:
    waited = axis.observer.waits("gather", label, axis.name) if axis.observer.on and not turn.done() else None
    try:
        return turn.result()
    finally:
        if waited is not None:
            axis.observer.arrived(waited)


def _let_pass(axis: Axis) -> None:
    """Gathers that were asked for earlier and are still to begin come first, on every rank."""
    earlier = _asked.pop(axis.gather, None) if _asked else None
    if earlier is not None and not earlier.done():
        concurrent.futures.wait([earlier])


def _gathering(axis: Axis, parts: Parts, mine: Tensor) -> Callable[[], Issued]:
    """What issues a gather of `mine` into the whole that `parts` are of."""
    own = parts.rows[axis.rank] if parts.rows[axis.rank].data_ptr() == mine.data_ptr() else _bytes(mine)
    if axis.backend == "gloo" and axis.device.type == "cpu":
        return lambda: _gather_on_host(axis, parts.rows, own)
    return lambda: _all_gather(parts.whole, own, group=axis.gather, async_op=True)


def _gather_on_host(axis: Axis, rows: list[Tensor], own: Tensor) -> Issued:
    """Each rank's part to all others, in place. Gloo's own all-gather goes through a temporary of full size for each
    gather under way, and took twice as long (77 ms against 36 for 150 MB over two ranks)."""
    if rows[axis.rank] is not own:
        rows[axis.rank].copy_(own)
    if axis.apart and own.numel() >= MESSAGE_NBYTES:
        return _exchange(axis, axis.gather, rows, [rows[axis.rank]] * axis.size)
    sources = dist.get_process_group_ranks(axis.gather)
    return [dist.broadcast(row, source, group=axis.gather, async_op=True) for row, source in zip(rows, sources)]


def _exchange(axis: Axis, group: Any, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Marked:
    """`sent[rank]` to each other rank, `received[rank]` from it, none where it is empty: see Note [Messages]."""
    works, distances = [], range(1, axis.size)
    for of in ((axis.rank - distance) % axis.size for distance in distances):
        if received[of].numel():
            works.append(dist.irecv(received[of], group=group, group_src=of, tag=_tag(received[of])))
    for to in ((axis.rank + distance) % axis.size for distance in distances):
        if sent[to].numel():
            works.append(dist.isend(sent[to], group=group, group_dst=to, tag=_tag(sent[to])))
    mark = torch.zeros(axis.size, dtype=torch.uint8)
    told = dist.all_to_all_single(torch.empty_like(mark), mark, group=group, async_op=True)
    return Marked([work for work in works if work is not None], told)


def _tag(message: Tensor) -> int:
    return message.nbytes % 0x7FFFFFFF


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
        return sum_in_rank_order(parts, factor, torch.empty_like(own) if into is None else into())

    return _start(axis, label, lambda: _exchange_parts(axis, full, received), finish, record)


def _exchange_parts(axis: Axis, full: Tensor, received: Tensor) -> Issued:
    """Each rank's part of `full` to that rank."""
    whole, into, rank = _bytes(full), _bytes(received), axis.rank
    if not _keeps_own(axis):
        return [dist.all_to_all_single(into, whole, group=axis.reduce, async_op=True)]
    nbytes = whole.numel() // axis.size
    if axis.apart and nbytes >= MESSAGE_NBYTES:
        rows, parts = list(whole.view(axis.size, -1)), list(into.view(axis.size - 1, -1))
        parts.insert(rank, rows[rank])
        return _exchange(axis, axis.reduce, parts, rows)
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


def exchange_receives(axis: Axis, full_numel: int) -> int:
    """Elements of the buffer that `exchange` receives into."""
    return full_numel - full_numel // axis.size if _keeps_own(axis) else full_numel


def exchange(axis: Axis, full: Tensor, received: Tensor, label: str) -> Move:
    """Each rank's part of `full` to that rank, as a reduce sends them; summing them is the caller's."""
    record = axis.observer.sent("reduce", full.nbytes // axis.size * (axis.size - 1), label, axis.name)
    return _start(axis, label, lambda: _exchange_parts(axis, full, received), lambda: received, record)


def exchanged(axis: Axis, received: Tensor) -> list[Tensor | None]:
    """What each rank has sent here, by rank; None for this one."""
    parts: list[Tensor | None] = list(received.view(axis.size - _keeps_own(axis), -1))
    parts[axis.rank : axis.rank + (not _keeps_own(axis))] = [None]
    return parts


def sum_in_rank_order(parts: Sequence[Tensor], factor: float, into: Tensor) -> Tensor:
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


def gather_sums(axis: Axis, full: Tensor, label: str) -> Move:
    """Each rank's part of `full` to all others, as a reduce's second half: on the reduce group, behind the exchanges
    that were begun there before it on every rank."""
    mine = full.view(axis.size, -1)[axis.rank]
    record = axis.observer.sent("reduce", mine.nbytes * (axis.size - 1), label, axis.name)
    issue = _gathering(replace(axis, gather=axis.reduce), Parts.of(axis, full), mine)
    return _start(axis, label, issue, lambda: full, record)


def sum_everywhere(axis: Axis, flat: Tensor, label: str) -> None:
    """The sum over ranks, in place, on every rank, at once. See Note [Sums in rank order]."""
    if axis.size == 1 or flat.numel() == 0:
        return
    record = axis.observer.sent("sum", flat.nbytes * (axis.size - 1), label, axis.name)
    if axis.native_reduce:
        issue = lambda: dist.all_reduce(flat, group=axis.reduce, async_op=True)
        _start(axis, label, issue, lambda: flat, record).wait()
        return
    for begin in range(0, flat.numel(), SUM_PIECE_NUMEL):
        piece = flat[begin : begin + SUM_PIECE_NUMEL]
        rows = torch.empty(axis.size * piece.numel(), dtype=flat.dtype, device=flat.device)
        issue = functools.partial(_all_gather, _bytes(rows), _bytes(piece.clone()), group=axis.reduce, async_op=True)
        _start(axis, label, issue, lambda rows=rows: rows, record).wait()  # type: ignore[misc]
        sum_in_rank_order(list(rows.view(axis.size, -1)), 1.0, piece)


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
    if axis.apart and axis.device.type == "cpu":  # ranks see different lengths, so these decide nothing
        parts, sent_parts = _bytes(received).split(into), _bytes(sent).split(out)
        parts[axis.rank].copy_(sent_parts[axis.rank])
        return _start(axis, label, lambda: _exchange(axis, axis.reduce, parts, sent_parts), lambda: received, record)
    return _start(axis, label, issue, lambda: received, record)


def broadcast(axis: Axis, tensor: Tensor, label: str, rank: int = 0) -> None:
    """One rank's values everywhere, at once."""
    if axis.size == 1 or tensor.numel() == 0:
        return
    record = axis.observer.sent("broadcast", tensor.nbytes if axis.rank == rank else 0, label, axis.name)
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    source = dist.get_global_rank(axis.gather, rank)
    _let_pass(axis)
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
    waited = None if record is None else axis.observer.waits(record.verb, label, axis.name)
    try:
        return exchange()
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    finally:
        for each in (waited, record):
            if each is not None:
                axis.observer.arrived(each)


def _start(
    axis: Axis,
    label: str,
    issue: Callable[[], Any],
    finish: Callable[[], Tensor],
    record: Record | None,
    meets: bool = True,
) -> Move:
    """`issue` gives what it has `Issued`. `meets`: not before a meeting that has begun is over."""
    if meets and axis.standing.meeting is not None:
        finish_meeting(axis)
    try:
        issued = issue()
    except RuntimeError as error:
        raise explain(axis, label, error) from error
    if isinstance(issued, Marked):
        return Move(axis, label, issued.works, finish, record, [issued.mark])
    return Move(axis, label, issued if isinstance(issued, list) else [issued], finish, record)


def _bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes: what moves without arithmetic needs no dtype."""
    return flat.view(torch.uint8)
