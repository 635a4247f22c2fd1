"""Models and optimizers that another library, or torch.compile, has wrapped or sharded already.

What zeor.shard cannot take gets one sentence that says what to hand over instead. Nothing is imported for that: a
class is known by its name. What works under DistributedDataParallel is in plain_grads.py.
`torch.compile(module)` gives an OptimizedModule around the module, which adds `_orig_mod.` to every name below it. zeor
works on the module inside: a wrapped child is put back in its place, compiled there as by `module.compile()`, so that
names in state dicts and checkpoints are the plain ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.memory.placed import is_placed

# By name, so that nothing is imported that the user did not: (module prefix, class) -> what to do.
_MODULES = {
    ("torch.nn.parallel", "DistributedDataParallel"): (
        "is wrapped in DistributedDataParallel, which would reduce every gradient a second time; give zeor.shard the "
        "module that was never wrapped (stage=0 does what DDP does)"
    ),
    ("torch.nn.parallel", "DataParallel"): (
        "is wrapped in DataParallel; start one process per device with torchrun or zeor.launch and give zeor.shard the "
        "module itself"
    ),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): (
        "is sharded by FullyShardedDataParallel already; give zeor.shard the module before it is wrapped"
    ),
    ("torch.distributed.fsdp", "FSDPModule"): (
        "is sharded by fully_shard already; give zeor.shard the module before that"
    ),
    ("torch._dynamo.eval_frame", "OptimizedModule"): (
        "is wrapped by torch.compile; give zeor.shard the model itself, and compile it by model.compile() or, better, "
        "its blocks by block.compile()"
    ),
    ("deepspeed", "DeepSpeedEngine"): (
        "is a DeepSpeed engine; give zeor.shard the module that deepspeed.initialize was given, without DeepSpeed"
    ),
}
_OPTIMIZERS = {
    ("accelerate", "AcceleratedOptimizer"): (
        "was prepared by Accelerate; call zeor.shard(model, optimizer) on what you made yourself and let "
        "accelerator.prepare have the data loaders alone"
    ),
    ("deepspeed", ""): "belongs to DeepSpeed; give zeor.shard a torch optimizer of your own",
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"): (
        "is sharded already; give zeor.shard the optimizer that it was made of, such as torch.optim.AdamW"
    ),
}


def refuse_wrapped(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """TypeError where another library has taken the model or an optimizer."""
    for name, module in model.named_modules():
        what = _found(module, _MODULES)
        if what:
            raise TypeError(f"{f'Module {name!r}' if name else 'The model'} {what}.")
    _refuse_partitioned(model.named_parameters())
    for optimizer in optimizers:
        what = _found(optimizer, _OPTIMIZERS)
        if what:
            raise TypeError(f"The optimizer ({type(optimizer).__name__}) {what}.")


def refuse_sharded(named: Iterable[tuple[str, Tensor]]) -> None:
    """TypeError where a parameter is itself a part of something: for optimizers that see no model."""
    given = list(named)
    for name, param in given:
        if is_placed(param):
            raise TypeError(
                f"Parameter {name!r} is a DTensor, sharded already by fully_shard or tensor parallelism, which an "
                "optimizer alone cannot take further; give the model: zeor.shard(model, optimizer, mesh=mesh['dp'])."
            )
    _refuse_partitioned(given)


def _refuse_partitioned(named: Iterable[tuple[str, Tensor]]) -> None:
    for name, param in named:
        if hasattr(param, "ds_id"):
            raise TypeError(
                f"Parameter {name!r} was taken apart by deepspeed.zero.Init; build the model without it, on the meta "
                "device if it does not fit, then zeor.shard."
            )


def _found(thing: Any, table: dict[tuple[str, str], str]) -> str:
    for base in type(thing).__mro__:
        for (prefix, name), what in table.items():
            if f"{base.__module__}.".startswith(f"{prefix}.") and name in ("", base.__name__):
                return what
    return ""


# ---- torch.compile


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
