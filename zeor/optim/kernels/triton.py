"""The Triton kernels behind adam.py and sgd.py: one pass over one contiguous run of elements.

Only this module imports Triton, and only adam.py and sgd.py import it, inside their functions. A kernel
is given flat pointers and numbers; a tensor that is absent is None, which is a compile-time constant here. `at` are
the elements that a program works on, `mask` says which of them there are. See Note [rounding is written out] and Note
[full blocks and the tail].

A moment is fp32, bf16, or 8-bit codes with a fp32 scale for every block (zeor.memory.small says what a code means); its
pointer's type says which. Where one is small a program works on whole blocks, one to a row of its tile, so a run starts
where a block does.
"""

import triton
import triton.language as tl

from zeor.memory import small
from zeor.plan import BLOCK_NUMEL

# Note [rounding is written out]
# The kernels are launched with enable_fp_fusion=False and say tl.fma where nvcc contracts a multiply and an
# add inside one of torch's own kernels. Left to the compiler, the contraction could differ between the full
# blocks and the tail, and an element's result would depend on where its slice was cut. Division and square
# root are the correctly rounded ones for the same reason; the pass is bound by memory and they are free.

# Note [full blocks and the tail]
# A mask `offset < n` can be vectorised only where n is a multiple of the vector. So that every n gets 16-byte
# loads, all blocks but the last take a branch (uniform in the block) without a mask. Only pointers aligned to
# 16 bytes get them, however: a run that starts in mid-vector is right but slow.

# Note [codes of the kernel and of torch]
# The kernel takes the hardware's root for a code, wrong by at most 2**-22 of its value, and its moments equal those
# of plain torch only to rounding. So its codes differ from torch's by at most one, and only where a root lies as near
# as that to the middle between two: about one code in ten thousand. Scales and what is kept (Note [what encoding
# keeps] in zeor.memory.small) are the same. Within one kind of device every run gives the same bits.
# A code is rounded to even by adding 1.5 * 2**23, which leaves it in the low bits: no conversion, and the byte of
# a negative one comes out as two's complement.

ROW = tl.constexpr(BLOCK_NUMEL)
SIGNED_LARGEST = tl.constexpr(float(small.SIGNED_LARGEST))
UNSIGNED_LARGEST = tl.constexpr(float(small.UNSIGNED_LARGEST))
UNSIGNED_LEAST = tl.constexpr(float(small.UNSIGNED_LEAST))
SIGNED_STEP = tl.constexpr(1 / small.SIGNED_LARGEST)
UNSIGNED_STEP = tl.constexpr(1 / small.UNSIGNED_LARGEST)
TINY_SCALE = tl.constexpr(small.TINY_SCALE)
DITHER_MULTIPLIER = tl.constexpr(small.DITHER_MULTIPLIER)
DITHER_WIDTH = tl.constexpr(small.DITHER_WIDTH)
ROUNDING = tl.constexpr(12582912.0)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


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
def read_master(master_ptr, compute_ptr, remainder_ptr, at, mask):
    """The fp32 master, put together where it is split. See Note [the split master] in zeor.memory.formats."""
    if remainder_ptr is None:
        return tl.load(master_ptr + at, mask=mask)
    else:
        compute = tl.load(compute_ptr + at, mask=mask)
        remainder = tl.load(remainder_ptr + at, mask=mask)
        bits = (compute.to(tl.int16, bitcast=True).to(tl.int32) << 16) + remainder.to(tl.int32)
        joined = bits.to(tl.float32, bitcast=True)
        return tl.where(joined != joined, compute.to(tl.float32), joined)  # any compute fits any remainder


@triton.jit
def write_master(master, master_ptr, compute_ptr, remainder_ptr, at, mask):
    """The master, or its remainder where it is split; then compute."""
    if remainder_ptr is None:
        tl.store(master_ptr + at, master, mask=mask)
    else:
        lower = master.to(tl.int32, bitcast=True).to(tl.int16)  # truncates: the lower half is what stays
        lower = tl.where(master != master, 0, lower).to(tl.int16)
        tl.store(remainder_ptr + at, lower, mask=mask)
    if compute_ptr is not None:
        tl.store(compute_ptr + at, _round_to_compute(master, compute_ptr.dtype.element_ty), mask=mask)


@triton.jit
def read_gradient(grad_ptr, at, mask, scale_ptr, MAXIMIZE: tl.constexpr):
    grad = tl.load(grad_ptr + at, mask=mask).to(tl.float32)
    if scale_ptr is not None:
        grad = grad * tl.load(scale_ptr).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    return grad


@triton.jit
def left_to_do(n, found_inf_ptr):
    """n, or no element where an infinity was found: then nothing is read or written."""
    if found_inf_ptr is not None:
        n = tl.where(tl.load(found_inf_ptr) == 0.0, n, 0)
    return n


@triton.jit
def read_moment(ptr, scale_ptr, at, row, mask, row_mask):
    """The fp32 values of a tile. `row`: the number of each row's scale."""
    stored = tl.load(ptr + at, mask=mask)
    if scale_ptr is None:
        return stored.to(tl.float32)
    else:
        scale = tl.load(scale_ptr + row, mask=row_mask)[:, None]
        if ptr.dtype.element_ty == tl.int8:
            root = stored.to(tl.float32) * SIGNED_STEP
            root = root * tl.abs(root)
            return root * tl.abs(root) * scale
        else:
            root = stored.to(tl.float32) * UNSIGNED_STEP
            root = root * root
            root = root * root
            return root * root * scale


@triton.jit
def _largest_magnitude(value, mask):
    """(the largest of each row, whether all of the row are finite).

    The bits of magnitudes are ordered as the magnitudes are, with infinity and NaN above all: the largest bits say
    what a maximum of floats would not.
    """
    bits = value.to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    if mask is not None:
        bits = tl.where(mask, bits, 0)
    largest = tl.max(bits, axis=1)
    return largest.to(tl.float32, bitcast=True), largest < INFINITY_BITS


@triton.jit
def write_signed(value, ptr, scale_ptr, at, row, mask, row_mask):
    """A moment of either sign; see Note [companded codes] in zeor.memory.small."""
    if scale_ptr is None:
        tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)
    else:
        scale, finite = _largest_magnitude(value, mask)
        scale = tl.where(scale < TINY_SCALE, 0.0, scale)
        factor = tl.where(scale == 0.0, 0.0, SIGNED_LARGEST / tl.sqrt(tl.sqrt(scale)))
        factor = tl.where(finite, factor, float("nan"))
        code = tl.maximum(tl.sqrt(tl.sqrt(tl.abs(value))) * factor[:, None], 0.0)  # zero where it is NaN
        code = tl.where(value < 0, -code, code) + ROUNDING
        tl.store(ptr + at, code.to(tl.int32, bitcast=True).to(tl.int8), mask=mask)
        tl.store(scale_ptr + row, tl.where(finite, scale, float("nan")), mask=row_mask)


@triton.jit
def _dither(value):
    """See Note [dither] in zeor.memory.small."""
    bits = value.to(tl.int32, bitcast=True) * DITHER_MULTIPLIER
    bits = ((bits >> 9) & 0x7FFFFF) | 0x3F800000
    return (bits.to(tl.float32, bitcast=True) - 1.5) * DITHER_WIDTH


@triton.jit
def write_unsigned(value, root, ptr, scale_ptr, at, row, mask, row_mask):
    """A moment that is never negative; `root` is its square root."""
    if scale_ptr is None:
        tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)
    else:
        scale, finite = _largest_magnitude(value, mask)
        tiny = scale < TINY_SCALE
        factor = tl.where(tiny, 0.0, UNSIGNED_LARGEST / tl.sqrt(tl.sqrt(tl.sqrt(scale))))
        factor = tl.where(finite, factor, float("nan"))
        least = tl.where(tiny, UNSIGNED_LARGEST, tl.where(finite, UNSIGNED_LEAST, 0.0))
        least = tl.where(value > 0, least[:, None], 0.0)
        code = tl.maximum(tl.sqrt(tl.sqrt(root)) * factor[:, None], least) + _dither(value)  # `least` where it is NaN
        code = code + ROUNDING
        tl.store(ptr + at, code.to(tl.int32, bitcast=True).to(tl.uint8), mask=mask)
        tl.store(scale_ptr + row, tl.where(finite, scale, float("nan")), mask=row_mask)


@triton.jit
def _bias_correction(step, log2_beta_high, log2_beta_low):
    """1 - beta ** step in fp64, from log2(beta) in two fp32 parts (kernel arguments are fp32 at most).

    In fp32 the difference would lose all but four digits at beta 0.999 and a small step.
    """
    log2_beta = tl.cast(log2_beta_high, tl.float64) + tl.cast(log2_beta_low, tl.float64)
    return 1.0 - tl.exp2(log2_beta * step)


@triton.jit
def adam_numbers(
    lr_ptr, step_ptr, lr, decay, weight_decay, log2_beta1_high, log2_beta1_low, log2_beta2_high, log2_beta2_low,
    bias_correction1, bias_correction2_sqrt, step_size,
):  # fmt: skip
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
    master, grad, exp_avg, exp_avg_sq, decay, weight_decay, lerp_weight, beta2, one_minus_beta2,
    DECAY: tl.constexpr, LERP_SMALL: tl.constexpr,
):  # fmt: skip
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
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, exp_avg_scale_ptr,
    exp_avg_sq_scale_ptr, at, row, mask, row_mask, scale_ptr,
    decay, weight_decay, lerp_weight, beta2, one_minus_beta2, correction, eps, step_size,
    DECAY: tl.constexpr, LERP_SMALL: tl.constexpr, MAXIMIZE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    grad = read_gradient(grad_ptr, at, mask, scale_ptr, MAXIMIZE)
    master = read_master(master_ptr, compute_ptr, remainder_ptr, at, mask)
    exp_avg = read_moment(exp_avg_ptr, exp_avg_scale_ptr, at, row, mask, row_mask)
    exp_avg_sq = read_moment(exp_avg_sq_ptr, exp_avg_sq_scale_ptr, at, row, mask, row_mask)

    master, exp_avg, exp_avg_sq = adam_moments(
        master, grad, exp_avg, exp_avg_sq, decay, weight_decay, lerp_weight, beta2, one_minus_beta2, DECAY, LERP_SMALL
    )
    root = tl.sqrt_rn(exp_avg_sq)
    if SMALL:
        denom = tl.fma(root, correction, eps)
    else:
        denom = tl.div_rn(root, correction) + eps
    master = tl.fma(tl.div_rn(exp_avg, denom), -step_size, master)

    write_master(master, master_ptr, compute_ptr, remainder_ptr, at, mask)
    write_signed(exp_avg, exp_avg_ptr, exp_avg_scale_ptr, at, row, mask, row_mask)
    write_unsigned(exp_avg_sq, root, exp_avg_sq_ptr, exp_avg_sq_scale_ptr, at, row, mask, row_mask)


@triton.jit(do_not_specialize=["n"])
def adam_kernel(
    master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, exp_avg_scale_ptr,
    exp_avg_sq_scale_ptr, n, scale_ptr, found_inf_ptr,
    lr_ptr, step_ptr, lr, decay, weight_decay, lerp_weight, beta2, one_minus_beta2,
    log2_beta1_high, log2_beta1_low, log2_beta2_high, log2_beta2_low,
    bias_correction1, correction, eps, step_size,
    DECAY: tl.constexpr, LERP_SMALL: tl.constexpr, MAXIMIZE: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SMALL: a moment rests in a small format. `correction` is the root of the second moment's bias correction."""
    n = left_to_do(n, found_inf_ptr)
    decay, correction, step_size = adam_numbers(
        lr_ptr, step_ptr, lr, decay, weight_decay, log2_beta1_high, log2_beta1_low, log2_beta2_high, log2_beta2_low,
        bias_correction1, correction, step_size,
    )  # fmt: skip

    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a run may be longer than 2**31
    if SMALL:
        # What is rounded to eight bits needs no division by the correction, only its reciprocal.
        correction = tl.div_rn(1.0, correction)
        rows = tl.arange(0, BLOCK // ROW)
        at, row = start + (rows[:, None] * ROW + tl.arange(0, ROW)[None, :]), start // ROW + rows
        row_mask = start + rows * ROW < n
    else:
        at, row, row_mask = start + tl.arange(0, BLOCK), None, None
    if start + BLOCK <= n:
        _adam_block(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, exp_avg_scale_ptr,
            exp_avg_sq_scale_ptr, at, row, None, None, scale_ptr, decay, weight_decay, lerp_weight, beta2,
            one_minus_beta2, correction, eps, step_size, DECAY, LERP_SMALL, MAXIMIZE, SMALL,
        )  # fmt: skip
    else:
        _adam_block(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, exp_avg_scale_ptr,
            exp_avg_sq_scale_ptr, at, row, at < n, row_mask, scale_ptr, decay, weight_decay, lerp_weight, beta2,
            one_minus_beta2, correction, eps, step_size, DECAY, LERP_SMALL, MAXIMIZE, SMALL,
        )  # fmt: skip


@triton.jit
def _sgd_block(
    master_ptr, grad_ptr, momentum_ptr, compute_ptr, remainder_ptr, at, mask, scale_ptr,
    first, lr, weight_decay, momentum, one_minus_dampening,
    WEIGHT_DECAY: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The lines of torch.optim.sgd._single_tensor_sgd, in their order."""
    grad = read_gradient(grad_ptr, at, mask, scale_ptr, MAXIMIZE)
    master = read_master(master_ptr, compute_ptr, remainder_ptr, at, mask)

    if WEIGHT_DECAY:
        grad = tl.fma(master, weight_decay, grad)
    if momentum_ptr is not None:
        if FIRST:
            buffer = grad  # what the buffer held is not read
        else:
            buffer = tl.load(momentum_ptr + at, mask=mask)
            buffer = tl.fma(grad, one_minus_dampening, buffer * momentum)
            if first is not None:
                buffer = tl.where(first, grad, buffer)
        tl.store(momentum_ptr + at, buffer, mask=mask)
        if NESTEROV:
            grad = tl.fma(buffer, momentum, grad)
        else:
            grad = buffer
    master = tl.fma(grad, -lr, master)

    write_master(master, master_ptr, compute_ptr, remainder_ptr, at, mask)


@triton.jit(do_not_specialize=["n"])
def sgd_kernel(
    master_ptr, grad_ptr, momentum_ptr, compute_ptr, remainder_ptr, n, scale_ptr, found_inf_ptr, lr_ptr, first_ptr,
    lr, weight_decay, momentum, one_minus_dampening,
    WEIGHT_DECAY: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = left_to_do(n, found_inf_ptr)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    first = None
    if first_ptr is not None:
        first = tl.load(first_ptr) != 0

    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a run may be longer than 2**31
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _sgd_block(
            master_ptr, grad_ptr, momentum_ptr, compute_ptr, remainder_ptr, at, None, scale_ptr, first, lr,
            weight_decay, momentum, one_minus_dampening, WEIGHT_DECAY, NESTEROV, MAXIMIZE, FIRST,
        )  # fmt: skip
    else:
        _sgd_block(
            master_ptr, grad_ptr, momentum_ptr, compute_ptr, remainder_ptr, at, at < n, scale_ptr, first, lr,
            weight_decay, momentum, one_minus_dampening, WEIGHT_DECAY, NESTEROV, MAXIMIZE, FIRST,
        )  # fmt: skip
