"""Batches on the device of the model: whoever shards a model says here where it is, and loaders follow.

Nothing is moved before a model was sharded: a loader alone does not know what it feeds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

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


class Moved:
    """An iterator over batches that brings each to the device of the model, or to the one that was asked for."""

    def __init__(self, batches: Any, device: torch.device | None) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Moved:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        device = self._device or followed()
        return batch if device is None else move(batch, device)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not there yet: while being copied
            raise AttributeError(name)
        return getattr(self._batches, name)
