"""Which lane a parameter belongs to: its dtypes by role, from the plan's precision.

Pure: looks at a parameter and the modules that hold it. Used when packing and when predicting bytes,
so both say the same.

Note [Small parameters]
~~~~~~~~~~~~~~~~~~~~~~~
A temperature or a bias is read and written outside forward as a matter of course (`model.logit_scale.clamp_()` after a
step, `.item()` for a log on one rank), and slicing it saves nothing. So parameters of at most keep_whole elements lie
in lanes whose compute is whole on every rank at every stage; gradients and state are sliced as the stage says. All of
them belong to the root's unit: one reduce at the end of backward and one publish at the step serve the whole model,
where lanes in every unit would each have their own. The layout is the same at every stage, so that norms, which add up
what each rank has, are the same bits at every stage. A rank alone has no slices, and nothing is kept apart.

Note [Blocks of one kind]
~~~~~~~~~~~~~~~~~~~~~~~~~
Codes of a wire are made for blocks of a lane, so what a parameter is rounded to depends on its neighbours. A parameter
that tensor parallelism has not cut is to be the same on the ranks beside this one, and its neighbours are not where
they are cut. So in a model with a wire what is cut has lanes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zeor.memory.float8 import code_dtype
from zeor.memory.placed import cut_dims, replicated_dims
from zeor.plan import Plan, Precision


@dataclass(frozen=True)
class LaneKey:
    """What parameters must share to lie in one lane. master_dtype None: compute is the exact value and nothing
    updates it. A frozen lane has a master where compute alone would be a rounded value. stays_whole: small parameters,
    which every rank keeps whole at every stage (keys.py). compute_dtype of 8 bits with a master: codes, which forward
    reads beside one scale for each parameter (Note [Codes] in memory/float8.py)."""

    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype | None
    trainable: bool
    stays_whole: bool = False
    sums: tuple[int, ...] = ()  # mesh dimensions that are not ours: Note [Partial gradients] in memory/placed.py
    experts: bool = False  # its axes are those of experts: Note [Axes] in comm/axes.py
    cut: tuple[int, ...] = ()  # such dimensions too, of a model with a wire: Note [Blocks of one kind]

    @property
    def coded(self) -> bool:
        return self.master_dtype is not None and self.compute_dtype.itemsize == 1


def small_numel(plan: Plan, world: int) -> int:
    """Parameters of at most so many elements stay whole: see Note [Small parameters]."""
    return plan.keep_whole if world > 1 or plan.compute_is_away else 0


def lane_key(
    param: Tensor,
    owners: Sequence[tuple[nn.Module, str]],
    precision: Precision,
    small: int = 0,
    partial: tuple[int, ...] = (),
    experts: bool = False,
) -> LaneKey:
    """compute: as the plan says, but norms with running statistics and non-floating parameters keep
    their own. master: fp32 or the parameter's own dtype if wider. A frozen parameter has none where compute holds
    every value its own dtype has; elsewhere one keeps it exact, for export and for the day it is unfrozen. `partial`:
    the mesh dimensions along which the gradient of a plain parameter is partial. `experts`: it is an expert's."""
    dtype, stays = param.dtype, param.numel() <= small
    if not dtype.is_floating_point:
        return LaneKey(dtype, dtype, None, False, stays, experts=experts)
    compute = precision.compute or dtype
    if any(getattr(module, "running_mean", None) is not None for module, _ in owners):
        compute = dtype
    reduce = precision.reduce or compute
    if compute == torch.float64:
        reduce = torch.float64  # a float64 model is there to be compared with; nothing may round it
    exact = torch.promote_types(dtype, compute)
    if not param.requires_grad:
        return LaneKey(compute, reduce, None if exact == compute else exact, False, stays, experts=experts)
    master = precision.master or torch.promote_types(exact, torch.float32)
    codes = code_dtype(owners)
    return LaneKey(codes or compute, reduce, master, True, stays, replicated_dims(param) or partial, experts)


def kept_apart(key: LaneKey, param: Tensor, plan: Plan) -> LaneKey:
    """The key of a parameter's lane under this plan: see Note [Blocks of one kind]."""
    return key if plan.wire is None or key.experts else replace(key, cut=cut_dims(param))
