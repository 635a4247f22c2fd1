"""Methods beside forward that a model is used by: `zeor.shard(..., methods=("encode", "decoder.forward"))`.

An entry begins a pass of its own, like the model's forward: the root's parameters are gathered, inputs are cast,
ranks agree at the end, and the order of units is learned for it. Called while another pass is under way it is
simply part of that. This module finds and checks the methods; hooks.py puts them in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from zeor.plan import nearest


class Entry(NamedTuple):
    """`name` is dotted, as seen from the model; its last part is the method."""

    name: str
    module: nn.Module
    method: str

    @property
    def is_forward(self) -> bool:
        return self.method == "forward"

    @property
    def original(self) -> Callable:
        return getattr(self.module, self.method)


def find_entries(model: nn.Module, methods: Sequence[str]) -> list[Entry]:
    """The methods named, each checked."""
    modules = dict(model.named_modules())
    return [_find(modules, name) for name in dict.fromkeys(methods)]


def _find(modules: dict[str, nn.Module], name: str) -> Entry:
    owner, _, method = name.rpartition(".")
    if name == "forward":
        raise ValueError("methods= names 'forward', which is an entry already; name the other methods you call.")
    if owner not in modules:
        raise ValueError(f"methods= names {name!r}; the model has no module {owner!r}{nearest(owner, list(modules))}.")
    module = modules[owner]
    if isinstance(modules.get(name), nn.Module):
        raise ValueError(f"methods= names {name!r}, which is a module; to call it by itself name '{name}.forward'.")
    found = getattr(module, method, None)
    if not callable(found):
        known = [key for key in dir(type(module)) if not key.startswith("_") and key not in dir(nn.Module)]
        kind = type(module).__name__
        raise ValueError(f"methods= names {name!r}; {kind} has no method {method!r}{nearest(method, known)}.")
    if inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        raise ValueError(
            f"methods= names {name!r}, a generator or coroutine: it returns before it has run; name the methods "
            "it calls instead."
        )
    return Entry(name, module, method)
