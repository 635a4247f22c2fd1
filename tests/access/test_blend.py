"""lerp: a target drawn towards its source on slices equals torch.lerp of the plain parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeor
from tests import loops


def pair(stage: int, precision: str | None = None, frozen: bool = False) -> tuple[nn.Module, nn.Module]:
    dtype = torch.float32
    source, target = loops.net(dtype, seed=3), loops.net(dtype, seed=4)
    if frozen:
        target.requires_grad_(False)
        source.requires_grad_(False)
    zeor.shard(target.eval(), stage=stage, precision=precision)
    zeor.shard(source, stage=stage, precision=precision)
    return target, source


def check(stage: int, precision: str | None, frozen: bool) -> None:
    target, source = pair(stage, precision, frozen)
    x = torch.randn(3, loops.FEATURES)
    with torch.no_grad():
        target(x)  # gathered values must not outlive the change
    with zeor.full_params(target), zeor.full_params(source):
        ours, theirs = loops.values(target), loops.values(source)
    for alpha in (0.6, 0.0, 1.0):
        ours = {name: torch.lerp(value, theirs[name], alpha) for name, value in ours.items()}
        zeor.lerp(target, source, alpha)
        with zeor.full_params(target), zeor.full_params(source):
            loops.assert_equal(loops.values(target), ours)
            loops.assert_equal(loops.values(source), theirs)
    with torch.no_grad():
        torch.testing.assert_close(target(x), source(x), rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "precision", "frozen"), [
    (0, None, False), (1, None, False), (2, "bf16", False), (3, None, False), (3, "bf16", False), (3, None, True),
    (1, "bf16", True),
])  # fmt: skip
def test_the_target_is_torch_lerp_of_both(ranks, stage, precision, frozen):
    ranks(check, 2, stage, precision, frozen)


def test_on_three_ranks(ranks):
    ranks(check, 3, 3, None, False)


def check_follows_training() -> None:
    """A momentum target while its source trains, beside plain PyTorch in one process."""
    target, source = pair(3)
    plain_target, plain = loops.net(torch.float32, seed=4), loops.net(torch.float32, seed=3)
    source, optimizer = zeor.shard(source, torch.optim.SGD(source.parameters(), lr=0.1))
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for model, its, loss in ((source, optimizer, loops.own_loss), (plain, other, loops.joint_loss)):
            loss(model, step, torch.float32).backward()
            its.step()
            its.zero_grad()
        zeor.lerp(target, source, 0.1)
        with torch.no_grad():
            for mine, theirs in zip(plain_target.parameters(), plain.parameters()):
                mine.lerp_(theirs, 0.1)
    with zeor.full_params(target):
        loops.assert_close(loops.values(target), loops.values(plain_target), rtol=1e-5, atol=1e-6)


def test_a_target_follows_a_source_that_trains(ranks):
    ranks(check_follows_training, 2)


def check_refused() -> list[str]:
    target, source = pair(3)
    other = zeor.shard(loops.Net(blocks=3))
    cut = zeor.shard(loops.net(torch.float32), stage=0)
    found = []
    for to, frm, alpha in ((target, source, 1.5), (target, other, 0.5), (other, target, 0.5), (target, cut, 0.5),
                           (target, loops.net(), 0.5)):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            zeor.lerp(to, frm, alpha)
        found.append(str(caught.value))
    return found


def test_models_that_do_not_fit_are_refused_by_name(ranks):
    for found in ranks(check_refused, 2):
        assert found[0] == "zeor.lerp(alpha=1.5): give how far the target moves, between 0 and 1."
        assert "the target has no parameter 'blocks.2.norm.weight'" in found[1]
        assert "the source has no parameter of that name: 'blocks.2.norm.weight'" in found[2]
        assert "the models are cut differently, first at" in found[3]
        assert found[4] == "This model is not sharded; call zeor.shard(model, optimizer) first."
