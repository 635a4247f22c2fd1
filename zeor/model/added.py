"""Layers that are added to a model after it was sharded: refused, because no rank would average their gradients.

torch tells of every parameter and module that is registered anywhere; modules of sharded models are known here, weakly.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from zeor.memory.param import is_sharded

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
