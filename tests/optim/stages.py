"""One optimizer at every stage, against plain PyTorch in one process on the joint batch; for tests to send to ranks.

`check` trains the same model plainly and at stages 0 to 3 and asserts: the stages are equal in bits, and within
1e-10 of plain. An optimizer is made by `make(model)`: one, or a list of them with disjoint parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops

STAGES = (0, 1, 2, 3)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() != 2]


def as_list(optimizer: Any) -> list[Optimizer]:
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def train(model: nn.Module, optimizers: Sequence[Optimizer], steps: range, loss: Callable, clip: float | None) -> None:
    for step in steps:
        loss(model, step).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def sharded(make: Callable, stage: int, steps: int, clip: float | None = None, **options: Any) -> dict[str, Tensor]:
    """Full values after some steps of this rank's part."""
    model = loops.net(options.pop("dtype", torch.float64))
    dtype = model.head.weight.dtype
    optimizer = make(model)
    zeor.shard(model, optimizer, stage=stage, **options)
    train(model, as_list(optimizer), range(steps), lambda m, s: loops.own_loss(m, s, dtype), clip)
    with zeor.full_params(model):
        return loops.values(model)


def plain(make: Callable, steps: int, clip: float | None = None) -> dict[str, Tensor]:
    model = loops.net()
    train(model, as_list(make(model)), range(steps), loops.joint_loss, clip)
    return loops.values(model)


def check(make: Callable, steps: int = 3, clip: float | None = None) -> None:
    wanted = plain(make, steps, clip)
    assert not torch.equal(wanted["head.weight"], loops.values(loops.net())["head.weight"]), "it trains"
    found = {stage: sharded(make, stage, steps, clip) for stage in STAGES}
    for stage in STAGES:
        loops.assert_close(found[stage], wanted)
        loops.assert_equal(found[stage], found[3])


def check_bits(make: Callable, steps: int, **options: Any) -> dict[str, Tensor]:
    """Stages equal in bits where there is no exact reference; returns the values."""
    found = {stage: sharded(make, stage, steps, **options) for stage in STAGES}
    for stage in STAGES:
        loops.assert_equal(found[stage], found[3])
    return found[3]
