"""What kind of optimizer is this? Found by trying it, not by its name; each of its groups for itself.

A copy of the optimizer, with the user's settings but toy parameters, takes two steps in different
ways. Cut in two or whole, the same bits: it is element-wise and may work on slices. One call or two,
the same bits: it is separable and may step unit by unit. Two copies that never meet, the same bits:
parameters do not look at each other and may be computed on different ranks. The user's optimizer is not touched.

Note [The larger toy]
~~~~~~~~~~~~~~~~~~~~~
Some optimizers factor or quantise only what is large. The second toy has more than 128 rows and columns, and its cut
falls on a multiple of every block length in use (8-bit states come in blocks of 128 to 2,048): an optimizer that
looks at rows is found out, one that rounds its state by blocks counts as element-wise.

Note [A walk]
~~~~~~~~~~~~~
Some optimizers (Prodigy, D-Adaptation) estimate one step size from sums over all parameters, and the estimate moves
only after some steps in one direction; others (Shampoo's kin) look at whole matrices only after some steps, or only
at a gradient that is at a right angle to its parameter (AdamP). So the small toys also walk: more steps, the first of
them aside and all others in one direction.

Note [Once]
~~~~~~~~~~~
The trials take a tenth of a second and more. torch's own optimizers are tried once in a process for each choice of
settings; one of another's once for each object, as attributes of the object may decide what its step does.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.memory.device import use_threads
from zeor.optim.parts.counters import numbers, same_numbers
from zeor.optim.parts.pieces import Key, leaves

STEPS, WALK = 2, 30
ROUNDING = 1e-3  # over a walk: on a CPU the last elements of an array may be rounded differently
SMALL, SMALL_CUT = (6, 8), 19
LARGE, LARGE_CUT = (160, 256), 20480
TRIAL_LR = 0.01  # where the user's is zero, as a warm-up's first one is: nothing would move


@dataclass(frozen=True)
class Kind:
    """elementwise: an element's update depends on that element's gradient alone. separable: one call over
    all parameters equals one call for each. failed: why it could not be tried at all. coupled: a parameter's
    update depends on the other parameters. counts: a step moves numbers of its group (counters.py)."""

    elementwise: bool
    separable: bool
    failed: str | None = None
    coupled: bool = False
    counts: bool = field(default=False, compare=False)


def raw_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's own step, without the wrapper that runs the user's step hooks."""
    step: Any = type(optimizer).step
    raw: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return raw


def probe_groups(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> list[Kind]:
    """The kind of each group. Groups that differ in numbers of the schedule alone are of one kind."""
    kinds, found = _known(optimizer), []
    for number, group in enumerate(optimizer.param_groups):
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")}
        settings = repr(sorted(rest.items(), key=lambda item: item[0]))
        key = (raw_step(optimizer), device, dtype, bool(optimizer.state), settings)
        if key not in kinds:
            kinds[key] = probe(optimizer, device, dtype, number)
        found.append(kinds[key])
    return found


_of_torch: dict[Any, Kind] = {}
_of_others: weakref.WeakKeyDictionary[Optimizer, dict[Any, Kind]] = weakref.WeakKeyDictionary()


def _known(optimizer: Optimizer) -> dict[Any, Kind]:
    """What was found before: see Note [Once]."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return _of_torch
    return _of_others.setdefault(optimizer, {})


def probe(optimizer: Optimizer, device: torch.device, dtype: torch.dtype, group: int = 0) -> Kind:
    """The kind of one group, all of them trials in plain eager steps: compiling toys would take seconds."""
    with _trying():
        kind = _probe(_Trials(optimizer, group, with_state=False), device, dtype)
        if kind.failed is not None and optimizer.state:  # its constructor may have made what its step looks for
            again = _probe(_Trials(optimizer, group, with_state=True), device, dtype)
            kind = kind if again.failed is not None else again
        return kind


@contextlib.contextmanager
def _trying() -> Iterator[None]:
    """Eager steps, in one thread. Toys are too small for several: where cores are busy, waking those up took fifty
    times as long as the trials."""
    compiled = "torch._dynamo" in sys.modules  # else nothing can have been
    with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext(), use_threads(1):
        yield


def _probe(trials: _Trials, device: torch.device, dtype: torch.dtype) -> Kind:
    generator = torch.Generator().manual_seed(0)

    def toy(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).sub(0.5).to(device, dtype)

    values, grads = toy(*SMALL), [toy(*SMALL) for _ in range(STEPS)]
    # Two parameters of the same kind as the user's: whole ones, so that a matrix optimizer can be tried; and unlike
    # each other in size, so that one which looked at both would show it.
    two, two_grads = [values, toy(*SMALL) * 2], [[g, toy(*SMALL) * 3] for g in grads]
    ways = [_way(value, toy(*SMALL)) for value in two]  # see Note [A walk]
    walk = [list(grads) for grads in zip(*ways)]
    separable, coupled = True, False
    try:
        for steps in (two_grads, walk):
            once = trials.run(two, steps, together=True)
            twice = trials.run(two, steps, together=False)
            apart = [trials.run([v], [[g[i]] for g in steps], together=True)[0] for i, v in enumerate(two)]
            separable = separable and _same(once, twice)
            coupled = coupled or not (_same(once, twice) or _same(once, apart))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return Kind(False, False, f"{type(error).__name__}: {first}")
    elementwise = trials.cut_changes_nothing(values, grads, SMALL_CUT)
    for given in (ways[0][:1], ways[0]):
        elementwise = elementwise and trials.cut_changes_nothing(values, given, SMALL_CUT, ROUNDING)
    if elementwise:
        elementwise = trials.cut_changes_nothing(toy(*LARGE), [toy(*LARGE) for _ in range(STEPS)], LARGE_CUT)
    return Kind(elementwise, separable, coupled=coupled, counts=trials.counts)


def _way(value: Tensor, direction: Tensor) -> list[Tensor]:
    """The gradients of a walk: the first at a right angle to the parameter, the others in one direction."""
    aside = direction - value * (direction * value).sum() / value.square().sum()
    return [aside, *(direction * (1 + step / WALK) for step in range(1, WALK))]


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others))


class _Trials:
    """Steps of copies of one optimizer, with one group's settings, over toys."""

    def __init__(self, optimizer: Optimizer, group: int, with_state: bool):
        self._optimizer, self._group, self._with_state = optimizer, group, with_state
        self.counts = False  # a step has moved numbers of its group

    def cut_changes_nothing(self, values: Tensor, grads: list[Tensor], at: int, rounding: float = 0.0) -> bool:
        """`rounding`: what may differ, as a part of how far the toy moved."""

        def cut(tensor: Tensor) -> list[Tensor]:
            flat = tensor.reshape(-1)
            return [flat[:at], flat[at:]]

        try:
            whole = self.run([values], [[g] for g in grads], together=True)[0]
            parts = self.run(cut(values), [cut(g) for g in grads], together=True)
        except Exception:  # Muon takes matrices only
            return False
        if not rounding:
            return torch.equal(whole.reshape(-1), torch.cat(parts))
        apart, moved = (whole.reshape(-1) - torch.cat(parts)).abs().max(), (whole - values).abs().max()
        return bool(apart <= rounding * moved)

    def run(self, values: list[Tensor], grads: list[list[Tensor]], together: bool) -> list[Tensor]:
        """Step a copy of the optimizer over copies of these values; the results."""
        params = [torch.nn.Parameter(value.clone()) for value in values]
        trial = self._copy()
        if self._with_state:
            for param in params:
                trial.state[param] = _state_like(self._optimizer, param)
        group = trial.param_groups[0]
        step = raw_step(self._optimizer)
        before = numbers(group)
        for step_grads in grads:
            for param, grad in zip(params, step_grads):
                param.grad = grad.clone()
            for batch in [params] if together else [[param] for param in params]:
                group["params"] = batch
                step(trial)
        self.counts = self.counts or not same_numbers(before, numbers(group))
        return [param.detach() for param in params]

    def _copy(self) -> Optimizer:
        """The same class and settings, no parameters, no state; the original shares nothing that a step changes."""
        optimizer = self._optimizer
        trial = object.__new__(type(optimizer))
        own = {name: v for name, v in vars(optimizer).items() if name != "step" and not isinstance(v, types.MethodType)}
        trial.__dict__.update({name: copy.copy(value) for name, value in own.items()})
        trial.state = defaultdict(dict)
        first = {key: value for key, value in optimizer.param_groups[self._group].items() if key != "params"}
        copied = {key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in first.items()}
        if "lr" in copied and float(copied["lr"]) == 0.0:
            copied["lr"] = torch.full_like(copied["lr"], TRIAL_LR) if isinstance(copied["lr"], Tensor) else TRIAL_LR
        trial.param_groups = [{"params": [], **copied}]
        to_train = getattr(type(optimizer), "train", None)
        if callable(to_train):  # schedulefree steps only after it
            with contextlib.suppress(Exception):
                to_train(trial)
        return trial


def toys_after_steps(optimizer: Optimizer, device: torch.device) -> tuple[Optimizer, list[Tensor]]:
    """A copy of the optimizer over two toys, with its first group's settings, after a walk: at first an
    average equals what it is an average of, and warm-ups may not move anything."""
    trials = _Trials(optimizer, 0, with_state=False)
    with _trying():
        generator = torch.Generator().manual_seed(0)
        toys = [torch.nn.Parameter(torch.rand(SMALL, generator=generator).to(device)) for _ in range(2)]
        trial = trials._copy()
        trial.param_groups[0]["params"] = toys
        for _ in range(WALK):
            for toy in toys:
                toy.grad = torch.rand(SMALL, generator=generator).to(device)
            raw_step(optimizer)(trial)
    return trial, list(toys)


def states_of_steps(
    optimizer: Optimizer,
    group: int,
    settings: dict[str, Any],
    values: Tensor,
    grads: list[Tensor],
    state: dict[str, Any] | None = None,
) -> list[list[tuple[Key, Any]]]:
    """What a copy of the optimizer, with one group's settings and these over them, keeps of a toy after each of these
    steps: places and values. `state`: what it begins with. Raises whatever the step raises."""
    toy = torch.nn.Parameter(values.clone())
    with _trying():
        trial = _Trials(optimizer, group, with_state=False)._copy()
        trial.param_groups[0].update(copy.deepcopy(settings))
        trial.param_groups[0]["params"] = [toy]
        if state:
            trial.state[toy] = state
        found = []
        for grad in grads:
            toy.grad = grad.clone()
            raw_step(optimizer)(trial)
            found.append(list(leaves(trial.state.get(toy, {}))))
    return found


def state_from_constructor(optimizer: Optimizer, settings: Mapping[str, Any], values: Tensor) -> dict[str, Any]:
    """What the optimizer's constructor makes for a toy (Adagrad makes its state there)."""
    own = getattr(type(optimizer), "stock_class", type(optimizer))  # of a drop-in the class it is made of
    known = inspect.signature(own).parameters
    toy = torch.nn.Parameter(values.clone())
    made = own([toy], **{key: value for key, value in settings.items() if key in known and key != "params"})
    return dict(made.state.get(toy, {}))


def _state_like(optimizer: Optimizer, toy: Tensor) -> dict[str, Any]:
    """What the optimizer's constructor would have made for a toy (Adagrad makes its state there on some versions of
    torch), modelled on the state of a parameter of more than one element, where one can tell sizes apart."""
    for param, state in optimizer.state.items():
        if isinstance(param, Tensor) and state and param.numel() > 1:
            return {key: _like(value, param, toy) for key, value in state.items()}
    return {}


def _like(value: Any, param: Tensor, toy: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    if value.shape == param.shape and value.dim() > 0 and value.numel() > 0:
        return torch.full_like(toy, float(value.reshape(-1)[0]))
    return value.clone()
