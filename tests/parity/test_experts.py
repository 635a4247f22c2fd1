"""Expert parallelism beside ZeRO: float64 is one process on the joint batch, and all stages have the same bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import covering
from tests.parity.divided import adamw, whole
from tests.parity.mixtures import OVER, SHAPES, Mixed, batch, compared, loss_of, made, one_step, sharded

FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": SHAPES,
    "stage": (0, 1, 2, 3),
    "micro": ("1", "3", "3 no_sync"),
    "clip": ("none", "stock", "zeor"),
    "over": OVER,
}


def all_compared(settings: list[Mixed]) -> list[tuple[float, bytes]]:
    return [compared(setting) for setting in settings]


def check(ranks: Callable, settings: list[Mixed]) -> None:
    """All on one shape of mesh. Over one set of axes and for one way to accumulate all stages have the same bits."""
    by_rank = ranks(all_compared, settings[0].world, settings, timeout=300)
    bits: dict[Any, set[bytes]] = defaultdict(set)
    for number, setting in enumerate(settings):
        far = [found[number][0] for found in by_rank]
        assert max(far) < 1e-10, (setting, far)
        same = bits[setting.over, setting.micro, "none" if setting.clip == "none" else "clip"]
        same.update(found[number][1] for found in by_rank)
        assert len(same) == 1, f"other bits than before: {setting}"


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_are_one_process_and_each_other(ranks: Callable, shape: tuple[int, int]) -> None:
    """Every pair of factors; and, so that stages can be compared, two stages of every row."""
    rows = [row for row in covering.covering(FACTORS, strength=2) if row["shape"] == shape]
    stages = [{**row, "stage": stage} for row in rows for stage in (0, 3)]
    check(ranks, list(dict.fromkeys(Mixed(**row) for row in [*rows, *stages])))


# ---- ranks on different paths

LEFT_OUT = {1: (1, (2, 3)), 2: (0, (0, 1)), 3: (1, (0, 1, 2, 3))}  # step: a block, and the ranks that leave it out


def choose_path(model: Any, step: int, rank: int) -> None:
    for number, block in enumerate(model.blocks):
        block.is_left_out = step in LEFT_OUT and LEFT_OUT[step][0] == number and rank in LEFT_OUT[step][1]


def apart(stage: int) -> dict[str, Tensor]:
    setting = Mixed((2, 2), stage)
    model, optimizer, rank = sharded(setting)
    for step in range(5):
        choose_path(model, step, rank)
        one_step(model, optimizer, step, rank, setting)
    return whole(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_line_of_ranks_leaves_a_mixture_out(ranks: Callable, stage: int) -> None:
    """Ranks 0 and 1 exchange tokens, and ranks 2 and 3: each pair takes its own path, then all the same."""
    model = made()
    optimizer = adamw(model)
    for step in range(5):
        for rank in range(4):
            choose_path(model, step, rank)
            (loss_of(model, *batch(step, 0, rank)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(apart, 4, stage):
        for name, param in model.named_parameters():
            assert torch.allclose(found[name], param, rtol=0, atol=1e-10), name


@pytest.mark.whole
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_product(ranks: Callable, shape: tuple[int, int]) -> None:
    check(ranks, [Mixed(**row) for row in covering.product({**FACTORS, "shape": (shape,)})])
