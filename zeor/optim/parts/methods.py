"""Methods of an optimizer beside step(): `eval()` and `train()` of schedulefree, say, which write the parameters.

An optimizer's groups hold the user's parameters, and the values that count are the masters. So every public method
that a class adds to torch's Optimizer is replaced on the instance (by the stepper). Here is which methods these are,
and which of them write parameters: found by trying them on toys, those without arguments that look at `param_groups`,
so all ranks know the same. Any other runs as it is, inside Unwritten, and is stopped before it writes into weights.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeor.optim.parts.probe import toys_after_steps

REPLACED = ("step", "state_dict", "load_state_dict", "add_param_group")  # of every optimizer


def own_methods(kind: type[Optimizer]) -> dict[str, Callable[..., Any]]:
    """The public methods that a class of optimizers adds to torch's Optimizer."""
    found: dict[str, Callable[..., Any]] = {}
    for base in kind.__mro__:
        if base is Optimizer:
            break
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and not name.startswith("_") and not hasattr(Optimizer, name):
                found.setdefault(name, value)
    return found


def find_writers(optimizer: Optimizer, device: torch.device) -> set[str]:
    """Which of its own methods write parameters, as far as that can be tried."""
    tried = {name: method for name, method in own_methods(type(optimizer)).items() if _can_be_tried(method)}
    if not tried:
        return set()
    writers: set[str] = set()
    try:
        trial, toys = toys_after_steps(optimizer, device)
    except Exception:
        return set()
    for _ in range(2):  # twice: one may undo what the other did
        for name, method in tried.items():
            before = [toy.detach().clone() for toy in toys]
            try:
                method(trial)
            except Exception:
                continue
            if not all(torch.equal(toy, value) for toy, value in zip(toys, before)):
                writers.add(name)
    return writers


def _can_be_tried(method: Callable[..., Any]) -> bool:
    _, *others = inspect.signature(method).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in others if p.default is inspect.Parameter.empty and p.kind not in optional]
    code = getattr(inspect.unwrap(method), "__code__", None)
    return not needed and code is not None and "param_groups" in code.co_names


class Unwritten(TorchDispatchMode):
    """Inside, what would write into these tensors' memory raises first."""

    def __init__(self, what: str, watched: Iterable[Tensor]):
        super().__init__()
        self._what = what
        self._watched = {tensor.untyped_storage()._cdata for tensor in watched}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(map(self._is_watched, _written(func, args, kwargs))):
            raise RuntimeError(
                f"{self._what} writes into the weights of a sharded model beside a step, where they are one rank's "
                "copy; write inside `with zeor.full_params(model, write=True):`, or call zeor.unshard first."
            )
        return func(*args, **kwargs)

    def _is_watched(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or not torch._C._has_storage(value):
            return False
        return value.untyped_storage()._cdata in self._watched


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operation writes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args))
    given.update(kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(given.get(name))]
