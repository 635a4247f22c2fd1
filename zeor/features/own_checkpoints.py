"""Models that checkpoint themselves, under recompute="auto": which of their calls keep their activations after all.

A model may run its blocks inside `torch.utils.checkpoint`. What it wants computed again is then its own affair; where
memory suffices it is left out all the same, in the same bits. How much memory that is: keeping.py. This file knows
neither units nor limits.

Note [Inside a checkpoint of the model's own]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Not re-entrant: the checkpoint sees what is saved by hooks, and computes again when backward asks for one of these
   tensors. Of a call that keeps its activations our hooks are on top, so the checkpoint has nothing to be asked for.
   The same must be saved when a checkpoint's function is computed again, so a decision holds for its frame. A function
   that does more behind the block (a dropout) is computed again as a whole, the block too: keeping it was for nothing,
   and is not tried again. A call that keeps its products is computed again with them.
2. Re-entrant: forward runs without gradients, and backward runs it again with them. A call that keeps its activations
   makes its graph in forward already. Backward's call finds it by its inputs, which the checkpoint has kept, and hands
   out the same values, with a node that goes on in that graph. Random numbers go on from where forward left them.
   Such a call keeps all or nothing: without gradients an attention kernel leaves out what its backward would need.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from zeor.features.keeping import Call, Keeping
from zeor.features.levels import Level
from zeor.features.products import Products
from zeor.features.random_state import Rng
from zeor.step import saved
from zeor.step.passes import inside_backward

_Key = tuple[Any, ...]
_REENTRANT = CheckpointFunction.forward.__code__


class Decided(NamedTuple):
    call: Call
    level: Level
    products: Products | None = None


class OwnCheckpoints:
    """Of one model. `run` is a call of a chosen module inside a checkpoint, or inside backward."""

    def __init__(self, keeping: Keeping, device: torch.device):
        self._keeping, self._device = keeping, device
        self._trains = False
        self._frames: weakref.WeakKeyDictionary[Any, dict[nn.Module, Decided]] = weakref.WeakKeyDictionary()
        self._for_nothing: set[nn.Module] = set()  # kept, and computed again all the same
        self._seen: dict[_Key, Seen] = {}

    def begin_forward(self, train: bool) -> None:
        self._trains = train

    def end_pass(self) -> None:
        """No backward is to come."""
        self._seen.clear()

    def run(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        frame = frame_on_top()
        if frame is not None and torch.is_grad_enabled():
            return self._in_frame(frame, forward, module, args, kwargs)
        if inside_backward():
            return self._again(forward, module, args, kwargs)
        if self._trains and not torch.is_grad_enabled() and _in_reentrant():
            return self._without_grad(forward, module, args, kwargs)
        return forward(*args, **kwargs)

    # ---- point 1 of Note [Inside a checkpoint of the model's own]

    def _in_frame(self, frame: Any, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        decided = self._frames.setdefault(frame, {})
        if module not in decided and not inside_backward():
            decided[module] = self._decided(module, self._keeping.enter((args, kwargs)))
        found = decided.get(module)
        if found is None:  # a checkpoint inside another, which is computed again
            return forward(*args, **kwargs)
        if found.products is not None:
            with found.products.hands() if inside_backward() else found.products.keeps():
                return forward(*args, **kwargs)
        if found.level is not Level.ALL:
            return self._keeping.metered(found.call, forward)(*args, **kwargs)
        if inside_backward():
            self._for_nothing.add(module)
        with saved.on_top():
            return forward(*args, **kwargs)

    def _decided(self, module: nn.Module, call: Call) -> Decided:
        level = self._keeping.level(call)
        if level is Level.ALL and module in self._for_nothing:
            level = Level.AGAIN
        return Decided(call, level, self._keeping.products(call) if level is Level.PRODUCTS else None)

    # ---- point 2

    def _without_grad(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        key, seen = _key_of(module, args, kwargs), Seen.of(args, kwargs)
        call = self._keeping.enter((args, kwargs))
        if self._alive(key) is not None:
            self._seen[key] = seen  # nothing tells these two apart
            return forward(*args, **kwargs)
        if self._keeping.level(call) is not Level.ALL or module in self._for_nothing:
            self._seen[key] = seen._replace(what=call)
            return forward(*args, **kwargs)
        graph = Graph(forward, args, kwargs, self._device)
        self._seen[key] = seen._replace(what=graph)
        return graph.values()

    def _again(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = _key_of(module, args, kwargs)
        seen = self._alive(key) if torch.is_grad_enabled() else None
        if seen is None:
            return forward(*args, **kwargs)
        del self._seen[key]
        if isinstance(seen.what, Call):
            return self._keeping.metered(seen.what, forward, middle=False)(*args, **kwargs)
        if seen.what is not None:
            if seen.what.suits(args, kwargs):
                return seen.what.joined(args, kwargs)
            self._for_nothing.add(module)
        return forward(*args, **kwargs)

    def _alive(self, key: _Key) -> Seen | None:
        seen = self._seen.get(key)
        return None if seen is None or any(ref.expired() for ref in seen.inputs) else seen


class Seen(NamedTuple):
    """A call inside a re-entrant checkpoint's forward."""

    inputs: list[StorageWeakRef]  # once they are gone their addresses are others'
    what: Call | Graph | None = None  # None: two calls of one module with the same inputs

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Seen:
        return cls([StorageWeakRef(each.untyped_storage()) for each in _tensors((args, kwargs))])


class Graph:
    """Of one call inside a re-entrant checkpoint, made in forward."""

    def __init__(self, forward: Callable[..., Any], args: Any, kwargs: Any, device: torch.device):
        args, kwargs = tree_map(_leaf, (args, kwargs))
        self._needs = [each.requires_grad for each in _tensors((args, kwargs))]
        self.inputs = _needing_grad((args, kwargs))
        with torch.enable_grad():
            self.output = forward(*args, **kwargs)
        self._rng = Rng(device)

    def values(self) -> Any:
        return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, self.output)

    def suits(self, args: Any, kwargs: Any) -> bool:
        """Whether it has all the gradients that are wanted. Without gradients nobody knows that the output of one block
        will need one, which is the input of the next in the same checkpoint."""
        return self._needs == [each.requires_grad for each in _tensors((args, kwargs))]

    def joined(self, args: Any, kwargs: Any) -> Any:
        """The output of a call with these arguments, the same as in forward."""
        self._rng.restore()
        inputs = _needing_grad((args, kwargs))
        outputs = _needing_grad(self.output)
        made = dict(zip(map(id, outputs), _Joined.apply(self, *inputs), strict=True))
        return tree_map(lambda value: made.get(id(value), value), self.output)


class _Joined(torch.autograd.Function):
    """From the outputs of a call in backward to the graph that forward has made."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in _needing_grad(graph.output))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graph, ctx.graph = ctx.graph, None
        pairs = [(out, grad) for out, grad in zip(_needing_grad(graph.output), grads) if grad is not None]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return None, *[each.grad for each in graph.inputs]


def frame_on_top() -> Any:
    """The checkpoint whose hooks see what is saved now, in its forward or when it computes again: torch's own record
    of it, or None. torch hands it to nobody; its hooks hold it."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is None or getattr(top[0], "__module__", "") != "torch.utils.checkpoint":
        return None
    pack = inspect.unwrap(top[0])
    holds = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    if "frame" in holds:
        return holds["frame"].cell_contents
    return holds["target_frame_ref"].cell_contents() if "target_frame_ref" in holds else None


def _in_reentrant() -> bool:
    """Whether this is called by the forward of a re-entrant checkpoint."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the outermost
    return False


def _key_of(module: nn.Module, args: Any, kwargs: Any) -> _Key:
    """The same in forward and in the backward of a re-entrant checkpoint, which has kept these very inputs."""
    return (id(module), *((each.data_ptr(), each.shape, each.stride()) for each in _tensors((args, kwargs))))


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _needing_grad(tree: Any) -> list[Tensor]:
    return list(dict.fromkeys(each for each in _tensors(tree) if each.requires_grad))
