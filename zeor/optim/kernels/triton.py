"""The Triton kernels behind adam.py and sgd.py: one pass over one contiguous run of elements.

Only this module and small.py import Triton, and only adam.py and sgd.py import them, inside their functions. A kernel
is given flat pointers and numbers; a tensor that is absent is None, which is a compile-time constant here.
See Note [rounding is written out] and Note [full blocks and the tail].
"""

import triton
import triton.language as tl

# Note [rounding is written out]
# The kernels are launched with enable_fp_fusion=False and say tl.fma where nvcc contracts a multiply and an
# add inside one of torch's own kernels. Left to the compiler, the contraction could differ between the full
# blocks and the tail, and an element's result would depend on where its slice was cut. Division and square
# root are the correctly rounded ones for the same reason; the pass is bound by memory and they are free.

# Note [full blocks and the tail]
# A mask `offset < n` can be vectorised only where n is a multiple of the vector. So that every n gets 16-byte
# loads, all blocks but the last take a branch (uniform in the block) without a mask. Only pointers aligned to
# 16 bytes get them, however: a run that starts in mid-vector is right but slow.


@triton.jit
def _round_to_compute(master, compute_dtype: tl.constexpr):
    """The cast of zeor.memory.formats: for bf16 ties away from zero and one NaN, else the plain cast."""
    if compute_dtype == tl.bfloat16:
        bits = master.to(tl.int32, bitcast=True)
        rounded = (bits + 0x8000) >> 16
        rounded = tl.where(master != master, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return master.to(compute_dtype)


@triton.jit
def read_master(master_ptr, compute_ptr, remainder_ptr, mask):
    """The fp32 master, put together where it is split. See Note [the split master] in zeor.memory.formats."""
    if remainder_ptr is None:
        return tl.load(master_ptr, mask=mask)
    else:
        compute = tl.load(compute_ptr, mask=mask)
        remainder = tl.load(remainder_ptr, mask=mask)
        bits = (compute.to(tl.int16, bitcast=True).to(tl.int32) << 16) + remainder.to(tl.int32)
        joined = bits.to(tl.float32, bitcast=True)
        return tl.where(joined != joined, compute.to(tl.float32), joined)  # any compute fits any remainder


@triton.jit
def write_master(master, master_ptr, compute_ptr, remainder_ptr, mask):
    """The master, or its remainder where it is split; then compute."""
    if remainder_ptr is None:
        tl.store(master_ptr, master, mask=mask)
    else:
        lower = master.to(tl.int32, bitcast=True).to(tl.int16)  # truncates: the lower half is what stays
        lower = tl.where(master != master, 0, lower).to(tl.int16)
        tl.store(remainder_ptr, lower, mask=mask)
    if compute_ptr is not None:
        tl.store(compute_ptr, _round_to_compute(master, compute_ptr.dtype.element_ty), mask=mask)


@triton.jit
def read_gradient(grad_ptr, mask, scale, MAXIMIZE: tl.constexpr):
    grad = tl.load(grad_ptr, mask=mask).to(tl.float32)
    if scale is not None:
        grad = grad * scale
    if MAXIMIZE:
        grad = -grad
    return grad


@triton.jit
def _bias_correction(step, log2_beta_high, log2_beta_low):
    """1 - beta ** step in fp64, from log2(beta) in two fp32 parts (kernel arguments are fp32 at most).

    In fp32 the difference would lose all but four digits at beta 0.999 and a small step.
    """
    log2_beta = tl.cast(log2_beta_high, tl.float64) + tl.cast(log2_beta_low, tl.float64)
    return 1.0 - tl.exp2(log2_beta * step)


@triton.jit
def adam_numbers(
    lr_ptr,
    step_ptr,
    lr,
    decay,
    weight_decay,
    log2_beta1_high,
    log2_beta1_low,
    log2_beta2_high,
    log2_beta2_low,
    bias_correction1,
    bias_correction2_sqrt,
    step_size,
):
    """(decay, bias_correction2_sqrt, step_size); what the host could not know is computed in fp64, once per block."""
    if step_ptr is not None:
        step = tl.load(step_ptr).to(tl.float64)
        bias_correction1 = _bias_correction(step, log2_beta1_high, log2_beta1_low)
        bias_correction2 = _bias_correction(step, log2_beta2_high, log2_beta2_low)
        bias_correction2_sqrt = tl.sqrt_rn(bias_correction2.to(tl.float32))
    if lr_ptr is not None:
        lr = tl.load(lr_ptr)
        decay = (1.0 - tl.cast(lr, tl.float64) * weight_decay).to(tl.float32)
    if step_ptr is not None or lr_ptr is not None:
        step_size = (tl.cast(lr, tl.float64) / bias_correction1).to(tl.float32)
    return decay, bias_correction2_sqrt, step_size


@triton.jit
def adam_moments(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    decay,
    weight_decay,
    lerp_weight,
    beta2,
    one_minus_beta2,
    DECAY: tl.constexpr,
    LERP_SMALL: tl.constexpr,
):
    """(master after decay, exp_avg, exp_avg_sq): the lines of torch.optim.adam._single_tensor_adam, in their order."""
    if DECAY == "decoupled":
        master = master * decay
    elif DECAY == "coupled":
        grad = tl.fma(master, weight_decay, grad)

    # torch's lerp has two forms; the second returns `grad` itself when the weight is 1.
    if LERP_SMALL:
        exp_avg = tl.fma(grad - exp_avg, lerp_weight, exp_avg)
    else:
        exp_avg = tl.fma(exp_avg - grad, 1.0 - lerp_weight, grad)
    exp_avg_sq = tl.fma(one_minus_beta2 * grad, grad, exp_avg_sq * beta2)
    return master, exp_avg, exp_avg_sq


@triton.jit
def _adam_block(
    master_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compute_ptr,
    remainder_ptr,
    mask,
    scale,
    decay,
    weight_decay,
    lerp_weight,
    beta2,
    one_minus_beta2,
    bias_correction2_sqrt,
    eps,
    step_size,
    DECAY: tl.constexpr,
    LERP_SMALL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    grad = read_gradient(grad_ptr, mask, scale, MAXIMIZE)
    master = read_master(master_ptr, compute_ptr, remainder_ptr, mask)
    exp_avg = tl.load(exp_avg_ptr, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr, mask=mask)

    master, exp_avg, exp_avg_sq = adam_moments(
        master, grad, exp_avg, exp_avg_sq, decay, weight_decay, lerp_weight, beta2, one_minus_beta2, DECAY, LERP_SMALL
    )
    denom = tl.div_rn(tl.sqrt_rn(exp_avg_sq), bias_correction2_sqrt) + eps
    master = tl.fma(tl.div_rn(exp_avg, denom), -step_size, master)

    write_master(master, master_ptr, compute_ptr, remainder_ptr, mask)
    tl.store(exp_avg_ptr, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr, exp_avg_sq, mask=mask)


@triton.jit(do_not_specialize=["n"])
def adam_kernel(
    master_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compute_ptr,
    remainder_ptr,
    n,
    scale_ptr,
    found_inf_ptr,
    lr_ptr,
    step_ptr,
    lr,
    decay,
    weight_decay,
    lerp_weight,
    beta2,
    one_minus_beta2,
    log2_beta1_high,
    log2_beta1_low,
    log2_beta2_high,
    log2_beta2_low,
    bias_correction1,
    bias_correction2_sqrt,
    eps,
    step_size,
    DECAY: tl.constexpr,
    LERP_SMALL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    if found_inf_ptr is not None:
        n = tl.where(tl.load(found_inf_ptr) == 0.0, n, 0)  # no element left: nothing is read or written

    decay, bias_correction2_sqrt, step_size = adam_numbers(
        lr_ptr, step_ptr, lr, decay, weight_decay, log2_beta1_high, log2_beta1_low, log2_beta2_high, log2_beta2_low,
        bias_correction1, bias_correction2_sqrt, step_size,
    )  # fmt: skip

    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a run may be longer than 2**31
    offsets = tl.arange(0, BLOCK)
    if master_ptr is not None:
        master_ptr += start + offsets
    grad_ptr += start + offsets
    exp_avg_ptr += start + offsets
    exp_avg_sq_ptr += start + offsets
    if compute_ptr is not None:
        compute_ptr += start + offsets
    if remainder_ptr is not None:
        remainder_ptr += start + offsets
    if start + BLOCK <= n:
        _adam_block(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, None, scale, decay,
            weight_decay, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
            DECAY, LERP_SMALL, MAXIMIZE,
        )  # fmt: skip
    else:
        _adam_block(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, start + offsets < n,
            scale, decay, weight_decay, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps,
            step_size, DECAY, LERP_SMALL, MAXIMIZE,
        )  # fmt: skip


@triton.jit
def _sgd_block(
    master_ptr,
    grad_ptr,
    momentum_ptr,
    compute_ptr,
    remainder_ptr,
    mask,
    scale,
    first,
    lr,
    weight_decay,
    momentum,
    one_minus_dampening,
    WEIGHT_DECAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The lines of torch.optim.sgd._single_tensor_sgd, in their order."""
    grad = read_gradient(grad_ptr, mask, scale, MAXIMIZE)
    master = read_master(master_ptr, compute_ptr, remainder_ptr, mask)

    if WEIGHT_DECAY:
        grad = tl.fma(master, weight_decay, grad)
    if momentum_ptr is not None:
        if FIRST:
            buffer = grad  # what the buffer held is not read
        else:
            buffer = tl.load(momentum_ptr, mask=mask)
            buffer = tl.fma(grad, one_minus_dampening, buffer * momentum)
            if first is not None:
                buffer = tl.where(first, grad, buffer)
        tl.store(momentum_ptr, buffer, mask=mask)
        if NESTEROV:
            grad = tl.fma(buffer, momentum, grad)
        else:
            grad = buffer
    master = tl.fma(grad, -lr, master)

    write_master(master, master_ptr, compute_ptr, remainder_ptr, mask)


@triton.jit(do_not_specialize=["n"])
def sgd_kernel(
    master_ptr,
    grad_ptr,
    momentum_ptr,
    compute_ptr,
    remainder_ptr,
    n,
    scale_ptr,
    found_inf_ptr,
    lr_ptr,
    first_ptr,
    lr,
    weight_decay,
    momentum,
    one_minus_dampening,
    WEIGHT_DECAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    if found_inf_ptr is not None:
        n = tl.where(tl.load(found_inf_ptr) == 0.0, n, 0)  # no element left: nothing is read or written
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    first = None
    if first_ptr is not None:
        first = tl.load(first_ptr) != 0

    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a run may be longer than 2**31
    offsets = tl.arange(0, BLOCK)
    if master_ptr is not None:
        master_ptr += start + offsets
    grad_ptr += start + offsets
    if momentum_ptr is not None:
        momentum_ptr += start + offsets
    if compute_ptr is not None:
        compute_ptr += start + offsets
    if remainder_ptr is not None:
        remainder_ptr += start + offsets
    if start + BLOCK <= n:
        _sgd_block(
            master_ptr, grad_ptr, momentum_ptr, compute_ptr, remainder_ptr, None, scale, first, lr,
            weight_decay, momentum, one_minus_dampening, WEIGHT_DECAY, NESTEROV, MAXIMIZE, FIRST,
        )  # fmt: skip
    else:
        _sgd_block(
            master_ptr, grad_ptr, momentum_ptr, compute_ptr, remainder_ptr, start + offsets < n, scale, first,
            lr, weight_decay, momentum, one_minus_dampening, WEIGHT_DECAY, NESTEROV, MAXIMIZE, FIRST,
        )  # fmt: skip
