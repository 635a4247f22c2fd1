"""Inputs of the model in the dtype and on the device that it computes in, without copying what the caller may look at
afterwards.

Tensors and tuples are cast on the way in. A list, a dict or a dataclass that holds a tensor to be cast is handed on as
a copy with the cast tensor, and what forward puts into the copy is put into the caller's own object when forward ends;
one that holds none is handed on as it is. So what a model appends or stores is there for the caller.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_logger = logging.getLogger("zeor")


class Casts:
    """The casts of one forward's arguments. dtype: of floating tensors, None: as they are. device: of tensors on the
    host, single numbers excepted, which a device reads from there."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device):
        self._dtype, self._device = dtype, device
        self._copies: list[tuple[Any, Any, dict[Any, Any]]] = []  # (the caller's, the copy, what the copy began with)

    def cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, PackedSequence):  # a tuple that keeps its lengths on the host
            value = value if self._device.type == "cpu" else value.to(self._device)  # type: ignore[arg-type]  # torch's stub
            return value if self._dtype is None else value.to(self._dtype)
        if isinstance(value, tuple):
            items = [self.cast(item) for item in value]
            if all(new is old for new, old in zip(items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        items_of = dict(_items(value))
        new = {key: self.cast(item) for key, item in items_of.items()}
        if all(new[key] is items_of[key] for key in new):
            return value
        made = copy.copy(value)
        for key, item in new.items():
            _put(made, key, item)
        self._copies.append((value, made, new))
        return made

    def _tensor(self, value: Tensor) -> Tensor:
        if value.device.type == "cpu" and self._device.type != "cpu" and value.dim() > 0:
            value = value.to(self._device, non_blocking=value.is_pinned())
        return value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value

    def give_back(self) -> None:
        """What forward changed in the copies, into the caller's own."""
        for theirs, made, began in self._copies:
            now = dict(_items(made))
            if isinstance(theirs, list):
                mine = dict(enumerate(theirs))
                given = {id(item): mine[key] for key, item in began.items()}
                theirs[:] = [given.get(id(item), item) for item in made]
                continue
            for key in [key for key in began if key not in now]:
                del theirs[key]
            for key, item in now.items():
                if key not in began or item is not began[key]:
                    _put(theirs, key, item)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a container holds, by key; nothing for anything else."""
    if type(value) is dict:
        yield from value.items()
    elif type(value) is list:
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _put(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, (dict, list)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)


def explain_dtypes(error: BaseException | None, compute: torch.dtype | None) -> None:
    """Torch's complaint about two dtypes does not say where the second one comes from: add it to the error."""
    if compute is None or not isinstance(error, RuntimeError) or not _MIXED.search(str(error)):
        return
    said = (
        f"zeor: parameters and inputs of this model are {str(compute).removeprefix('torch.')} (precision=), and "
        "forward computed with a floating tensor of another dtype that it made or kept itself; cast it where it meets "
        "a layer: x.to(layer.weight.dtype)."
    )
    if hasattr(error, "add_note"):
        error.add_note(said)
    else:  # Python 3.10
        _logger.warning(said)


# As torch names them where two must be equal.
_MIXED = re.compile(r"type.*\b(BFloat16|Half)\b|\b(BFloat16|Half)\b.*type")
