"""What a kernel is: which optimizers and settings it takes, what state it reads and writes, a launch over a chunk.

A kernel updates one contiguous run of elements in one launch and never waits for the device: gradient and clip factor
in; master, moments and compute out; each byte moved once. Beside the protocol this file holds what kernels share: how
a run is cut into blocks, and the checks of the tensors that they are given. registry.py lists the kernels there are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.memory.small import scale_count
from zeor.plan import BLOCK_NUMEL

GRAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMPUTE_DTYPES = (torch.bfloat16, torch.float16)
Tensors = Mapping[str, Tensor]  # of a chunk, by name: grad, master, compute, remainder, moments, "... scales"
LaunchOver = Callable[[Tensors, Tensor | None], None]  # a chunk's tensors, and what its gradient is multiplied by


class Kernel(Protocol):
    classes: tuple[type[Optimizer], ...]  # exactly these: a subclass may have a step of its own
    numbers: tuple[str, ...]  # settings that must be plain numbers; only lr may be a tensor
    formats: tuple[str, ...]  # of moments at rest that it reads and writes

    def refuses(self, group: dict[str, Any]) -> str | None:
        """Why it cannot do what a group asks for, in words."""

    def moments(self, groups: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        """The names of the state that it reads and writes: one value for each element."""

    def age(self, state: dict[str, Any], begun: Collection[str]) -> int:
        """Steps taken so far, as far as the kernel must know. `begun`: the moments that have values."""

    def count(self, states: Sequence[dict[str, Any]]) -> None:
        """One more step is taken of each of these."""

    def launcher(self, optimizer: Optimizer, group: dict[str, Any], age: int) -> LaunchOver:
        """The update of a chunk, for runs of this age and with these settings."""


@dataclass(frozen=True)
class Launch:
    """How a run is cut into blocks. 4 elements per thread are one 16-byte vector of fp32.

    With 8 (one vector of bf16) Triton carries the fp32 stores through shared memory and doubles the registers
    (seen in what 3.6 and 3.9 make for Hopper).
    """

    block_numel: int = 1024
    num_warps: int = 8


DEFAULT_LAUNCH = Launch()


def split_scalar(value: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
    """(the tensor that the kernel reads or None, the number on the host; an idle 1.0 beside a tensor)."""
    if not isinstance(value, Tensor):
        return None, float(value)
    if value.numel() != 1:
        raise ValueError(f"lr, step and first are single numbers, but one has shape {tuple(value.shape)}")
    if value.device == device:
        return value, 1.0
    if value.device.type != "cpu":
        raise ValueError(f"lr, step or first is on {value.device}, but the run is on {device}")
    return None, float(value.item())


def check_run(
    run: Mapping[str, Tensor | None], moments: Mapping[str, Sequence[torch.dtype]], controls: Sequence[Tensor | None]
) -> tuple[int, torch.device]:
    """(numel, device) of a run whose tensors fit each other and the kernels. `moments`: the dtypes they may have."""
    if (run["master"] is None) == (run["remainder"] is None):
        raise ValueError("a run takes either a master or, with compute, the remainder of a split one")
    weights = run["compute"] if run["master"] is None else run["master"]
    if weights is None:
        raise ValueError("a remainder is half a master: the run needs compute as well")
    numel, device = weights.numel(), weights.device
    compute_dtypes = COMPUTE_DTYPES if run["remainder"] is None else (torch.bfloat16,)
    dtypes = {"grad": GRAD_DTYPES, "compute": compute_dtypes, "remainder": (torch.int16,), **moments}
    for name, tensor in run.items():
        if tensor is not None:
            _check_tensor(name, tensor, dtypes.get(name, (torch.float32,)), weights)
    for name in (name for name in moments if f"{name}_scale" in run):
        _check_scales(name, run[name], run[f"{name}_scale"])
    for control in controls:
        if control is not None and (control.numel() != 1 or control.device != device):
            raise ValueError(f"scale and found_inf must be 0-d tensors on {device}, not {control}")
    return numel, device


def _check_tensor(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], weights: Tensor) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, but a pass takes {' or '.join(map(str, allowed))}")
    fits = tensor.numel() == weights.numel() and tensor.device == weights.device and tensor.is_contiguous()
    if not fits and not name.endswith("_scale"):
        raise ValueError(
            f"{name} (shape {tuple(tensor.shape)}, {tensor.device}) must be contiguous, with "
            f"the master's {weights.numel()} elements on {weights.device}"
        )


def _check_scales(name: str, moment: Tensor | None, scales: Tensor | None) -> None:
    assert moment is not None
    count = scale_count(moment.numel()) if moment.dtype in (torch.int8, torch.uint8) else None
    if count == (None if scales is None else scales.numel()) and (
        scales is None or (scales.device == moment.device and scales.is_contiguous())
    ):
        return
    found = "none" if scales is None else f"{scales.numel()} on {scales.device}"
    raise ValueError(
        f"{name}, {moment.numel()} elements of {moment.dtype}, goes with {count or 'no'} contiguous scales "
        f"(one for each {BLOCK_NUMEL} codes) on {moment.device}; the run has {found}"
    )


def launch_run(
    kernel: Any, launch: Launch, device: torch.device, arguments: Sequence[Any], numel: int, **constants: Any
) -> None:
    """One launch over a run. Triton launches on the current device, whichever device its arguments are on."""
    on_cpu = device.type == "cpu"  # Triton's interpreter
    with contextlib.nullcontext() if on_cpu else torch.accelerator.device_index(device.index):
        kernel[(math.ceil(numel / launch.block_numel),)](
            *arguments, **constants, BLOCK=launch.block_numel, num_warps=launch.num_warps, enable_fp_fusion=False
        )
