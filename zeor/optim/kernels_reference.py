"""The passes of `kernels.py` in plain torch: what they mean, and what the kernels are tested against.

Each is torch.optim's single-tensor code for one run, with the gradient's scale before it and the cast to
compute after it. It works on any device, but makes temporaries and, on a GPU, waits for `found_inf`, `step`,
`first` and lr when they are tensors there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeor.memory.formats import cast_into
from zeor.optim.kernels import AdamRun, AdamSettings, SGDRun, SGDSettings


@torch.no_grad()
def adam_pass_reference(
    run: AdamRun,
    settings: AdamSettings,
    step: float | Tensor,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """See `kernels.adam_pass`."""
    if found_inf is not None and bool(found_inf != 0):
        return
    lr, step, (beta1, beta2) = float(settings.lr), float(step), settings.betas
    grad = _read_gradient(run.grad, scale, settings.maximize)
    if settings.weight_decay != 0:
        if settings.decoupled_weight_decay:
            run.master.mul_(1 - lr * settings.weight_decay)
        else:
            grad = grad.add(run.master, alpha=settings.weight_decay)
    run.exp_avg.lerp_(grad, 1 - beta1)
    run.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denom = (run.exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(settings.eps)
    run.master.addcdiv_(run.exp_avg, denom, value=-lr / (1 - beta1**step))
    if run.compute is not None:
        cast_into(run.compute, run.master)


@torch.no_grad()
def sgd_pass_reference(
    run: SGDRun,
    settings: SGDSettings,
    first: bool | Tensor = False,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """See `kernels.sgd_pass`."""
    if found_inf is not None and bool(found_inf != 0):
        return
    grad = _read_gradient(run.grad, scale, settings.maximize)
    if settings.weight_decay != 0:
        grad = grad.add(run.master, alpha=settings.weight_decay)
    if run.momentum_buffer is not None:
        if bool(first):
            run.momentum_buffer.copy_(grad)
        else:
            run.momentum_buffer.mul_(settings.momentum).add_(grad, alpha=1 - settings.dampening)
        if settings.nesterov:
            grad = grad.add(run.momentum_buffer, alpha=settings.momentum)
        else:
            grad = run.momentum_buffer
    run.master.add_(grad, alpha=-float(settings.lr))
    if run.compute is not None:
        cast_into(run.compute, run.master)


def _read_gradient(grad: Tensor, scale: Tensor | None, maximize: bool) -> Tensor:
    grad = grad.to(torch.float32)
    if scale is not None:
        grad = grad * scale
    return -grad if maximize else grad
