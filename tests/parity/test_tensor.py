"""Tensor parallelism beside ZeRO: float64 is one process on the joint batch, and all stages have the same bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from tests import covering
from tests.parity.divided import SHAPES, TRANSFORMERS, Divided, compared

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("mlp", "sequence", "between", "vocabulary"),
    "shape": SHAPES,
    "stage": (0, 1, 2, 3),
    "micro": ("1", "3", "3 no_sync"),
    "clip": ("none", "stock", "zeor"),
}
NEAR = {"mixtral": 1e-6}  # tensor parallelism alone is off by 4e-9 there




def all_compared(settings: list[Divided]) -> list[tuple[float, bytes]]:
    return [compared(setting) for setting in settings]


def check(ranks: Callable, settings: list[Divided]) -> None:
    """All on one shape of mesh."""
    world = settings[0].shape[0] * settings[0].shape[1]
    by_rank = ranks(all_compared, world, settings, timeout=300)
    bits: dict[Any, set[bytes]] = defaultdict(set)
    for number, setting in enumerate(settings):
        far = [found[number][0] for found in by_rank]
        assert max(far) < NEAR.get(setting.model, 1e-10), (setting, far)
        same = bits[setting.model, setting.micro, "none" if setting.clip == "none" else "clip"]
        same.update(found[number][1] for found in by_rank)
        assert len(same) == 1, f"other bits than before: {setting}"


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_are_one_process_and_each_other(ranks: Callable, shape: tuple[int, int]) -> None:
    """Every pair of factors; and, so that stages can be compared, all stages of one row of each model."""
    rows = [row for row in covering.covering(FACTORS, strength=2) if row["shape"] == shape]
    stages = [{**row, "stage": stage} for row in rows for stage in (0, 3)]
    settings = list(dict.fromkeys(Divided(**row) for row in [*rows, *stages]))
    assert {setting.model for setting in settings} == set(FACTORS["model"])
    check(ranks, settings)


@pytest.mark.long
@pytest.mark.parametrize("model", TRANSFORMERS)
def test_models_of_transformers(ranks: Callable, model: str) -> None:
    check(ranks, [Divided(model, (2, 2), stage, "3 no_sync", "zeor") for stage in (0, 1, 2, 3)])


@pytest.mark.whole
@pytest.mark.parametrize("model", (*FACTORS["model"], *TRANSFORMERS))
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_product(ranks: Callable, shape: tuple[int, int], model: str) -> None:
    rows = covering.product({**FACTORS, "shape": (shape,), "model": (model,)})
    check(ranks, [Divided(**row) for row in rows])
