"""The parameter: one object for the user, the module and autograd, whose class says where its bytes are.

`lay` puts a parameter of the user's over the memory of a lane, in place: identity, attributes, hooks and autograd's
own node stay. From then on it is of one of two classes: `Whole`, where every operation is torch's own and no Python
stands between, or `Away`, which knows its metadata, and asks its `Held` for the bytes before anything reads them.
Gradients rest elsewhere (view.py): `grad` asks the `Held` too. This file knows no collective and no lane.

Note [One object]
~~~~~~~~~~~~~~~~~
A parameter that were another object inside forward than outside would have two identities, two sets of hooks and two
gradients, and whoever kept the wrong one would train nothing. So there is one, and it is native while its bytes are
here. What must be noticed is a method or property of the class, which Python finds before torch's:

1. `grad`: autograd accumulates into its own slot, which a hook empties; what the user sees is the reduced gradient.
2. `requires_grad`, `requires_grad_`, `detach_`: freezing concerns every rank.
3. `copy_`, `fill_`, `zero_` and assignment to `data`: the value goes to the master as it is given, where compute would
   round it. Any other write is native: it changes compute, and a master that is kept beside it follows (lane.py).
4. `register_post_accumulate_grad_hook`: such hooks run when the gradient is reduced, not when one rank has its own.

An operation that torch does not tell Python of never sees an `Away` whose memory is gone: what C++ keeps of a parameter
is counted, and its memory stays (Note [Lent] in buffers.py).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zeor.memory.placed import dtensor_class, is_placed, local_tensor, put_local, wrapped
from zeor.memory.view import CONVERSIONS, Args, Func, Held, Kwargs, changes_nothing, is_metadata, written

autograd_grad: Any = torch.Tensor.grad  # where autograd accumulates; `grad` of the classes below hides it
_data: Any = torch.Tensor.data
_flag: Any = torch.Tensor.requires_grad
_native = torch._C.DisableTorchFunctionSubclass

# Of a parameter that is sharded: a weak reference to its Held. Graphs hold parameters, models may hold graphs, and
# Python's collector does not see through autograd's nodes: a parameter that held its model would keep it for ever.
_ATTRIBUTE = "_zeor_held"


class ShardedParam:
    """What both classes of parameters answer by themselves. See Note [One object]."""

    @property
    def _zeor_slot(self) -> Held:
        held: Held | None = vars(self)[_ATTRIBUTE]()
        if held is None:
            raise RuntimeError(
                "The sharded model that this parameter belongs to is gone; keep the model while you use its parameters."
            )
        return held

    @property
    def grad(self) -> Tensor | None:
        return self._zeor_slot.get_grad()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._zeor_slot.set_grad(value)

    @grad.deleter
    def grad(self) -> None:
        self._zeor_slot.set_grad(None)

    @property
    def requires_grad(self) -> bool:
        flag: bool = _flag.__get__(self)
        return flag

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if bool(requires_grad) != self.requires_grad:
            self._zeor_slot.set_requires_grad(bool(requires_grad))
        return self

    def detach_(self) -> Any:
        return self.requires_grad_(False)

    @property
    def data(self) -> Tensor:
        return self._zeor_slot.get_data()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # type: ignore[comparison-overlap]  # every class that inherits from it is a Tensor
            self._zeor_slot.set_data(value)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Any:
        return self._store(other)

    def fill_(self, value: Any) -> Any:
        return self._store(value)

    def zero_(self) -> Any:
        return self._store(0)

    def _store(self, value: Any) -> Any:
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        self._zeor_slot.load(value)
        return self

    def register_post_accumulate_grad_hook(self, hook: Func) -> Any:
        return self._zeor_slot.after_grad(hook)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"Parameter {self._zeor_slot.name!r} is sharded, so a copy of it would not train; copy the model before "
            "zeor.shard, or inside `with zeor.full_params(model):`; for an average of the weights use zeor.ema(model)."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"Parameter {self._zeor_slot.name!r} is sharded and cannot be pickled; use zeor.save or zeor.export, or "
            "pickle inside `with zeor.full_params(model):`, where the model is a plain one."
        )


class Whole(ShardedParam, nn.Parameter):
    """A parameter whose bytes are here: every operation is torch's own."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch: untyped
        alias = self.detach().requires_grad_(self.requires_grad)  # torch would print the name of this class
        return f"Parameter containing:\n{alias!r}"


class Away(ShardedParam, nn.Parameter):
    """A parameter whose bytes are not here, or not yet: metadata, and a read that brings them or refuses."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch: untyped
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<zeor: parameter {self._zeor_slot.name}, {tuple(self.shape)}, {dtype}, {self.device}, sharded>"

    @classmethod
    def __torch_function__(cls, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func) or func in _BY_METADATA:
            with _native():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        return _read_all(func, args, kwargs)


class Coded(Away):
    """A parameter that rests as 8-bit codes (Note [Codes] in float8.py): a read sees what the codes stand for, in
    memory of its own; only whole values can be written. To C++ it is a single NaN, as large as the parameter, so that
    whoever asks no Python computes NaN and not something that looks like a weight."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch: untyped
        return super().__repr__().replace("sharded>", "as 8-bit codes>")

    def stride(self, dim: int | None = None) -> Any:
        strides = torch.empty(self.shape, device="meta").stride()
        return strides if dim is None else strides[dim]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return True


def nothing_like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a `Coded` parameter lies over."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


def _detach(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    param: ShardedParam = args[0]
    return param._zeor_slot.get_data()


def _convert(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`to`, `float`, `cuda` and kin, which model.to(...) calls on every parameter: one that changes nothing gives the
    parameter itself."""
    param = args[0]
    if isinstance(param, Away) and changes_nothing(func, param, args[1:], kwargs):
        return param
    return _read_all(func, args, kwargs)


def _read_all(func: Func, args: Args, kwargs: Kwargs) -> Any:
    target = written(func, args, kwargs)
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Away):
            leaf._zeor_slot.read(writes=leaf is target)  # from here on it is Whole or Coded, or this has raised
    args, kwargs = tree_map_only(Coded, lambda param: param._zeor_slot.read(), (args, kwargs))
    return func(*args, **kwargs)


_T = torch.Tensor
_LIKE = [getattr(torch, f"{name}_like") for name in ("zeros", "ones", "full", "empty", "rand", "randn")]
_NEW = [getattr(_T, f"new_{name}") for name in ("zeros", "ones", "full", "empty", "tensor")]
# They look at metadata, or at autograd's own books; none reads a value.
_BY_METADATA = {torch.autograd.backward, torch.autograd.grad, _T.register_hook, _T.retain_grad, *_LIKE, *_NEW}
_HANDLERS: dict[Any, Func] = {
    _T.detach: _detach,
    torch.detach: _detach,
    **{getattr(_T, name): _convert for name in CONVERSIONS},
}


# ---- the classes of one parameter


@functools.cache
def classes_of(kind: type) -> tuple[type, type]:
    """(Whole, Away) for parameters of a class of the user's: a quantised one still knows how to be read."""
    if kind is nn.Parameter:
        return Whole, Away
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if kind is dtensor_class():
        return _placed_classes(kind, names)
    whole = type(kind.__name__, (ShardedParam, kind), names)
    away = type(kind.__name__, (Away, kind), {**names, "__torch_function__": Away.__torch_function__})
    return whole, away


def _placed_classes(kind: Any, names: dict[str, Any]) -> tuple[type, type]:
    """Of DTensors (placed.py). Their methods, and C++, reach for the local tensor by its name, so a parameter that is
    away brings its bytes, or refuses, where that name is read. Torch's own classes alone are dispatched by it."""

    def plain(value: Any) -> Any:
        return kind(local_tensor(value), value._spec, requires_grad=False)

    def dispatch(cls: type, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        args, kwargs = tree_map_only(ShardedParam, plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def brought(param: Any) -> Tensor:
        param._zeor_slot.read()
        return local_tensor(param)

    names = {**names, "__torch_dispatch__": classmethod(dispatch)}
    whole = type(kind.__name__, (ShardedParam, kind), {**names, "__repr__": Whole.__repr__})
    asks = {"__torch_function__": Away.__torch_function__, "_local_tensor": property(brought, put_local)}
    return whole, type(kind.__name__, (Away, kind), {**names, **asks})


def held_of(tensor: Tensor) -> Held | None:
    """What stands behind a sharded parameter; None for any other tensor."""
    ref = vars(tensor).get(_ATTRIBUTE)
    return None if ref is None else ref()


def hand_to(param: nn.Parameter, held: Held | None) -> None:
    """From now on the parameter asks `held`; None: nobody, it is plain again. The caller keeps `held` alive."""
    if held is None:
        vars(param).pop(_ATTRIBUTE, None)
    else:
        vars(param)[_ATTRIBUTE] = weakref.ref(held)


def own_dtype(tensor: Tensor) -> torch.dtype:
    """As the user gave it: a sharded parameter has the dtype that it computes in."""
    held = held_of(tensor) if isinstance(tensor, ShardedParam) else None
    return tensor.dtype if held is None else held.dtype


def plain_data(param: nn.Parameter) -> Tensor:
    """torch's own `param.data`: the same memory, with a version counter of its own."""
    data: Tensor = _data.__get__(param)
    return data


def take_grad(param: nn.Parameter) -> Tensor | None:
    """What autograd has accumulated; its slot is empty afterwards."""
    if isinstance(param, Away):
        with _native():
            return _take_grad(param)
    return _take_grad(param)


def _take_grad(param: nn.Parameter) -> Tensor | None:
    grad: Tensor | None = autograd_grad.__get__(param)
    autograd_grad.__set__(param, None)
    return grad


def when_accumulated(param: nn.Parameter, hook: Func) -> Any:
    """Autograd's own hook, which `register_post_accumulate_grad_hook` of a sharded parameter is not. torch refuses one
    on a parameter that is frozen now, and keeps those of one that is frozen later."""
    with _native():
        trains = param.requires_grad
        Tensor.requires_grad_(param, True)
        try:
            return Tensor.register_post_accumulate_grad_hook(param, hook)
        finally:
            Tensor.requires_grad_(param, trains)


def is_sharded(param: Any) -> bool:
    return isinstance(param, ShardedParam)


@torch.no_grad()
def lay(param: nn.Parameter, over: Tensor) -> None:
    """The same object over other memory. Autograd's node, its hooks and the attributes stay."""
    if is_placed(param):
        dtensor: Any = param
        made = wrapped(dtensor._spec, over)
        if param.is_meta != over.is_meta:
            _exchange(param, made)
        elif param.dtype != over.dtype or param.device != over.device:
            _data.__set__(param, made)
        dtensor._spec = made._spec
        put_local(param, over)
        return
    if param.is_meta or over.is_meta:  # torch cannot assign between these: the object is kept, its insides exchanged
        _exchange(param, over)
        return
    _data.__set__(param, over)


def made_over(param: nn.Parameter, over: Tensor) -> nn.Parameter:
    """Another parameter of the same class, with the attributes of the user's, over other memory."""
    made = nn.Parameter(over, requires_grad=param.requires_grad)
    if type(param) is not nn.Parameter:
        made.__class__ = type(param)
    vars(made).update(vars(param))
    return made


def _exchange(param: nn.Parameter, over: Tensor) -> None:
    made = made_over(param, over)
    hooks = param._backward_hooks, param._post_accumulate_grad_hooks
    torch.utils.swap_tensors(param, made)
    param._backward_hooks, param._post_accumulate_grad_hooks = hooks
