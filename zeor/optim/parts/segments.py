"""Segments: what an optimizer really steps on, and its state, cut and put together.

A segment is a Parameter over this rank's part of one parameter's master. The user's groups keep holding
the user's parameters; segments enter them only inside step() and state_dict(). State an optimizer
already holds for whole parameters is cut, not dropped, and put together again by `unshard`. On the owner
of a parameter that is computed whole (owners.py), the whole stands where segments stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.comm.axes import Axes
from zeor.layout import Segment
from zeor.memory.placed import is_placed
from zeor.optim.owners.exchange import state_from_owner
from zeor.optim.owners.owners import Owners
from zeor.step.unit import Slot


class Segments:
    """The segments of one optimizer, by the user's parameter."""

    def __init__(self, optimizer: Optimizer, slots: Iterable[Slot], owners: Owners, axes: Axes):
        self.optimizer, self.owners, self._axes = optimizer, owners, axes
        self.resting: Callable[[Tensor], dict[str, Tensor]] = lambda param: {}  # state beside the optimizer's own
        self.parts: dict[int, nn.Parameter] = {}  # id of the user's parameter -> segment
        self._at: dict[int, Segment] = {}
        self.slots: dict[int, Slot] = {id(slot.param): slot for slot in slots}
        for group in optimizer.param_groups:
            for param in group["params"]:
                self.make(param)

    def make(self, param: Tensor) -> None:
        """What this rank steps on for one parameter, and its state, cut."""
        slot, owned = self.slots[id(param)], self.owners.owned.get(id(param))
        if slot.lane.grads is None:
            return  # frozen; made when it is unfrozen
        if owned is not None:
            if owned.whole is not None:
                self.parts[id(param)] = owned.whole
                self._at[id(param)] = Segment(slot.index, 0, owned.numel, 0)
        else:
            for segment in slot.lane.segments:
                if segment.param == slot.index:
                    with slot.lane.full.owning():
                        self.parts[id(param)] = nn.Parameter(slot.lane.master_part(segment))
                    self._at[id(param)] = segment
        self.adopt(param, self.optimizer.state)

    def adopt(self, param: Tensor, state_by_param: dict[Any, Any]) -> None:
        """State that is held for the user's own parameter is held for this rank's part from here on."""
        state = dict.pop(state_by_param, param, None)
        mine = self.parts.get(id(param))
        cut = self.cut_state(param, state) if state else {}
        if state and mine is not None:
            state_by_param[mine] = cut

    def of(self, param: Tensor) -> nn.Parameter | None:
        """The segment this rank updates (on an owner the whole), or None where it has none."""
        return self.parts.get(id(param))

    def at(self, param: Tensor) -> Segment:
        """Which elements of the parameter these are."""
        return self._at[id(param)]

    def all(self) -> Iterable[nn.Parameter]:
        """Everything this rank's optimizer steps on."""
        return self.parts.values()

    def cut_state(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state as this rank keeps it, from the whole parameter's or from its own; nothing where this
        rank has no part. What cannot be cut is refused, on every rank."""
        slot = self.slots[id(param)]
        state = local_state(slot, state)
        if id(param) not in self.owners.owned and self.owners.cut:
            check_cuttable(slot.name, slot.shape, state)
        if self.of(param) is None:
            return {}
        # A state dict shows state that rests elsewhere as it lies there, and a load begins by emptying that memory.
        resting = {value.untyped_storage()._cdata for value in self.resting(param).values()}
        return {key: self._cut(param, value, resting) for key, value in state.items()}

    def _cut(self, param: Tensor, value: Any, resting: set[int]) -> Any:
        """One entry of a parameter's state: whole tensors are cut, everything else is kept, but for what lies in memory
        of `resting`, which is copied. What was made in the parameter's dtype is as wide as its master from here on."""
        slot = self.slots[id(param)]
        if not isinstance(value, Tensor):
            return value
        segment, mine = self._at[id(param)], self.parts[id(param)]
        dtype = mine.dtype if value.dtype == slot.dtype else value.dtype
        if not of_shape(value, slot.shape, plain=True):
            return value.to(dtype, copy=value.untyped_storage()._cdata in resting)
        flat = value.detach().reshape(-1)[segment.start : segment.start + segment.numel]
        return flat.to(mine.device, dtype, copy=True).view(mine.shape)

    def whole(self, param: Tensor) -> dict[str, Any]:
        """One parameter's state put together from all ranks; a collective."""
        slot, mine = self.slots[id(param)], self.parts.get(id(param))
        state = dict(self.optimizer.state.get(mine, {})) if mine is not None else {}
        resting = self.resting(param).items()
        state.update({name: value.to(self._axes.device, copy=True) for name, value in resting})
        owned = self.owners.owned.get(id(param))
        if slot.lane.grads is not None and slot.lane.spec.cut("update"):
            at = self._at.get(id(param))
            state = _put_together(slot, at, state) if owned is None else state_from_owner(owned, state)
        return {key: slot.wrap(value) if of_shape(value, slot.shape) else value for key, value in state.items()}

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Segments stand in for parameters in the optimizer's groups; a parameter of which this rank holds
        nothing stays as it is, so that indices keep their meaning."""
        before = self.optimizer.param_groups
        kept = [group["params"] for group in before]
        try:
            for group in before:
                group["params"] = [self.parts.get(id(param), param) for param in group["params"]]
            yield
        finally:
            for groups in (before, self.optimizer.param_groups):  # a stock load makes new ones; the user may keep both
                for group, params in zip(groups, kept):
                    group["params"] = params


def _put_together(slot: Slot, segment: Segment | None, state: dict[str, Any]) -> dict[str, Any]:
    """Gather a parameter's element-wise state; ranks without a part learn the rest from those with one."""
    axis = slot.lane.axes.over(slot.lane.spec.table.cut("update"))
    numel = segment.numel if segment else 0
    described: dict[str, Any] = {}
    refused = ""
    for key, value in state.items():
        if type(value) is Tensor and value.numel() == numel and value.dim() > 0:
            described[key] = ["elements", str(value.dtype).removeprefix("torch.")]
        elif type(value) is Tensor and value.dim() == 0:
            described[key] = ["number", str(value.dtype).removeprefix("torch."), float(value)]
        elif isinstance(value, (int, float, bool, str, type(None))):
            described[key] = ["plain", value]
        else:
            refused = refused or (
                f"The optimizer keeps {key!r} of {slot.name!r} as {_words(value)}, made for this rank's part of it "
                "alone, so the whole parameter's cannot be put together; continue sharded, or take the values alone "
                "inside zeor.full_params."
            )
    label = f"exchange about the optimizer's state of {slot.name!r}"
    everyone = exchange(axis, [described, segment.start if segment else 0, numel, refused], label)
    for rank in everyone:
        if rank[3]:  # on every rank, so that none is left waiting
            raise RuntimeError(rank[3])
    known: dict[str, Any] = next((rank[0] for rank in everyone if rank[0]), {})
    result: dict[str, Any] = {}
    for key, (kind, *rest) in known.items():
        if kind == "elements":
            result[key] = _gather_elements(slot, everyone, state.get(key), getattr(torch, rest[0]))
        elif kind == "number":
            result[key] = torch.tensor(rest[1], dtype=getattr(torch, rest[0]))
        else:
            result[key] = rest[0]
    return result


def local_state(slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
    """A whole parameter's state with local tensors in place of DTensors, which it is made of where the parameter is
    one."""
    placed = slot.placed
    return state if placed is None else {k: placed.local_of(v) if is_placed(v) else v for k, v in state.items()}


def check_cuttable(name: str, shape: tuple[int, ...], state: dict[str, Any]) -> None:
    """ValueError where the state of a whole parameter holds more than one value for each element and counters."""
    if not any(of_shape(value, shape) for value in state.values()):
        return
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and not of_shape(value, shape, plain=True):
            raise ValueError(
                f"The optimizer's state of {name!r} holds {key!r} as {_words(value)}, made for the whole parameter of "
                f"shape {shape}, so it cannot be cut; shard before the first step."
            )


def of_shape(value: Any, shape: tuple[int, ...], plain: bool = False) -> bool:
    """Whether it is one value for each element of a parameter; `plain`: in a tensor that can be cut."""
    if not isinstance(value, Tensor) or value.dim() == 0 or (plain and type(value) is not Tensor):
        return False
    return tuple(value.shape) == shape


def _words(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"


def _gather_elements(slot: Slot, everyone: list[Any], mine: Tensor | None, dtype: torch.dtype) -> Tensor:
    axis = slot.lane.axes.over(slot.lane.spec.table.cut("update"))
    longest = max(rank[2] for rank in everyone)
    padded = torch.zeros(longest, dtype=dtype, device=axis.device)
    if mine is not None:
        padded[: mine.numel()] = mine.reshape(-1)
    rows = torch.empty(axis.size * longest, dtype=dtype, device=axis.device)
    verbs.gather(axis, rows, padded, f"gather of the optimizer's state of {slot.name!r}").wait()
    whole = torch.empty(slot.lane.layout.numels[slot.index], dtype=dtype, device=axis.device)
    for row, (_, start, numel, _) in zip(rows.view(axis.size, longest), everyone):
        whole[start : start + numel] = row[:numel]
    return whole.view(slot.shape)
