"""Which lane a parameter belongs to: its dtypes by role, from the plan's precision.

Pure: looks at a parameter and the modules that hold it. Used when packing and when predicting bytes,
so both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeor.plan import Precision
from zeor.runtime.lane import LaneKey


def lane_key(param: Tensor, owners: Sequence[tuple[nn.Module, str]], precision: Precision) -> LaneKey:
    """compute: as the plan says, but norms with running statistics and non-floating parameters keep
    their own. master: fp32 or the parameter's own dtype if wider. A frozen parameter has none where compute holds
    every value its own dtype has; elsewhere one keeps it exact, for export and for the day it is unfrozen."""
    dtype = param.dtype
    if not dtype.is_floating_point:
        return LaneKey(dtype, dtype, None, trainable=False)
    compute = precision.compute or dtype
    if any(getattr(module, "running_mean", None) is not None for module, _ in owners):
        compute = dtype
    reduce = precision.reduce or compute
    if compute == torch.float64:
        reduce = torch.float64  # a float64 model is there to be compared with; nothing may round it
    exact = torch.promote_types(dtype, compute)
    if not param.requires_grad:
        return LaneKey(compute, reduce, None if exact == compute else exact, trainable=False)
    master = precision.master or torch.promote_types(exact, torch.float32)
    return LaneKey(compute, reduce, master, trainable=True)
