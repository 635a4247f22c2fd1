"""The one cast from the fp32 master to what forward reads.

Every stage, tier and format publishes compute through `cast_into` (or through a fused pass that
rounds in the same way), so that all of them agree in bits. See Note [ties away from zero].
This file knows nothing of units, slices or ranks: it is given two tensors of one length.
"""

from __future__ import annotations

import math

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

HALF_UNIT_BITS = 0x8000
BF16_NAN_BITS = 0x7FC0

# The only temporary is one fp32 chunk. On a host it should stay in the cache; on a device it should be
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
    compute_flat, master_flat = compute.view(-1), master.view(-1)
    chunk_numel = HOST_CHUNK_NUMEL if master.device.type == "cpu" else DEVICE_CHUNK_NUMEL
    for start in range(0, master.numel(), chunk_numel):
        _cast_chunk(compute_flat[start : start + chunk_numel], master_flat[start : start + chunk_numel])


def _cast_chunk(compute: Tensor, master: Tensor) -> None:
    # nan_to_num because it is one vectorised pass: isnan and masked_fill_ take six times as long on a CPU.
    one_nan = torch.nan_to_num(master, nan=math.nan, posinf=math.inf, neginf=-math.inf)
    rounded_bits = one_nan.view(torch.int32).add_(HALF_UNIT_BITS).bitwise_right_shift_(16)
    # The shift is arithmetic: its result lies within int16, and the copy has nothing to saturate or wrap.
    compute.view(torch.int16).copy_(rounded_bits)
