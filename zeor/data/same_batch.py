"""fingerprint(): a number that tells whether ranks were fed the same batch by mistake.

Reads tensors and arrays anywhere in a batch, at most 64 KiB of each. Knows batches, not ranks or loaders.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

FINGERPRINT_NBYTES = 64 * 1024  # per tensor


def fingerprint(batch: Any) -> int:
    """A number below 2**63, the same for equal batches on any rank and different for different ones.

    Cheap: of each tensor or array anywhere in the batch's mappings, sequences and dataclasses at most 64 KiB
    count, spread evenly over it (its head alone may be padding or a border). So equal fingerprints of large
    batches are a strong hint, no proof. A batch without a tensor to read gets a random number: it equals no
    other.
    """
    parts = list(_parts(batch))
    if not any(isinstance(part, memoryview) for part in parts):
        return random.SystemRandom().getrandbits(63)
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """What tells a batch from another, piece by piece: tensors' contents as memoryview, all else as bytes."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta:
            yield memoryview(_spread(value))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield from _parts(torch.from_numpy(np.array(value)))
    elif isinstance(value, Mapping):
        for key in value:
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield from _parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield repr(value).encode()
    else:
        # Not its repr: the address in a default repr would make equal batches differ.
        yield type(value).__name__.encode()


def _spread(tensor: Tensor) -> bytes:
    """Every k-th element's bytes, at most FINGERPRINT_NBYTES of them."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    kept_numel = FINGERPRINT_NBYTES // flat.element_size()
    stride = max(1, -(-flat.numel() // kept_numel))
    return flat[::stride].cpu().contiguous().view(torch.uint8).numpy().tobytes()
