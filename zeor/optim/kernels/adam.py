"""Adam and AdamW as one pass over memory.

With a bf16 gradient and a bf16 compute it reads and writes 28 bytes per parameter: grad 2, master 4 + 4, exp_avg 4 + 4,
exp_avg_sq 4 + 4, compute 2. With a split master it is 26 (compute 2 + 2 and remainder 2 + 2 in place of master and
compute), and the bits are the same. The moments may rest in bf16 (18 bytes with a split master) or 8-bit codes (14.06):
see zeor.memory.small. The pass follows torch.optim's single-tensor code line by line and equals it to rounding.
`triton.py` holds the kernel: Triton is imported, and the device touched, only when a function here is called.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.optim.kernels.protocol import DEFAULT_LAUNCH, Launch, LaunchOver, Tensors, check_run, launch_run, split_scalar

MOMENTS = {
    "exp_avg": (torch.float32, torch.bfloat16, torch.int8),
    "exp_avg_sq": (torch.float32, torch.bfloat16, torch.uint8),
}
SMALL_DTYPES = (torch.bfloat16, torch.int8, torch.uint8)

# 8 elements per thread: a warp has a block of codes to itself, and 16-bit tensors move in full vectors. Only for runs
# without an fp32 tensor, for the reason that Launch gives.
NARROW_LAUNCH = Launch(1024, 4)


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


class AdamKernel:
    classes: tuple[type[Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW)
    numbers: tuple[str, ...] = ("betas", "eps", "weight_decay")
    formats: tuple[str, ...] = ("exact", "bf16", "int8")

    def refuses(self, group: dict[str, Any]) -> str | None:
        return "amsgrad keeps a third moment" if group.get("amsgrad") else None

    def moments(self, groups: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        return tuple(MOMENTS)

    def age(self, state: dict[str, Any], begun: Collection[str]) -> int:
        return int(state.setdefault("step", torch.zeros(())))

    def count(self, states: Sequence[dict[str, Any]]) -> None:
        torch._foreach_add_([state["step"] for state in states], 1.0)

    def launcher(self, optimizer: Optimizer, group: dict[str, Any], age: int) -> LaunchOver:
        settings = AdamSettings.from_group(optimizer, group)

        def launch(at: Tensors, scale: Tensor | None) -> None:
            scales = [at.get(f"{name} scales") for name in MOMENTS]
            weights = (at.get("compute"), at.get("remainder"))
            run = AdamRun(at.get("master"), at["grad"], at["exp_avg"], at["exp_avg_sq"], *weights, *scales)
            adam_pass(run, settings, age + 1, scale)

        return launch


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
    numel, device = check_run(run._asdict(), MOMENTS, (scale, found_inf))
    if numel == 0:
        return
    from zeor.optim.kernels.triton import adam_kernel

    step_tensor, step_value = split_scalar(step, device)
    lr_tensor, lr_value = split_scalar(settings.lr, device)
    scalars = _adam_scalars(settings, lr_value, step_value)
    decay = "none" if settings.weight_decay == 0 else "decoupled" if settings.decoupled_weight_decay else "coupled"
    launch_run(
        adam_kernel, launch or _launch_of(run), device,
        (*run, numel, scale, found_inf, lr_tensor, step_tensor, *scalars), numel,
        DECAY=decay, LERP_SMALL=1 - settings.betas[0] < 0.5, MAXIMIZE=settings.maximize, SMALL=run.small,
    )  # fmt: skip


def _launch_of(run: AdamRun) -> Launch:
    wide = (run.master, run.grad, run.exp_avg, run.exp_avg_sq)
    return DEFAULT_LAUNCH if any(t is not None and t.dtype == torch.float32 for t in wide) else NARROW_LAUNCH


def _adam_scalars(settings: AdamSettings, lr: float, step: float) -> tuple[float, ...]:
    """The kernel's numbers, in its order: from lr to step_size. The host computes them in fp64; each is rounded to
    fp32 once. Where lr or step is on the device, what is made of it here is idle: the kernel makes its own."""
    beta1, beta2 = map(float, settings.betas)  # an int would be specialised upon, and compile anew
    bias_correction1 = 1 - beta1**step
    return (
        lr, 1 - lr * settings.weight_decay, float(settings.weight_decay), 1 - beta1, beta2, 1 - beta2,
        *_log2_in_two_parts(beta1), *_log2_in_two_parts(beta2),
        bias_correction1, math.sqrt(1 - beta2**step), float(settings.eps), lr / bias_correction1,
    )  # fmt: skip


def _log2_in_two_parts(beta: float) -> tuple[float, float]:
    """log2(beta) as a sum of two fp32 numbers: 48 bits in place of the 24 of one kernel argument."""
    if beta == 0.0:
        return -math.inf, 0.0
    exact = math.log2(beta)
    high = float(np.float32(exact))
    return high, float(np.float32(exact - high))
