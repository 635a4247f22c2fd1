"""The Triton kernels for moments in small formats: decode, update and encode in one pass.

A moment is fp32, bf16, or 8-bit codes with a fp32 scale for every block (zeor.memory.small says what a code means);
its pointer's type says which. A program works on whole blocks, one to a row of its tile, so a run starts where a
block does. As triton.py, whose notes hold here too, it is only imported inside functions of adam.py.
"""

import triton
import triton.language as tl

from zeor.memory import small
from zeor.optim.kernels.triton import adam_moments, adam_numbers, read_gradient, read_master, write_master

# Note [codes of the kernel and of torch]
# The kernel takes the hardware's root for a code, wrong by at most 2**-22 of its value, and its moments equal those
# of plain torch only to rounding. So its codes differ from torch's by at most one, and only where a root lies as near
# as that to the middle between two: about one code in ten thousand. Scales and what is kept (Note [what encoding
# keeps] in zeor.memory.small) are the same. Within one kind of device every run gives the same bits.
# A code is rounded to even by adding 1.5 * 2**23, which leaves it in the low bits: no conversion, and the byte of
# a negative one comes out as two's complement.

ROW = tl.constexpr(small.BLOCK_NUMEL)
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
def _read_moment(ptr, scale_ptr, mask, row_mask):
    """The fp32 values of a tile. `scale_ptr` has one pointer for each row."""
    stored = tl.load(ptr, mask=mask)
    if scale_ptr is None:
        return stored.to(tl.float32)
    else:
        scale = tl.load(scale_ptr, mask=row_mask)[:, None]
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
def _write_signed(value, ptr, scale_ptr, mask, row_mask):
    """A moment of either sign; see Note [companded codes] in zeor.memory.small."""
    if scale_ptr is None:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)
    else:
        scale, finite = _largest_magnitude(value, mask)
        scale = tl.where(scale < TINY_SCALE, 0.0, scale)
        factor = tl.where(scale == 0.0, 0.0, SIGNED_LARGEST / tl.sqrt(tl.sqrt(scale)))
        factor = tl.where(finite, factor, float("nan"))
        code = tl.maximum(tl.sqrt(tl.sqrt(tl.abs(value))) * factor[:, None], 0.0)  # zero where it is NaN
        code = tl.where(value < 0, -code, code) + ROUNDING
        tl.store(ptr, code.to(tl.int32, bitcast=True).to(tl.int8), mask=mask)
        tl.store(scale_ptr, tl.where(finite, scale, float("nan")), mask=row_mask)


@triton.jit
def _dither(value):
    """See Note [dither] in zeor.memory.small."""
    bits = value.to(tl.int32, bitcast=True) * DITHER_MULTIPLIER
    bits = ((bits >> 9) & 0x7FFFFF) | 0x3F800000
    return (bits.to(tl.float32, bitcast=True) - 1.5) * DITHER_WIDTH


@triton.jit
def _write_unsigned(value, root, ptr, scale_ptr, mask, row_mask):
    """A moment that is never negative; `root` is its square root."""
    if scale_ptr is None:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)
    else:
        scale, finite = _largest_magnitude(value, mask)
        tiny = scale < TINY_SCALE
        factor = tl.where(tiny, 0.0, UNSIGNED_LARGEST / tl.sqrt(tl.sqrt(tl.sqrt(scale))))
        factor = tl.where(finite, factor, float("nan"))
        least = tl.where(tiny, UNSIGNED_LARGEST, tl.where(finite, UNSIGNED_LEAST, 0.0))
        least = tl.where(value > 0, least[:, None], 0.0)
        code = tl.maximum(tl.sqrt(tl.sqrt(root)) * factor[:, None], least) + _dither(value)  # `least` where it is NaN
        code = code + ROUNDING
        tl.store(ptr, code.to(tl.int32, bitcast=True).to(tl.uint8), mask=mask)
        tl.store(scale_ptr, tl.where(finite, scale, float("nan")), mask=row_mask)


@triton.jit
def _adam_tile(
    master_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compute_ptr,
    remainder_ptr,
    exp_avg_scale_ptr,
    exp_avg_sq_scale_ptr,
    mask,
    row_mask,
    scale,
    decay,
    weight_decay,
    lerp_weight,
    beta2,
    one_minus_beta2,
    inverse_correction,
    eps,
    step_size,
    DECAY: tl.constexpr,
    LERP_SMALL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    grad = read_gradient(grad_ptr, mask, scale, MAXIMIZE)
    master = read_master(master_ptr, compute_ptr, remainder_ptr, mask)
    exp_avg = _read_moment(exp_avg_ptr, exp_avg_scale_ptr, mask, row_mask)
    exp_avg_sq = _read_moment(exp_avg_sq_ptr, exp_avg_sq_scale_ptr, mask, row_mask)
    master, exp_avg, exp_avg_sq = adam_moments(
        master, grad, exp_avg, exp_avg_sq, decay, weight_decay, lerp_weight, beta2, one_minus_beta2, DECAY, LERP_SMALL
    )
    root = tl.sqrt_rn(exp_avg_sq)
    master = tl.fma(tl.div_rn(exp_avg, tl.fma(root, inverse_correction, eps)), -step_size, master)
    write_master(master, master_ptr, compute_ptr, remainder_ptr, mask)
    _write_signed(exp_avg, exp_avg_ptr, exp_avg_scale_ptr, mask, row_mask)
    _write_unsigned(exp_avg_sq, root, exp_avg_sq_ptr, exp_avg_sq_scale_ptr, mask, row_mask)


@triton.jit(do_not_specialize=["n"])
def adam_small_kernel(
    master_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compute_ptr,
    remainder_ptr,
    exp_avg_scale_ptr,
    exp_avg_sq_scale_ptr,
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

    # What is rounded to eight bits needs no division by the correction, only its reciprocal.
    inverse_correction = tl.div_rn(1.0, bias_correction2_sqrt)

    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a run may be longer than 2**31
    rows = tl.arange(0, BLOCK // ROW)
    offsets = rows[:, None] * ROW + tl.arange(0, ROW)[None, :]
    if master_ptr is not None:
        master_ptr += start + offsets
    grad_ptr += start + offsets
    exp_avg_ptr += start + offsets
    exp_avg_sq_ptr += start + offsets
    if compute_ptr is not None:
        compute_ptr += start + offsets
    if remainder_ptr is not None:
        remainder_ptr += start + offsets
    if exp_avg_scale_ptr is not None:
        exp_avg_scale_ptr += start // ROW + rows
    if exp_avg_sq_scale_ptr is not None:
        exp_avg_sq_scale_ptr += start // ROW + rows
    if start + BLOCK <= n:
        _adam_tile(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, exp_avg_scale_ptr,
            exp_avg_sq_scale_ptr, None, None, scale, decay, weight_decay, lerp_weight, beta2, one_minus_beta2,
            inverse_correction, eps, step_size, DECAY, LERP_SMALL, MAXIMIZE,
        )  # fmt: skip
    else:
        _adam_tile(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, remainder_ptr, exp_avg_scale_ptr,
            exp_avg_sq_scale_ptr, start + offsets < n, start + rows * ROW < n, scale, decay, weight_decay,
            lerp_weight, beta2, one_minus_beta2, inverse_correction, eps, step_size, DECAY, LERP_SMALL, MAXIMIZE,
        )  # fmt: skip
