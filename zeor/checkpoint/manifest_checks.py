"""What a manifest says of optimizers, doubted before anything is changed by it.

A manifest that is consistent in itself may still name a place in an optimizer's state that cannot be, or a learning
rate that is no number. Everything here raises CheckpointError or does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zeor.checkpoint.files.errors import CheckpointError
from zeor.optim.parts.pieces import Key

_MOST_INDEX = 1 << 16  # of an entry in a list: the list is made as long as it says
_FLAGS = ("foreach", "fused")  # of torch's optimizers: yes, no, or as torch thinks best


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


def check_entry(where: str, number: int, entry: Any) -> None:
    """That what is said of an optimizer is of the form that contents.py writes."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: optimizer {number} is a {type(entry).__name__}.")
    kinds = {"class": str, "groups": list, "keys": dict, "scalars": dict}
    for key, kind in kinds.items():
        if not isinstance(entry.get(key), kind):
            raise CheckpointError(f"{where}: {key!r} of optimizer {number} is malformed or missing.")
    for group in entry["groups"]:
        if not isinstance(group, dict) or not isinstance(group.get("settings"), dict):
            raise CheckpointError(f"{where}: a group of optimizer {number} is malformed.")
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{where}: the parameters of a group of optimizer {number} are malformed.")
    for name, values in entry["scalars"].items():
        if not isinstance(values, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in values):
            raise CheckpointError(f"{where}: what optimizer {number} keeps of {name[:80]!r} is malformed.")


def check_members(where: str, number: int, stored: Iterable[tuple[str, str]], entry: Mapping[str, Any]) -> None:
    """That state is of parameters which are in a group: else some parameter would go without its own."""
    members = {name for group in entry["groups"] for name in group["params"]}
    held = {name for role, name in stored if role.startswith(f"optimizer.{number}.")} | entry["scalars"].keys()
    if held - members:
        name = min(held - members)
        raise CheckpointError(
            f"{where} holds state of optimizer {number} for {name[:80]!r}, which is in no group of it."
        )


def no_stored(where: str) -> Callable[[Any], Any]:
    """For values that never lie in files."""

    def refuse(name: Any) -> Any:
        raise CheckpointError(f"{where}: an optimizer's numbers are said to lie in a file, as {str(name)[:80]!r}.")

    return refuse


def checked_settings(
    where: str, group: Mapping[str, Any], defaults: Mapping[str, Any], saved: Any, complete: bool
) -> dict[str, Any]:
    """The settings that replace those of a group, each of the kind that is there now, or that the optimizer began with.
    `complete`: the same software wrote them, so that none may be missing."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where}: the settings of a group are a {type(saved).__name__}.")
    lacking = sorted(key for key in defaults if key in group and key not in saved and key != "params")
    if complete and lacking:
        raise CheckpointError(f"{where} lacks {', '.join(map(repr, lacking))} of a group's settings.")
    found = {}
    for key, value in saved.items():
        fits = isinstance(key, str) and key not in ("params", "param_names")
        known = [each[key] for each in (group, defaults) if fits and key in each]
        if not fits or (known and not any(_fits(key, old, value) for old in known)):
            raise CheckpointError(f"{where}: {str(key)[:40]!r} of a group cannot be {str(value)[:40]!r}.")
        old = known[0] if known else None
        if isinstance(value, (list, tuple)) and type(old) in (list, tuple):
            value = tuple(value) if isinstance(old, tuple) else list(value)
        if isinstance(value, Tensor) and known and not isinstance(old, Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate may be a tensor; whether it is one this run says
        found[key] = value
    return found


def _fits(key: str, old: Any, value: Any) -> bool:
    """Whether a setting may become this, by what it is."""
    if old is None:
        return value is None or isinstance(value, bool) or (key not in _FLAGS and not isinstance(value, dict))
    if isinstance(old, bool):
        return isinstance(value, bool) or (value is None and key in _FLAGS)
    if isinstance(old, Tensor):
        is_tensor = isinstance(value, Tensor) and value.shape == old.shape and _same_kind(value, old)
        is_number = _is_number(value) and not isinstance(value, Tensor)
        return is_tensor or (old.numel() == 1 and is_number and (old.is_floating_point() or value % 1 == 0))
    if isinstance(old, (int, float)):
        return _is_number(value) and (not _is_nan(value) or _is_nan(old))
    if isinstance(old, (list, tuple)):
        is_list = isinstance(value, (list, tuple)) and len(value) == len(old)
        return is_list and all(_fits(key, one, other) for one, other in zip(old, value))
    if isinstance(old, str):
        return value is None or isinstance(value, str)
    return isinstance(value, dict) if isinstance(old, dict) else True


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_nan(value: Any) -> bool:
    return bool(value != value)


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() == other.is_floating_point() and one.is_complex() == other.is_complex()
