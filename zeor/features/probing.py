"""What a compiled call would keep for its backward: found by trying it once, for recompute="auto".

A graph that torch.compile has made computes again inside itself, where nobody can look. So the same call is made twice
in the step that is measured: once as it would be with its activations kept, which is thrown away, and then as always.
Random numbers and buffers are put back in between, so the trial changes no bit. Who keeps what: keeping.py.

Note [A trial]
~~~~~~~~~~~~~~
The trial is the first call of its kind in a pass: least is in use then, so it needs no memory that a step does not need
anyway. Calls of a kind (class, shapes of inputs and parameters) keep equally much. On an accelerator the allocator
says what it is, on a host hooks for saved tensors do. It ends before the call itself begins, so that a graph for kept
activations is there when the first call keeps them: none is made late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from zeor.features.random_state import Rng
from zeor.memory.device import DeviceMemory

NEVER = 1 << 60  # bytes: there is not even room for the trial

Kind = tuple[Any, ...]


def kind_of(module: nn.Module, arguments: Any) -> Kind:
    """What calls have in common that keep equally much."""
    params = tuple((param.shape, param.dtype, param.requires_grad) for param in module.parameters())
    shapes = tuple((each.shape, each.dtype, each.requires_grad) for each in _tensors(arguments))
    return type(module), module.training, shapes, params


class Trial:
    """Of one call. `begin`, the call, `end`; between them nothing else may run."""

    def __init__(self, module: nn.Module, arguments: Any, device: torch.device, not_ours: Callable[[], set[int]]):
        self._memory, self._on_host = DeviceMemory(device), device.type == "cpu"
        self._module, self._given, self._not_ours = module, _storages(arguments), not_ours
        self._rng = Rng(device)
        self._saved: dict[int, int] = {}

    @_disable_dynamo
    def begin(self) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        if self._on_host:
            torch._C._autograd._push_saved_tensors_default_hooks(self._count, lambda kept: kept)
        self._before = self._memory.used_nbytes()

    @_disable_dynamo
    def end(self, output: Any) -> int:
        """The bytes that the call would keep. `output` None: memory ran out."""
        used = self._memory.used_nbytes() - self._before
        if self._on_host:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        self._rng.restore()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        if output is None:
            return NEVER
        made = {key: nbytes for key, nbytes in _storages(output).items() if key not in self._given}
        if not self._on_host:
            return used - sum(made.values())
        apart = {*self._given, *made, *self._not_ours()}
        return sum(nbytes for key, nbytes in self._saved.items() if key not in apart)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._saved[storage._cdata] = storage.nbytes()
        return tensor.detach()  # the tensor itself may be an output, which would then hold its own graph


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.layout is torch.strided]


def _storages(tree: Any) -> dict[int, int]:
    """The bytes of each storage that tensors in it lie over."""
    storages = (each.untyped_storage() for each in _tensors(tree))
    return {each._cdata: each.nbytes() for each in storages}
