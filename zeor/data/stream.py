"""RankStream: this rank's part of data that can only be read from its beginning on.

    the stream         a b c d e f g h | i j
    rank 0 of 4        a       e         i          rounds of one sample for each rank; an incomplete
    rank 1 of 4          b       f         j        last round is filled up from itself ("pad"), left
    rank 2 of 4            c       g       (i)      out ("drop"), or the ranks end unevenly ("uneven")
    rank 3 of 4              d       h     (j)

Every rank, and every worker process of its DataLoader, reads the whole stream and keeps its own samples: nothing
is communicated, and with "pad" and "drop" all ranks get equally many, so that no rank waits for one that has
run out. For that the stream must be the same on all ranks. Workers take whole batches in turn, so the batches
are the same ones in the same order with any number of workers. Knows samples, not loaders.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from zeor.data.position import VERSION, History, Position, part_numel, seed_now, seeded, take_state
from zeor.data.seeds import Seed

_END = object()


@dataclass(frozen=True)
class Share:
    """How a stream is dealt out. `own` names the (rank, world) of a source that is this rank's own already."""

    rank: int
    world: int
    seed: int = 0
    shuffle: int = 0  # samples in the shuffle buffer; 0: the stream's own order
    ends: str = "pad"
    own: tuple[int, int] | None = None


class RankStream(IterableDataset[Any]):
    """One rank's part of an iterable, or of what a function (a generator function, say) returns each time."""

    def __init__(self, source: Any, share: Share, history: History | None = None) -> None:
        self.source, self.share = source, share
        self.position = Position(History(share.seed) if history is None else history)
        self.driven = False  # by a loader, which begins the passes
        self.read_here = True  # and not by a loader's worker processes
        self.batch_size = 1  # samples that one worker takes at a time
        # The running pass, where worker processes that live on from epoch to epoch can see it: epoch, start.
        self._now = torch.zeros(2, dtype=torch.int64)
        self._origin: int | None = None
        self._ended = False  # the source has no more: its own state may say so, or the beginning again
        self._resume: tuple[int, int, Any] | None = None  # epoch, start, the source's own state there

    def drive(self, batch_size: int, workers: int, persistent: bool) -> None:
        """A loader begins the passes from now on, and its workers take this many samples at a time."""
        self.driven, self.batch_size, self.read_here = True, batch_size, workers == 0
        if persistent:
            self._now.share_memory_()

    def begin(self) -> None:
        seed_now(self.position.history)  # worker processes cannot ask
        this = self.position.begin()
        self._now.copy_(torch.tensor([this.epoch, this.start]))

    def set_epoch(self, epoch: int) -> None:
        """The next iter() is epoch `epoch`, and later ones count on from there."""
        self.position.set_epoch(epoch)

    def __len__(self) -> int:
        if not hasattr(self.source, "__len__"):
            raise TypeError(f"{type(self.source).__name__} has no length")
        return part_numel(len(self.source), self.share.world, self.share.ends == "drop")

    # ---- reading

    def __iter__(self) -> Iterator[Any]:
        if not self.driven:
            self.begin()
        epoch, start = self._now.tolist()
        # Where this pass's rounds are counted from: its start, unless one worker's own position was loaded.
        origin = start if self._origin is None else self._origin
        self._origin = None
        return self._pass(epoch, start, origin)

    def _pass(self, epoch: int, start: int, origin: int) -> Iterator[Any]:
        share, worker, running = self.share, get_worker_info(), self.position.running
        turn, turns = (worker.id, worker.num_workers) if worker else (0, 1)
        samples = self._from(epoch, start)
        for number in itertools.count((start - origin) // share.world):
            members = list(itertools.islice(samples, share.world))
            if not members or (len(members) < share.world and share.ends == "drop"):
                break
            if running is not None and running is self.position.running:
                running.handed += share.world
            if share.rank >= len(members) and share.ends == "uneven":
                break
            if number // self.batch_size % turns == turn:
                yield members[share.rank % len(members)]
        if not self.driven and running is self.position.running:
            self.position.running = None

    def _from(self, epoch: int, start: int) -> Iterator[Any]:
        """All samples of an epoch from `start` on; by the source's own position where that was saved."""
        state = self._resume[2] if self._resume is not None and self._resume[:2] == (epoch, start) else None
        samples = self._whole(epoch, state)
        if self.share.shuffle:
            samples = shuffled(samples, self.share.shuffle, random.Random(f"{seed_now(self.position.history)} {epoch}"))
        if state is None:
            for _ in itertools.islice(samples, start):
                pass
        return samples

    def _whole(self, epoch: int, state: Any) -> Iterator[Any]:
        """The stream as one process reads it. What it draws before its first sample (an order of files, say) is
        drawn from one common seed."""
        self._ended = False
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        with _alone(), seeded(seed_now(self.position.history) + epoch):
            if state is not None:
                self.source.load_state_dict(state)
            stream = iter(self.source if hasattr(self.source, "__iter__") else self.source())
            sample = next(stream, _END)
        while sample is not _END:
            yield sample
            with _alone():
                sample = next(stream, _END)
        self._ended = True

    # ---- position

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, and the same on every rank unless ranks have streams of their own."""
        epoch, consumed = self.position.now()
        state = {"zeor_data": VERSION, "epoch": epoch, "consumed": consumed, **self._settings()}
        if get_worker_info() is not None and self.position.running is not None:
            state["origin"] = self.position.running.start
        own = self._state_of_source()
        return state if own is None else {**state, "dataset": own}

    def _state_of_source(self) -> Any:
        """Where the source itself can say where it stands; not with a shuffle buffer, whose contents it has passed,
        nor in a loader's own process while its workers read."""
        running = self.position.running
        if self.share.shuffle or not self.read_here or self._ended or running is None or not running.handed:
            return None
        if not (hasattr(self.source, "state_dict") and hasattr(self.source, "load_state_dict")):
            return None
        try:
            return json.loads(json.dumps(self.source.state_dict()))
        except (TypeError, ValueError):
            return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iter() continues there; it may come from another number of ranks."""
        epoch, consumed = take_state(self.position, state, self._settings())
        self._origin = state.get("origin")
        self._resume = (epoch, consumed, state["dataset"]) if "dataset" in state else None

    def _settings(self) -> dict[str, Any]:
        share, seed = self.share, self.position.history.seed
        known = seed.agreed if isinstance(seed, Seed) else seed
        return {"kind": "a stream", "seed": known, "shuffle": share.shuffle, "own": share.own and list(share.own)}


def shuffled(samples: Iterator[Any], buffer_numel: int, chance: random.Random) -> Iterator[Any]:
    """Each time one of the buffer's samples, drawn at random, makes room for the next."""
    buffer = list(itertools.islice(samples, buffer_numel))
    for sample in samples:
        drawn = chance.randrange(len(buffer))
        sample, buffer[drawn] = buffer[drawn], sample
        yield sample
    chance.shuffle(buffer)
    yield from buffer


@contextmanager
def _alone() -> Iterator[None]:
    """Hide from a dataset that it runs in one of several workers: one that would then read only a part must not,
    since what is dealt out here is the whole."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info
