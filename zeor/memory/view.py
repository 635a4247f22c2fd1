"""The view: a gradient of which this rank holds a part, or values of a parameter that are not here.

A `View` is a wrapper tensor with the true shape, dtype and device that holds no bytes, only a `Held`. Metadata tells
the truth; what can be right on parts works (norms, scaling, element-wise edits of a gradient); what cannot raises one
sentence that names the parameter and what to call. It knows no collective: the `Held` behind it does.

Note [What a view answers]
~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Metadata (shape, dtype, device, numel, ...): answered by the wrapper itself.
2. Handlers (the table at the end of this file), where the view is the operation's own tensor: norms, in-place
   arithmetic and assignments to elements of gradients, the check and unscaling of GradScaler, detach, conversions.
3. Any other read, also by an operation that writes to something else: the view is replaced by its full value where
   one is at hand; otherwise it raises.
4. Any other write raises: it would miss the fp32 master or the other ranks.
A view never needs a gradient. The parameter itself is no view: see param.py.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from zeor.memory.placed import dtensor_class, is_placed

# A call as torch hands it to Python.
Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Held(Protocol):
    """What stands behind a view or a parameter. step/handle.py implements it; this class lists what they ask for."""

    name: str
    dtype: torch.dtype  # of the parameter as the user gave it
    placed: Any  # of a DTensor: see placed.py; None for a plain parameter

    def read(self, writes: bool = False) -> Tensor:
        """The parameter, with its full value here, or RuntimeError where that cannot be. `writes`: to be written to."""

    def get_data(self) -> Tensor:
        """The parameter's values as a tensor that needs no gradient."""

    def set_data(self, value: Tensor) -> None:
        """New values, of the parameter's own shape, dtype and device."""

    def load(self, value: Any) -> None:
        """Take this rank's part of a full value: a tensor that can be expanded to the shape, or a number."""

    def store(self, value: Tensor) -> None:
        """The same of a plain tensor of the parameter's own shape."""

    def set_requires_grad(self, flag: bool) -> None: ...

    def get_grad(self) -> Tensor | None: ...

    def set_grad(self, value: Tensor | None) -> None: ...

    def edited(self, verb: str, args: Args, kwargs: Kwargs) -> None:
        """The gradient was changed in place, by this method of tensors."""

    def after_grad(self, hook: Func) -> Any:
        """Call `hook(parameter)` whenever a backward has brought its gradient; returns a handle to remove it."""

    def read_grad(self) -> Tensor:
        """The gradient's full value, or RuntimeError where it is not on this rank."""

    def gather_grad(self) -> Tensor:
        """The gradient's full value by a collective."""

    def norm(self, ord: float) -> Tensor:
        """The norm of the whole gradient: the same plain scalar on every rank."""

    def scale_grad(self, factor: Tensor | float) -> None:
        """Multiply the gradient; may be remembered and applied when the gradient is next used."""

    def zero_unreduced(self) -> bool:
        """Set a gradient to zero that waits to be reduced; False where it is an ordinary one."""

    def local_grad(self) -> Tensor:
        """This rank's part of the gradient, flat, to be changed in place by the caller."""

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part, flat, of any tensor of the parameter's shape."""

    def check_and_unscale(self, helds: Sequence[Held], found_inf: Tensor, inv_scale: Tensor) -> None:
        """GradScaler's check and unscaling for all these gradients; found_inf is agreed by all ranks."""


class View(torch.Tensor):
    """A gradient of which this rank holds a part, or a parameter's values that are away. See the module's docstring."""

    _behind: weakref.ref[Held]  # weak: a plain parameter holds its gradient where Python's collector does not look
    _of_grad: bool
    _device: torch.device

    @staticmethod
    def __new__(cls, like: Tensor, held: Held, of_grad: bool, dtype: torch.dtype | None = None) -> View:
        # To C++ a parameter's values are on the meta device: `other.data = view`, which asks no Python, is refused.
        place = like.device if of_grad else torch.device("meta")
        view = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype or like.dtype, device=place)
        view._behind, view._of_grad, view._device = weakref.ref(held), of_grad, like.device
        return view

    def __init__(self, like: Tensor, held: Held, of_grad: bool, dtype: torch.dtype | None = None):
        pass

    @property
    def _held(self) -> Held:
        held = self._behind()
        if held is None:
            raise RuntimeError(
                "The sharded model or optimizer that this gradient belongs to is gone; keep it while you use its "
                "gradients."
            )
        return held

    def _local_shape(self) -> torch.Size:
        return self.shape

    def _wrap(self, local: Tensor) -> Tensor:
        """A plain tensor as one of the parameter's own kind."""
        return local

    def value(self) -> Tensor:
        """The full value, a plain tensor that needs no gradient; RuntimeError where it is not on this rank."""
        return self._held.read_grad() if self._of_grad else self._held.read().detach()

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute in torch's stub
        return self._device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]  # an attribute in torch's stub
        return self._device.type == "meta"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # an attribute in torch's stub
        return self._device.type == "cpu"

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # an attribute in torch's stub
        return self._device.type == "cuda"

    # Python properties, not autograd's slots: a view is no part of any graph.
    @property
    def grad(self) -> None:
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(f"{self!r} is no parameter: it has no gradient of its own.")

    @property
    def data(self) -> View:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch: untyped
        kind = "gradient of" if self._of_grad else "values of parameter"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<zeor view: {kind} {self._held.name}, {tuple(self.shape)}, {dtype}, {self.device}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"{self!r} holds one rank's part and cannot be pickled; use zeor.save or zeor.export, or save inside "
            "`with zeor.full_params(model):`, where model.state_dict() is the plain one."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"{self!r} holds one rank's part and cannot be copied; copy the model before zeor.shard, "
            "or inside `with zeor.full_params(model):`; for an average of the weights use zeor.ema(model)."
        )

    @classmethod
    def __torch_function__(cls, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and _is_own(args):
            return handler(func, args, kwargs)
        if is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(written(func, args, kwargs), View):
            _refuse_write(func, (args, kwargs))
        args, kwargs = tree_map_only(View, View.value, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates another signature
        cls, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> NoReturn:
        # Only C++ code that never asked __torch_function__ gets here, with a view it cannot use.
        views = [v for v in tree_leaves((args, kwargs)) if isinstance(v, View)]
        if _inside_ddp():
            raise RuntimeError(
                "The model is sharded by zeor, so it is data-parallel already; drop DistributedDataParallel."
            )
        raise RuntimeError(f"{func} was called on {views[0]!r}; use `with zeor.full_params(model):` around it.")


@functools.cache
def _placed_view() -> type[View]:
    """The view that is a DTensor too, for parameters that are (placed.py): it has placements and a mesh."""
    kind = dtensor_class()

    def to_local(self: Any, *, grad_placements: Any = None) -> Tensor:
        local: Tensor = self.value().to_local()
        return local

    def redistribute(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = self.value().redistribute(*args, **kwargs)
        return made

    def full_tensor(self: Any, *, grad_placements: Any = None) -> Tensor:
        value: Any = self._held.gather_grad() if self._of_grad else self.value()
        whole: Tensor = value.full_tensor()
        return whole

    def local_shape(self: Any) -> torch.Size:
        return torch.Size(self._held.placed.local_shape)

    def wrap(self: Any, local: Tensor) -> Tensor:
        made: Tensor = self._held.placed.wrap(local)
        return made

    own = {each.__name__: each for each in (to_local, redistribute, full_tensor)}
    names = {**own, "_local_shape": local_shape, "_wrap": wrap, "_local_tensor": property(to_local)}
    return type("View", (View, kind), {"__module__": View.__module__, "__doc__": View.__doc__, **names})


def view_of(like: Tensor, held: Held, of_grad: bool, dtype: torch.dtype | None = None) -> View:
    """Of a parameter's gradient, or of its values."""
    if not is_placed(like):
        return View(like, held, of_grad, dtype)
    view = _placed_view()(like, held, of_grad, dtype)
    view._spec = like._spec  # type: ignore[attr-defined]
    return view


def _inside_ddp() -> bool:
    """A DistributedDataParallel is being made around the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is DistributedDataParallel.__init__.__code__:
            return True
        frame = frame.f_back
    return False


def _is_own(args: Args) -> bool:
    """The operation is one of the view's own: its first argument is a view, or a list of views alone."""
    first = args[0] if args else None
    if isinstance(first, (tuple, list)):
        return bool(first) and all(isinstance(each, View) for each in first)
    return isinstance(first, View)


def is_metadata(func: Any) -> bool:
    """Answered without the bytes."""
    if func in _METADATA:
        return True
    return getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ not in _VALUE_PROPERTIES


def written(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """What an operation writes to, as far as its name tells: its first argument, or what `out=` names; or None."""
    out = kwargs.get("out")
    if out is not None:
        targets = out if isinstance(out, (tuple, list)) else (out,)
        return next((target for target in targets if type(target) is not Tensor), None)
    name = str(getattr(func, "__name__", "")).split(".")[0]  # add_.Tensor
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _WRITING_NAMES
    if not in_place and not kwargs.get("inplace"):
        return None
    first = args[0] if args else next((kwargs[name] for name in ("input", "tensor", "self") if name in kwargs), None)
    if isinstance(first, (tuple, list)):
        return next((each for each in first if type(each) is not Tensor), None)
    return first


def _refuse_write(func: Func, args: Any) -> NoReturn:
    view = next((v for v in tree_leaves(args) if isinstance(v, View)), None)
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} would write to {view!r}, of which this rank holds a part; "
        "write inside `with zeor.full_params(model, write=True):`."
    )


def changes_nothing(func: Func, like: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Whether a conversion (`to`, `float`, `cuda`, ...) gives a tensor of this dtype and device back as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        tried = torch.empty(0, dtype=like.dtype, device=like.device)
        return func(tried, *args, **kwargs) is tried


# ---- handlers: (func, args, kwargs) -> result; the first argument is a view, or a list of views


def _identity(func: Func, args: Args, kwargs: Kwargs) -> View:
    view: View = args[0]
    return view


def _convert(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`to`, `float`, `cuda` and kin: model.to(...) calls them on gradients too."""
    view = args[0]
    return view if changes_nothing(func, view, args[1:], kwargs) else func(view.value(), *args[1:], **kwargs)


def _make_like(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """zeros_like and kin: a plain tensor of the full shape; no value is read. Adagrad makes its state so."""
    view, *rest = args
    kwargs = {"dtype": view.dtype, "device": view.device, **{k: v for k, v in kwargs.items() if v is not None}}
    made: Tensor = view._wrap(func(torch.empty(view._local_shape(), dtype=view.dtype, device="meta"), *rest, **kwargs))
    return made


def _make_new(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """new_zeros and kin: only dtype and device are taken from the view."""
    view, *rest = args
    made: Tensor = func(torch.empty(0, dtype=view.dtype, device=view.device), *rest, **kwargs)
    return made


def _set_requires_grad(func: Func, args: Args, kwargs: Kwargs) -> Any:
    flag = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if flag:
        raise RuntimeError(f"{args[0]!r} is no part of any graph, so it cannot require a gradient.")
    return args[0]


def _norm(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """vector_norm(x, ord), norm(x, p) and x.norm(p) over all elements of a gradient."""
    view, *rest = args
    if not view._of_grad or kwargs.get("dim") is not None or len(rest) > 1 or kwargs.get("out") is not None:
        norm: Tensor = func(view.value(), *rest, **kwargs)
        return norm
    ord = rest[0] if rest else kwargs.get("ord", kwargs.get("p", 2))
    norm = view._held.norm(2.0 if ord in ("fro", None) else float(ord))
    if kwargs.get("keepdim"):
        norm = norm.view([1] * view.dim())
    return norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])


def _foreach_norm(func: Func, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    views, *rest = args
    kwargs = {"ord": rest[0], **kwargs} if rest else kwargs
    return tuple(_norm(torch.linalg.vector_norm, (view,), kwargs) for view in views)


def _scale(func: Func, args: Args, kwargs: Kwargs) -> View:
    """Multiplication by one number: the clip factor, a loss scale."""
    view: View = args[0]
    factor = args[1] if len(args) > 1 else kwargs["other"]
    if not view._of_grad:
        _refuse_write(func, args)
    if isinstance(factor, Tensor) and factor.numel() != 1:
        return _in_place(_T.mul_, (view, factor), {})
    view._held.scale_grad(factor)
    return view


def _foreach_scale(func: Func, args: Args, kwargs: Kwargs) -> None:
    views, factors = args
    for index, view in enumerate(views):
        factor = factors[index] if isinstance(factors, (list, tuple)) else factors
        _scale(torch.Tensor.mul_, (view, factor), {})


def _in_place(func: Func, args: Args, kwargs: Kwargs) -> View:
    """Element-wise arithmetic on a gradient: done on this rank's part."""
    view: View = args[0]
    if not view._of_grad:
        _refuse_write(func, args)
    if func is _T.zero_ and view._held.zero_unreduced():
        return view
    local = view._held.local_grad()
    held, given = view._held, kwargs

    def part(x: Tensor) -> Tensor:
        if isinstance(x, View):
            return x._held.local_grad() if x._of_grad else held.cut(x.value())
        return x if x.numel() == 1 and view.numel() != 1 else held.cut(x)

    rest, kwargs = tree_map_only(Tensor, part, (args[1:], kwargs))
    func(local, *rest, **kwargs)
    held.edited(func.__name__, args[1:], given)
    return view


def _set_elements(func: Func, args: Args, kwargs: Kwargs) -> None:
    """grad[key] = value: the elements that lie in this rank's part, found by their numbers in the whole."""
    view, key, value = args
    if not view._of_grad:
        _refuse_write(func, args)
    held = view._held
    if is_placed(view):
        raise RuntimeError(
            f"Elements of {view!r}, a DTensor, were assigned, and no rank knows which of them it has; change it as a "
            "whole, as by grad.mul_(mask)."
        )
    key, value = tree_map_only(View, View.value, (key, value))
    numbers = torch.arange(view.numel(), device=view.device).view(view.shape)
    mine, chosen = held.cut(numbers), numbers[key]
    values = torch.as_tensor(value, dtype=view.dtype, device=view.device).expand(chosen.shape)
    if mine.numel():
        inside = (chosen >= mine[0]) & (chosen <= mine[-1])
        local = held.local_grad()
        local[chosen[inside] - mine[0]] = values[inside].to(local.dtype)
    else:
        held.local_grad()  # norms are forgotten on every rank
    held.edited("__setitem__", ([key], value), {})  # a rank that only follows cannot repeat it


def _foreach_in_place(name: str) -> Func:
    one = getattr(torch.Tensor, name)

    def handler(func: Func, args: Args, kwargs: Kwargs) -> None:
        views, *rest = args
        for index, view in enumerate(views):
            mine = [r[index] if isinstance(r, (list, tuple)) else r for r in rest]
            _in_place(one, (view, *mine), kwargs)

    return handler


def _elementwise_check(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """isfinite, isnan, isinf of a gradient: exact, element by element, by a gather."""
    view: View = args[0]
    found: Tensor = func(view._held.gather_grad() if view._of_grad else view.value())
    return found


def _amp(func: Func, args: Args, kwargs: Kwargs) -> None:
    views, found_inf, inv_scale = args
    views[0]._held.check_and_unscale([v._held for v in views], found_inf, inv_scale)


def _copy(func: Func, args: Args, kwargs: Kwargs) -> View:
    view: View = args[0]
    if view._of_grad:
        return _in_place(func, args, kwargs)
    view._held.load(args[1])
    return view


def _no_hooks(func: Func, args: Args, kwargs: Kwargs) -> Any:
    raise RuntimeError(f"{args[0]!r} is no part of any graph, so a hook on it would never be called.")


def _no_backward(func: Func, args: Args, kwargs: Kwargs) -> None:
    raise RuntimeError(f"backward was called on {args[0]!r}, which is the result of nothing; call it on a loss.")


_T = torch.Tensor
_VALUE_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}
_WRITING_NAMES = {
    "__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__imod__", "__ilshift__", "__irshift__",
}  # fmt: skip
_METADATA = {
    _T.size, _T.numel, _T.nelement, _T.dim, _T.ndimension, _T.stride, _T.element_size, _T.is_floating_point,
    _T.is_complex, _T.is_contiguous, _T.get_device, _T.__len__, _T.__hash__, _T.storage_offset, _T.type,
    _T.is_signed, torch.numel, torch.is_floating_point, torch.is_complex, _T.__deepcopy__,
    _T.__reduce_ex__, _T._is_view, _T.is_shared, torch._has_compatible_shallow_copy_type,
}  # fmt: skip
CONVERSIONS = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")

_HANDLERS: dict[Any, Func] = {
    _T.detach: _identity,
    torch.detach: _identity,
    _T.detach_: _identity,
    _T.retain_grad: _identity,  # a leaf's gradient is retained anyway
    _T.requires_grad_: _set_requires_grad,
    _T.register_hook: _no_hooks,
    _T.register_post_accumulate_grad_hook: _no_hooks,
    torch.autograd.backward: _no_backward,
    _T.backward: _no_backward,
    torch.linalg.vector_norm: _norm,
    torch.norm: _norm,
    _T.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    _T.mul_: _scale,
    _T.__imul__: _scale,
    torch._foreach_mul_: _foreach_scale,
    torch._amp_foreach_non_finite_check_and_unscale_: _amp,
    _T.copy_: _copy,
    _T.__setitem__: _set_elements,
    **{getattr(_T, name): _convert for name in CONVERSIONS},
    **{check: _elementwise_check for name in ("isfinite", "isnan", "isinf")
       for check in (getattr(torch, name), getattr(_T, name))},
}  # fmt: skip
for _name in ("zeros", "ones", "full", "empty", "rand", "randn"):
    _HANDLERS[getattr(torch, f"{_name}_like")] = _make_like
    if hasattr(_T, f"new_{_name}"):
        _HANDLERS[getattr(_T, f"new_{_name}")] = _make_new
for _name in ("div_", "clamp_", "clamp_min_", "clamp_max_", "zero_", "nan_to_num_", "add_", "sub_", "neg_", "abs_",
              "sign_", "pow_", "sqrt_", "fill_", "addcmul_", "addcdiv_", "lerp_", "masked_fill_"):  # fmt: skip
    _HANDLERS[getattr(_T, _name)] = _in_place
    if hasattr(torch, f"_foreach_{_name}"):
        _HANDLERS[getattr(torch, f"_foreach_{_name}")] = _foreach_in_place(_name)
for _name, _plain in (("__iadd__", _T.add_), ("__isub__", _T.sub_), ("__itruediv__", _T.div_)):
    _HANDLERS[getattr(_T, _name)] = lambda func, args, kwargs, _plain=_plain: _in_place(_plain, args, kwargs)
