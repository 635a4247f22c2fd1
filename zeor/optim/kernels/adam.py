"""One-pass updates: gradient and clip factor in; master, moments and compute out; each byte moved once.

With a bf16 gradient and a bf16 compute, Adam reads and writes 28 bytes per parameter:
grad 2, master 4 + 4, exp_avg 4 + 4, exp_avg_sq 4 + 4, compute 2. With a split master it is 26 (compute 2 + 2
and remainder 2 + 2 in place of master and compute), and the bits are the same. Adam's moments may rest in bf16 (18
bytes with a split master) or 8-bit codes (14.06): see zeor.memory.small. A pass covers one contiguous run of elements
in one launch and never waits for the device. It follows torch.optim's single-tensor code line by line and equals it to
rounding. `kernels_reference.py` says the same in plain torch, `kernels_triton.py` and `kernels_small.py` hold
the kernels: Triton is imported, and the device touched, only when a function here is called.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zeor.memory.small import BLOCK_NUMEL, scale_count

GRAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMPUTE_DTYPES = (torch.bfloat16, torch.float16)
SMALL_DTYPES = (torch.bfloat16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class AdamSettings:
    """What a group of torch.optim.Adam or AdamW says about its update."""

    lr: float | Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False

    @classmethod
    def from_group(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> AdamSettings:
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        return cls(group["lr"], group["betas"], group["eps"], group["weight_decay"], decoupled, group["maximize"])


@dataclass(frozen=True)
class SGDSettings:
    """What a group of torch.optim.SGD says about its update."""

    lr: float | Tensor
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @classmethod
    def from_group(cls, group: dict[str, Any]) -> SGDSettings:
        return cls(
            group["lr"],
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
        )


class AdamRun(NamedTuple):
    """Flat tensors of one length. `compute` is None where the master itself is what forward reads.

    Where the master is split (zeor.memory.formats), `master` is None: `compute` (bf16) and `remainder` (int16)
    are read in its place, and both are written.
    A moment is fp32, bf16 or, with its scales beside it, 8-bit codes (int8 for exp_avg, uint8 for exp_avg_sq) whose
    blocks are counted from the start of the run: it is a segment, or a part of one that starts with a block.
    """

    master: Tensor | None
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compute: Tensor | None = None
    remainder: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None

    @property
    def small(self) -> bool:
        """Whether a moment rests in a small format."""
        return self.exp_avg.dtype in SMALL_DTYPES or self.exp_avg_sq.dtype in SMALL_DTYPES


class SGDRun(NamedTuple):
    """As AdamRun. `momentum_buffer` is None where momentum is zero."""

    master: Tensor | None
    grad: Tensor
    momentum_buffer: Tensor | None = None
    compute: Tensor | None = None
    remainder: Tensor | None = None


@dataclass(frozen=True)
class Launch:
    """How a run is cut into blocks. 4 elements per thread are one 16-byte vector of fp32.

    With 8 (one vector of bf16) Triton carries the fp32 stores through shared memory and doubles the registers
    (seen in what 3.6 and 3.9 make for Hopper).
    """

    block_numel: int = 1024
    num_warps: int = 8


DEFAULT_LAUNCH = Launch()
# 8 elements per thread: a warp has a block of codes to itself, and 16-bit tensors move in full vectors. Only for runs
# without an fp32 tensor, for the reason that Launch gives.
NARROW_LAUNCH = Launch(1024, 4)


def available(device: torch.device | str | int) -> bool:
    """Whether the passes can run on this device."""
    return unavailable_reason(torch.device(device)) is None


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


def supports(optimizer: torch.optim.Optimizer, group: dict[str, Any], settings_only: bool = False) -> str | None:
    """None where this group of this optimizer can be updated by a pass, else the reason in words. `settings_only`: its
    parameters were looked at before; there may be thousands, and a step asks often."""
    kind = getattr(optimizer, "stock_class", type(optimizer))  # a drop-in is its base class, sharded
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return f"{kind.__name__} is not exactly torch.optim.Adam, AdamW or SGD: it may have its own step"
    if group.get("amsgrad"):
        return "amsgrad keeps a third moment"
    if group.get("differentiable"):
        return "differentiable=True asks autograd to record the step"
    if isinstance(group["lr"], Tensor) and group["lr"].requires_grad:
        return "lr requires grad"
    for name in ("betas", "eps", "weight_decay", "momentum", "dampening"):
        value = group.get(name)
        if any(isinstance(v, Tensor) for v in (value if isinstance(value, (tuple, list)) else (value,))):
            return f"{name} is a tensor (only lr may be one)"
    for parameter in () if settings_only else group["params"]:
        if parameter.dtype not in GRAD_DTYPES:
            return f"a parameter is {parameter.dtype}; the master of a pass is torch.float32"
    return None


def adam_pass(
    run: AdamRun,
    settings: AdamSettings,
    step: float | Tensor,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """One update of Adam or AdamW over one run.

    `step` counts this update, from 1. `scale` (0-d) is multiplied into the gradient in fp32. Where
    `found_inf` (0-d) is not zero nothing is written, and the caller must not let `step` advance. A `step`
    or lr that is a tensor on the run's device is read by the kernel, one on the host is read here.
    """
    numel, device = _check_run(run, (scale, found_inf))
    if numel == 0:
        return
    step_tensor, step_value = _split_scalar(step, device)
    lr_tensor, lr_value = _split_scalar(settings.lr, device)
    scalars = _adam_scalars(settings, lr_value, step_value)
    kernel, tensors = _adam_kernel(run)
    launch = launch or _launch_of(run)
    with _launching_on(device):
        kernel[(math.ceil(numel / launch.block_numel),)](
            *tensors,
            numel,
            scale,
            found_inf,
            lr_tensor,
            step_tensor,
            *scalars,
            DECAY=_decay_kind(settings),
            LERP_SMALL=1 - settings.betas[0] < 0.5,
            MAXIMIZE=settings.maximize,
            BLOCK=launch.block_numel,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )


def sgd_pass(
    run: SGDRun,
    settings: SGDSettings,
    first: bool | Tensor = False,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    launch: Launch = DEFAULT_LAUNCH,
) -> None:
    """One update of SGD over one run; `scale` and `found_inf` as in `adam_pass`.

    `first` says that the momentum buffer holds nothing yet: it becomes the gradient, undampened. It may be a
    0-d tensor on the device, for a caller that cannot know whether found_inf skipped the first step.
    """
    from zeor.optim.kernels.triton import sgd_kernel

    numel, device = _check_run(run, (scale, found_inf))
    if (run.momentum_buffer is None) != (settings.momentum == 0):
        raise ValueError(f"momentum_buffer must be None just where momentum is 0; it is {settings.momentum}")
    if numel == 0:
        return
    first_tensor, first_value = _split_scalar(first, device)
    lr_tensor, lr_value = _split_scalar(settings.lr, device)
    with _launching_on(device):
        sgd_kernel[(math.ceil(numel / launch.block_numel),)](
            *run,
            numel,
            scale,
            found_inf,
            lr_tensor,
            first_tensor,
            lr_value,
            float(settings.weight_decay),
            float(settings.momentum),
            1.0 - settings.dampening,
            WEIGHT_DECAY=settings.weight_decay != 0,
            NESTEROV=settings.nesterov,
            MAXIMIZE=settings.maximize,
            FIRST=first_tensor is None and bool(first_value),
            BLOCK=launch.block_numel,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )


def _adam_kernel(run: AdamRun) -> tuple[Any, tuple[Tensor | None, ...]]:
    """(the kernel for the formats of this run's moments, the tensors that it takes)."""
    if run.small:
        from zeor.optim.kernels.small import adam_small_kernel

        return adam_small_kernel, run
    from zeor.optim.kernels.triton import adam_kernel

    return adam_kernel, run[:6]  # all but the scales


def _launch_of(run: AdamRun) -> Launch:
    wide = (run.master, run.grad, run.exp_avg, run.exp_avg_sq)
    return DEFAULT_LAUNCH if any(t is not None and t.dtype == torch.float32 for t in wide) else NARROW_LAUNCH


class _AdamScalars(NamedTuple):
    """The kernel's numbers, in its order. The host computes them in fp64; each is rounded to fp32 once."""

    lr: float
    decay: float
    weight_decay: float
    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    log2_beta1_high: float
    log2_beta1_low: float
    log2_beta2_high: float
    log2_beta2_low: float
    bias_correction1: float
    bias_correction2_sqrt: float
    eps: float
    step_size: float


def _adam_scalars(settings: AdamSettings, lr: float, step: float) -> _AdamScalars:
    """Where lr or step is on the device, what is made of it here is idle: the kernel makes its own."""
    beta1, beta2 = map(float, settings.betas)  # an int would be specialised upon, and compile anew
    bias_correction1 = 1 - beta1**step
    return _AdamScalars(
        lr,
        1 - lr * settings.weight_decay,
        float(settings.weight_decay),
        1 - beta1,
        beta2,
        1 - beta2,
        *_log2_in_two_parts(beta1),
        *_log2_in_two_parts(beta2),
        bias_correction1,
        math.sqrt(1 - beta2**step),
        float(settings.eps),
        lr / bias_correction1,
    )


def _log2_in_two_parts(beta: float) -> tuple[float, float]:
    """log2(beta) as a sum of two fp32 numbers: 48 bits in place of the 24 of one kernel argument."""
    if beta == 0.0:
        return -math.inf, 0.0
    exact = math.log2(beta)
    high = float(np.float32(exact))
    return high, float(np.float32(exact - high))


def _decay_kind(settings: AdamSettings) -> str:
    if settings.weight_decay == 0:
        return "none"
    return "decoupled" if settings.decoupled_weight_decay else "coupled"


def _split_scalar(value: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
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


def _check_run(run: AdamRun | SGDRun, controls: tuple[Tensor | None, ...]) -> tuple[int, torch.device]:
    """(numel, device) of a run whose tensors fit each other and the kernels."""
    if (run.master is None) == (run.remainder is None):
        raise ValueError("a run takes either a master or, with compute, the remainder of a split one")
    weights = run.compute if run.master is None else run.master
    if weights is None:
        raise ValueError("a remainder is half a master: the run needs compute as well")
    numel, device = weights.numel(), weights.device
    compute_dtypes = COMPUTE_DTYPES if run.remainder is None else (torch.bfloat16,)
    dtypes = {
        "grad": GRAD_DTYPES,
        "compute": compute_dtypes,
        "remainder": (torch.int16,),
        "exp_avg": (torch.float32, torch.bfloat16, torch.int8),
        "exp_avg_sq": (torch.float32, torch.bfloat16, torch.uint8),
    }
    for name, tensor in run._asdict().items():
        if tensor is None:
            continue
        allowed = dtypes.get(name, (torch.float32,))
        if tensor.dtype not in allowed:
            raise ValueError(f"{name} is {tensor.dtype}, but a pass takes {' or '.join(map(str, allowed))}")
        if name.endswith("_scale"):
            continue
        if tensor.numel() != numel or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} (shape {tuple(tensor.shape)}, {tensor.device}) must be contiguous, with "
                f"the master's {numel} elements on {device}"
            )
    if isinstance(run, AdamRun):
        _check_scales("exp_avg", run.exp_avg, run.exp_avg_scale)
        _check_scales("exp_avg_sq", run.exp_avg_sq, run.exp_avg_sq_scale)
    for control in controls:
        if control is not None and (control.numel() != 1 or control.device != device):
            raise ValueError(f"scale and found_inf must be 0-d tensors on {device}, not {control}")
    return numel, device


def _check_scales(name: str, moment: Tensor, scales: Tensor | None) -> None:
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


def _launching_on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whichever device its arguments are on."""
    if device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)
