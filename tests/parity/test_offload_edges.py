"""Sequences of events around offload, release and delay that once went wrong, or could."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from zeor.access.sharded import state_of
from zeor.features.nonfinite import NonFinite


class Forked(nn.Module):
    """Two branches of which one may be left out, and a parameter smaller than the number of ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last = nn.Linear(12, 1)

    def forward(self, x, both=True):
        x = self.left(x).tanh()
        return self.last(x + self.right(x) if both else x)


def made(**options):
    model = Forked()
    units = [nn.Linear]
    return zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), units=units, **options)


def batch(step: int) -> torch.Tensor:
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4 * world, 12, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]


def values(model) -> list[torch.Tensor]:
    with zeor.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def delayed_with_a_branch_left_out(stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(what the full parameters are, what this rank's forward reads) after a step without gradients for one branch."""
    model, optimizer = made(stage=stage, delay=1)
    for step in range(4):
        model(batch(step), both=step != 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = []
    engine = state_of(model).engine
    for unit in engine.units:
        for lane in unit.lanes:
            lane.wait()
            if not lane.frees:
                seen.append(lane.full.flat.clone())
    return values(model), seen


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_agree_when_a_delayed_unit_had_no_gradient(ranks, stage):
    found = ranks(delayed_with_a_branch_left_out, 2, stage)
    for kind in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(found[0][kind], found[1][kind], strict=True))
    whole = ranks(delayed_with_a_branch_left_out, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], whole[0][0], strict=True))


def gradients_stay_away() -> list[bool]:
    """Whether each lane's gradients still rest on the host after clipping and the watch for non-finite ones."""
    model, _ = made(offload=zeor.Offload(grads="host", chunk=256))
    model(batch(0)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    engine = state_of(model).engine
    engine.feature(NonFinite)._look([slot for slot in engine.slots if slot.lane.grads is not None])
    return [bool(lane.grads.resting) for unit in engine.units for lane in unit.lanes if lane.grads is not None]


def test_clipping_brings_no_gradients_back(ranks):
    for world in (1, 2, 3):
        assert all(all(found) for found in ranks(gradients_stay_away, world))


def test_a_failed_backward_with_release_is_forgotten():
    model, optimizer = made(release=True)
    handle = model.left.register_full_backward_pre_hook(_raise)
    loss = model(batch(0)).square().mean()
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    handle.remove()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="a backward raised"):
        model(batch(1)).square().mean().backward()
    before = values(model)
    optimizer.step()
    optimizer.zero_grad()
    model(batch(2)).square().mean().backward()
    optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


def _raise(*_):
    raise RuntimeError("on purpose")


def test_an_average_is_what_a_delayed_model_evaluates():
    model, optimizer = made(delay=1)
    average = zeor.ema(model, 0.5)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    with average.applied(), torch.no_grad():
        found = model(batch(9))
        with zeor.full_params(model):
            wanted = Forked()
            wanted.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
    assert torch.equal(found, wanted(batch(9)))
