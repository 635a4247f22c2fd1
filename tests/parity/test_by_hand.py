"""zeor.shard against ZeRO by hand: examples/by_hand.py is the naive reference, equal in bits at every stage.

By hand there is one buffer for the whole model, no hooks, no overlap and no freeing inside a pass. An element-wise
update does not depend on where a buffer is cut, so zeor may find its own units; a norm's last bits do, so where
gradients are clipped zeor is given the same single unit.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import by_hand
from tests import loops
from tests.covering import covering, product

ROOT = Path(__file__).resolve().parents[2]
MAX_NORM = 0.05

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


def batches(steps: int, accumulate: int, own: bool, dtype: torch.dtype) -> list[list[by_hand.Batch]]:
    pick = loops.mine if own else lambda tensor: tensor
    joint = [[loops.batch(10 * step + i, dtype) for i in range(accumulate)] for step in range(steps)]
    return [[(pick(x), pick(y)) for x, y in step] for step in joint]


def loss(model: nn.Module, batch: by_hand.Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def on_ranks(optimizer: str, accumulate: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Parameters after four steps, by hand and by zeor, at every stage."""
    make, steps = OPTIMIZERS[optimizer], batches(4, accumulate, own=True, dtype=dtype)
    found = {}
    for stage in (1, 2, 3):
        found[f"hand {stage}"] = by_hand.train(loops.net(dtype), make, loss, steps, stage).params
    for stage in (0, 1, 2, 3):
        found[f"zeor {stage}"] = by_hand.by_zeor(loops.net(dtype), make, loss, steps, stage)
    return found


def alone(optimizer: str, accumulate: int, max_norm: float | None = None) -> list[Tensor]:
    """One process, plain PyTorch, on the joint batch."""
    model = loops.net()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in batches(4, accumulate, own=False, dtype=torch.float64):
        for batch in step:
            loss(model, batch).backward()
        if max_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), max_norm) > max_norm
        stepper.step()
        stepper.zero_grad()
    return [param.detach() for param in model.parameters()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


RUNS = {
    "world": (1, 2, 3, 4),
    "dtype": (torch.float32, torch.float64),
    "run": (("sgd momentum", 1), ("adamw", 2), ("adagrad", 1)),  # with how many micro-batches
}
PAIRS = functools.partial(covering, strength=2)


@pytest.mark.parametrize(
    "select", [pytest.param(PAIRS, id="pairs"), pytest.param(product, id="whole", marks=pytest.mark.whole)]
)
@pytest.mark.parametrize("world", RUNS["world"])
def test_zeor_equals_zero_by_hand_in_bits_at_every_stage(ranks: Any, world: int, select: Any) -> None:
    rows = [row for row in select(RUNS) if row["world"] == world]
    assert len(rows) >= 3
    for dtype, (optimizer, accumulate) in ((row["dtype"], row["run"]) for row in rows):
        results = ranks(on_ranks, world, optimizer, accumulate, dtype)
        wanted = results[0]["hand 1"]
        for rank, found in enumerate(results):
            for what, params in found.items():
                assert same(params, wanted), f"{optimizer}, rank {rank}, {what} differs"
        if dtype == torch.float64:
            torch.testing.assert_close(wanted, alone(optimizer, accumulate), **loops.TIGHT)


def clipped(stage: int) -> tuple[list[Tensor], list[Tensor]]:
    import zeor

    make, steps = OPTIMIZERS["adamw"], batches(4, 2, own=True, dtype=torch.float64)
    hand = by_hand.train(loops.net(), make, loss, steps, stage, max_norm=MAX_NORM).params
    model = loops.net()
    model, optimizer = zeor.shard(model, make(model.parameters()), stage=stage, units=[])
    for step in steps:
        for batch in step:
            loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        return hand, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_by_hand_is_the_stock_call_in_bits(ranks: Any, stage: int) -> None:
    for hand, zeors in ranks(clipped, 3, stage):
        assert same(hand, zeors)
        torch.testing.assert_close(hand, alone("adamw", 2, MAX_NORM), **loops.TIGHT)


def kept(stage: int) -> dict[str, int]:
    make, steps = OPTIMIZERS["adamw"], batches(1, 1, own=True, dtype=torch.float32)
    return by_hand.train(loops.net(torch.float32), make, loss, steps, stage).kept_nbytes


def test_what_a_rank_keeps_is_the_table_of_stages(ranks: Any) -> None:
    numel = sum(param.numel() for param in loops.net().parameters())
    whole, world = 4 * numel, 4
    slices = -(-numel // world) * 4
    for stage, (parameters, gradients) in {1: (whole, whole), 2: (whole, slices), 3: (slices, slices)}.items():
        results = ranks(kept, world, stage)
        for found in results:
            assert abs(found["parameters"] - parameters) < 4 * world
            assert abs(found["gradients"] - gradients) < 4 * world
        assert sum(found["optimizer state"] for found in results) == 2 * whole  # two moments, nothing twice


TORCHRUN = pytest.param(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"), id="torchrun")


@pytest.mark.long
@pytest.mark.parametrize("launcher", [pytest.param((), id="python", marks=pytest.mark.whole), TORCHRUN])
def test_the_script_checks_itself(launcher: tuple[str, ...]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "examples/by_hand.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "every stage gave the same bits as zeor.shard" in done.stdout
    for first, last in re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout):
        assert float(last) < 0.1 * float(first)
    assert len(re.findall(r"^stage \d on [23] ranks", done.stdout, re.M)) == 3
