"""A forward and backward on the meta device, and how many bytes are alive while they run.

`trace()` runs the model as it is, in the dtypes the plan says, and counts memory by storage: what operations make,
until the last tensor over it is gone. Parameters are not counted, nor their gradients once autograd has handed them
over: the engine holds those, and peaks.py adds what it holds at that time. So that the two can be put together, peaks
are kept by how many gradients had arrived. What is computed is counted by the way (work.py), by the unit whose forward
it is. Nothing is allocated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zeor.memory.placed import dtensor_class, is_placed, local_tensor
from zeor.model.discover import UnitSpec
from zeor.plan import Plan
from zeor.planner.as_on_device import AsOnDevice, inner_nbytes
from zeor.planner.computed_again import Again
from zeor.planner.rests import reused_nbytes
from zeor.planner.work import Works, cost_of
from zeor.spec.keys import lane_key


@dataclass
class Trace:
    """`peaks[n]`: the most bytes alive while n gradients had arrived. `arrived`: the parameters, in that order.
    `entered`: units in the order of forward, each with the most bytes alive from then until the next one's turn.
    `kept`: (unit, bytes) by call, what a unit's forward has left alive when it is over, units inside it left out."""

    peaks: list[int] = field(default_factory=lambda: [0])
    arrived: list[nn.Parameter] = field(default_factory=list)
    entered: list[tuple[int, int]] = field(default_factory=list)
    left: int = 0  # alive when backward is over
    sent: list[int] = field(default_factory=list)  # sizes of inputs that recompute="offload" keeps on the host
    kept: list[tuple[int, int]] = field(default_factory=list)
    products: list[int] = field(default_factory=list)  # by call that is computed again: how many of them it runs then
    waiting: int = 0  # alive between forward and backward
    works: Works = field(default_factory=Works)

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def beside(self, others: int) -> Trace:
        """With so many other micro-batches that wait between their forward and their backward, as in a pipeline."""
        more = others * self.waiting
        entered = [(unit, nbytes + more) for unit, nbytes in self.entered]
        return replace(self, peaks=[nbytes + more for nbytes in self.peaks], entered=entered)


@dataclass(frozen=True)
class Workload:
    """What a step computes: the arguments of the model (or of `loss`, after the model), on the meta device."""

    inputs: tuple[Any, ...]
    loss: Callable[..., Tensor]

    def of(self, sequences: int) -> Workload:
        """The first so many of its inputs: tensors are cut along their first dimension."""
        return Workload(
            tree_map_only(Tensor, lambda each: each[:sequences] if each.dim() else each, self.inputs), self.loss
        )

    @staticmethod
    def parse(batch: Any, inputs: Any, loss: Any) -> Workload | None:
        """From what predict() was given; None where it was given nothing."""
        if batch is None and inputs is None:
            if loss is not None:
                raise TypeError("zeor.predict was given loss= without what it works on; give batch= or inputs= too.")
            return None
        if batch is not None and inputs is not None:
            raise TypeError("zeor.predict takes batch=(sequences, tokens) or inputs=(...), not both.")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss={loss!r} cannot be called; give a function of the model and the inputs.")
        if batch is not None:
            counts = tuple(batch) if isinstance(batch, (tuple, list)) else ()
            if len(counts) != 2 or not all(type(n) is int and n > 0 for n in counts):
                raise ValueError(f"batch={batch!r}; give (sequences, tokens), two whole numbers.")
            made = torch.empty(tuple(batch), dtype=torch.int64, device="meta")
            return Workload((made, torch.empty_like(made)), loss or _loss_of_tokens)
        given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        given = tree_map_only(Tensor, lambda each: torch.empty_like(each, device="meta"), given)
        return Workload(given, loss or _loss_of_output)


def trace(
    model: nn.Module, units: Sequence[UnitSpec], plan: Plan, work: Workload, products: Sequence[int] = ()
) -> Trace:  # fmt: skip
    """ValueError where the model cannot run without values. `products`: by call, of how many the results are kept."""
    found = Trace()
    compute = plan.precision.compute
    with contextlib.ExitStack() as stack:
        standing_in = stack.enter_context(_on_meta(model, units, plan))
        counter = stack.enter_context(_Counter(found))
        again = stack.enter_context(Again(units, plan.recompute, products))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(AsOnDevice())
        stack.enter_context(torch.enable_grad())
        if any(getattr(each, "_compiled_call_impl", None) or hasattr(each, "_orig_mod") for each in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        counter.begin(standing_in, work.inputs)
        for number, unit in enumerate(units):
            handle = unit.module.register_forward_pre_hook(lambda *_, number=number: counter.enter(number))
            stack.callback(handle.remove)
            handle = unit.module.register_forward_hook(lambda *_, number=number: counter.leave(number))
            stack.callback(handle.remove)
        given = work.inputs
        if compute is not None:
            given = tree_map_only(Tensor, lambda each: each.to(compute) if each.is_floating_point() else each, given)
        try:
            loss = work.loss(model, *given)
            _check_loss(loss, any(each.requires_grad for each in standing_in))
            found.waiting = counter.live
            counter.turn()
            _backward(loss)
        except NotImplementedError as error:
            raise ValueError(
                "The model's forward looks at values, and predict() runs it without any, on the meta device; leave "
                f"out batch= and inputs=, or give a loss= that avoids it. ({_line(error)})"
            ) from error
        except TypeError as error:
            raise TypeError(
                f"The model cannot be called with what it was given ({_line(error)}); give loss=, a function of the "
                "model and the inputs, such as lambda model, x: model(x=x).loss."
            ) from error
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            raise ValueError(
                f"The model could not run on the meta device, where predict() measures activations ({_line(error)}); "
                "leave out batch= and inputs=."
            ) from error
        found.left, found.sent, found.products = counter.live, again.sent, again.counts
    return found


def _backward(loss: Tensor) -> None:
    """loss.backward() would step out of AsOnDevice, and what is computed again would not be as on the device."""
    ones = torch.ones_like(loss)
    _engine_run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _check_loss(loss: Any, trains: bool) -> None:
    if not trains:
        raise ValueError("Nothing of the model trains, so a step has no backward; leave out batch= and inputs=.")
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"The loss is {what}, not one number with a gradient; give loss=, a function of the model and "
                         "the inputs.")  # fmt: skip


# ---- what is computed


def _loss_of_tokens(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of float logits, which get no name here; or what a model says that takes targets itself."""
    takes = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    if len([p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > 1:
        return _loss_of_output(model, tokens, targets)
    return functional.cross_entropy(_logits(model(tokens)).flatten(0, 1).float(), targets.flatten())


def _logits(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    found = found[0] if isinstance(found, (tuple, list)) else found
    if not isinstance(found, Tensor) or found.dim() != 3:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"The model gives {what} for tokens, not logits of (sequences, tokens, classes); give loss=.")
    return found


def _loss_of_output(model: nn.Module, *inputs: Any) -> Tensor:
    """The model's output if that is one number, else the mean of its floating tensors."""
    output = model(*inputs)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(output, Tensor):
        return output if output.numel() == 1 else output.float().mean()
    leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    return sum((each.float().mean() for each in leaves), torch.zeros(()))


# ---- how it is counted


class _Counter(TorchDispatchMode):
    """Bytes alive, by storage; a weak reference says when one is gone."""

    def __init__(self, found: Trace):
        super().__init__()
        self.live, self._found = 0, found
        self._held: dict[int, tuple[Any, int]] = {}
        self._ignored: set[int] = set()
        # Units whose forward goes on: what was alive before it, and what units inside it have left alive since.
        self._inside: list[tuple[int, int, int]] = []
        self._backward = False

    def begin(self, params: dict[nn.Parameter, nn.Parameter], inputs: Any) -> None:
        """`params`: by what stands in for it. From here on."""
        for standing_in, param in params.items():
            self._ignored.add(local_tensor(standing_in).untyped_storage()._cdata)
            if standing_in.requires_grad:
                arrived = functools.partial(self._arrived, param)
                standing_in.register_post_accumulate_grad_hook(arrived)
        self._take(inputs)

    def _arrived(self, param: nn.Parameter, standing_in: Tensor) -> None:
        standing_in.grad = None  # the engine's now
        self._found.arrived.append(param)
        self._found.peaks.append(self.live)

    def enter(self, unit: int) -> None:
        """A unit's forward begins."""
        if not self._found.arrived:
            self._found.entered.append((unit, self.live))
        if not self._backward:
            self._inside.append((unit, self.live, 0))

    def leave(self, unit: int) -> None:
        """It is over, with the result alive."""
        if self._backward or not self._inside or self._inside[-1][0] != unit:
            return
        _, before, of_others = self._inside.pop()
        left = self.live - before
        self._found.kept.append((unit, max(0, left - of_others)))
        if self._inside:
            outer, outer_before, others = self._inside[-1]
            self._inside[-1] = (outer, outer_before, others + left)

    def turn(self) -> None:
        """Backward begins."""
        self._backward = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._take(result)
        seen = args, kwargs or {}, result
        placed = dtensor_class()
        if placed is not None and any(issubclass(each, placed) for each in types):  # this rank computes its part
            seen = tree_map_only(placed, local_tensor, seen)
        cost = cost_of(func, *seen)
        if cost is not None:
            works = self._found.works
            (works.backward if self._backward else works.of(self._inside[-1][0] if self._inside else 0)).add(cost)
        peaks, entered = self._found.peaks, self._found.entered
        now = self.live + inner_nbytes(func, args)
        peaks[-1] = max(peaks[-1], now)
        if entered and not self._found.arrived:
            entered[-1] = (entered[-1][0], max(entered[-1][1], now))
        return result

    def _take(self, tree: Any) -> None:
        for leaf in [tree] if isinstance(tree, Tensor) else tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                storage = local_tensor(leaf).untyped_storage()
                key = storage._cdata
                if key not in self._held and key not in self._ignored and storage.nbytes():
                    nbytes = reused_nbytes(storage.nbytes())
                    self._held[key] = (weakref.ref(storage, lambda _, key=key: self._gone(key)), nbytes)  # type: ignore[misc]
                    self.live += nbytes

    def _gone(self, key: int) -> None:
        self.live -= self._held.pop(key)[1]


def _without_values(param: Any, dtype: torch.dtype) -> Tensor:
    """One like it; of a DTensor this rank's part, in the same placements."""
    local = torch.empty(local_tensor(param).shape, dtype=dtype, device="meta")
    if not is_placed(param):
        return local
    laid_out = {"shape": param.shape, "stride": param.stride(), "run_check": False}
    found: Tensor = dtensor_class().from_local(local, param.device_mesh, param.placements, **laid_out)
    return found


@contextlib.contextmanager
def _on_meta(model: nn.Module, units: Sequence[UnitSpec], plan: Plan) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Parameters, in the dtype forward reads, and buffers stand in for the model's own, without values."""
    placed: list[tuple[dict[str, Any], str, Any]] = []
    found: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for _, param, owners in (each for unit in units for each in unit.params):
            key = lane_key(param, owners, plan.precision)
            made = nn.Parameter(_without_values(param, key.compute_dtype), key.trainable)
            found[made] = param
            for module, attr in owners:
                placed.append((module._parameters, attr, param))
                module._parameters[attr] = made
        for module in model.modules():
            if isinstance(module, nn.RNNBase):  # it has a list of them besides
                placed.append((vars(module), "_flat_weights", module._flat_weights))
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    placed.append((module._buffers, name, buffer))
                    module._buffers[name] = torch.empty_like(buffer, device="meta")
        yield found
    finally:
        for where, name, value in placed:
            where[name] = value
