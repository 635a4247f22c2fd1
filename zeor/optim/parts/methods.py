"""Methods of an optimizer beside step(): `eval()` and `train()` of schedulefree, say, which write the parameters.

An optimizer's groups hold the user's parameters, and the values that count are the masters. So every public method
that a class adds to torch's Optimizer is replaced on the instance:

- One that writes parameters runs over what this rank steps on, as step() does, and the new values are published:
  every rank must call it. Which ones write is found by trying them on toys, those without arguments that look at
  `param_groups`; so all ranks know the same.
- Any other runs as it is, and is stopped before it writes into weights.

What the optimizer calls by itself while it steps is passed through.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeor.optim import kept
from zeor.optim.owners.exchange import Visit
from zeor.optim.owners.owners import updates_are_cut
from zeor.optim.parts.probe import toys_after_steps
from zeor.runtime import events
from zeor.runtime.lane import Lane

if TYPE_CHECKING:
    from zeor.optim.stepper import Stepper


def own_methods(kind: type[Optimizer]) -> dict[str, Callable]:
    """The public methods that a class of optimizers adds to torch's Optimizer."""
    found: dict[str, Callable] = {}
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


def _can_be_tried(method: Callable) -> bool:
    _, *others = inspect.signature(method).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in others if p.default is inspect.Parameter.empty and p.kind not in optional]
    code = getattr(inspect.unwrap(method), "__code__", None)
    return not needed and code is not None and "param_groups" in code.co_names


def replacements(stepper: Stepper) -> dict[str, Callable[..., Any]]:
    """By name, what stands for each method on the instance."""
    optimizer = stepper.optimizer
    writers = find_writers(optimizer, stepper.engine.mesh.device)

    def replace(name: str, method: Callable) -> Callable[..., Any]:
        run = _run_over_masters if name in writers else _run_without_writes

        def call(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if stepper.calls.running:
                return method(optimizer, *args, **kwargs)
            return run(stepper, name, lambda: method(optimizer, *args, **kwargs))

        return call

    return {name: replace(name, method) for name, method in own_methods(type(optimizer)).items()}


# ---- those that write


@torch.no_grad()
def _run_over_masters(stepper: Stepper, name: str, method: Callable[[], Any]) -> Any:
    engine, what = stepper.engine, f"{type(stepper.optimizer).__name__}.{name}()"
    engine.refuse_if_borrowed(f"{what} was called")
    engine.unfilled.check()
    if stepper.owners.rounds and updates_are_cut(engine):
        raise RuntimeError(
            f"{what} writes parameters that are updated whole, by one rank each, as this optimizer looks at matrices; "
            "zeor cannot do that beside a step; use zeor.shard(..., stage=0), where every rank updates everything."
        )
    engine.announce(events.OTHER, what)
    kept.heed_new_state(stepper)
    engine.drain()
    lanes = _lanes(stepper)
    visits = [Visit(stepper.owners.mesh, engine.ledger, members, what) for members in stepper.owners.rounds]
    for visit in visits:
        visit.start()
        visit.arrive()
    for lane in lanes:
        lane.wait()
        lane.master.fetch()  # type: ignore[union-attr]
    try:
        with kept.shown(stepper), stepper.calls.in_groups(stepper.calls.everything()):
            return method()
    finally:
        for lane in lanes:
            lane.master.spill()  # type: ignore[union-attr]
            lane.catch_up()
        for visit in visits:
            visit.send_back()
            visit.finish()
        engine.forget_gathered()
        for unit in engine.units:
            if any(lane.grads is not None for lane in unit.lanes):
                engine.publish(unit)
        if engine.plain:
            engine.drain()


def _lanes(stepper: Stepper) -> list[Lane]:
    """Those of which segments are updated, by this rank or another."""
    params = (param for group in stepper.optimizer.param_groups for param in group["params"])
    slots = [stepper.segments.slots[id(param)] for param in params if stepper.owners.of(param) is None]
    return list(dict.fromkeys(slot.lane for slot in slots if slot.lane.grads is not None))


# ---- those that do not


def _run_without_writes(stepper: Stepper, name: str, method: Callable[[], Any]) -> Any:
    what = f"{type(stepper.optimizer).__name__}.{name}()"
    weights = [lane.full.flat for unit in stepper.engine.units for lane in unit.lanes]
    with _Watch(what, [*weights, *stepper.segments.all()]):
        return method()


class _Watch(TorchDispatchMode):
    """Inside, what would write into these tensors' memory raises first."""

    def __init__(self, what: str, watched: list[Tensor] | list[nn.Parameter]):
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
