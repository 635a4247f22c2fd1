"""What a checkpoint says of an optimizer, compared with what this optimizer keeps, before anything is changed by it.

Whoever writes a checkpoint may leave out an entry, give it another shape, or put a word where a number was: the load
would succeed, and the next step break or go wrong in silence. So, for every parameter this rank updates:

    places   those that the optimizer always fills are all there, or none is; torch's own optimizers have no others
    kinds    a tensor as large as the parameter, a tensor of one number, a number, a word, nothing: as the optimizer
             keeps it. Floating tensors of another width are converted, and a plain number to the tensor of one number
             that torch keeps today (Adam's step was an int once)
    numbers  a copy of the optimizer takes a step with the saved counters and settings

What the optimizer keeps is found by trying it (optim/expected.py); one that cannot be tried is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeor.checkpoint.files.errors import CheckpointError
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

    def check_group(self, group: int, like: nn.Parameter) -> None:
        """That the optimizer can take a step with these settings, over something like this."""
        self._expected(group, like)

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
        left = [key for key, value in saved.items() if key[0] in _LEFT_OVER and _is_moment(value, shape)]
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
                return self._checked_counter(name, key, found)
        if not is_stock(self._optimizer):  # what it keeps may depend on gradients; a trial decides
            return value
        raise CheckpointError(
            f"{self._where} holds {_words(key)} of the optimizer's state of {name!r} as {_kind(value)}; "
            f"{type(self._optimizer).__name__} keeps {_kind(expected.seen[key][0])}"
            f"{' (made for ' + str(expected.shape) + ')' if isinstance(expected.seen[key][0], Tensor) else ''}."
        )

    def _checked_counter(self, name: str, key: Key, value: Any) -> Any:
        if key[-1] == "step" and _number(value) is not None:
            check_count(self._where, name, float(_number(value)))
        return value

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


def _is_moment(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, UnreadTensor) and value.shape == shape and value.dtype.is_floating_point


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
