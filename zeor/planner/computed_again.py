"""recompute= in a trace on the meta device: the same units, computed again by the same checkpoint, without the engine.

With "offload" what a call keeps is only a description of its large inputs, from when two later calls have sent theirs;
backward makes them anew, this call's and those of the call before, as activations.py brings them. With "products" calls
keep as many results as another trace has counted (`counts`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from zeor.features.activations import (
    BLOCK_NBYTES,
    HELD_CALLS,
    MOST_NBYTES,
    Kept,
    Sent,
    Shelved,
    is_worth_sending,
)
from zeor.features.products import Products, counting
from zeor.features.recompute import _chosen, _inside_checkpoint, _without_caches, asks_offload
from zeor.model.discover import UnitSpec
from zeor.step.passes import inside_backward


class Again:
    """`with Again(units, wanted) as again:` the chosen units are computed again. `again.sent`: sizes of what is kept
    on the host at once. `again.counts`: by call, how many products its recomputation has run. `kept`: by call, of how
    many the results are kept."""

    def __init__(self, units: Sequence[UnitSpec], wanted: Any, kept: Sequence[int] = ()):
        self._modules = _chosen(units, wanted)  # type: ignore[arg-type]  # asked for their modules alone
        self._offloads = asks_offload(wanted)
        self.sent: list[int] = []
        self.counts: list[int] = []
        self._kept = kept
        self._seen: dict[int, StorageWeakRef] = {}
        self._calls: list[Sent] = []
        self._recent: deque[Sent] = deque()
        self._before: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> Again:
        for module in self._modules:
            self._before.append((module, vars(module).get("forward")))
            vars(module)["forward"] = functools.partial(self._forward, module, module.forward)
        return self

    def __exit__(self, *_: Any) -> None:
        for module, before in self._before:
            vars(module).pop("forward")
            if before is not None:
                vars(module)["forward"] = before

    def _forward(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or inside_backward() or _inside_checkpoint():
            return forward(*args, **kwargs)
        if module.training:
            args, kwargs = _without_caches(args, kwargs)
        if self._offloads:
            return self._offloaded(forward, _AgainCall(self, (args, kwargs)))
        marker, forward = torch.empty(0, device="meta"), self._listening(forward)
        return checkpoint(lambda _, *given: forward(*given, **kwargs), marker, *args, use_reentrant=False)

    def _listening(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        call = len(self.counts)
        self.counts.append(0)
        if call < len(self._kept):
            return Products(torch.device("cpu"), self._kept[call]).around(forward)
        return counting(forward, functools.partial(self.counts.__setitem__, call))

    @staticmethod
    def _offloaded(forward: Callable[..., Any], call: _AgainCall) -> Any:
        def again(_: Tensor) -> Any:
            args, kwargs = call.inputs()
            return forward(*args, **kwargs)

        return checkpoint(again, torch.empty(0, device="meta"), use_reentrant=False)

    # ---- what is sent away: a Shelf's part for a Kept call, see activations.py

    def put(self, value: Any) -> _Away | None:
        if not is_worth_sending(value, torch.device("meta"), self._seen):
            return None
        self.sent.append(value.nbytes)
        return _Away(value)

    def note(self, call: Sent) -> None:
        self._calls.append(call)
        self._recent.append(call)
        if len(self._recent) > HELD_CALLS:
            for away in self._recent.popleft().aways:
                away.let_go()

    def before(self, call: Sent) -> Sent | None:
        place = self._calls.index(call)
        return self._calls[place - 1] if place else None


class _Away(Shelved):
    """A description of a tensor, and the tensor itself while it is held."""

    def __init__(self, value: Tensor):
        self._held = value.detach()
        self._shape, self._stride, self._dtype = value.shape, value.stride(), value.dtype
        self._requires_grad = value.requires_grad

    def let_go(self) -> None:
        self._held = None

    def check(self) -> None:
        pass

    def start(self) -> None:
        if self._held is None:
            self._held = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device="meta")


class _AgainCall(Kept):
    def all_sent(self) -> None:
        self._shelf.note(self)


def shelf_nbytes(sent: Sequence[int]) -> int:
    """Host memory for inputs of these sizes at once: blocks of powers of two, cut as activations.py cuts them."""
    total = left = 0
    for nbytes in sent:
        if nbytes > left:
            size = 1 << (max(nbytes, min(4 * nbytes, MOST_NBYTES), BLOCK_NBYTES) - 1).bit_length()
            total, left = total + size, size
        left -= nbytes
    return total
