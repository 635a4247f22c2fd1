"""Segments: what an optimizer really steps on, and its state, cut and put together.

A segment is a Parameter over this rank's part of one parameter's master. The user's groups keep holding
the user's parameters; segments enter them only inside step() and state_dict(). State an optimizer
already holds for whole parameters is cut, not dropped, and put together again by `unshard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.comm import verbs
from zeor.layout import Segment
from zeor.runtime.engine import Engine
from zeor.runtime.unit import Slot


class Segments:
    """The segments of one optimizer, by the user's parameter."""

    def __init__(self, engine: Engine, optimizer: Optimizer):
        self.engine, self.optimizer = engine, optimizer
        self._of: dict[int, nn.Parameter] = {}  # id of the user's parameter -> segment
        self._at: dict[int, Segment] = {}
        self.slots: dict[int, Slot] = {id(slot.user): slot for slot in engine.slots}
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._make(param)

    def _make(self, param: Tensor) -> None:
        slot = self.slots[id(param)]
        if slot.lane.master is None:
            return
        for segment in slot.lane.segments:
            if segment.param == slot.index:
                self._of[id(param)] = nn.Parameter(slot.lane.master_part(segment))
                self._at[id(param)] = segment
        state = self.optimizer.state.pop(param, None)
        mine = self._of.get(id(param))
        if state and mine is not None:
            self.optimizer.state[mine] = {key: self.cut(param, value) for key, value in state.items()}

    def of(self, param: Tensor) -> nn.Parameter | None:
        """The segment this rank updates, or None where it has none."""
        return self._of.get(id(param))

    def cut(self, param: Tensor, value: Any) -> Any:
        """One entry of a parameter's state: whole tensors are cut, everything else is kept. What was made in the
        parameter's dtype is as wide as its master from here on."""
        slot = self.slots[id(param)]
        if not isinstance(value, Tensor):
            return value
        segment, mine = self._at[id(param)], self._of[id(param)]
        dtype = mine.dtype if value.dtype == slot.dtype else value.dtype
        if tuple(value.shape) != slot.shape or value.dim() == 0:
            return value.to(dtype)
        flat = value.detach().reshape(-1)[segment.start : segment.start + segment.numel]
        return flat.to(mine.device, dtype, copy=True).view(mine.shape)

    def whole(self, param: Tensor) -> dict[str, Any]:
        """One parameter's state put together from all ranks; a collective."""
        slot, mine = self.slots[id(param)], self._of.get(id(param))
        state = dict(self.optimizer.state.get(mine, {})) if mine is not None else {}
        if slot.lane.master is None or slot.lane.updates_whole or self.engine.mesh.world == 1:
            return state
        return _put_together(slot, self._at.get(id(param)), state)

    @contextmanager
    def in_groups(self, groups: list[dict[str, Any]] | None = None) -> Iterator[None]:
        """Segments stand in for parameters in the optimizer's groups; a parameter of which this rank holds
        nothing stays as it is, so that indices keep their meaning."""
        groups = self.optimizer.param_groups if groups is None else groups
        kept = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [self._of.get(id(param), param) for param in group["params"]]
            yield
        finally:
            for group, params in zip(groups, kept):
                group["params"] = params


def _put_together(slot: Slot, segment: Segment | None, state: dict[str, Any]) -> dict[str, Any]:
    """Gather a parameter's element-wise state; ranks without a part learn the rest from those with one."""
    from zeor.comm.agree import exchange

    mesh = slot.engine.mesh
    numel = segment.numel if segment else 0
    described: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() == numel and value.dim() > 0:
            described[key] = ["elements", str(value.dtype).removeprefix("torch.")]
        elif isinstance(value, Tensor) and value.dim() == 0:
            described[key] = ["number", str(value.dtype).removeprefix("torch."), float(value)]
        elif isinstance(value, (int, float, bool, str, type(None))):
            described[key] = ["plain", value]
        else:
            raise RuntimeError(
                f"The optimizer keeps {key!r} of {slot.name!r} as {type(value).__name__}; zeor cannot put it together."
            )
    label = f"exchange about the optimizer's state of {slot.name!r}"
    everyone = exchange(mesh, [described, segment.start if segment else 0, numel], label)
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


def _gather_elements(slot: Slot, everyone: list, mine: Tensor | None, dtype: torch.dtype) -> Tensor:
    mesh = slot.engine.mesh
    longest = max(rank[2] for rank in everyone)
    padded = torch.zeros(longest, dtype=dtype, device=mesh.device)
    if mine is not None:
        padded[: mine.numel()] = mine.reshape(-1)
    rows = torch.empty(mesh.world * longest, dtype=dtype, device=mesh.device)
    verbs.gather(mesh, rows, padded, f"gather of the optimizer's state of {slot.name!r}").wait()
    whole = torch.empty(slot.lane.layout.numels[slot.index], dtype=dtype, device=mesh.device)
    for row, (_, start, numel) in zip(rows.view(mesh.world, longest), everyone):
        whole[start : start + numel] = row[:numel]
    return whole.view(slot.shape)
