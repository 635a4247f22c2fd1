"""A checkpoint loads at any world size and stage: everything bit-equal, and training goes on as if nothing happened."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeor
from tests.loops import net, own_loss
from zeor.checkpoint.training import load, save
from zeor.runtime.sharded import state_of

SAVED, MORE = 3, 5
WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)


def make(stage: int, seed: int = 3, **options: Any) -> tuple[Any, Any, Any]:
    model = net(torch.float32, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeor.shard(model, optimizer, stage=stage, **options)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def steps(model: Any, optimizer: Any, scheduler: Any, which: range) -> list[float]:
    losses = []
    for step in which:
        loss = own_loss(model, step, torch.float32)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def everything(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and the optimizer's state, whole."""
    segments = state_of(model).steppers[0].segments
    state = {name: segments.whole(param) for name, param in model.named_parameters()}
    with zeor.full_params(model):
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, entries in state.items():
        found.update({f"{name}/{key}": torch.as_tensor(value).clone() for key, value in entries.items()})
    return found


def save_one(folder: str, stage: int, options: dict[str, Any]) -> Any:
    """Train, save, train on."""
    model, optimizer, scheduler = make(stage, **options)
    steps(model, optimizer, scheduler, range(SAVED))
    path = save(folder, model, optimizer, step=SAVED, extra={"scheduler": scheduler, "note": ("a", 1)})
    losses = steps(model, optimizer, scheduler, range(SAVED, SAVED + MORE))
    return str(path), losses, everything(model, optimizer)


def load_one(folder: str, stage: int, options: dict[str, Any]) -> Any:
    model, optimizer, scheduler = make(stage, seed=11, **options)
    steps(model, optimizer, scheduler, range(100, 101))  # state of its own, all of which must go
    loaded = load(folder, model, optimizer, extra={"scheduler": scheduler})
    assert loaded.step == SAVED and loaded.extra["note"] == ("a", 1)
    at_load = everything(model, optimizer)
    losses = steps(model, optimizer, scheduler, range(SAVED, SAVED + MORE))
    return at_load, losses, everything(model, optimizer)


def save_all(root: str) -> dict[int, Any]:
    return {stage: save_one(f"{root}/{dist.get_world_size()}-{stage}", stage, {}) for stage in STAGES}


def load_all(root: str, saved: list[tuple[int, int]], stages: list[int]) -> dict[Any, Any]:
    return {
        (world, from_stage, stage): load_one(f"{root}/{world}-{from_stage}", stage, {})
        for (world, from_stage), stage in itertools.product(saved, stages)
    }


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[str, dict[int, Any]]:
    root = str(tmp_path_factory.mktemp("reshard"))
    return root, {world: ranks(save_all, world, root)[0] for world in WORLDS}


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_saved_at_any_world_and_stage_loads_here_at_every_stage(ranks, saved, world: int) -> None:
    root, runs = saved
    pairs = list(itertools.product(WORLDS, STAGES))
    results = ranks(load_all, world, root, pairs, list(STAGES), timeout=280)[0]
    assert len(results) == len(pairs) * len(STAGES)
    for (from_world, from_stage, _), (at_load, losses, at_end) in results.items():
        first = results[from_world, 0, 0][0]
        assert at_load.keys() == first.keys()
        for key, value in at_load.items():
            assert torch.equal(value, first[key]), key
        _, wanted_losses, wanted = runs[from_world][from_stage]
        if from_world == world:
            assert losses == wanted_losses
            assert all(torch.equal(value, wanted[key]) for key, value in at_end.items())
        else:
            assert losses == pytest.approx(wanted_losses, rel=1e-5)


def test_stages_write_the_same_values(saved) -> None:
    _, runs = saved
    for world in WORLDS:
        assert all(runs[world][stage][1] == runs[world][0][1] for stage in STAGES)


def bf16_round(folder: str) -> Any:
    model, optimizer, scheduler = make(3, precision="bf16")
    steps(model, optimizer, scheduler, range(SAVED))
    save(folder, model, optimizer, step=SAVED, extra={"scheduler": scheduler})
    losses = steps(model, optimizer, scheduler, range(SAVED, SAVED + MORE))
    again = make(2, seed=11, precision="bf16")
    load(folder, *again[:2], extra={"scheduler": again[2]})
    assert steps(*again, range(SAVED, SAVED + MORE)) == losses
    return True


def test_masters_of_a_bf16_run_come_back_in_every_bit(ranks, tmp_path: Path) -> None:
    assert all(ranks(bf16_round, 2, str(tmp_path)))
