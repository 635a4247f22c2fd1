"""Methods that a model has while it is sharded, and which of its own begin a pass; `no_sync` and `accumulate`.

They are put on by hooks (step/hooks.py), so whoever makes hooks for a model calls `add_methods` with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from zeor.access.sharded import state_of
from zeor.plan import Plan
from zeor.step.hooks import Entry, Hooks, find_entries

_EXCHANGING = ("merge_and_unload", "unload")  # peft's: they put other layers in the places of the model's


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside keeps this rank's own gradients, summed in fp32 at full size; the next backward outside
    reduces them together with its own. For accumulation over several micro-batches."""
    backward = state_of(model).engine.backward
    before, backward.sync = backward.sync, False
    try:
        yield
    finally:
        backward.sync = before


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Another backward of this step follows those inside. Every backward adds to the slices; with release=True those
    inside do so without updating, and the next one outside updates with the sum. Costs a slice of gradients, where
    no_sync keeps them whole."""
    backward = state_of(model).engine.backward
    before, backward.accumulates = backward.accumulates, True
    try:
        yield
    finally:
        backward.accumulates = before


def entries_of(model: nn.Module, plan: Plan) -> list[Entry]:
    """Methods beside forward that begin a pass, each checked. An nn.ModuleList has no forward: its modules are stages
    of a pipeline, and each is called by itself."""
    is_list = isinstance(model, nn.ModuleList)
    stages = [f"{name}.forward" for name, _ in model.named_children()] if is_list else []
    return find_entries(model, (*stages, *plan.methods))


def add_methods(model: nn.Module, hooks: Hooks, plan: Plan) -> None:
    """What the model answers by itself as long as it has these hooks, for loops that were written without zeor."""
    if not hasattr(model, "no_sync"):  # loops made for DistributedDataParallel look for it
        hooks.put_method(model, "no_sync", functools.partial(accumulate if plan.release else no_sync, model))
    for name in _EXCHANGING:
        if callable(getattr(model, name, None)):
            hooks.put_method(model, name, functools.partial(_refuse_exchange, name))


def _refuse_exchange(name: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"{name}() would put other layers into a sharded model; call zeor.unshard(model) first, or do it to a copy: "
        f"`with zeor.full_params(model, to_rank=0):` and there, on rank 0, copy.deepcopy(model).{name}()."
    )
