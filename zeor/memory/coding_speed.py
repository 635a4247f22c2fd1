"""How fast a codec encodes and decodes on a device, measured once per process.

What takes part in a forecast of a step is an order of magnitude, not a benchmark: benchmarks/codecs.py is that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from zeor.memory.codecs import Codec
from zeor.memory.noise import Noise

HOST_NUMEL, DEVICE_NUMEL = 1 << 19, 1 << 25
_ROUNDS = 3


class Speed(NamedTuple):
    """Elements a second."""

    encode: float
    decode: float


@lru_cache(maxsize=64)
def speed_of(codec: Codec, device: torch.device) -> Speed:
    """The best of a few rounds after one that is not counted, of numbers in fp32."""
    numel = HOST_NUMEL if device.type == "cpu" else DEVICE_NUMEL
    values = torch.linspace(-1.0, 1.0, numel, device=device)
    message = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=device)
    noise = Noise(1) if codec.chance else None
    encode_s = _seconds(lambda: codec.encode_into(message, values, noise), device)
    decode_s = _seconds(lambda: codec.decode_into(values, message), device)
    return Speed(numel / encode_s, numel / decode_s)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    found = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - begin)
    return max(min(found[1:]), 1e-9)
