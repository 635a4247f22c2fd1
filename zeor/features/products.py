"""Results of products that a recomputed call keeps, so that only what is cheap is computed again.

`Products` holds those of one call, from its forward until its recomputation asks for them. Which calls keep them is
decided by recompute.py and keeping.py.

Note [Products that are kept]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Matrix products, convolutions and attention kernels. A product whose elements take fewer than LEAST_INNER
   multiply-adds costs no more than an element-wise operation and is computed again: LoRA's second one, a depthwise
   convolution, the scores of attention that is not one kernel.
2. torch ends a recomputation as soon as it has all that backward reads. Products behind that point are asked for by
   nobody; so the first `most` are kept, as many as an earlier recomputation has run.
3. A recomputation is handed each result once, and from then on it is autograd's, which frees it as it goes. A second
   recomputation (retain_graph) runs the product. torch's own means (create_selective_checkpoint_contexts) refuses it.
4. A result is handed out only to the operation that made it, in the same place of the same order, and as it was made:
   where somebody has changed it in place it is computed again. At the first operation that differs nothing more is
   handed out. What a product draws of random numbers (dropout inside attention) is drawn by leaving them as they were
   behind it; the seed that its backward needs is one of its results.
5. Memory is the results' own: an operation that may return a part of its arguments is not in the table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from zeor.features.random_state import Rng
from zeor.step.passes import inside_backward

# An element-wise operation reads and writes at least 4 bytes for a 16-bit element. A GPU that multiplies at 600 TFLOP/s
# and moves 4.8 TB/s does 250 multiply-adds meanwhile. Reckoned, not measured.
LEAST_INNER = 256

_Args = tuple[Any, ...]


def _of_rows(args: _Args) -> int:
    return int(args[0].shape[-1])


def _of_second(args: _Args) -> int:
    return int(args[1].shape[-1])


def _of_kernel(args: _Args) -> int:
    return math.prod(args[1].shape[1:])


def _always(args: _Args) -> int:
    return LEAST_INNER


# By operation: the multiply-adds of each element of its result.
_INNER: dict[str, Callable[[_Args], int]] = {
    "aten::mm": _of_rows,
    "aten::bmm": _of_rows,
    "aten::linear": _of_rows,
    "aten::_scaled_mm": _of_rows,
    "aten::_grouped_mm": _of_rows,
    "aten::_scaled_grouped_mm": _of_rows,
    "aten::addmm": _of_second,
    "aten::baddbmm": _of_second,
    "aten::convolution": _of_kernel,
    "aten::_scaled_dot_product_flash_attention": _always,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _always,
    "aten::_scaled_dot_product_efficient_attention": _always,
    "aten::_scaled_dot_product_cudnn_attention": _always,
    "aten::_scaled_dot_product_fused_attention_overrideable": _always,
    "aten::_flash_attention_forward": _always,
    "aten::_efficient_attention_forward": _always,
}


@functools.cache
def _inner_of(func: Any) -> Callable[[_Args], int] | None:
    return _INNER.get(func.name()) if isinstance(func, OpOverload) else None


@functools.cache
def _dropout_place(func: OpOverload) -> int | None:
    names = [each.name for each in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def is_product(func: Any, args: _Args) -> bool:
    """Point 1 of Note [Products that are kept]."""
    inner = _inner_of(func)
    return inner is not None and inner(args) >= LEAST_INNER


class Listener(TorchDispatchMode):
    """Sees operations below autograd. What is compiled inside stays compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Counted(Listener):
    """How many products run inside, and the bytes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_product(func, args):
            self.count += 1
            storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in _tensors(result)}
            self.nbytes += sum(storages.values())
        return result


def counting(forward: Callable[..., Any], tell: Callable[[int], None]) -> Callable[..., Any]:
    """The same forward, whose recomputations tell how many products they have run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not inside_backward():
            return forward(*args, **kwargs)
        counted = Counted()
        try:
            with counted:
                return forward(*args, **kwargs)
        finally:  # torch ends a recomputation by an exception
            tell(counted.count)

    return run


class _Result(NamedTuple):
    asked: Any  # the operation, and what its arguments look like
    given: Any
    versions: list[int]
    behind: Rng | None  # the random numbers after it, where it has drawn some

    @property
    def is_as_made(self) -> bool:
        return self.versions == [each._version for each in _tensors(self.given)]


class Products:
    """Of one call: the first `most` results."""

    def __init__(self, device: torch.device, most: int):
        self._device, self._most, self._begun = device, most, False
        self._results: list[_Result | None] = []
        self._place = 0  # in the order of the recomputation that goes on

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The first run of this is the forward, all others compute it again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.hands() if self._begun else self.keeps():
                return forward(*args, **kwargs)

        return run

    def keeps(self) -> _Keeps:
        """`with` it around the forward. Of two nothing is kept: nobody says which of them is computed again."""
        if self._begun:
            self._most = 0
            self._results.clear()
        self._begun = True
        return _Keeps(self)

    def hands(self) -> _Hands:
        """`with` it around a recomputation."""
        self._place = 0
        return _Hands(self)

    def add(self, func: Any, args: _Args, kwargs: Any, result: Any) -> None:
        if len(self._results) >= self._most:
            return
        if _is_capturing(self._device):
            self._most = 0
            self._results.clear()
            return
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(type(each) is not Tensor for each in tensors):
            self._results.append(None)
            return
        behind = Rng(self._device) if _draws(func, args) else None
        versions = [each._version for each in tensors]
        given = tree_map_only(Tensor, _apart, result)
        self._results.append(_Result(_asked(func, args, kwargs), given, versions, behind))

    def forget_changed(self) -> None:
        """A forward is over."""
        kept = [each if each is None or each.is_as_made else None for each in self._results]
        self._results = kept

    def take(self, func: Any, args: _Args, kwargs: Any) -> _Result | None:
        """For the next product of a recomputation; None: it must run."""
        place, self._place = self._place, self._place + 1
        found = self._results[place] if place < len(self._results) else None
        if found is None:
            return None
        if _is_capturing(self._device) or found.asked != _asked(func, args, kwargs):
            self._results.clear()
            return None
        self._results[place] = None
        if not found.is_as_made:
            return None
        if found.behind is not None:
            found.behind.restore()
        return found


class _Keeps(Listener):
    def __init__(self, products: Products):
        super().__init__()
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_product(func, args):
            self._products.add(func, args, kwargs, result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._products.forget_changed()


class _Hands(Listener):
    def __init__(self, products: Products):
        super().__init__()
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._products.take(func, args, kwargs) if is_product(func, args) else None
        return func(*args, **(kwargs or {})) if found is None else found.given


def _asked(func: Any, args: _Args, kwargs: Any) -> Any:
    def described(leaf: Any) -> Any:
        return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf

    return func, tree_map(described, (args, kwargs or {}))


def _draws(func: OpOverload, args: _Args) -> bool:
    """Whether it draws random numbers."""
    place = _dropout_place(func)
    return place is not None and place < len(args) and bool(args[place])


def _apart(tensor: Tensor) -> Tensor:
    """Without the graph, which holds us: it would hold itself. It shares the counter of changes in place, which is
    done above the level at which modes see operations."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _is_capturing(device: torch.device) -> bool:
    """Into a graph of the device's, which would be replayed without what is kept."""
    if device.type == "cpu":
        return False
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.layout is torch.strided]
