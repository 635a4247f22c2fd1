"""Modules that torch.compile has wrapped: `torch.compile(module)` gives an OptimizedModule around the module.

The wrapper adds `_orig_mod.` to every name below it. zeor works on the module inside: a wrapped child is put back in
its place, compiled there as by `module.compile()`, so that names in state dicts and checkpoints are the plain ones.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def unwrapped(module: Any) -> Any:
    """The module inside, where this is a wrapper of torch.compile."""
    return module._orig_mod if _is_wrapper(module) else module


def compile_in_place(model: nn.Module) -> None:
    """Every wrapped module below this one, compiled in its own place."""
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if _is_wrapper(child) and not _is_wrapper(parent):
                inner = child._orig_mod
                inner._compiled_call_impl = child.dynamo_ctx(inner._call_impl)
                parent._modules[name] = inner


def _is_wrapper(module: Any) -> bool:
    # Where nobody compiled anything the compiler is not imported.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)
