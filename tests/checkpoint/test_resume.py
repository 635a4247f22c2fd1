"""A resumed run is the uninterrupted one: data order in mid-epoch, dropout, scalers and schedulers, in every bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import zeor
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.errors import CheckpointError

SAMPLES, SAVED, MORE = 27, 3, 8  # saved in mid-epoch; what follows reaches into the next epoch


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(index)) for index in range(SAMPLES))


def loader_of(kind: str) -> Any:
    if kind == "map":
        return zeor.data.shard(DataLoader(Numbers(), batch_size=2, shuffle=True))
    if kind == "map, workers":
        return zeor.data.shard(DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=1))
    if kind == "stream":
        return zeor.data.shard(DataLoader(Stream(), batch_size=2), shuffle=5)
    if kind == "stateful map":
        return zeor.data.shard(StatefulDataLoader(Numbers(), batch_size=2, shuffle=True))
    if kind == "stateful stream":
        return zeor.data.shard(StatefulDataLoader(Stream(), batch_size=2))
    assert kind == "stateful alone"
    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank an order of its own
    return StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator)


class Run:
    """A model with dropout and noise from every generator, a scaler, a warm-up and decay, a loader."""

    def __init__(self, kind: str, seed: int) -> None:
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed + dist.get_rank())
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.4), nn.Linear(16, 3))
        torch.manual_seed(seed + dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = zeor.shard(model, optimizer, stage=3)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[4])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.loader = loader_of(kind)

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    def step(self, batch: Tensor) -> list[Any]:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        loss = self.model(batch / SAMPLES).square().mean() + noise
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return [loss.item(), batch[:, 0].tolist(), self.optimizer.param_groups[0]["lr"], self.scaler.get_scale()]

    def batches(self) -> Iterator[Tensor]:
        while True:
            yield from self.loader


def resume(folder: str, kinds: list[str]) -> Any:
    for kind in kinds:
        run, place = Run(kind, seed=0), f"{folder}/{kind}"
        batches, wanted = run.batches(), []
        for step in range(SAVED + MORE):
            if step == SAVED:
                save(place, run.model, run.optimizer, step=step, extra=run.extra, data=run.loader)
            wanted.append(run.step(next(batches)))
        again = Run(kind, seed=50)
        again.step(next(again.batches()))
        load(place, again.model, again.optimizer, extra=again.extra, data=again.loader)
        batches = again.batches()
        found = [again.step(next(batches)) for _ in range(MORE)]
        assert found == wanted[SAVED:], f"{kind}: {found} instead of {wanted[SAVED:]}"
    return True


@pytest.mark.parametrize("kind", ["map", "stream", "stateful map", "stateful stream", "stateful alone"])
def test_losses_data_scaler_and_schedule_go_on_in_every_bit_from_mid_epoch(ranks, tmp_path: Path, kind: str) -> None:
    assert all(ranks(resume, 2, str(tmp_path), [kind]))


@pytest.mark.long
def test_they_do_with_worker_processes_too(ranks, tmp_path: Path) -> None:
    assert all(ranks(resume, 2, str(tmp_path), ["map, workers"]))


SCHEDULERS = {
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 6], 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3),
}


def scheduled(scheduler: Any, which: range) -> list[float]:
    rates = []
    for step in which:
        scheduler.optimizer.step()
        scheduler.step(*([1.0 + step % 3] if "Plateau" in type(scheduler).__name__ else []))
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_go_on_in_every_bit(tmp_path: Path, name: str) -> None:
    def made(lr: float) -> tuple[Any, Any]:
        model = nn.Linear(2, 2)
        model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), stage=1)
        return model, SCHEDULERS[name](optimizer)

    model, scheduler = made(0.3)
    scheduled(scheduler, range(3))
    save(tmp_path, model, step=3, extra={"scheduler": scheduler})
    wanted = scheduled(scheduler, range(3, 9))
    model, scheduler = made(0.7)
    load(tmp_path, model, extra={"scheduler": scheduler})
    assert scheduled(scheduler, range(3, 9)) == wanted


def begin(folder: str, kind: str) -> list[float]:
    """The samples of this rank before the save, which each rank is given two of at a time."""
    run = Run(kind, seed=0)
    batches, seen = run.batches(), []
    for _ in range(SAVED):
        seen += run.step(next(batches))[1]
    save(folder, run.model, run.optimizer, step=SAVED, extra=run.extra, data=run.loader)
    return seen


def go_on(folder: str, kind: str) -> list[float]:
    """The rest of the epoch."""
    run = Run(kind, seed=9)
    loaded = load(folder, run.model, run.optimizer, extra=run.extra, data=run.loader)
    assert loaded.step == SAVED
    return [number for batch in run.loader for number in run.step(batch)[1]]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_another_number_of_ranks_goes_on_with_the_rest_of_the_epoch(ranks, tmp_path: Path, kind: str) -> None:
    first = [number for seen in ranks(begin, 2, str(tmp_path), kind) for number in seen]
    rest = [number for seen in ranks(go_on, 3, str(tmp_path), kind) for number in seen]
    assert len(first) == SAVED * 2 * 2 and (SAMPLES - len(first)) % 3 == 0  # so that no rank's last round is filled up
    assert sorted(first + rest) == list(range(SAMPLES))


def refused_elsewhere(folder: str) -> Any:
    run = Run("stateful alone", seed=9)
    before = [param.sum().item() for param in run.model.state_dict().values()] if dist.get_world_size() == 1 else None
    with pytest.raises(CheckpointError, match="position of the data loader for each of 2 ranks, and there are 1 here"):
        load(folder, run.model, run.optimizer, extra=run.extra, data=run.loader)
    assert before == [param.sum().item() for param in run.model.state_dict().values()]
    load(folder, run.model, run.optimizer, extra=run.extra)
    with pytest.raises(CheckpointError, match="lacks extra: 'average'"):
        load(folder, run.model, run.optimizer, extra={"average": run.scaler})
    return True


def test_positions_of_each_rank_are_refused_at_another_number_of_ranks(ranks, tmp_path: Path) -> None:
    ranks(begin, 2, str(tmp_path), "stateful alone")
    assert ranks(refused_elsewhere, 1, str(tmp_path)) == [True]


def test_tensors_in_extra_come_back_whether_or_not_an_object_asks_for_them(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    table = torch.arange(1000.0)
    save(tmp_path, model, optimizer, step=1, extra={"table": table})
    assert torch.equal(load(tmp_path, model, optimizer).extra["table"], table)


def without_position(folder: str) -> Any:
    run = Run("map", seed=0)
    save(folder, run.model, run.optimizer, step=1)
    with pytest.raises(CheckpointError, match="holds no position of a data loader"):
        load(folder, run.model, run.optimizer, data=run.loader)
    return load(folder, run.model, run.optimizer, data=run.loader, strict=False).step


def test_a_checkpoint_without_a_position_says_so(ranks, tmp_path: Path) -> None:
    assert ranks(without_position, 1, str(tmp_path)) == [1]
