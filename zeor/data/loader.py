"""A sharded DataLoader: the user's own class and settings, this rank's batches, and a position that can be saved.

Copies the user's loader and replaces its sampler, or its dataset where that is a stream. Batches are counted
when they are handed to the user, not when a worker prefetches them. Knows one rank of one world.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from zeor.data.devices import Moved
from zeor.data.history import History
from zeor.data.position import Pass, seed_now
from zeor.data.sampler import RankSampler
from zeor.data.stream import RankStream


def is_sharded(loader: DataLoader) -> bool:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return isinstance(loader.dataset, RankStream) or any(
        isinstance(sampler, (RankSampler, DistributedSampler)) for sampler in samplers
    )


def loader_of_batches(
    loader: DataLoader, rank: int, world: int, history: History, drop_last: bool | None
) -> DataLoader:
    """For a loader with a batch_sampler of its own: whole batches are dealt out."""
    dealt: RankSampler = RankSampler(loader.batch_sampler, rank, world, history=history, drop_last=bool(drop_last))
    dealt.kind = "whole batches"
    return _counting(loader, dealt, world, batch_sampler=dealt)


def loader_of_samples(
    loader: DataLoader, rank: int, world: int, *, shuffle: bool | None, history: History, drop_last: bool | None
) -> DataLoader:
    inner = loader.sampler if shuffle is None else sampler_for(loader.dataset, shuffle)
    drop_last = loader.drop_last if drop_last is None else drop_last
    dealt: RankSampler = RankSampler(inner, rank, world, history=history, drop_last=drop_last)
    if loader.batch_size is None:
        return _counting(loader, dealt, world, sampler=dealt)
    batches = BatchSampler(dealt, loader.batch_size, loader.drop_last)
    return _counting(loader, dealt, world * loader.batch_size, sampler=dealt, batch_sampler=batches)


def loader_of_stream(loader: DataLoader, stream: RankStream) -> DataLoader:
    batch_size = loader.batch_size or 1
    if hasattr(loader, "state_dict"):
        # A stateful loader asks its workers for the position of their streams, and knows how to give it back.
        stream.batch_size = batch_size
        seed_now(stream.position.history)
        # Workers that are started anew each epoch have a copy of the stream as it is here: it must know the epoch.
        anew = loader.num_workers and not loader.persistent_workers
        kind = _mixed(Advancing, type(loader)) if anew else None  # type: ignore[arg-type]
        return _replace(loader, kind, dataset=stream, set_epoch=stream.set_epoch)
    stream.drive(batch_size, loader.num_workers, loader.persistent_workers)
    return _counting(loader, stream, stream.share.world * batch_size, dataset=stream)


def sampler_for(data: Any, shuffle: bool) -> Sampler:
    # RandomSampler refuses an empty dataset in some torch versions; there is nothing to shuffle in one.
    return RandomSampler(data) if shuffle and len(data) else SequentialSampler(data)


# ---- the loader's class


class Counting:
    """What a sharded loader can do beyond its own class. Items are samples, or whole batches where those are
    dealt out."""

    _dealt: RankSampler | RankStream
    _items_per_batch: int  # on all ranks together

    def __iter__(self) -> Any:
        self._dealt.position.running = None  # a pass that was left half-way is given up
        if isinstance(self._dealt, RankStream):
            self._dealt.begin()
        with _undrawn(self._dealt.position.continues):
            batches = super().__iter__()  # type: ignore[misc]
        return HandedOver(batches, self._dealt, self._items_per_batch)

    @property
    def epoch(self) -> int:
        """The running epoch; between epochs the next one."""
        return self._dealt.position.now()[0]

    def set_epoch(self, epoch: int) -> None:
        """The next iter() is epoch `epoch`, and later ones count on from there. The epoch of a position that was
        just loaded is continued where it stands; any other begins at its first sample."""
        self._dealt.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this epoch stands: what the user has been given, on all ranks together. JSON-able. Ask on every
        rank after the same number of batches."""
        return self._dealt.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iter() continues there; the state may come from another number of ranks."""
        self._dealt.load_state_dict(state)
        object.__setattr__(self, "_iterator", None)  # persistent workers hold an older copy


class Moving:
    """A loader whose batches come on a device: see devices.py."""

    _device: torch.device | None

    def __iter__(self) -> Any:
        return Moved(super().__iter__(), self._device)  # type: ignore[misc]


def moving(loader: DataLoader, device: torch.device | None) -> DataLoader:
    return _replace(loader, _mixed(Moving, type(loader)), _device=device)  # type: ignore[arg-type]


class Advancing:
    """A stateful loader whose workers read the stream: counts the epochs here that they begin there."""

    dataset: RankStream

    def __iter__(self) -> Any:
        batches = super().__iter__()  # type: ignore[misc]
        self.dataset.set_epoch(self.dataset.position.epoch + 1)
        return batches

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)  # type: ignore[misc]
        for epoch in _epochs_in(state):
            self.dataset.set_epoch(epoch)


def _epochs_in(state: Any) -> Iterator[int]:
    """Of every position of ours inside a stateful loader's own."""
    if isinstance(state, dict) and "zeor_data" in state:
        yield int(state["epoch"])
    elif isinstance(state, (dict, list, tuple)):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _epochs_in(each)


class HandedOver:
    """An iterator over batches that counts what it has handed over."""

    def __init__(self, batches: Iterator[Any], dealt: RankSampler | RankStream, items_per_batch: int) -> None:
        self._batches, self._position, self._items_per_batch = batches, dealt.position, items_per_batch
        self._running: Pass | None = None
        self._count = 0

    def __iter__(self) -> HandedOver:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._running in (None, self._position.running):
                self._position.running = None
            raise
        self._count += 1
        if self._running is None:
            self._running = self._position.running  # begun at the latest with the first batch
        if self._running is not None:
            self._running.handed = self._count * self._items_per_batch
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not there yet: while being copied
            raise AttributeError(name)
        return getattr(self._batches, name)


@contextmanager
def _undrawn(continues: bool) -> Iterator[None]:
    """A DataLoader draws the seed of its workers at each iter(). Where an epoch is continued the run that began it has
    drawn already: the generator is put back, so that what follows draws the same numbers as it would have there."""
    if not continues:
        yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@cache
def _mixed(more: type, kind: type[DataLoader]) -> type[DataLoader]:
    """The user's class, by its own name, with what `more` can do."""
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (more, kind), body)


def _counting(loader: DataLoader, dealt: RankSampler | RankStream, items_per_batch: int, **changed: Any) -> DataLoader:
    kind = _mixed(Counting, type(loader))  # type: ignore[arg-type]
    return _replace(loader, kind, _dealt=dealt, _items_per_batch=items_per_batch, **changed)


def _replace(loader: DataLoader, kind: type[DataLoader] | None = None, **changed: Any) -> DataLoader:
    """A shallow copy with some attributes changed, perhaps of a subclass.

    Copying keeps every setting, those of subclasses and of other torch versions included; calling the
    constructor again would not. DataLoader forbids setting a sampler later, hence the plain dict.
    """
    kind = kind or type(loader)
    fresh = kind.__new__(kind)
    # Persistent workers belong to the original.
    vars(fresh).update(vars(loader), **changed, _iterator=None)
    return fresh
