"""What a model must not have when it is sharded, because sharding would silently change what it computes.

Looks at parameters, buffers and modules before anything is changed; each refusal is one sentence with the names. What
another library has wrapped is wrapped.py's business. Layers that are added later are refused too, because no rank would
average their gradients: torch tells of every parameter and module that is registered anywhere, and modules of sharded
models are known here, weakly.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeor.memory.param import is_sharded
from zeor.memory.placed import is_placed, local_tensor


def check_model(model: nn.Module, world: int) -> None:
    """Raises, or warns where the loss is the user's to judge. Nothing is changed."""
    _refuse_wrappers(model)
    _refuse_shared_memory(model)
    _refuse_renormalised(model, world)
    _warn_of_gradients(model)
    _warn_of_layouts(model)


def _refuse_wrappers(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if is_traceable_wrapper_subclass(param) and not is_placed(param):
            raise TypeError(
                f"Parameter {name!r} is a {type(param).__name__}, a tensor made of other tensors, which a flat buffer "
                "cannot hold; shard the model before it is converted, or keep it as plain tensors."
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Tensors that share memory without being one object would be parted: what is written to one would no longer be
    seen in the other."""
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    held: dict[int, list[tuple[int, int, str, Tensor]]] = defaultdict(list)
    for name, given in named:
        tensor = local_tensor(given)
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            begin, end = _span(tensor)
            held[tensor.untyped_storage()._cdata].append((begin, end, name, given))
    for spans in held.values():
        spans.sort(key=lambda span: span[:2])
        for (_, end, name, tensor), (begin, _, other_name, other) in pairwise(spans):
            if begin < end and (isinstance(tensor, nn.Parameter) or isinstance(other, nn.Parameter)):
                raise ValueError(
                    f"{name!r} and {other_name!r} share memory without being one object, and sharding would part them; "
                    "tie parameters by assigning the object itself (b.weight = a.weight), and clone other aliases."
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches, begin and end."""
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride()))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + (last + 1) * tensor.itemsize


def _refuse_renormalised(model: nn.Module, world: int) -> None:
    """Each rank would renormalise the rows that its own batch looks up, and ranks would hold different weights."""
    for name, module in model.named_modules():
        if world > 1 and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"Module {name!r} has max_norm={module.max_norm}, which changes the rows that a rank looks up: "
                "ranks would hold different weights. Leave max_norm out, and renormalise all rows after each step "
                "inside `with zeor.full_params(model, write=True):`."
            )


def _warn_of_gradients(model: nn.Module) -> None:
    names = [name for name, param in model.named_parameters() if param.grad is not None]
    if names:
        warnings.warn(
            f"{len(names)} parameters ({names[0]!r} first) have gradients from before zeor.shard; they are dropped. "
            "Call optimizer.zero_grad() before zeor.shard to say that you know.",
            stacklevel=5,
        )


def _warn_of_layouts(model: nn.Module) -> None:
    named = [(name, param) for name, param in model.named_parameters() if not param.is_meta and not is_placed(param)]
    names = [name for name, param in named if not param.is_contiguous()]
    if names:
        warnings.warn(
            f"{len(names)} parameters ({names[0]!r} first) are not contiguous; sharded, they are: values and shapes "
            "are the same, strides are not.",
            stacklevel=5,
        )


# ---- layers that are added later


_known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_listening: list[Any] = []


def watch(model: nn.Module) -> None:
    """The model is sharded from now on."""
    if not _listening:
        _listening.append(torch_module.register_module_parameter_registration_hook(_parameter_added))
        _listening.append(torch_module.register_module_module_registration_hook(_module_added))
    for module in model.modules():
        _known.add(module)


def ignore(model: nn.Module) -> None:
    """It is a plain one, for a while or for good."""
    for module in model.modules():
        _known.discard(module)


def _parameter_added(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if module in _known and param is not None and not is_sharded(param):
        _refuse(f"Parameter {name!r}", module)


def _module_added(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if module in _known and child is not None and any(not is_sharded(param) for param in child.parameters()):
        _refuse(f"Module {name!r}", module)


def _refuse(what: str, module: nn.Module) -> None:
    raise RuntimeError(
        f"{what} was added to a {type(module).__name__} of a sharded model, so its gradients would not be averaged "
        "over ranks; call zeor.unshard, add it, and zeor.shard again."
    )
