"""The stages of one engine on this rank, as a pipeline runs them: what is gathered and reduced at each action.

torch's schedules compute through three methods of a stage object (a forward, a backward or a half of one, and the end
of a step), and `bind` puts ours around those. `Local` knows the engine and no schedule; pipeline.py knows both.

Note [Actions of a pipeline]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A schedule runs forwards (F) and backwards (B) of several micro-batches in turn. Zero-bubble ones cut a backward in two:
I computes the gradients of a stage's inputs, W those of its parameters, later, from what I left.

1. Every B, I and W is one backward of the engine's (`Backward.spanning`), whatever calls of autograd's it is made of:
   a W is one for each group of parameters. Gradients are summed at full size, as inside no_sync, and reduced once, when
   all stages of the engine have ended (`Backward.reduce`), divided by the number of micro-batches.
2. They come from two sources. B, and W on the first stage, accumulate into parameters, whose hooks hand them over. W
   elsewhere assigns to `.grad`: torch's code is given a stand-in for each parameter, which hands over what it is given.
   So nothing is summed in the dtype of a parameter.
3. keep="step": at the first F all units begin to be gathered, in the order of forward, and stay (rule 7 in
   step/residency.py) until the stages have ended. Hooks go on waiting unit by unit. Autograd saves the parameters
   themselves, so that W, which no hook sees, finds its weights.
4. keep="action": each action gathers what it needs and gives it back. Autograd saves handles (Note [What autograd
   saves] in step/saved.py), so I and W gather the units whose parameters they read.
5. torch finds shapes by running each stage once, past these methods, and by computing gradients of its inputs. Nobody
   uses the values: zeros stand for parameters that are away, hooks are off, and buffers are put back (`Local.quiet`).
6. torch's I finds what is left to W on the way to a stage's inputs. Where all stages before are frozen no input needs a
   gradient, and parameters would get none: there I is a whole backward, and nothing is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeor.access.sharded import Sharded
from zeor.step import events
from zeor.step import order as orders
from zeor.step.casts import Casts
from zeor.step.unit import Slot

KEEPS = ("step", "action")


class Local:
    """One engine. `keep`, `reduce`: "step" or "action"; `divisor`: of the gradients of one step of the schedule."""

    def __init__(self, state: Sharded, keep: str, reduce: str, divisor: int):
        self.state, self.engine = state, state.engine
        self._by_action, self._reduces_at_once, self._divisor = keep == "action", reduce == "action", divisor
        self._kinds: dict[int, str] = {}  # of the forward of each stage
        self._to_come: set[int] = set()  # stages that have not ended in this step
        self._trains = False  # this step has backwards
        self.waits = False  # for gradients from another stage, before its own are reduced
        self._passes, self._backward = self.engine.passes, self.engine.backward
        self.slots = set(self.engine.slots)
        self._passes.residents.by_action = self._by_action

    def add(self, index: int, entry: str) -> None:
        """A stage of this number."""
        self._kinds[index] = orders.kind_of(True, entry)

    # ---- a step of the schedule

    def begin(self, trains: bool) -> None:
        if self.engine.announcer.block is not None:
            raise RuntimeError(
                "A step of a pipeline ran inside zeor.join, where ranks without data could not follow it; give all "
                "ranks equally many batches, and leave out zeor.join."
            )
        self.engine.recover()
        self._to_come, self._trains = set(self._kinds), trains

    @torch.no_grad()
    def _arrive(self) -> None:
        """The first computation of a step that keeps its units: step 3 of the Note."""
        passes = self._passes
        if self._by_action or passes.residents.held:
            return
        if passes.gathers.frees:
            self.engine.announce(events.OTHER, "a pipeline's first computation of a step")
        passes.hold([unit for kind in self._kinds.values() for unit in passes.orders[kind]])

    def gather_early(self) -> None:
        """The schedule says that a stage is needed soon."""
        if self._to_come:
            self._arrive()

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._arrive()
        output = run(*args, **kwargs)
        if self._by_action:
            self._passes.give_back()
        return tree_map_only(Tensor, _no_view, output)

    @contextmanager
    def backward(self, index: int, what: str) -> Iterator[None]:
        """`what`: "full", or one of the halves: "input" and "weight"."""
        self._arrive()
        kind = self._kinds[index]
        order = orders.backward_of(kind) if what != "weight" else kind.replace(orders.TRAIN, "weights", 1)
        sync = self._reduces_at_once and what != "input" and self._backward.sync
        alone = self.engine.axes.everyone.size == 1  # gradients are adopted as they are, and divided afterwards
        now = sync and not alone
        with self._backward.spanning(now, self._divisor if now else 1.0, kind, order or ""):
            yield
        if sync and alone:
            self._backward.reduce(self._divisor)

    def ended(self, index: int) -> None:
        """The last action of this stage is over."""
        self._to_come.discard(index)
        if not self._to_come:
            self.let_go()
            if not self.waits:
                self.finish()

    @property
    def reduces(self) -> bool:
        """This step ends with a reduce."""
        return self._trains and not self._reduces_at_once and self._backward.sync

    def finish(self) -> None:
        """All of its stages have ended, and nothing more comes to their gradients."""
        if self.reduces:
            self._backward.reduce(self._divisor)
        self._trains = False

    def add_grad(self, slot: Slot, grad: Tensor) -> None:
        """Part of a gradient that another stage has computed."""
        self._backward.add(slot, grad)

    @torch.no_grad()
    def let_go(self) -> None:
        self._passes.let_go()

    def fail(self) -> None:
        """A step of the schedule raised half-way: part of its gradients would stay."""
        self._backward.recover()
        if self._trains:
            self._backward.abandon()
        self._trains = False

    def take(self, slot: Slot, grad: Tensor) -> None:
        self._backward.take(slot, grad)

    # ---- finding shapes

    @contextmanager
    def quiet(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Step 5 of the Note."""
        self.engine.recover()
        self.let_go()
        lanes = [lane for unit in self.engine.units for lane in unit.lanes]
        kept = [(module, name, buffer) for stage in stages for module, name, buffer in _buffers(stage)]
        copies = [buffer.clone() for _, _, buffer in kept]
        with ExitStack() as stack:
            self.state.hooks.pause()
            stack.callback(self.state.hooks.resume)
            for lane in lanes:
                lane.wait()
                lane.blank()
            stack.callback(self.let_go)
            for stage in stages:
                stack.callback(stage.register_forward_pre_hook(self._cast, with_kwargs=True).remove)
            try:
                yield
            finally:
                with torch.no_grad():
                    for (module, name, buffer), copy in zip(kept, copies):
                        with torch.autograd._unsafe_preserve_version_counter(buffer):
                            buffer.copy_(copy)
                        module._buffers[name] = buffer

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        casts = Casts(self.engine.plan.precision.compute, self.engine.axes.device)
        return casts.cast(args), casts.cast(kwargs)


def _buffers(stage: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


# ---- what torch's schedules call


def bind(stage: Any, local: Local) -> None:
    """The three methods of a stage object through which every schedule computes become ours, on this object alone."""
    forward, backward = stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync
    index, module = stage.stage_index, stage.submod
    slots = {id(slot.param): slot for slot in local.engine.slots}
    mine = [slots[id(param)] for param in module.parameters()]

    def forward_one(*args: Any, **kwargs: Any) -> Any:
        return local.forward(forward, *args, **kwargs)

    def backward_one(what: str, kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        with local.backward(index, what), _standing_in(module, mine, local):
            if what == "input" and not _any_needs_grad(kwargs["input_values"]):
                grads, _ = backward("full", _as_full(kwargs), last_backward=last_backward)
                return grads, []
            return backward(what, kwargs, last_backward=last_backward)

    def reduce_grad(divisor: int) -> None:
        local.ended(index)

    stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync = forward_one, backward_one
    stage.perform_reduce_grad = reduce_grad
    _bind_neighbours(stage)


def _any_needs_grad(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _as_full(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What torch gives to a whole backward, of what it gives to half a one: there a loss stands in a tuple."""
    if kwargs["output_grads"] is None:
        return {**kwargs, "stage_output": kwargs["stage_output"][0]}
    return kwargs


def _bind_neighbours(stage: Any) -> None:
    """Stages next to each other on one rank hand gradients over, also in an evaluation, which has none: there torch
    raises. (Seen in 2.13: `eval` of the two V-shaped schedules.)"""
    for name, nothing in (("get_local_bwd_output", ()), ("set_local_bwd_input", None)):
        plain = getattr(stage, name, None)
        if plain is not None:
            setattr(stage, name, functools.partial(_unless_evaluating, stage, plain, nothing))


def _unless_evaluating(stage: Any, plain: Callable[..., Any], nothing: Any, *args: Any) -> Any:
    return plain(*args) if stage.has_backward else nothing


@contextmanager
def _standing_in(module: nn.Module, slots: Sequence[Slot], local: Local) -> Iterator[None]:
    """torch asks the module for its parameters where it cuts a backward in two: step 2 of the Note."""
    standing = [StandIn(slot, local) for slot in slots if slot.lane.grads is not None and slot.trains]
    vars(module)["parameters"] = lambda: iter(standing)
    try:
        yield
    finally:
        del vars(module)["parameters"]


class StandIn:
    """What torch's code for half a backward looks at of a parameter: its node in the graph, and `.grad`, which takes
    what is assigned and shows nothing."""

    requires_grad = True

    def __init__(self, slot: Slot, local: Local):
        self._slot, self._local = slot, local

    @property
    def grad_fn(self) -> Any:
        """The node that accumulates into it. It needs no byte of the parameter, which may be away."""
        param = self._slot.param
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            node = param.view_as(param).grad_fn
        assert node is not None
        return node.next_functions[0][0]

    @property
    def grad(self) -> None:
        return None

    @grad.setter
    def grad(self, value: Tensor) -> None:
        self._local.take(self._slot, value.detach())


class _Plain(torch.autograd.Function):
    """The same memory as no view: torch detaches a stage's outputs in place, and cannot detach a view."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _no_view(value: Tensor) -> Tensor:
    if value.requires_grad and value._is_view():
        plain: Tensor = _Plain.apply(value)
        return plain
    return value
