"""8-bit floating codes of weights with one scale for each: how they are made, and what they stand for.

The arithmetic is torchao's tensorwise cast, in plain torch, over flat parts: torchao is not needed here. This file
knows no lane and no rank.

Note [Codes]
~~~~~~~~~~~~
torchao's linears cast their bf16 weight at every call: a pass for the largest magnitude, one for the cast, in forward
and again in backward. With one scale for a whole tensor

    scale = 448 / amax(bf16(master))         code = saturate(bf16(master) * scale)

is element-wise, so each rank can cast its own slice where it lies, once per step, given all scales. So where weights
rest as codes:

1. The optimizer updates the master, in memory of its own (the format `coded` in tiers/master.py): codes are no part of
   it.
2. Rounding keeps order, so amax(bf16(master)) is the rounded largest magnitude of the master. Each rank finds that of
   its segments, and one exchange of these numbers, for all weights of the model, gives everybody all scales.
3. Each rank casts its slice. What is gathered, by forward and backward (stage 3) or once after the step (1 and 2), is
   one byte for each element, and so is what rests (0 to 2).
4. Forward and backward multiply by codes and scale (features/coded_linear.py). The bits are those of casting at each
   call, because code and scale are the same function of the same bf16 weight.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zeor.memory.formats import DEVICE_CHUNK_NUMEL, HOST_CHUNK_NUMEL, cast_into

CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
LEAST_AMAX = 1e-12  # torchao's: a weight of zeros has a finite scale

# Of a module whose weight rests as codes: their dtype.
CODE_ATTRIBUTE = "_zeor_code_dtype"


def code_dtype(owners: Iterable[tuple[nn.Module, str]]) -> torch.dtype | None:
    """In which the parameter that these modules hold, under these names, rests; None: not as codes."""
    found = [vars(module).get(CODE_ATTRIBUTE) if name == "weight" else None for module, name in owners]
    return found[0] if found and all(each == found[0] for each in found) else None


@torch.no_grad()
def scales_of(amaxima: Tensor, codes: torch.dtype) -> Tensor:
    """From the largest magnitudes of fp32 masters, one for each weight."""
    rounded = torch.empty_like(amaxima, dtype=torch.bfloat16)
    cast_into(rounded, amaxima)
    return (torch.finfo(codes).max / rounded.double().clamp(min=LEAST_AMAX)).float()  # as torchao: by way of float64


@torch.no_grad()
def encode_into(codes: Tensor, master: Tensor, scale: Tensor) -> None:
    """The codes of a part of one weight, flat, from its master; `scale`: the whole weight's."""
    most = torch.finfo(codes.dtype).max
    size = HOST_CHUNK_NUMEL if master.device.type == "cpu" else DEVICE_CHUNK_NUMEL
    for begin in range(0, master.numel(), size):
        part = master[begin : begin + size]
        rounded = torch.empty_like(part, dtype=torch.bfloat16)
        cast_into(rounded, part)
        codes[begin : begin + size].copy_(rounded.float().mul_(scale).clamp_(-most, most))


class Decoded(torch.autograd.Function):
    """What the codes of a parameter stand for, in its own dtype; gradients go to the parameter as they are."""

    @staticmethod
    def forward(ctx: object, param: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(param.dtype) / scale

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
