"""The zoo: nine families of models, three steps each, at stages 1-3 on two ranks.

The stages are the same bits, and all are one process on the joint batch within 1e-10 in float64.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeor
from tests.parity.zoo import ZOO, build, joint_batch, no_float32

STEPS, WORLD = 3, 2
Result = tuple[list[float], dict[str, Tensor]]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(name: str, device: str = "cpu") -> Result:
    """One process on the joint batch."""
    model, losses = build(name).to(device), []
    optimizer = optimizer_of(model)
    with no_float32():
        for step in range(STEPS):
            batch = {key: value.to(device) for key, value in joint_batch(name, step).items()}
            loss = ZOO[name].loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {key: value.detach().cpu().clone() for key, value in model.named_parameters()}


def sharded(name: str, stage: int, device: str = "cpu") -> Result:
    """This rank's rows of the joint batch; the mean of the ranks' losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(name).to(device)
    model, optimizer = zeor.shard(model, optimizer_of(model), stage=stage)
    losses = []
    with no_float32():
        for step in range(STEPS):
            batch = {key: value[rank::world].contiguous().to(device) for key, value in joint_batch(name, step).items()}
            loss = ZOO[name].loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().cpu()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
    with zeor.full_params(model):
        return losses, {key: value.detach().cpu().clone() for key, value in model.named_parameters()}


def stages(name: str, device: str = "cpu") -> list[Result]:
    return [sharded(name, stage, device) for stage in (1, 2, 3)]


def compare(results: list[Result], expected: Result) -> None:
    for losses, params in results:
        assert losses == results[0][0]
        assert params.keys() == expected[1].keys()
        for key, value in params.items():
            assert torch.equal(value, results[0][1][key]), key
    losses, params = results[0]
    assert losses == pytest.approx(expected[0], rel=1e-10)
    for key, value in params.items():
        torch.testing.assert_close(
            value, expected[1][key], rtol=1e-10, atol=1e-10, msg=lambda text, k=key: f"{k}: {text}"
        )
    assert len(set(losses)) == STEPS


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO)
def test_stages_are_the_same_bits_and_equal_one_process(ranks, name: str) -> None:
    compare(ranks(stages, WORLD, name)[0], plain(name))
