"""recompute= in a trace on the meta device: the same units, computed again by the same checkpoint, without the engine.

With "offload" what a call keeps is only a description of its large inputs, from when two later calls have sent theirs;
backward makes them anew, this call's and those of the call before, as activations.py brings them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from zeor.features.activations import BLOCK_NBYTES, HELD_CALLS, LEAST_NBYTES, MOST_NBYTES
from zeor.features.recompute import _chosen, _inside_checkpoint, _without_caches, asks_offload
from zeor.model.discover import UnitSpec
from zeor.step.passes import inside_backward


class Again:
    """`with Again(units, wanted) as again:` the chosen units are computed again. `again.sent`: sizes of what is kept
    on the host at once."""

    def __init__(self, units: Sequence[UnitSpec], wanted: Any):
        self._modules = _chosen(units, wanted)  # type: ignore[arg-type]  # asked for their modules alone
        self._offloads = asks_offload(wanted)
        self.sent: list[int] = []
        self._seen: dict[int, StorageWeakRef] = {}
        self._calls: list[_AgainCall] = []
        self._recent: deque[_AgainCall] = deque()
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

    def _forward(self, module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or inside_backward() or _inside_checkpoint():
            return forward(*args, **kwargs)
        if module.training:
            args, kwargs = _without_caches(args, kwargs)
        if self._offloads:
            return self._offloaded(forward, _AgainCall(self, (args, kwargs)))
        marker = torch.empty(0, device="meta")
        return checkpoint(lambda _, *given: forward(*given, **kwargs), marker, *args, use_reentrant=False)

    @staticmethod
    def _offloaded(forward: Callable, call: _AgainCall) -> Any:
        def again(_: Tensor) -> Any:
            args, kwargs = call.inputs()
            return forward(*args, **kwargs)

        return checkpoint(again, torch.empty(0, device="meta"), use_reentrant=False)

    # ---- what is sent away

    def takes(self, value: Any) -> bool:
        if type(value) is not Tensor or not value.is_floating_point() or value.nbytes < LEAST_NBYTES:
            return False
        if torch.empty_like(value).stride() != value.stride() or (value.is_leaf and value.requires_grad):
            return False
        storage = value.untyped_storage()
        seen = self._seen.get(storage._cdata)
        if seen is not None and not seen.expired():
            return False
        self._seen[storage._cdata] = StorageWeakRef(storage)
        return True

    def note(self, call: _AgainCall) -> None:
        self._calls.append(call)
        self._recent.append(call)
        if len(self._recent) > HELD_CALLS:
            self._recent.popleft().let_go()

    def before(self, call: _AgainCall) -> _AgainCall | None:
        place = self._calls.index(call)
        return self._calls[place - 1] if place else None

    def done(self, call: _AgainCall) -> None:
        if call in self._recent:
            self._recent.remove(call)


class _Away:
    def __init__(self, value: Tensor):
        self.held: Tensor | None = value.detach()
        self._like, self._needs_grad = (value.shape, value.stride(), value.dtype), value.requires_grad

    def start(self) -> None:
        if self.held is None:
            shape, stride, dtype = self._like
            self.held = torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def fetch(self) -> Tensor:
        self.start()
        here, self.held = self.held, None
        assert here is not None
        return here.requires_grad_(self._needs_grad)


class _AgainCall:
    """The arguments of one call, for its forward and for its recomputation."""

    def __init__(self, again: Again, arguments: Any):
        self._again, self._first = again, arguments
        self._aways: list[_Away] = []
        self._arguments = tree_map(self._send, arguments)
        again.note(self)

    def _send(self, value: Any) -> Any:
        if not self._again.takes(value):
            return value
        self._again.sent.append(value.nbytes)
        self._aways.append(_Away(value))
        return self._aways[-1]

    def let_go(self) -> None:
        for away in self._aways:
            away.held = None

    def start(self) -> None:
        for away in self._aways:
            away.start()

    def inputs(self) -> Any:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._again.done(self)
        self.start()
        before = self._again.before(self)
        if before is not None:
            before.start()
        here = {away: away.fetch() for away in self._aways}
        return tree_map(lambda value: here[value] if isinstance(value, _Away) else value, self._arguments)


def shelf_nbytes(sent: Sequence[int]) -> int:
    """Host memory for inputs of these sizes at once: blocks of powers of two, cut as activations.py cuts them."""
    total = left = 0
    for nbytes in sent:
        if nbytes > left:
            size = 1 << (max(nbytes, min(4 * nbytes, MOST_NBYTES), BLOCK_NBYTES) - 1).bit_length()
            total, left = total + size, size
        left -= nbytes
    return total
