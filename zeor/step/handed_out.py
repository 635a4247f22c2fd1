"""Gradients that were read: what the user then writes into the tensor he got reaches the gradient itself.

`p.grad.view(-1)[3] = 0` reads a gradient, makes a view of it and writes there. Where the whole gradient lies on this
rank the reader gets a tensor over it, or a copy in the parameter's own dtype; torch's version counter tells whether it
was written to. Before gradients are used again `heed` forgets the norms of those, and takes copies over.

A backward writes too, into the memory where gradients arrive, and afterwards the sum may lie elsewhere (it gets wider
by accumulation). So versions are read anew when it is over. From then on a tensor that was handed out before stands for
the gradient only where it lies over the sum still; a write into any other is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.memory.view import Held
from zeor.step.extension import Extension


class _Given(NamedTuple):
    tensor: Callable[[], Tensor | None]
    version: int
    before: bool  # it was handed out before the last backward


class HandedOut(Extension):
    """Copies are held weakly: one that nobody holds any more, nor a view of it, cannot be written to."""

    def __init__(self) -> None:
        self._out: dict[Held, list[_Given]] = {}

    def give(self, held: Held, grad: Tensor, is_copy: bool) -> Tensor:
        """`grad` is the whole gradient of a parameter: the memory itself, or a copy."""
        ref = weakref.ref(grad) if is_copy else lambda: grad
        self._out.setdefault(held, []).append(_Given(ref, grad._version, before=False))
        return grad

    def begin_backward(self, said: dict[str, Any]) -> None:
        self.heed()

    def grads_there(self) -> None:
        out, self._out = self._out, {}
        for held, given in out.items():
            for each in given:
                tensor = each.tensor()
                if tensor is not None:
                    self._out.setdefault(held, []).append(_Given(each.tensor, tensor._version, before=True))

    def heed(self) -> None:
        if self._out:
            self._take_over()

    @torch.no_grad()
    def _take_over(self) -> None:
        out, self._out = self._out, {}
        for held, given in out.items():
            for each in given:
                tensor = each.tensor()
                if tensor is None:
                    continue
                if tensor._version != each.version and held.get_grad() is not None:
                    local = held.local_grad()  # forgets the norm
                    if local.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
                        if each.before:
                            raise RuntimeError(
                                f"A gradient of {held.name!r} that was read before the last backward was written to, "
                                "and the gradient lies elsewhere since; read p.grad again after each backward."
                            )
                        local.copy_(held.cut(tensor))
                self._out.setdefault(held, []).append(each._replace(version=tensor._version))

    def drop(self, held: Held) -> None:
        """The gradient was set to None: what is left of it in the user's hands is his alone."""
        self._out.pop(held, None)
