"""Gradients that arrive reduced: full, averaged and the same on every rank, as DistributedDataParallel leaves them.

Note [Given gradients]
~~~~~~~~~~~~~~~~~~~~~~
A drop-in optimizer sees parameters, not the model, and DDP leaves no trace on parameters. So when its first gradient
arrives, a drop-in looks once through the process's objects for a DDP around its own parameters. (A hook on all
modules would see the wrapper called, but would be noticed by torch.compile.) Where there is one the engine is `given`
its gradients: it leaves them alone as they arrive, and step() cuts this rank's part out of them. Nothing is reduced a
second time; clipping, GradScaler and ddp.no_sync() act on plain tensors before that. The first step checks that ranks
do have the same gradients: they do not where the module inside the DDP was called.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeor.comm.agree import exchange
from zeor.data import fingerprint
from zeor.runtime.grads import GradLane

if TYPE_CHECKING:
    from zeor.runtime.engine import Engine


def around(params: Iterable[nn.Parameter]) -> bool:
    """Whether a DistributedDataParallel holds any of these."""
    ours = {id(param) for param in params}
    # By type(): asking some objects for their class runs code of theirs.
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return any(id(param) in ours for wrapper in wrappers for param in wrapper.parameters())


def take(engine: Engine) -> None:
    """This rank's part of what lies on the user's parameters."""
    if not engine.first_batch.done:
        engine.first_batch.done = True
        _compare(engine)
    engine.norms.forget_all()
    engine.nonfinite.travels = False  # no backward of this engine's own ends with an exchange
    for unit in engine.units:
        for lane in unit.lanes:
            if lane.grads is not None:
                _cut(lane.grads, [slot.param.grad for slot in unit.slots if slot.lane is lane])


def _compare(engine: Engine) -> None:
    prints = [0 if slot.param.grad is None else fingerprint(slot.param.grad) for slot in engine.slots]
    seen = exchange(engine.mesh, prints, "comparison of the ranks' gradients")
    for number, slot in enumerate(engine.slots):
        if any(rank[number] != seen[0][number] for rank in seen):
            raise RuntimeError(
                f"The model is wrapped in DistributedDataParallel, but the gradient of {slot.name!r} differs between "
                "ranks at the first step; call the DistributedDataParallel itself, not the module inside it, and run "
                "the last backward before a step outside its no_sync()."
            )


@torch.no_grad()
def _cut(lane: GradLane, grads: Sequence[Tensor | None]) -> None:
    lane.has = [grad is not None for grad in grads]
    lane.scales = [None] * len(grads)
    lane.buffer = lane.sum = None  # a buffer that stays would never be filled
    lane.parts.clear()
    segments = {segment.param: segment for segment in lane.layout.segments(lane.mesh.rank)}
    for param, grad in enumerate(grads):
        if grad is None:
            continue
        flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
        if lane.adopts:
            lane.parts[param] = flat.to(lane.reduce_dtype)
            continue
        if lane.sum is None:
            lane.sum = torch.zeros(lane.layout.slice_numel, dtype=lane.reduce_dtype, device=flat.device)
        if param in segments:
            start = segments[param].start
            lane.own(param).copy_(flat[start : start + segments[param].numel])
