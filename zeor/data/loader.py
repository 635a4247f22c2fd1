"""A sharded DataLoader: the user's own class and settings, this rank's batches, and a position that can be saved.

Copies the user's loader and replaces its sampler, or its dataset where that is a stream. Batches are counted
when they are handed to the user, not when a worker prefetches them. Knows one rank of one world.
Batches come on the device of the model: whoever shards a model says here where it is, and loaders follow. Nothing is
moved before a model was sharded: a loader alone does not know what it feeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from zeor.data.position import History, Pass, kept, seed_now
from zeor.data.sampler import RankSampler
from zeor.data.stream import RankStream


def is_sharded(loader: DataLoader[Any]) -> bool:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return isinstance(loader.dataset, RankStream) or any(
        isinstance(sampler, (RankSampler, DistributedSampler)) for sampler in samplers
    )


def loader_of_batches(
    loader: DataLoader[Any], rank: int, world: int, history: History, drop_last: bool | None
) -> DataLoader[Any]:
    """For a loader with a batch_sampler of its own: whole batches are dealt out."""
    dealt: RankSampler[Any] = RankSampler(loader.batch_sampler, rank, world, history=history, drop_last=bool(drop_last))
    dealt.kind = "whole batches"
    return _counting(loader, dealt, world, batch_sampler=dealt)


def loader_of_samples(
    loader: DataLoader[Any], rank: int, world: int, *, shuffle: bool | None, history: History, drop_last: bool | None
) -> DataLoader[Any]:
    inner = loader.sampler if shuffle is None else sampler_for(loader.dataset, shuffle)
    drop_last = loader.drop_last if drop_last is None else drop_last
    dealt: RankSampler[Any] = RankSampler(inner, rank, world, history=history, drop_last=drop_last)
    if loader.batch_size is None:
        return _counting(loader, dealt, world, sampler=dealt)
    batches = BatchSampler(dealt, loader.batch_size, loader.drop_last)
    return _counting(loader, dealt, world * loader.batch_size, sampler=dealt, batch_sampler=batches)


def loader_of_stream(loader: DataLoader[Any], stream: RankStream) -> DataLoader[Any]:
    batch_size = loader.batch_size or 1
    if hasattr(loader, "state_dict"):
        # A stateful loader asks its workers for the position of their streams, and knows how to give it back.
        stream.batch_size = batch_size
        seed_now(stream.position.history)
        # Workers that are started anew each epoch have a copy of the stream as it is here: it must know the epoch.
        anew = loader.num_workers and not loader.persistent_workers
        return _replace(loader, Advancing if anew else None, dataset=stream, set_epoch=stream.set_epoch)
    stream.drive(batch_size, loader.num_workers, loader.persistent_workers)
    return _counting(loader, stream, stream.share.world * batch_size, dataset=stream)


def sampler_for(data: Any, shuffle: bool) -> Sampler[int]:
    # RandomSampler refuses an empty dataset in some torch versions; there is nothing to shuffle in one.
    return RandomSampler(data) if shuffle and len(data) else SequentialSampler(data)


# ---- the loader's class


class Counting:
    """What a sharded loader can do beyond its own class. Items are samples, or whole batches where those are
    dealt out."""

    _dealt: RankSampler[Any] | RankStream
    _items_per_batch: int  # on all ranks together

    def __iter__(self) -> Any:
        self._dealt.position.running = None  # a pass that was left half-way is given up
        if isinstance(self._dealt, RankStream):
            self._dealt.begin()
        # A DataLoader draws the seed of its workers at each iter(). Where an epoch is continued the run that began it
        # has drawn already: the generator is put back, so that what follows draws the same numbers as there.
        with kept(torch.default_generator if self._dealt.position.continues else None):
            batches = super().__iter__()  # type: ignore[misc]  # mixed into a DataLoader
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
    """A loader whose batches come on a device."""

    _device: torch.device | None

    def __iter__(self) -> Any:
        return Moved(super().__iter__(), self._device)  # type: ignore[misc]  # mixed into a DataLoader


def moving(loader: DataLoader[Any], device: torch.device | None) -> DataLoader[Any]:
    return _replace(loader, Moving, _device=device)


class Advancing:
    """A stateful loader whose workers read the stream: counts the epochs here that they begin there."""

    dataset: RankStream

    def __iter__(self) -> Any:
        batches = super().__iter__()  # type: ignore[misc]  # mixed into a DataLoader
        self.dataset.set_epoch(self.dataset.position.epoch + 1)
        return batches

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)  # type: ignore[misc]  # mixed into a DataLoader
        for epoch in _epochs_in(state):
            self.dataset.set_epoch(epoch)


def _epochs_in(state: Any) -> Iterator[int]:
    """Of every position of ours inside a stateful loader's own."""
    if isinstance(state, dict) and "zeor_data" in state:
        yield int(state["epoch"])
    elif isinstance(state, (dict, list, tuple)):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _epochs_in(each)


class Batches:
    """An iterator over a loader's batches that is as long, and answers the same, as the loader's own."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not there yet: while being copied
            raise AttributeError(name)
        return getattr(self._batches, name)


class HandedOver(Batches):
    """Counts the batches that it has handed over."""

    def __init__(self, batches: Iterator[Any], dealt: RankSampler[Any] | RankStream, items_per_batch: int) -> None:
        super().__init__(batches)
        self._position, self._items_per_batch = dealt.position, items_per_batch
        self._running: Pass | None = None
        self._count = 0

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


@cache
def _mixed(more: type, kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """The user's class, by its own name, with what `more` can do."""
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (more, kind), body)


def _counting(
    loader: DataLoader[Any], dealt: RankSampler[Any] | RankStream, items_per_batch: int, **changed: Any
) -> DataLoader[Any]:
    return _replace(loader, Counting, _dealt=dealt, _items_per_batch=items_per_batch, **changed)


def _replace(loader: DataLoader[Any], more: type | None, **changed: Any) -> DataLoader[Any]:
    """A shallow copy with some attributes changed, perhaps of a subclass with what `more` can do.

    Copying keeps every setting, those of subclasses and of other torch versions included; calling the
    constructor again would not. DataLoader forbids setting a sampler later, hence the plain dict.
    """
    kind = type(loader) if more is None else _mixed(more, type(loader))  # type: ignore[arg-type]  # classes hash
    fresh = kind.__new__(kind)
    # Persistent workers belong to the original.
    vars(fresh).update(vars(loader), **changed, _iterator=None)
    return fresh


# ---- batches on the device of the model


_followed: list[torch.device] = []  # of the model that was sharded last


def follow(device: torch.device) -> None:
    """The model is there: batches go there too, unless their loader was told otherwise."""
    _followed[:] = [device]


def followed() -> torch.device | None:
    return _followed[0] if _followed else None


def move(value: Any, device: torch.device) -> Any:
    """A batch with all its tensors there: in tuples, lists, dicts, dataclasses, and objects that have `to` (the
    encoding of a tokenizer, a packed sequence). What is there already, and what is no tensor, stays as it is."""
    return tree_map(lambda leaf: _moved(leaf, device), value, is_leaf=_moves_itself)


def _moves_itself(value: Any) -> bool:
    """A packed sequence is a tuple too, and keeps its lengths on the host."""
    return callable(getattr(value, "to", None)) and not isinstance(value, type)


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        same = leaf.device == device or (leaf.device.type == device.type and device.index is None)
        # From pinned memory the copy goes on beside the host; what follows on the device waits for it.
        return leaf if same else leaf.to(device, non_blocking=leaf.is_pinned())
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
        return dataclasses.replace(leaf, **{name: move(value, device) for name, value in fields.items()})
    return leaf.to(device) if _moves_itself(leaf) else leaf


class Moved(Batches):
    """Brings each batch to the device of the model, or to the one that was asked for."""

    def __init__(self, batches: Any, device: torch.device | None) -> None:
        super().__init__(batches)
        self._device = device

    def __next__(self) -> Any:
        batch = next(self._batches)
        device = self._device or followed()
        return batch if device is None else move(batch, device)
