"""Units that keep only their inputs for backward, which computes the rest again: `zeor.shard(..., recompute=True)`.

A chosen unit's `forward` is put behind one that runs it under torch's non-re-entrant checkpoint, inside the module's
call: hooks on the unit run once, and backward has gathered the unit before its recomputation begins (hooks.py opens a
call by its outputs' gradients). Where the kept inputs rest is activations.py's business; with recompute="products"
units keep the results of their products too (products.py), and compute only what is cheap again.

Note [Which units are computed again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Every unit with modules inside, save the root and those that contain another such unit. A single Linear or Embedding
   saves little but its input, which a checkpoint keeps too; and to compute a unit again as a whole, when its parts
   are computed again one by one, costs time and holds all the parts' inputs at once.
2. `recompute=[classes or modules]` chooses instead; of two that lie in each other the outer one counts.
3. A call in evaluation, inside somebody's checkpoint, or inside backward (a re-entrant checkpoint's real forward) runs
   as it is (with recompute="auto": own_checkpoints.py). What decides is the same when that forward is computed again,
   as torch demands.
4. Of a block that is compiled in place the compiler makes two graphs: one that computes again inside itself (`_again`),
   and one that keeps what backward needs (`_kept`). Which one a call runs is decided outside both. The compiler itself
   keeps products and computes what is cheap again, so recompute="products" means the second.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch._dynamo.disable, less the import of the compiler
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from zeor.features.activations import Kept, Packed, Shelf
from zeor.features.keeping import Call, Keeping
from zeor.features.levels import Level
from zeor.features.own_checkpoints import OwnCheckpoints
from zeor.features.probing import Kind, Trial, kind_of
from zeor.features.products import Products, counting
from zeor.model.wrapped import unwrapped
from zeor.step.extension import NEWS, Extension
from zeor.step.passes import inside_backward
from zeor.step.unit import Unit

# Attributes of a chosen module: the Recompute it belongs to, and a forward of its own that is not its class's.
_HELD_BY, _BEHIND = "_zeor_recompute", "_zeor_forward"


class Recompute(Extension):
    """The chosen units of one model."""

    def __init__(self, units: Sequence[Unit], wanted: Any, device: torch.device):
        self._units, self.modules = units, _chosen(units, wanted)
        self.shelf = Shelf(device) if asks_offload(wanted) and self.modules else None
        # torch looks at the arguments to find the device whose random numbers it must repeat.
        self._marker = torch.empty(0, device=device)
        self._warned = False
        # Made once: what is compiled with a module's forward stays valid when it was away for a while.
        ours = torch._dynamo.disable(_forward, recursive=False)
        self._ours = [(module, vars(module).get("forward"), MethodType(ours, module)) for module in self.modules]
        self.resume()

    def resume(self) -> None:
        """Each chosen module's forward behind ours."""
        for module, before, ours in self._ours:
            vars(module).update({_HELD_BY: self, _BEHIND: before, "forward": ours})

    def pause(self) -> None:
        """The modules as they were."""
        for module, before, _ in self._ours:
            for name in (_HELD_BY, _BEHIND, "forward"):
                vars(module).pop(name, None)
            if before is not None:
                vars(module)["forward"] = before

    @_disable_dynamo
    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._applies():
            return forward(*args, **kwargs)
        if module.training:
            args, kwargs = _without_caches(args, kwargs)
        forward = _without_its_own(module, forward)
        if self.shelf is None:
            return self._checkpointed(module, forward, args, kwargs)
        kept = Kept(self.shelf, (args, kwargs))

        def again(_: Tensor) -> Any:
            args, kwargs = kept.inputs()
            return forward(*args, **kwargs)

        output = checkpoint(again, self._marker, use_reentrant=False)
        kept.check()
        return output

    def _checkpointed(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return checkpoint(lambda _, *a: forward(*a, **kwargs), self._marker, *args, use_reentrant=False)

    @_disable_dynamo
    def packed(self) -> Packed | None:
        """For a call that may turn out to run as a compiled graph; one that does not saves nothing by itself."""
        if self.shelf is None or not self._applies():
            return None
        return Packed(self.shelf, self._lane_storages())

    def _lane_storages(self) -> set[int]:
        return {lane.full.flat.untyped_storage()._cdata for unit in self._units for lane in unit.lanes}

    @_disable_dynamo
    def compiled_call(self, module: nn.Module, arguments: Any) -> CompiledCall | None:
        """Point 4 of Note [Which units are computed again]; None where nothing says that the block is compiled."""
        if module._compiled_call_impl is None:
            return None
        if not self._applies():
            return CompiledCall(keeps=True)
        return self._compiled_call(module, arguments)

    def _compiled_call(self, module: nn.Module, arguments: Any) -> CompiledCall:
        return CompiledCall(keeps=False)

    def _applies(self) -> bool:
        """Point 3 of Note [Which units are computed again]."""
        if not torch.is_grad_enabled() or inside_backward():
            return False
        if not _inside_checkpoint():
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                "The model checkpoints its own activations (transformers' gradient_checkpointing_enable does) and "
                "zeor.shard was given recompute= as well: what the model does stays, and recompute= does nothing "
                "inside it; use one of the two.",
                stacklevel=2,
            )
        return False


class KeepsProducts(Recompute):
    """recompute="products". Of a module's first call nobody knows how many of its products a recomputation needs: it
    keeps none, and its recomputation counts."""

    def __init__(self, units: Sequence[Unit], wanted: Any, device: torch.device):
        super().__init__(units, wanted, device)
        self._device, self._counts = device, dict[nn.Module, int]()

    def _checkpointed(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        count = self._counts.get(module)
        if count is None:
            forward = counting(forward, functools.partial(self._told, module))
        elif count:
            forward = Products(self._device, count).around(forward)
        return super()._checkpointed(module, forward, args, kwargs)

    def _told(self, module: nn.Module, count: int) -> None:
        self._counts[module] = max(self._counts.get(module, 0), count)

    def _compiled_call(self, module: nn.Module, arguments: Any) -> CompiledCall:
        return CompiledCall(keeps=True)


class AutoRecompute(Recompute):
    """recompute="auto": some of the chosen units keep their activations, see keeping.py."""

    riding = NEWS

    def __init__(self, units: Sequence[Unit], device: torch.device, budget: Any = None):
        super().__init__(units, True, device)
        self._device, self._trials = device, dict[Kind, int]()  # by kind: what a compiled call would keep
        self.keeping = Keeping(device, budget if isinstance(budget, int) else None)
        self.own = OwnCheckpoints(self.keeping, device)

    @_disable_dynamo
    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or inside_backward() or _inside_checkpoint():
            return self.own.run(forward, module, args, kwargs)
        return super().run(forward, module, args, kwargs)

    def _checkpointed(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if module._compiled_call_impl is not None:  # `compiled_call` has decided; torch.compile made no graph of it
            return super()._checkpointed(module, forward, args, kwargs)
        call = self.keeping.enter((args, kwargs))
        level = self.keeping.level(call)
        if level is Level.ALL:
            return forward(*args, **kwargs)
        products = None if level is Level.AGAIN else self.keeping.products(call)
        forward = self.keeping.metered(call, forward) if products is None else products.around(forward)
        return super()._checkpointed(module, forward, args, kwargs)

    def _compiled_call(self, module: nn.Module, arguments: Any) -> CompiledCall:
        call = self.keeping.enter(arguments)
        found = CompiledCall(self.keeping.level(call) is Level.ALL)
        if not found.keeps and self.keeping.measures:
            kind = kind_of(module, arguments)
            if kind not in self._trials:
                found.trial = Trial(module, arguments, self._device, self._lane_storages)
            found.measure = _Measured(self.keeping, self._trials, kind, call)
        return found

    def begin_forward(self, train: bool, alone: bool) -> None:
        self.own.begin_forward(train)
        if train:
            self.keeping.begin_forward()

    @property
    def told_count(self) -> int:
        return 2

    def told(self) -> list[int]:
        return self.keeping.told()

    def heard(self, largest: Sequence[int]) -> None:
        self.keeping.heard(largest)

    def grads_there(self) -> None:
        if self.keeping.end_backward():
            self.own.end_pass()

    def abandon(self) -> None:
        if self.keeping.end_backward():
            self.own.end_pass()

    def end_step(self) -> None:
        self._trials.clear()
        self.keeping.end_step()
        self.own.end_pass()


class CompiledCall:
    """What becomes of one call of a compiled block. `trial`: it is tried first, with its activations kept."""

    def __init__(self, keeps: bool):
        self.keeps = keeps
        self.trial: Trial | None = None
        self.measure: _Measured | None = None

    @_disable_dynamo
    def tried(self, output: Any) -> None:
        assert self.trial is not None and self.measure is not None
        self.measure.found(self.trial.end(output))

    @_disable_dynamo
    def returned(self, output: Any) -> Any:
        if self.measure is not None:
            self.measure.when_computed_again(output)
        return output


class _Measured:
    """A call of a compiled block in the step that is measured."""

    def __init__(self, keeping: Keeping, trials: dict[Kind, int], kind: Kind, call: Call):
        self._keeping, self._trials, self._kind, self._call = keeping, trials, kind, call
        self._begun = False

    def found(self, nbytes: int) -> None:
        self._trials[self._kind] = nbytes

    def when_computed_again(self, output: Any) -> None:
        """Backward comes to the call when it has the gradient of one of its outputs."""
        self._need = self._trials[self._kind]
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._begin)

    def _begin(self, grad: Tensor) -> None:
        if not self._begun:
            self._begun = True
            self._keeping.begin_again(self._call)
            self._keeping.needs(self._call, self._need)


def asks_offload(wanted: Any) -> bool:
    """Of the plan's `recompute`: whether inputs go to host memory."""
    return wanted == "offload" or (isinstance(wanted, tuple) and "offload" in wanted)


def asks_products(wanted: Any) -> bool:
    """Of the plan's `recompute`: whether products are kept."""
    return wanted == "products" or (isinstance(wanted, tuple) and "products" in wanted)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in the place of a chosen module's forward; never a part of a graph itself."""
    held = vars(module)[_HELD_BY]
    call = held.compiled_call(module, (args, kwargs))
    if call is not None and call.trial is not None:  # see Note [A trial] in probing.py
        tried = None
        call.trial.begin()
        try:
            tried = _kept(module, *args, **kwargs)
        except torch.OutOfMemoryError:
            pass  # and its frames, which hold what was made, go
        finally:
            call.tried(tried)
        del tried
    if call is not None and call.keeps:
        return _kept(module, *args, **kwargs)
    packed = held.packed()
    if packed is None:
        output = _again(module, *args, **kwargs)
        return output if call is None else call.returned(output)
    with packed.hooks():
        output = _again(module, *args, **kwargs)
    packed.all_sent()
    return output


def _again(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """One function for all, so that torch.compile, which reads it, compiles one graph for all blocks of a kind.
    Inside a graph the compiler does the recomputation itself."""
    if not torch.compiler.is_compiling():
        return vars(module)[_HELD_BY].run(functools.partial(_plain, module), module, args, kwargs)
    if not torch.is_grad_enabled():
        return _plain(module, *args, **kwargs)

    def run(*args: Any) -> Any:
        return _plain(module, *args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False)


def _kept(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A frame of its own, as `_again` is: the graph of a compiled block that keeps what its backward needs."""
    return _plain(module, *args, **kwargs)


def _plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = vars(module)[_BEHIND]
    return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


def _chosen(units: Sequence[Unit], wanted: Any) -> list[nn.Module]:
    """Points 1 and 2 of Note [Which units are computed again]."""
    root = units[0].module
    assert root is not None
    named = find_wanted(root, wanted)
    return named if named or wanted is False else blocks_of(units)


def blocks_of(units: Sequence[Unit]) -> list[nn.Module]:
    """Point 1 of Note [Which units are computed again]."""
    modules = [unit.module for unit in units[1:] if unit.module is not None]
    able = {module for module in modules if next(module.children(), None) is not None}
    return [m for m in modules if m in able and not any(inner in able for inner in m.modules() if inner is not m)]


def find_wanted(root: nn.Module, wanted: Any) -> list[nn.Module]:
    """The modules that `recompute=[...]` names; ValueError where it names what the model does not have."""
    found: dict[nn.Module, None] = {}
    for each in wanted if isinstance(wanted, tuple) else ():
        if isinstance(each, str):
            continue
        each = unwrapped(each)
        a_class = isinstance(each, type)
        members = [m for m in root.modules() if m is not root and (isinstance(m, each) if a_class else m is each)]
        if not members:
            what = f"the class {each.__name__}" if a_class else f"a {type(each).__name__}"
            raise ValueError(f"recompute= names {what}, which is no part of the model.")
        found.update(dict.fromkeys(members))
    inner = {child for module in found for child in module.modules() if child is not module}
    return [module for module in found if module not in inner]


def _inside_checkpoint() -> bool:
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def _without_its_own(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Layers of transformers checkpoint inside their own forward where an attribute says so (older versions around the
    call). Ours takes its place: else what we compute again would be computed again inside."""
    its_own = any(each.__name__ == "GradientCheckpointingLayer" for each in type(module).__mro__)
    if not its_own or not getattr(module, "gradient_checkpointing", False):
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        module.gradient_checkpointing = False  # type: ignore[assignment]  # no tensor
        try:
            return forward(*args, **kwargs)
        finally:
            module.gradient_checkpointing = True  # type: ignore[assignment]

    return run


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """transformers hands a cache of keys and values to every block, even in training; computed again, a block would
    add to it a second time. Its own checkpointing leaves the cache out, and so do we."""

    def is_cache(leaf: Any) -> bool:
        return type(leaf).__name__.endswith("Cache") and hasattr(leaf, "update")

    if not any(is_cache(leaf) for leaf in tree_leaves((args, kwargs), is_leaf=is_cache)):
        return args, kwargs
    args, kwargs = tree_map(lambda leaf: None if is_cache(leaf) else leaf, (args, kwargs), is_leaf=is_cache)
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs
