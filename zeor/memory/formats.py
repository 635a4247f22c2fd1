"""The one cast from the fp32 master to what forward reads, and the master in two halves.

Every stage, tier and format publishes compute through `cast_into` (or through a fused pass that
rounds in the same way), so that all of them agree in bits. See Note [ties away from zero].
In the format `split` the master is not kept: compute and a 16-bit remainder are together its exact value,
which `split_into` and `join_into` take apart and put together. See Note [the split master].
This file knows nothing of units, slices or ranks: it is given tensors of one length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Note [ties away from zero]
# A bf16 number is the upper half of an fp32 number:
#
#     fp32 bits   s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm
#     compute     upper half, after (bits + 0x8000) >> 16
#     remainder   bits - (compute << 16), in [-0x8000, 0x7fff] for every finite value
#
# Sign and magnitude are apart in the format, so adding half a unit to the bits moves the magnitude of
# either sign up: ties go away from zero, and the remainder always fits an int16. Under torch's own cast (ties
# to even) a tie that goes down leaves +0x8000, which does not fit. Infinity stays itself, as its lower half
# is zero. A NaN would not: a full mantissa carries into the sign (0x7fffffff + 0x8000), one whose set bits
# all lie low turns into infinity. So every NaN first becomes the quiet NaN whose compute is BF16_NAN_BITS.

# Note [the split master]
# compute << 16 ends in sixteen zeros, so the remainder is the lower half of the bits, read as a signed number,
# and bits = (compute << 16) + remainder undoes it: for every finite value, denormals and both zeros included.
# Nothing overflows on the way back, as the sum of what was split is the 32 bits that it was split from.
#
#     bits        compute   remainder
#     0x80000001  0x8000     1        a denormal below -0.0: the remainder grows the magnitude of either sign
#     0x7f7fffff  0x7f80    -1        finite, but forward reads infinity; joined it is finite again
#     0x7f800000  0x7f80     0        infinity itself. The finite ones beside it have remainders below zero
#     any NaN     0x7fc0     0        one NaN for all, as in the cast
#
# A user may write to compute, which is the upper half, and the remainder does not know. So the join is total: any
# compute with any remainder is a number that rounds to that compute. The pairs that no number was split into are a zero
# with a remainder below zero and an infinity with one above; their sums are the bits of a NaN. So where the sum is
# a NaN it is compute itself.

HALF_UNIT_BITS = 0x8000
BF16_NAN_BITS = 0x7FC0

# The only temporaries are one or two fp32 chunks. On a host it should stay in the cache; on a device it should be
# long enough to hide the launches.
HOST_CHUNK_NUMEL = 1 << 20
DEVICE_CHUNK_NUMEL = 1 << 22


@torch.no_grad()
def cast_into(compute: Tensor, master: Tensor) -> None:
    """Writes `master`, cast to compute's dtype, into `compute`. Both are contiguous and of one length."""
    if compute.numel() != master.numel():
        raise ValueError(f"compute holds {compute.numel()} elements, but master {master.numel()}")
    if compute.dtype != torch.bfloat16 or master.dtype != torch.float32:
        compute.copy_(master.view(compute.shape))
        return
    for compute_chunk, master_chunk in _chunks(compute, master):
        _round_into(compute_chunk, _bits_with_one_nan(master_chunk))


@torch.no_grad()
def cast_and_spoil(compute: Tensor, master: Tensor) -> None:
    """The same with no memory but the master's, which holds nothing of use afterwards."""
    if compute.dtype != torch.bfloat16 or master.dtype != torch.float32:
        compute.copy_(master.view(compute.shape))
        return
    bits = master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf).view(torch.int32)
    _round_into(compute, bits)


@torch.no_grad()
def split_into(compute: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Writes `master` (fp32) as `compute` (bf16, what `cast_into` gives) and `remainder` (int16)."""
    _check_split(compute, remainder, master)
    for compute_chunk, remainder_chunk, master_chunk in _chunks(compute, remainder, master):
        bits = _bits_with_one_nan(master_chunk)
        remainder_chunk.copy_(bits)  # wraps: the lower half is what stays
        _round_into(compute_chunk, bits)


@torch.no_grad()
def join_into(master: Tensor, compute: Tensor, remainder: Tensor) -> None:
    """Writes into `master` (fp32) what `split_into` made `compute` and `remainder` of."""
    _check_split(compute, remainder, master)
    for master_chunk, compute_chunk, remainder_chunk in _chunks(master, compute, remainder):
        bits = master_chunk.view(torch.int32)
        bits.copy_(remainder_chunk)
        bits.add_(compute_chunk.view(torch.int16), alpha=1 << 16)  # in int32: one pass for shift and sum
        # On a host a sum tells whether there is a NaN, in one fast pass; a device is not waited for.
        if master_chunk.device.type != "cpu" or math.isnan(master_chunk.sum()):
            master_chunk.copy_(torch.where(master_chunk.isnan(), compute_chunk.to(torch.float32), master_chunk))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same range of each tensor at a time. All are contiguous, of one length and on one device."""
    flat = [tensor.view(-1) for tensor in tensors]
    chunk_numel = HOST_CHUNK_NUMEL if flat[0].device.type == "cpu" else DEVICE_CHUNK_NUMEL
    for start in range(0, flat[0].numel(), chunk_numel):
        yield tuple(tensor[start : start + chunk_numel] for tensor in flat)


def _bits_with_one_nan(master: Tensor) -> Tensor:
    """A copy of the fp32 bits, as int32, in which every NaN is the quiet one."""
    # nan_to_num because it is one vectorised pass: isnan and masked_fill_ take six times as long on a CPU.
    return torch.nan_to_num(master, nan=math.nan, posinf=math.inf, neginf=-math.inf).view(torch.int32)


def _round_into(compute: Tensor, bits: Tensor) -> None:
    """Writes the fp32 `bits`, rounded, into `compute`; `bits` are used up."""
    rounded_bits = bits.add_(HALF_UNIT_BITS).bitwise_right_shift_(16)
    # The shift is arithmetic: its result lies within int16, and the copy has nothing to saturate or wrap.
    compute.view(torch.int16).copy_(rounded_bits)


def _check_split(compute: Tensor, remainder: Tensor, master: Tensor) -> None:
    dtypes = (compute.dtype, remainder.dtype, master.dtype)
    if dtypes != (torch.bfloat16, torch.int16, torch.float32):
        raise ValueError(f"a split master is bfloat16, int16 and (whole) float32, not {', '.join(map(str, dtypes))}")
    numels = (compute.numel(), remainder.numel(), master.numel())
    if len(set(numels)) > 1:
        raise ValueError("compute holds {} elements, remainder {} and master {}".format(*numels))
