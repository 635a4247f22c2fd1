"""The kernels there are, and which of them updates an optimizer's groups.

A kernel is a file of its own (protocol.py says what it must tell) and one line in KERNELS. Where none runs, the
optimizer's own step does; it is what the kernels are tested against.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.optim.kernels.adam import AdamKernel
from zeor.optim.kernels.protocol import GRAD_DTYPES, Kernel
from zeor.optim.kernels.sgd import SGDKernel, SGDRun, SGDSettings, sgd_pass

KERNELS: tuple[Kernel, ...] = (
    AdamKernel(),
    SGDKernel(),
)


def kernel_of(optimizer: Optimizer) -> Kernel | None:
    """The one that knows this class of optimizers."""
    kind = _stock_class(optimizer)
    return next((kernel for kernel in KERNELS if kind in kernel.classes), None)


def _stock_class(optimizer: Optimizer) -> type[Optimizer]:
    return getattr(optimizer, "stock_class", type(optimizer))  # a drop-in is its base class, sharded


def supports(optimizer: Optimizer, group: dict[str, Any], settings_only: bool = False) -> str | None:
    """None where this group of this optimizer can be updated by a kernel, else the reason in words. `settings_only`:
    its parameters were looked at before; there may be thousands, and a step asks often."""
    kernel = kernel_of(optimizer)
    if kernel is None:
        *names, last = (kind.__name__ for each in KERNELS for kind in each.classes)
        known = f"torch.optim.{', '.join(names)} or {last}"
        return f"{_stock_class(optimizer).__name__} is not exactly {known}: it may have its own step"
    reason = kernel.refuses(group)
    if reason is not None:
        return reason
    if group.get("differentiable"):
        return "differentiable=True asks autograd to record the step"
    if isinstance(group["lr"], Tensor) and group["lr"].requires_grad:
        return "lr requires grad"
    for name in kernel.numbers:
        value = group.get(name)
        if any(isinstance(v, Tensor) for v in (value if isinstance(value, (tuple, list)) else (value,))):
            return f"{name} is a tensor (only lr may be one)"
    for parameter in () if settings_only else group["params"]:
        if parameter.dtype not in GRAD_DTYPES:
            return f"a parameter is {parameter.dtype}; the master of a pass is torch.float32"
    return None


def why_not(optimizer: Optimizer, device: torch.device, asked: str) -> str | None:
    """Why no kernel runs for this optimizer, or None where one does. `asked`: the plan's kernel=."""
    if asked == "stock":
        return "kernel='stock' was asked for"
    reason = unavailable_reason(device)
    for group in optimizer.param_groups:
        reason = reason or supports(optimizer, group)
    return reason


def kernel_for(optimizer: Optimizer, device: torch.device, asked: str, format: str = "exact") -> Kernel | None:
    """The kernel that does this step over moments in this format; none while GradScaler hands its scale to the stock
    step."""
    kernel = kernel_of(optimizer)
    if kernel is None or asked == "stock" or getattr(optimizer, "found_inf", None) is not None:
        return None
    if unavailable_reason(device) is not None or format not in kernel.formats:
        return None
    return None if any(supports(optimizer, group, True) for group in optimizer.param_groups) else kernel


@functools.cache
def unavailable_reason(device: torch.device) -> str | None:
    """None where the passes run on this device, else why not. The first call makes a trial launch."""
    # Triton also runs on other kinds of device; the passes were only ever tried on this one.
    if device.type != "cuda":
        return f"zeor's one-pass update needs a CUDA device, not {device.type}"
    if not torch.accelerator.is_available():
        return "there is no accelerator on this machine"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    try:
        # Triton builds a launcher with the host's C compiler: where there is none, only a launch shows it.
        probe = torch.zeros(16, device=device)
        sgd_pass(SGDRun(probe, probe.clone()), SGDSettings(lr=0.0))
    except Exception as error:  # whatever a compiler may throw; the reason is kept, not lost
        return f"a trial launch failed: {type(error).__name__}: {error}"
    return None
