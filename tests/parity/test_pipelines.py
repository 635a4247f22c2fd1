"""Pipelines: stages that zeor has sharded, under every schedule of torch.distributed.pipelining, are one process.

Every run is compared with plain PyTorch on the joint batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import covering
from tests.parity.pipes import SCHEDULES, Piped, Piping, mesh_of, reference

FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": tuple(SCHEDULES), "stage": (0, 1, 2, 3), "micro": (4, 8), "keep": ("step", "action"),
    "reduce": ("step", "action"), "together": (True, False), "clip": (False, True), "tied": (False, True),
}  # fmt: skip
LIMIT = 1e-10


def allowed(row: covering.Row) -> bool:
    """Ties are exchanged on unreduced gradients; one local stage is never a list."""
    alone = SCHEDULES[row["schedule"]][1] == 1 if "schedule" in row else False
    return not (row["tied"] and row["reduce"] == "action") and not (alone and not row["together"])


def compare(pp: int, pipings: list[Piping]) -> list[float]:
    mesh = mesh_of(pp)
    wanted: dict[Any, Any] = {}
    found = []
    for piping in pipings:
        key = piping.stages_per_rank, piping.clip, piping.tied
        if key not in wanted:
            wanted[key] = reference(piping, pp, mesh["dp"].size())
        run = Piped(piping, mesh)
        run.train()
        found.append(run.differs(wanted[key]))
    return found


def check(ranks: Callable, world: int, pipings: list[Piping], timeout: float) -> None:
    for found in ranks(compare, world, 2, pipings, timeout=timeout):
        assert len(found) == len(pipings)
        assert max(found) < LIMIT, {str(piping): each for piping, each in zip(pipings, found) if not each < LIMIT}


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_pairs_of_factors_are_one_process(ranks: Callable, world: int) -> None:
    rows = covering.covering({**FACTORS, "world": (2, 4)}, strength=2, allowed=allowed)
    assert {(row["schedule"], row["stage"]) for row in rows} == {(a, b) for a in SCHEDULES for b in range(4)}
    mine = [{name: value for name, value in row.items() if name != "world"} for row in rows if row["world"] == world]
    assert {row["schedule"] for row in mine} == set(SCHEDULES) and {row["stage"] for row in mine} == set(range(4))
    check(ranks, world, [Piping(**row) for row in mine], timeout=240)


@pytest.mark.whole
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [2, 4])
def test_whole_product_is_one_process(ranks: Callable, world: int, schedule: str) -> None:
    rows = covering.product({**FACTORS, "schedule": (schedule,)}, allowed)
    pipings = [Piping(**row) for row in rows]
    for first in range(0, len(pipings), 32):
        check(ranks, world, pipings[first : first + 32], timeout=600)
