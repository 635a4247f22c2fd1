"""Checkpoints between any two shapes of ranks and stages for each axis: element-wise state, and matrices of owners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zeor
from tests import offloads
from tests.parity.models import Setting, placed
from tests.parity.test_axes import muon

# (stage inside and across, shape) on four ranks; a number: one axis.
PLACES: list[Any] = [((3, 1), (2, 2)), ((2, 0), (2, 2)), ((0, 1), (2, 2)), ((3, 3), (1, 4)), ((3, 2), (4, 1)), 3, 0]


def options(place: Any) -> dict[str, Any]:
    return {"stage": place} if isinstance(place, int) else placed(Setting(place[0], shape=place[1]))


def go_on_elsewhere(folder: str, make: Callable) -> None:
    for number, (old, new) in enumerate(zip(PLACES, [*PLACES[1:], PLACES[0]])):
        model, optimizers = offloads.made(make, **options(old))
        offloads.one_step(model, optimizers, 0, "clip")
        zeor.save(f"{folder}/{number}", model, optimizers, step=1)
        other, others = offloads.made(make, **options(new))
        zeor.load(f"{folder}/{number}", other, others)
        offloads.same(offloads.whole(other), offloads.whole(model), (old, new))


@pytest.mark.parametrize("make", [offloads.adamw, muon])
def test_a_checkpoint_of_one_shape_loads_at_another(ranks: Callable, tmp_path: Path, make: Callable) -> None:
    ranks(go_on_elsewhere, 4, str(tmp_path), make)
