"""What a manifest says of optimizers and generators, doubted before anything is changed by it.

A manifest that is consistent in itself may still name a place in an optimizer's state that cannot be, a learning rate
that is no number, or a generator state that would be read beyond its end. Everything here raises CheckpointError or
does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeor.checkpoint.errors import CheckpointError
from zeor.optim.pieces import Key

_MOST_INDEX = 1 << 16  # of an entry in a list: the list is made as long as it says
_NUMPY_WORDS = 624  # of its generator's state; numpy itself reads at whatever position it is told


class Paths:
    """The places of one parameter's state: each a leaf, or below it only names, or only indices."""

    def __init__(self, where: str):
        self._where = where
        self._below: dict[Key, type | None] = {}

    def take(self, key: Any) -> Key:
        whole = isinstance(key, list) and bool(key) and type(key[0]) is str
        if not whole or not all(type(p) is str or (type(p) is int and 0 <= p < _MOST_INDEX) for p in key):
            raise self._wrong(key)
        for depth, part in enumerate(key):
            if self._below.setdefault(tuple(key[:depth]), type(part)) is not type(part):
                raise self._wrong(key)
        if self._below.setdefault(tuple(key), None) is not None:
            raise self._wrong(key)
        return tuple(key)

    def _wrong(self, key: Any) -> CheckpointError:
        return CheckpointError(f"{self._where}: {str(key)[:80]} is no place in an optimizer's state.")


def check_scalar(where: str, value: Any) -> Any:
    """What an optimizer keeps beside its parameters' tensors: a number, a word, a small tensor, an empty list."""
    if isinstance(value, (dict, list, tuple)) and value:
        raise CheckpointError(f"{where}: {str(value)[:80]} is no value of an optimizer's state.")
    return value


def check_roles(where: str, number: int, roles: Iterable[str], known: Iterable[str]) -> None:
    """That every tensor of an optimizer has a place in its state."""
    lost = {role for role in roles if role.startswith(f"optimizer.{number}.")} - set(known)
    if lost:
        raise CheckpointError(f"{where}: it does not say where {min(lost)!r} belongs.")


def check_settings(where: str, group: Mapping[str, Any], saved: Any) -> None:
    """That settings can replace those of a group: a number stays one."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where}: the settings of a group are a {type(saved).__name__}.")
    for key, value in saved.items():
        old = group.get(key)
        unlike = _is_number(old) and value is not None and not _is_number(value)
        unlike |= isinstance(old, Tensor) and isinstance(value, Tensor) and old.numel() != value.numel()
        if not isinstance(key, str) or key in ("params", "param_names") or unlike:
            raise CheckpointError(f"{where}: {key!r} of a group cannot be {str(value)[:40]!r}.")


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def check_rng(where: str, state: Any, device: torch.device) -> None:
    """That generators can take these states, tried on others than those in use."""
    try:
        torch.Generator().set_state(state["torch"])
        version, keys, gauss = state["python"]
        random.Random().setstate((version, tuple(keys.tolist()), gauss))
        kind, words, position, has_gauss, gauss = state["numpy"]
        if words.shape != (_NUMPY_WORDS,) or type(position) is not int or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError("numpy's position")
        np.random.RandomState().set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, gauss))
        if device.type != "cpu" and "device" in state:
            torch.Generator(device).set_state(state["device"])
    except Exception as error:  # whatever it is, it is not a state that a generator gave
        raise CheckpointError(
            f"{where}: the state of a random generator is malformed ({type(error).__name__}: {str(error)[:80]})."
        ) from error
