"""Saving in the background: from a copy, in a thread of its own, with a process group of its own.

    main thread     agree (save.py), copy (HostBlocks)   --> trains on
    a thread                                             --> write (save.py)

The thread speaks on a group that nobody else uses, so its exchanges never mix with training's. It holds the copy,
never the model: the model may train, be unsharded or go. Threads that share a group run one after the other, in
the order of the calls, which is the same on every rank.

The copy lies in blocks of host memory that are kept from save to save; beside an accelerator they are pinned. Pinned
memory is rounded up to a power of two, hence blocks of that size, and many tensors in each.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeor.checkpoint import room
from zeor.checkpoint import save as saving
from zeor.checkpoint.contents import Contents
from zeor.checkpoint.files.branches import Lineage
from zeor.checkpoint.files.errors import CheckpointError, lost_peers
from zeor.checkpoint.files.urls import Place
from zeor.checkpoint.files.writer import Source
from zeor.checkpoint.run import TrainingRun
from zeor.checkpoint.save import Destination, SaveRequest
from zeor.comm.agree import exchange, raise_first
from zeor.comm.axes import Axis
from zeor.comm.stuck import explain, has_failed
from zeor.memory.device import thread_beside
from zeor.step.engine import Engine

SNAPSHOT_SHARE = 0.8  # of the free host memory: what a snapshot may newly take
LEAST_TIMEOUT = 3600.0  # seconds that ranks wait for the slowest one's disk
LEAVE_SECONDS = 10.0  # that a program waits at its end for a save, once a collective has failed

log = logging.getLogger("zeor")


class Saving:
    """A checkpoint being written in the background."""

    def __init__(self, to: Destination) -> None:
        self.step = to.step
        self._to = to
        self._thread: threading.Thread | None = None
        self._path: Place | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self.timeout: float | None = None  # of the mesh's collectives

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._path is not None or self._error is not None

    def wait(self) -> Place:
        """Where the checkpoint is, once it is there; zeor.CheckpointError if it could not be written."""
        self.join()
        error = self.take_error()
        if error is not None:
            raise error
        assert self._path is not None
        return self._path

    def join(self, seconds: float | None = None) -> None:
        if self._thread is not None and self._pid == os.getpid():  # in a forked process there is no such thread
            self._thread.join(seconds)

    def take_error(self) -> BaseException | None:
        """What went wrong; whoever asks is responsible for it from then on."""
        _unseen.discard(self)
        return self._error

    def start(self, axis: Axis, lineage: Lineage, found: Contents, before: threading.Thread | None) -> None:
        _unseen.add(self)
        _watch_exit()
        work = (axis, lineage, found, before)
        self._thread = threading.Thread(target=self._work, args=work, daemon=True, name="zeor-checkpoint")
        self._thread.start()

    def _work(self, axis: Axis, lineage: Lineage, found: Contents, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            with thread_beside(axis.device), lost_peers(axis, *self._to.lost_words):
                self._path = saving.write(axis, lineage, found, self._to)
            _unseen.discard(self)
        except BaseException as error:
            unforeseen = not isinstance(error, CheckpointError)
            log.error(
                "zeor: the checkpoint of step %d, written in the background, failed: %s",
                self.step, error, exc_info=unforeseen,
            )  # fmt: skip
            self._error = _bare(error)  # its frames hold the copy of the run


def _bare(error: BaseException) -> BaseException:
    """Without frames, and its causes too."""
    each: BaseException | None = error
    while each is not None:
        each.with_traceback(None)
        each = each.__cause__ or each.__context__
    return error


# ---- at exit

_unseen: set[Saving] = set()  # under way, or failed and nobody was told


@functools.cache
def _watch_exit() -> None:
    """Wait for what is under way when the program ends. Before Python shuts its thread pools down, which the writing
    needs: that is earlier than atexit."""
    threading._register_atexit(_finish)  # type: ignore[attr-defined]


def _finish() -> None:
    for each in sorted(_unseen, key=lambda saving: saving.step):
        if each._pid != os.getpid():
            continue
        each.join(_patience(each))
        if not each.done:
            log.error(
                "zeor: the program ends after an error, and the checkpoint of step %d, which other ranks did not "
                "finish either, is left as it is: nothing of it is visible.", each.step,
            )  # fmt: skip
        elif each._error is not None:
            log.error(
                "zeor: the program ends, and the checkpoint of step %d was not written: %s", each.step, each._error
            )


def _patience(saving: Saving) -> float | None:
    """How long a program that ends waits for a save: as long as it takes, unless something went wrong. Then other ranks
    may never answer, and the process must be able to leave."""
    if has_failed():
        return LEAVE_SECONDS
    return saving.timeout if hasattr(sys, "last_value") else None  # an error that nobody caught


# ---- one per sharded model


@dataclass
class _Channel:
    """The group that background threads of a mesh speak on, and the thread that was started last."""

    group: Any = None
    last: threading.Thread | None = None


_channels: weakref.WeakKeyDictionary[Any, _Channel] = weakref.WeakKeyDictionary()  # by control group, and gone with it
_savers: weakref.WeakKeyDictionary[Engine, Saver] = weakref.WeakKeyDictionary()


class Saver:
    """The saves of one sharded model: at most one is under way."""

    def __init__(self, axis: Axis) -> None:
        self.blocks = HostBlocks(pinned=axis.device.type != "cpu")
        self.last: Saving | None = None

    def after_last(self, request: SaveRequest, refuse: bool) -> SaveRequest:
        """The request, when the save before it has ended; or, with `refuse`, at once, marked as busy."""
        if request.error is not None:
            return request
        if refuse and self.last is not None and not self.last.done:
            return request._replace(busy=True)
        return request._replace(error=self._end_last())

    def start(self, run: TrainingRun, request: SaveRequest) -> Saving:
        """Every rank calls it, and all agree before anything begins."""
        found, memory = saving.agree(run, request, self.blocks.missing_nbytes)
        short = room.short_of(memory, SNAPSHOT_SHARE)
        if not short:
            return self._start(run, found, request.to)
        if run.everyone.rank == 0:
            host, (nbytes, free) = next(iter(short.items()))
            log.warning(
                "zeor: a copy of the run for an asynchronous save takes %.1f GB on %s, where %.1f GB are free; this "
                "checkpoint is written at once instead, and training waits for it.", nbytes / 1e9, host, free / 1e9,
            )  # fmt: skip
        ended = Saving(request.to)
        ended._path = saving.write(run.everyone, run.lineage, found, request.to)
        return ended

    def _end_last(self) -> BaseException | None:
        """Wait for the save before this one; what was wrong with it, if nobody knows yet."""
        if self.last is None:
            return None
        self.last.join()
        error = self.last.take_error() if self.last in _unseen else None
        self.last = None
        return error

    def pass_over_last(self, step: int) -> None:
        """Wait for the save before that of `step`, which is made even where that one failed: no time is left to ask."""
        before, error = self.last, self._end_last()
        if before is not None and error is not None:
            log.warning(
                "zeor: saving step %d though the checkpoint of step %d, written in the background, failed: %s",
                step, before.step, error,
            )  # fmt: skip

    def settle(self) -> None:
        """Wait for a save under way; its error waits for who asks."""
        if self.last is not None:
            self.last.join()

    def _start(self, run: TrainingRun, found: Contents, to: Destination) -> Saving:
        channel = _channel_of(run.everyone)
        problem = ""
        try:
            found.sources = self.blocks.take(found.sources)
        except Exception as error:
            problem = f"the run could not be copied for a checkpoint ({type(error).__name__}: {error})."
        raise_first(exchange(run.everyone, problem, "copy of a run for a checkpoint"), CheckpointError)
        self.last = Saving(to)
        self.last.timeout = run.everyone.timeout
        # Its thread may wait for a slow disk for longer than anything else is waited for.
        patient = max(run.everyone.timeout, LEAST_TIMEOUT)
        axis = dataclasses.replace(run.everyone, control=channel.group, timeout=patient)
        self.last.start(axis, run.lineage, found, channel.last)
        channel.last = self.last._thread
        return self.last


def saver_of(run: TrainingRun) -> Saver:
    if run.engine not in _savers:
        _savers[run.engine] = Saver(run.everyone)
    return _savers[run.engine]


def carry_over(old: Engine, new: Engine) -> None:
    """The same run goes on with another engine: what is being written is still known."""
    if old in _savers:
        _savers[new] = _savers[old]


def _channel_of(axis: Axis) -> _Channel:
    """Every rank calls it: the first time it makes a group."""
    if axis.size == 1:
        return _Channel()
    if axis.control not in _channels:
        ranks = dist.get_process_group_ranks(axis.control)
        local = len(ranks) < dist.get_world_size()  # ranks outside the mesh take no part
        limit = timedelta(seconds=axis.timeout)  # a rank may die while the group is made
        try:
            group = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=local)
        except RuntimeError as error:
            raise explain(axis, "making of a process group for checkpoints", error) from error
        _channels[axis.control] = _Channel(group)
    return _channels[axis.control]


# ---- the copy, in one go, so that training can change the originals


BLOCK_NBYTES = 1 << 30
_ALIGNED = 64  # bytes: every dtype may begin there


class HostBlocks:
    """Host memory that is reused; one snapshot at a time."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._blocks: list[Tensor] = []
        self._used: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def missing_nbytes(self, sources: Sequence[Source]) -> int:
        """What a snapshot of these would have to allocate, about."""
        return max(0, sum(map(_room, sources)) - self.nbytes)

    @torch.no_grad()
    def take(self, sources: Sequence[Source]) -> list[Source]:
        """The same sources with the values they have now. What an earlier call returned is overwritten."""
        self._used = [0] * len(self._blocks)
        left_nbytes, copies, on_device = sum(map(_room, sources)), [], False
        for source in sources:
            value = source.read().detach()
            into = self._cut(source, left_nbytes)
            into.copy_(value.reshape(into.shape), non_blocking=True)
            on_device |= value.device.type != "cpu"
            left_nbytes -= _room(source)
            copies.append(dataclasses.replace(source, read=into.detach))
        if on_device:
            torch.accelerator.current_stream().synchronize()  # the copies -> whoever writes the originals next
        return copies

    def _cut(self, source: Source, left_nbytes: int) -> Tensor:
        room = _room(source)
        for number, block in enumerate(self._blocks):
            if self._used[number] + room <= block.numel():
                break
        else:
            number = len(self._blocks)
            self._blocks.append(self._allocate(max(room, min(left_nbytes, BLOCK_NBYTES))))
            self._used.append(0)
        begin = self._used[number]
        self._used[number] += room
        return self._blocks[number][begin : begin + source.nbytes].view(source.dtype)

    def _allocate(self, nbytes: int) -> Tensor:
        if self.pinned:
            try:
                return torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                text = str(error).splitlines()[0]
                log.warning("zeor: no pinned memory for a checkpoint (%s); plain memory serves, more slowly.", text)
                self.pinned = False
        return torch.empty(nbytes, dtype=torch.uint8)


def _room(source: Source) -> int:
    """Bytes a source takes in a block; never none, so that an empty one has a place too."""
    return max(1, -(-source.nbytes // _ALIGNED)) * _ALIGNED
