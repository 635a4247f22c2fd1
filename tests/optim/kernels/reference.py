"""The passes of zeor.optim.kernels in plain torch: what they mean, and what the kernels are tested against.

Each is torch.optim's single-tensor code for one run, with the gradient's scale before it and the cast to
compute after it; a split master is put together first and taken apart at the end, moments in a small format are
decoded first and encoded at the end. It works on any device, but makes temporaries and, on a GPU, waits for
`found_inf`, `step`, `first` and lr when they are tensors there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeor.memory.formats import cast_into, join_into, split_into
from zeor.memory.small import decode_into, encode_into
from zeor.optim.kernels.adam import AdamRun, AdamSettings
from zeor.optim.kernels.sgd import SGDRun, SGDSettings


@torch.no_grad()
def adam_pass_reference(
    run: AdamRun,
    settings: AdamSettings,
    step: float | Tensor,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """See `adam.adam_pass`."""
    if found_inf is not None and bool(found_inf != 0):
        return
    lr, step, (beta1, beta2) = float(settings.lr), float(step), settings.betas
    master = _read_master(run)
    grad = _read_gradient(run.grad, scale, settings.maximize)
    if settings.weight_decay != 0:
        if settings.decoupled_weight_decay:
            master.mul_(1 - lr * settings.weight_decay)
        else:
            grad = grad.add(master, alpha=settings.weight_decay)
    exp_avg = _read_moment(run.exp_avg, run.exp_avg_scale)
    exp_avg_sq = _read_moment(run.exp_avg_sq, run.exp_avg_sq_scale)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denom = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(settings.eps)
    master.addcdiv_(exp_avg, denom, value=-lr / (1 - beta1**step))
    _write_master(run, master)
    if run.small:
        encode_into(run.exp_avg, run.exp_avg_scale, exp_avg, signed=True)
        encode_into(run.exp_avg_sq, run.exp_avg_sq_scale, exp_avg_sq, signed=False)


@torch.no_grad()
def sgd_pass_reference(
    run: SGDRun,
    settings: SGDSettings,
    first: bool | Tensor = False,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """See `sgd.sgd_pass`."""
    assert (run.momentum_buffer is None) == (settings.momentum == 0), "the kernel refuses that"
    if found_inf is not None and bool(found_inf != 0):
        return
    master = _read_master(run)
    grad = _read_gradient(run.grad, scale, settings.maximize)
    if settings.weight_decay != 0:
        grad = grad.add(master, alpha=settings.weight_decay)
    if run.momentum_buffer is not None:
        if bool(first):
            run.momentum_buffer.copy_(grad)
        else:
            run.momentum_buffer.mul_(settings.momentum).add_(grad, alpha=1 - settings.dampening)
        if settings.nesterov:
            grad = grad.add(run.momentum_buffer, alpha=settings.momentum)
        else:
            grad = run.momentum_buffer
    master.add_(grad, alpha=-float(settings.lr))
    _write_master(run, master)


def _read_master(run: AdamRun | SGDRun) -> Tensor:
    """The run's own master, or a temporary one where it is split."""
    if run.master is not None:
        return run.master
    assert run.compute is not None and run.remainder is not None
    master = torch.empty_like(run.compute, dtype=torch.float32)
    join_into(master, run.compute, run.remainder)
    return master


def _write_master(run: AdamRun | SGDRun, master: Tensor) -> None:
    """What follows from the updated master: compute, and the remainder where it is split."""
    if run.compute is None:
        return
    if run.remainder is None:
        cast_into(run.compute, master)
    else:
        split_into(run.compute, run.remainder, master)


def _read_moment(moment: Tensor, scales: Tensor | None) -> Tensor:
    """The run's own moment, or a temporary one where it rests in a small format."""
    if moment.dtype == torch.float32:
        return moment
    values = torch.empty_like(moment, dtype=torch.float32)
    decode_into(values, moment, scales)
    return values


def _read_gradient(grad: Tensor, scale: Tensor | None, maximize: bool) -> Tensor:
    grad = grad.to(torch.float32)
    if scale is not None:
        grad = grad * scale
    return -grad if maximize else grad
