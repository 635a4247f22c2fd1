"""What fits: the host memory that a model needs beside a device of some size, filled first.

The choice is that of offload="auto" (automatic.py), with as much host memory as it takes. Nothing is allocated.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zeor.plan import Offload
from zeor.planner.automatic import OverBudget
from zeor.planner.bytes import Prediction, predict

CONTEXT_NBYTES = 1 << 30  # of a device that is no allocator's: the driver's context, and libraries' own memory
_ENDLESS = 1 << 60


def beside(model: nn.Module, device_nbytes: int, **options: Any) -> Prediction | None:
    """What predict() says with a device of so many bytes and all the host memory that is needed; None where compute,
    gradients and activations alone do not fit. `options` are predict's, but for offload=."""
    budget = device_nbytes - CONTEXT_NBYTES
    if budget <= 0:
        return None
    offload = Offload(auto=True, device_budget=budget, host_budget=_ENDLESS)
    try:
        return predict(model, offload=offload, **{"native_reduce": True, **options})
    except OverBudget:
        return None
