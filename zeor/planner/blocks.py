"""How allocators round: what a request really takes of the device's memory, and of torch's pinned host memory.

torch's caching allocator hands out multiples of 512 bytes. More than 10 MiB come in segments of whole 2 MiB, of which
the rest is cut off only if it is more than 1 MiB. Pinned host memory that torch allocates comes in powers of two; what
zeor maps by itself does not (tiers/host.py).
"""

from __future__ import annotations

_MIB = 1 << 20
_GRAIN, _LARGE, _SEGMENT = 512, 10 * _MIB, 2 * _MIB


def device_nbytes(nbytes: int) -> int:
    """What max_memory_allocated counts for a request, where it gets a segment of its own."""
    rounded = -(-nbytes // _GRAIN) * _GRAIN
    if rounded < _LARGE:
        return rounded
    segment = -(-rounded // _SEGMENT) * _SEGMENT
    return rounded if segment - rounded > _MIB else segment


def reused_nbytes(nbytes: int) -> int:
    """The most it counts where memory is handed out again: a block may be up to 1 MiB larger than what is asked for."""
    rounded = -(-nbytes // _GRAIN) * _GRAIN
    return rounded if rounded < _LARGE else rounded + _MIB


def pinned_nbytes(nbytes: int) -> int:
    """What torch's pinned memory takes for a request."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
