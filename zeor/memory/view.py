"""The view: what a parameter, and its gradient, is outside forward and backward.

A `View` is a wrapper tensor with the true shape, dtype and device of the whole parameter that holds
only this rank's part, through a `Held`. Metadata tells the truth; what can be right on parts works
(norms, scaling, clamping); what cannot raises one sentence that names the parameter and what to call.
This is the only Tensor subclass in zeor. It knows no collective: the `Held` behind it does.

Note [What a view answers]
~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Metadata (shape, dtype, device, requires_grad, numel, ...): answered by the wrapper itself.
2. Handlers (the table at the end of this file): norms, in-place arithmetic of gradients, the check and
   unscaling of GradScaler, detach, loading.
3. Any other read: the view is replaced by its full value where one is at hand (for a parameter: compute
   rests FULL), which also makes penalties on parameters differentiable; otherwise it raises.
4. Any other write raises: it would miss the fp32 master or the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Held:
    """What stands behind a view. The runtime implements it; this class lists what views ask for."""

    name: str

    def read(self) -> Tensor:
        """The parameter's full value, or RuntimeError where it is not on this rank."""
        raise NotImplementedError

    def load(self, value: Tensor) -> None:
        """Take this rank's part of a full value; refused outside load_state_dict and full_params."""
        raise NotImplementedError

    def set_requires_grad(self, flag: bool) -> None:
        raise NotImplementedError

    def get_grad(self) -> Tensor | None:
        raise NotImplementedError

    def set_grad(self, value: Tensor | None) -> None:
        raise NotImplementedError

    def edited(self, verb: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """The gradient was changed in place, by this method of tensors."""
        raise NotImplementedError

    def leaf(self) -> Tensor:
        """The full Parameter that autograd knows; its memory may be away."""
        raise NotImplementedError

    def after_grad(self, hook: Callable) -> Any:
        """Call `hook(parameter)` whenever a backward has brought its gradient; returns a handle to remove it."""
        raise NotImplementedError

    def read_grad(self) -> Tensor:
        """The gradient's full value, or RuntimeError where it is not on this rank."""
        raise NotImplementedError

    def gather_grad(self) -> Tensor:
        """The gradient's full value by a collective."""
        raise NotImplementedError

    def norm(self, ord: float, of_grad: bool) -> Tensor:
        """The norm of the whole parameter or gradient: the same plain scalar on every rank."""
        raise NotImplementedError

    def scale_grad(self, factor: Tensor | float) -> None:
        """Multiply the gradient; may be remembered and applied when the gradient is next used."""
        raise NotImplementedError

    def local_grad(self) -> Tensor:
        """This rank's part of the gradient, flat, to be changed in place by the caller."""
        raise NotImplementedError

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part, flat, of any tensor of the parameter's shape."""
        raise NotImplementedError

    def check_and_unscale(self, helds: Sequence[Held], found_inf: Tensor, inv_scale: Tensor) -> None:
        """GradScaler's check and unscaling for all these gradients; found_inf is agreed by all ranks."""
        raise NotImplementedError


class View(torch.Tensor):
    """A parameter or a gradient of which this rank holds a part. See the module's docstring."""

    _held: Held
    _of_grad: bool
    _wants_grad: bool
    _is_param: bool  # what isinstance(view, torch.nn.Parameter) looks at

    @staticmethod
    def __new__(cls, like: Tensor, held: Held, of_grad: bool) -> View:
        view = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            dtype=like.dtype,
            device=like.device,
        )
        view._wants_grad = like.requires_grad and not of_grad
        view._held = held
        view._of_grad = of_grad
        view._is_param = not of_grad
        return view

    def __init__(self, like: Tensor, held: Held, of_grad: bool):
        pass

    # What autograd itself sees never needs a gradient: a torch that does not ask views about backward(inputs=...)
    # then refuses them, where it would silently compute nothing.
    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._wants_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        _set_requires_grad(_T.requires_grad_, (self, flag), {})

    # A Python property, not autograd's slot: the engine hears at once when a gradient is dropped.
    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return None if self._of_grad else self._held.get_grad()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._held.set_grad(value)

    @grad.deleter
    def grad(self) -> None:
        self._held.set_grad(None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "gradient of" if self._of_grad else "parameter"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<zeor view: {kind} {self._held.name}, {tuple(self.shape)}, {dtype}, {self.device}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"{self!r} holds one rank's part and cannot be pickled; save inside "
            "`with zeor.full_params(model):`, where model.state_dict() is the plain one."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"{self!r} holds one rank's part and cannot be copied; copy the model before zeor.shard, "
            "or inside `with zeor.full_params(model):`; for an average of the weights use zeor.ema(model)."
        )

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA or (getattr(func, "__name__", "") == "__get__" and _is_metadata(func)):
                return func(*args, **kwargs)
            if _writes(func, kwargs):
                _refuse_write(func, (args, kwargs))
            args, kwargs = tree_map_only(View, _value, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        # Only C++ code that never asked __torch_function__ gets here, with a view it cannot use.
        views = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, View)]
        raise RuntimeError(f"{func} was called on {views[0]!r}; use `with zeor.full_params(model):` around it.")


def _value(view: View) -> Tensor:
    return view._held.read_grad() if view._of_grad else view._held.read()


def _is_metadata(func: Any) -> bool:
    return getattr(func.__self__, "__name__", "") not in _VALUE_PROPERTIES


def _writes(func: Callable, kwargs: dict) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING_NAMES or isinstance(kwargs.get("out"), View)


def _refuse_write(func: Callable, args: Any) -> None:
    view = next((v for v in torch.utils._pytree.tree_leaves(args) if isinstance(v, View)), None)
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} would write to {view!r}, of which this rank holds a part; "
        "write inside `with zeor.full_params(model, write=True):`."
    )


# ---- handlers: (func, args, kwargs) -> result


def _detach(func: Callable, args: tuple, kwargs: dict) -> View:
    view = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        alias = View(view, view._held, view._of_grad)
    alias._wants_grad = alias._is_param = False
    return alias


def _identity(func: Callable, args: tuple, kwargs: dict) -> View:
    return args[0]


def _make_like(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """zeros_like and kin: a plain tensor of the full shape; no value is read. Adagrad makes its state so."""
    view, *rest = args
    kwargs = {"dtype": view.dtype, "device": view.device, **{k: v for k, v in kwargs.items() if v is not None}}
    return func(torch.empty(view.shape, dtype=view.dtype, device="meta"), *rest, **kwargs)


def _make_new(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """new_zeros and kin: only dtype and device are taken from the view."""
    view, *rest = args
    return func(torch.empty(0, dtype=view.dtype, device=view.device), *rest, **kwargs)


def _set_requires_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    view = args[0]
    flag = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if not view._of_grad and view._is_param and flag != view.requires_grad:
        view._held.set_requires_grad(flag)
    view._wants_grad = bool(flag) and not view._of_grad
    return view


def _norm(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """vector_norm(x, ord), norm(x, p) and x.norm(p) over all elements."""
    view, *rest = args
    ord = rest[0] if rest else kwargs.get("ord", kwargs.get("p", 2))
    ord = 2.0 if ord in ("fro", None) else float(ord)
    if kwargs.get("dim") is not None or len(rest) > 1:
        return func(_value(view), *rest, **kwargs)
    norm = view._held.norm(ord, view._of_grad)
    return norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])


def _foreach_norm(func: Callable, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
    views, *rest = args
    ord = float(rest[0] if rest else kwargs.get("ord", 2))
    return tuple(v._held.norm(ord, v._of_grad) for v in views)


def _scale(func: Callable, args: tuple, kwargs: dict) -> View:
    """Multiplication by one number: the clip factor, a loss scale."""
    view, factor = args[0], args[1]
    if not view._of_grad:
        _refuse_write(func, args)
    if isinstance(factor, Tensor) and factor.numel() != 1:
        return _in_place(func, args, kwargs)
    view._held.scale_grad(factor)
    return view


def _foreach_scale(func: Callable, args: tuple, kwargs: dict) -> None:
    views, factors = args
    for index, view in enumerate(views):
        factor = factors[index] if isinstance(factors, (list, tuple)) else factors
        _scale(torch.Tensor.mul_, (view, factor), {})


def _in_place(func: Callable, args: tuple, kwargs: dict) -> View:
    """Element-wise arithmetic on a gradient: done on this rank's part."""
    view = args[0]
    if not view._of_grad:
        _refuse_write(func, args)
    local = view._held.local_grad()
    held, given = view._held, kwargs

    def part(x: Tensor) -> Tensor:
        if isinstance(x, View):
            return x._held.local_grad() if x._of_grad else held.cut(x._held.read())
        return x if x.numel() == 1 and view.numel() != 1 else held.cut(x)

    rest, kwargs = tree_map_only(Tensor, part, (args[1:], kwargs))
    func(local, *rest, **kwargs)
    held.edited(func.__name__, args[1:], given)
    return view


def _foreach_in_place(name: str) -> Callable:
    one = getattr(torch.Tensor, name)

    def handler(func: Callable, args: tuple, kwargs: dict) -> None:
        views, *rest = args
        for index, view in enumerate(views):
            mine = [r[index] if isinstance(r, (list, tuple)) else r for r in rest]
            _in_place(one, (view, *mine), kwargs)

    return handler


def _elementwise_check(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """isfinite, isnan, isinf of a gradient: exact, element by element, by a gather."""
    view = args[0]
    return func(view._held.gather_grad() if view._of_grad else view._held.read())


def _amp(func: Callable, args: tuple, kwargs: dict) -> None:
    views, found_inf, inv_scale = args
    views[0]._held.check_and_unscale([v._held for v in views], found_inf, inv_scale)


def _copy(func: Callable, args: tuple, kwargs: dict) -> View:
    view, source = args[0], args[1]
    if view._of_grad:
        return _in_place(func, args, kwargs)
    view._held.load(source)
    return view


def _register_hook(func: Callable, args: tuple, kwargs: dict) -> Any:
    """On the parameter that autograd knows: the hook sees this rank's own gradient, before ranks are averaged."""
    view, *rest = args
    if view._of_grad or not view._is_param:
        raise RuntimeError(f"{view!r} is no part of any graph, so a hook on it would never be called.")
    return func(view._held.leaf(), *rest, **kwargs)


def _after_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    view, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    return view._held.after_grad(hook)


def _backward(func: Callable, args: tuple, kwargs: dict) -> None:
    """backward(inputs=parameters): autograd is told of the parameters it knows."""
    if any(isinstance(x, View) for x in (args[0] if isinstance(args[0], (tuple, list)) else args[:1])):
        raise RuntimeError(f"backward was called on {args[0]!r}, which is the result of nothing; call it on a loss.")
    func(*args, **tree_map_only(View, lambda view: view._held.leaf(), kwargs))


def _refuse_autograd_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    view = next(v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, View))
    raise RuntimeError(
        f"torch.autograd.grad was asked for the gradient of {view!r}, which ranks compute together; call "
        "loss.backward() and use .grad, or take this rank's own inside `with zeor.full_params(model):`."
    )


_T = torch.Tensor
_VALUE_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag"}
_WRITING_NAMES = {
    "__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__",
    "__iand__", "__ior__", "__ixor__",
}  # fmt: skip
_METADATA = {
    _T.size, _T.numel, _T.nelement, _T.dim, _T.ndimension, _T.stride, _T.element_size, _T.is_floating_point,
    _T.is_complex, _T.is_contiguous, _T.get_device, _T.__len__, _T.__hash__, _T.storage_offset, _T.type,
    _T.is_signed, torch.numel, torch.is_floating_point, torch.is_complex, _T.__deepcopy__,
    _T.__reduce_ex__, _T._is_view,
}  # fmt: skip

_HANDLERS: dict[Any, Callable] = {
    _T.detach: _detach,
    torch.detach: _detach,
    _T.detach_: _identity,
    _T.retain_grad: _identity,  # a leaf's gradient is retained anyway
    _T.register_hook: _register_hook,
    _T.register_post_accumulate_grad_hook: _after_grad,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _refuse_autograd_grad,
    # `.data` too: what is written through it must meet the same refusal, or the same arithmetic on a gradient.
    _T.data.__get__: _detach,  # type: ignore[attr-defined]
    _T.requires_grad_: _set_requires_grad,
    torch.linalg.vector_norm: _norm,
    torch.norm: _norm,
    _T.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    _T.mul_: _scale,
    _T.__imul__: _scale,
    torch._foreach_mul_: _foreach_scale,
    torch._amp_foreach_non_finite_check_and_unscale_: _amp,
    _T.copy_: _copy,
    **{check: _elementwise_check for name in ("isfinite", "isnan", "isinf")
       for check in (getattr(torch, name), getattr(_T, name))},
}  # fmt: skip
for _name in ("zeros", "ones", "full", "empty", "rand", "randn"):
    _HANDLERS[getattr(torch, f"{_name}_like")] = _make_like
    if hasattr(_T, f"new_{_name}"):
        _HANDLERS[getattr(_T, f"new_{_name}")] = _make_new
for _name in ("div_", "clamp_", "clamp_min_", "clamp_max_", "zero_", "nan_to_num_", "add_", "sub_", "neg_",
              "fill_", "addcmul_", "lerp_"):  # fmt: skip
    _HANDLERS[getattr(_T, _name)] = _in_place
    if hasattr(torch, f"_foreach_{_name}"):
        _HANDLERS[getattr(torch, f"_foreach_{_name}")] = _foreach_in_place(_name)
for _name, _plain in (("__iadd__", _T.add_), ("__isub__", _T.sub_), ("__itruediv__", _T.div_)):
    _HANDLERS[getattr(_T, _name)] = lambda func, args, kwargs, _plain=_plain: _in_place(_plain, args, kwargs)
