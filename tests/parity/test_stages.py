"""At equal world size stages 0 to 3, with overlap and without, give the same bits.

Every setting is compared with stage 0 without overlap, in parameters, losses and gradient norms. Every triple of the
factors runs at world size 2 (`make test-all`: the full product), every pair of them and of the worlds 1, 3 and 4. A
test sends many settings to the ranks at once: making a model costs less than making process groups.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.parity.models import (
    FACTORS,
    MAX_NORM,
    SELECTIONS,
    Run,
    Setting,
    baseline,
    build_model,
    net,
    product,
    same_bits,
    steps,
    train,
    triples,
)

OTHER_WORLDS = (1, 3, 4)


def compare_in_bits(settings: list[Setting]) -> list[tuple[str, str, str]]:
    """On ranks: (setting, digest, what differs from its baseline) for every setting."""
    found, known = [], {}
    for setting in settings:
        first = baseline(setting)
        if first not in known:
            known[first] = train(first)
            _check_it_trained(first, known[first])
        run = known[first] if setting == first else train(setting)
        found.append((str(setting), run.digest(), same_bits(run, known[first])))
    return found


def _check_it_trained(setting: Setting, run: Run) -> None:
    """A comparison of models that did not move, or gradients that were not clipped, would show nothing."""
    before = dict(build_model(setting, net).named_parameters())
    for name, value in run.params.items():
        assert not torch.equal(before[name], value), f"{name} did not move: {setting}"
        assert value.isfinite().all(), f"{name} is not finite: {setting}"
    assert all(norm > MAX_NORM for norm in run.norms), f"{run.norms} were not clipped to {MAX_NORM}: {setting}"
    assert len(run.norms) == (0 if setting.clip == "none" else steps(int(setting.micro[0])))


def check(ranks: Callable, world: int, settings: list[Setting]) -> None:
    results = ranks(compare_in_bits, world, settings, timeout=240)
    differing = [f"{setting}: {difference}" for setting, _, difference in results[0] if difference]
    assert not differing, f"{len(differing)} of {len(settings)} settings differ from stage 0:\n" + "\n".join(differing)
    for rank, result in enumerate(results):
        apart = [mine[0] for mine, first in zip(result, results[0]) if mine[1] != first[1]]
        assert not apart, f"rank {rank} holds other parameters than rank 0:\n" + "\n".join(apart)


@pytest.mark.long
@pytest.mark.parametrize("precision", FACTORS["precision"])
def test_triples_at_world_2(ranks, precision):
    check(ranks, 2, [setting for setting in triples(**FACTORS) if setting.precision == precision])


@pytest.mark.whole
@pytest.mark.parametrize("precision", FACTORS["precision"])
@pytest.mark.parametrize("checkpoint", FACTORS["checkpoint"])
@pytest.mark.parametrize("optimizer", FACTORS["optimizer"])
def test_full_product_at_world_2(ranks, optimizer, checkpoint, precision):
    varied = {name: FACTORS[name] for name in ("micro", "clip", "stage", "overlap")}
    settings = product(**varied, checkpoint=[checkpoint], optimizer=[optimizer], precision=[precision])
    assert len(settings) == 72
    check(ranks, 2, settings)


@pytest.mark.long
@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("world", OTHER_WORLDS)
def test_pairs_at_other_worlds(ranks, world, select):
    check(ranks, world, select(world, OTHER_WORLDS, **FACTORS))
