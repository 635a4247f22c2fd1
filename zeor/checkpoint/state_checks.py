"""What a checkpoint says of an optimizer, compared with what this optimizer keeps, before anything is changed by it.

Whoever writes a checkpoint may leave out an entry, give it another shape, or put a word where a number was: the load
would succeed, and the next step break or go wrong in silence. So, for every parameter this rank updates:

    places   those that the optimizer always fills are all there, or none is; torch's own optimizers have no others
    kinds    a tensor as large as the parameter, a tensor of one number, a number, a word, nothing: as the optimizer
             keeps it. Floating tensors of another width are converted, and a plain number to the tensor of one number
             that torch keeps today (Adam's step was an int once)
    numbers  a copy of the optimizer takes a step with the saved counters and settings

What the optimizer keeps is found by trying it (optim/parts/expected.py); one that cannot be tried is not judged.

Before that, the manifest itself is doubted: consistent as it may be, it may name a place in an optimizer's state that
cannot be, or a learning rate that is no number. Everything here raises CheckpointError or changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.weights.matching import kind_of
from zeor.optim.parts.expected import Expected, expect, is_stock, toy_shape, try_step
from zeor.optim.parts.pieces import Key
from zeor.optim.streaming.moments import COUNTERS

_FILLING = 0.01  # for state in a trial: positive, as second moments are
# What stays where a user has changed a setting (momentum=, amsgrad=, centered=) while training.
_LEFT_OVER = frozenset({"momentum_buffer", "max_exp_avg_sq", "grad_avg"})


class UnreadTensor(NamedTuple):
    """A tensor of a checkpoint that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class States:
    """Of one optimizer, as one load sees it. `settings`: of each group, those that are to be loaded."""

    def __init__(self, where: str, optimizer: Any, settings: Sequence[Mapping[str, Any]], device: torch.device):
        self._where, self._optimizer, self._settings, self._device = where, optimizer, settings, device
        self._known: dict[Any, Expected | None] = {}
        self._tried: dict[Any, str] = {}

    def check(
        self, group: int, name: str, shape: tuple[int, ...], mine: nn.Parameter, saved: Mapping[Key, Any]
    ) -> dict[Key, Any]:
        """What to make of the state of a parameter of this shape, of which this rank updates `mine`: by place the
        value, or the UnreadTensor with the dtype it is to have. CheckpointError where it does not fit."""
        expected = self._expected(group, mine)
        if expected is None or not saved:
            return dict(saved)
        self._check_places(name, shape, saved, expected)
        known = {key: value for key, value in saved.items() if key in expected.seen}
        found = {key: self._fitted(name, key, value, shape, expected) for key, value in known.items()}
        found = {key: found.get(key, value) for key, value in saved.items()}
        self._try(group, name, shape, mine, found, expected)
        return found

    def _expected(self, group: int, mine: nn.Parameter) -> Expected | None:
        settings, toy = self._settings[group], toy_shape(self._optimizer, tuple(mine.shape))
        key = (group, toy, toy == tuple(mine.shape), mine.dtype)
        if key not in self._known:
            found = expect(self._optimizer, group, settings, mine, self._device)
            if isinstance(found, str):
                own = expect(self._optimizer, group, {}, mine, self._device)
                if not isinstance(own, str):
                    raise CheckpointError(
                        f"{self._where}: {type(self._optimizer).__name__} cannot take a step with the settings that it "
                        f"holds of group {group} ({found})."
                    )
                found = None  # type: ignore[assignment]
            self._known[key] = found  # type: ignore[assignment]
        return self._known[key]

    def _check_places(self, name: str, shape: tuple[int, ...], saved: Mapping[Key, Any], expected: Expected) -> None:
        class_name = type(self._optimizer).__name__
        lacking = sorted(_words(key) for key in expected.always - saved.keys())
        if lacking:
            raise CheckpointError(
                f"{self._where} lacks {', '.join(lacking)} of the optimizer's state of {name!r}, which {class_name} "
                "keeps with these settings."
            )
        like = [key for key, value in saved.items() if isinstance(value, UnreadTensor) and value.shape == shape]
        left = [key for key in like if key[0] in _LEFT_OVER and saved[key].dtype.is_floating_point]
        unknown = sorted(_words(key) for key in saved.keys() - expected.seen.keys() - set(left))
        if unknown and is_stock(self._optimizer):
            raise CheckpointError(
                f"{self._where} holds {', '.join(unknown)[:200]} in the optimizer's state of {name!r}, which "
                f"{class_name} does not keep with these settings."
            )

    def _fitted(self, name: str, key: Key, value: Any, shape: tuple[int, ...], expected: Expected) -> Any:
        """The value as the optimizer keeps it."""
        for like in expected.seen[key]:
            found = _as(key, value, like, shape, expected)
            if found is not None or (value is None and like is None):
                if key[-1] == "step" and _number(found) is not None:
                    check_count(self._where, name, float(_number(found)))
                return found
        if not is_stock(self._optimizer):  # what it keeps may depend on gradients; a trial decides
            return value
        raise CheckpointError(
            f"{self._where} holds {_words(key)} of the optimizer's state of {name!r} as {_kind(value)}; "
            f"{type(self._optimizer).__name__} keeps {_kind(expected.seen[key][0])}"
            f"{' (made for ' + str(expected.shape) + ')' if isinstance(expected.seen[key][0], Tensor) else ''}."
        )

    def _try(
        self,
        group: int,
        name: str,
        shape: tuple[int, ...],
        mine: nn.Parameter,
        found: Mapping[Key, Any],
        expected: Expected,
    ) -> None:
        """A step of a copy, over a toy: with the saved numbers, and something in the place of what is not read yet."""
        unread = {key: value for key, value in found.items() if isinstance(value, UnreadTensor)}
        toy = expected.shape
        if any(each.shape != shape for each in unread.values()) and not expected.is_exact:
            return  # of a shape of its own: what would be in it is not known
        shapes = {key: toy if each.shape == shape else each.shape for key, each in unread.items()}
        if is_stock(self._optimizer) and any(each != toy for each in shapes.values()):
            return
        numbers = [(key, repr(value)) for key, value in found.items() if key not in unread]
        signature = (group, toy, mine.dtype, repr(shapes), repr(numbers), *(each.dtype for each in unread.values()))
        if signature not in self._tried:
            state: list[tuple[Key, Any]] = []
            for key, value in found.items():
                if isinstance(value, UnreadTensor):
                    value = torch.full(shapes[key], _FILLING, device=self._device).to(value.dtype)
                elif isinstance(value, Tensor) and isinstance(like := expected.seen.get(key, [None])[0], Tensor):
                    value = value.to(like.device)  # where fused optimizers count
                state.append((key, value))
            settings = self._settings[group]
            self._tried[signature] = try_step(self._optimizer, group, settings, state, mine, self._device)
        if self._tried[signature]:
            raise CheckpointError(
                f"{self._where}: {type(self._optimizer).__name__} cannot take a step from the state that it holds of "
                f"{name!r} ({self._tried[signature]})."
            )


def check_count(where: str, name: str, count: float) -> None:
    if not math.isfinite(count) or count < 0 or count % 1:
        raise CheckpointError(f"{where} says that {name!r} was updated {count} times; a count of steps is 0 or more.")


def is_counter(key: Key, tensor: UnreadTensor) -> bool:
    """One number of a parameter, and not its element, though it may have but one."""
    return tensor.shape == () and key[-1] in COUNTERS


def _as(key: Key, value: Any, like: Any, shape: tuple[int, ...], expected: Expected) -> Any:
    """A value as one that was seen is kept, if it can be that; else None."""
    if isinstance(value, UnreadTensor):
        return _tensor_as(key, value, like, shape, expected)
    if isinstance(like, Tensor):
        if like.dim() > 0 or _number(value) is None or not (isinstance(value, Tensor) or key[-1] in COUNTERS):
            return None
        return _exactly(value, like.dtype)
    if isinstance(value, Tensor) or isinstance(value, bool) is not isinstance(like, bool):
        return None
    if isinstance(like, float) and isinstance(value, int) and not isinstance(like, bool):
        return float(value)
    return value if type(value) is type(like) else None


def _tensor_as(
    key: Key, value: UnreadTensor, like: Any, shape: tuple[int, ...], expected: Expected
) -> UnreadTensor | None:
    if not isinstance(like, Tensor):
        return None
    if like.dim() == 0 and key[-1] in COUNTERS:  # checkpoints of others hold it as a tensor
        return UnreadTensor((), like.dtype) if value.shape == () and not value.dtype.is_complex else None
    if tuple(like.shape) == expected.shape:
        fits = value.shape == shape
    elif expected.is_exact:
        fits = value.shape == tuple(like.shape)
    else:
        fits = len(value.shape) == like.dim()
    if not fits or (value.dtype != like.dtype and not (value.dtype.is_floating_point and like.is_floating_point())):
        return None
    return UnreadTensor(value.shape, like.dtype)


def _number(value: Any) -> Any:
    """A plain number, of a tensor of no dimensions too; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _exactly(value: Any, dtype: torch.dtype) -> Tensor | None:
    """As a tensor of one number; None where that would be another number. What is floating may be rounded."""
    if isinstance(value, Tensor) and value.dtype == dtype:
        return value
    number = _number(value)
    try:
        made = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64).to(dtype)
    except (OverflowError, RuntimeError, ValueError):
        return None
    both_floating = isinstance(number, float) and dtype.is_floating_point
    return made if both_floating or made.item() == number else None


def _words(key: Key) -> str:
    return repr("/".join(map(str, key))[:80])


def _kind(value: Any) -> str:
    if isinstance(value, (UnreadTensor, Tensor)):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)}, {kind}" if tuple(value.shape) else f"one number, {kind}"
    if value is None:
        return "nothing"
    return f"{type(value).__name__} ({str(value)[:40]})"


# ---- what the manifest says of optimizers


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
    """That every tensor of an optimizer has a place in its state, and that state is of parameters which are in a group:
    else some parameter would go without its own."""
    mine = [(role, name) for role, name in stored if role.startswith(f"optimizer.{number}.")]
    lost = {role for role, _ in mine} - entry["keys"].keys()
    if lost:
        raise CheckpointError(f"{where}: it does not say where {min(lost)!r} belongs.")
    members = {name for group in entry["groups"] for name in group["params"]}
    held = {name for _, name in mine} | entry["scalars"].keys()
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
        is_tensor = (
            isinstance(value, Tensor) and value.shape == old.shape and kind_of(value.dtype) == kind_of(old.dtype)
        )
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
