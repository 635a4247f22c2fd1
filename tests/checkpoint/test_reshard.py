"""A checkpoint loads at any world size and stage: everything bit-equal, and training goes on as if nothing happened.

`make test` loads what holds every triple of the four factors, `make test-all` every combination.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeor
from tests.covering import PAIRS, Row
from tests.loops import net, own_loss
from zeor.access.sharded import state_of
from zeor.checkpoint.api import load, save

SAVED, MORE = 3, 3
WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
FACTORS = {"from_world": WORLDS, "from_stage": STAGES, "world": WORLDS, "stage": STAGES}


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
    """Train, save, train on: the losses afterwards, and what there was at the save and in the end."""
    model, optimizer, scheduler = make(stage, **options)
    steps(model, optimizer, scheduler, range(SAVED))
    save(folder, model, optimizer, step=SAVED, extra={"scheduler": scheduler, "note": ("a", 1)})
    at_save = everything(model, optimizer)
    losses = steps(model, optimizer, scheduler, range(SAVED, SAVED + MORE))
    return at_save, losses, everything(model, optimizer)


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


def load_all(root: str, rows: list[Row]) -> list[Any]:
    return [load_one(f"{root}/{row['from_world']}-{row['from_stage']}", row["stage"], {}) for row in rows]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: object) -> None:
    assert found.keys() == wanted.keys(), what
    differing = [key for key, value in wanted.items() if not torch.equal(found[key], value)]
    assert not differing, f"{what}: {differing}"


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[str, dict[int, Any]]:
    root = str(tmp_path_factory.mktemp("reshard"))
    return root, {world: ranks(save_all, world, root)[0] for world in WORLDS}


@pytest.mark.long
@pytest.mark.parametrize("select", PAIRS)
@pytest.mark.parametrize("world", WORLDS)
def test_saved_at_any_world_and_stage_loads_here_at_every_stage(ranks, saved, world: int, select: Any) -> None:
    root, runs = saved
    rows = [row for row in select(FACTORS) if row["world"] == world]
    results = ranks(load_all, world, root, rows, timeout=280)[0]
    assert {row["from_world"] for row in rows} == set(WORLDS) and {row["from_stage"] for row in rows} == set(STAGES)
    assert {row["stage"] for row in rows} == set(STAGES)
    for row, (at_load, losses, at_end) in zip(rows, results, strict=True):
        at_save, wanted_losses, wanted = runs[row["from_world"]][row["from_stage"]]
        assert_same(at_load, at_save, row)
        if row["from_world"] == world:
            assert losses == wanted_losses
            assert_same(at_end, wanted, row)
        else:
            assert losses == pytest.approx(wanted_losses, rel=1e-5)


def test_stages_write_the_same_values(saved) -> None:
    _, runs = saved
    for world in WORLDS:
        first, *others = (runs[world][stage] for stage in STAGES)
        for at_save, losses, at_end in others:
            assert losses == first[1]
            assert_same(at_save, first[0], world)
            assert_same(at_end, first[2], world)


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
