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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.memory.view import Held
from zeor.step.extension import Extension


class _Given(NamedTuple):
    tensor: Callable[[], Tensor | None]
    version: int
    is_copy: bool
    before: bool  # it was handed out before the last backward


class HandedOut(Extension):
    """A copy is held until it was looked at once: a write into it may have been all that the reader did. From then on
    it is held weakly: one that nobody holds any more, nor a view of it, cannot be written to."""

    def __init__(self) -> None:
        self._out: dict[Held, list[_Given]] = {}

    def give(self, held: Held, grad: Tensor, is_copy: bool) -> Tensor:
        """`grad` is the whole gradient of a parameter: the memory itself, or a copy."""
        self._add(held, _Given(lambda: grad, grad._version, is_copy, before=False))
        return grad

    def _add(self, held: Held, new: _Given) -> None:
        """One entry for the same memory is enough."""
        given, tensor = self._out.setdefault(held, []), new.tensor()
        assert tensor is not None
        if not new.is_copy:
            given[:] = [each for each in given if each.is_copy or _address(each) != tensor.data_ptr()]
        given.append(new)

    def begin_backward(self, said: dict[str, Any]) -> None:
        self.heed()

    def grads_there(self) -> None:
        out, self._out = self._out, {}
        for held, each, tensor in _living(out):
            self._add(held, _looked_at(each, tensor)._replace(before=True))

    def heed(self) -> None:
        if self._out:
            self._take_over()

    @torch.no_grad()
    def _take_over(self) -> None:
        out, self._out = self._out, {}
        refused = ""
        for held, each, tensor in _living(out):
            if tensor._version != each.version and held.get_grad() is not None:
                local = held.local_grad()  # forgets the norm
                if local.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                    pass
                elif each.before:
                    refused = held.name
                    continue
                else:
                    local.copy_(held.cut(tensor))
            self._add(held, _looked_at(each, tensor))
        if refused:
            raise RuntimeError(
                f"A gradient of {refused!r} that was read before the last backward was written to, and the gradient "
                "lies elsewhere since; read p.grad again after each backward."
            )

    def drop(self, held: Held) -> None:
        """The gradient was set to None: what is left of it in the user's hands is his alone."""
        self._out.pop(held, None)


def _living(out: dict[Held, list[_Given]]) -> Iterator[tuple[Held, _Given, Tensor]]:
    for held, given in out.items():
        for each in given:
            tensor = each.tensor()
            if tensor is not None:
                yield held, each, tensor


def _looked_at(each: _Given, tensor: Tensor) -> _Given:
    """With the version that it has now."""
    return each._replace(tensor=weakref.ref(tensor) if each.is_copy else each.tensor, version=tensor._version)


def _address(each: _Given) -> int | None:
    tensor = each.tensor()
    return None if tensor is None else tensor.data_ptr()
