"""Schedulers, scalers, averages and loaders beside the model: what does not fit is refused before anything changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import zeor
from tests.checkpoint.mutants import signed
from tests.checkpoint.test_resume import Numbers, loader_of
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files import manifest as manifests
from zeor.checkpoint.files.errors import CheckpointError


def made(kind: Any = torch.optim.AdamW, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(6, 3)
    model, optimizer = zeor.shard(model, kind(model.parameters(), lr=1e-2, **options))
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def weights(model: Any) -> torch.Tensor:
    with zeor.full_params(model):
        return torch.cat([param.detach().flatten() for param in model.parameters()])


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])


class Choosy:
    """Refuses whatever it is given."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("b")


def test_where_one_refuses_the_others_and_the_model_are_as_they_were(tmp_path: Path) -> None:
    model, optimizer = made()
    scheduler = scheduler_of(optimizer)
    scheduler.step()
    save(tmp_path, model, optimizer, step=1, extra={"scheduler": scheduler, "choosy": Choosy(), "number": 5})
    again, other = made(seed=1)
    late, before = scheduler_of(other), weights(again)
    was = late.state_dict()
    for name, given in (("choosy", Choosy()), ("number", Choosy())):
        with pytest.raises(CheckpointError, match=f"extra={{'{name}'"):
            load(tmp_path, again, other, extra={"scheduler": late, name: given})
        assert late.state_dict() == was and torch.equal(weights(again), before)
    assert load(tmp_path, again, other, extra={"scheduler": late}).extra["number"] == 5
    assert torch.equal(weights(again), weights(model)) and late.last_epoch == 1
    assert list(late.milestones.elements()) == [2, 4, 4]  # a Counter, as it was


def test_a_loader_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = made()
    saved = zeor.data.shard(DataLoader(Numbers(), batch_size=2))
    next(iter(saved))
    save(tmp_path, model, optimizer, step=1, data=saved)
    again, other = made(seed=1)
    before = weights(again)
    for data, what in (
        (DataLoader(Numbers(), batch_size=2), "data= is a DataLoader, which cannot be sent to a position"),
        (5, "data= is a int"),
        (zeor.data.shard(DataLoader(range(5), batch_size=2)), "does not fit this"),
        (loader_of("stream"), "does not fit this"),
    ):
        with pytest.raises(CheckpointError, match=what):
            load(tmp_path, again, other, data=data)
        assert torch.equal(weights(again), before)


def test_states_that_are_none_are_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    path = save(tmp_path, model, optimizer, step=1, extra={"scheduler": scheduler_of(optimizer)})
    assert isinstance(path, Path)
    file = path / manifests.NAME
    body = json.loads(file.read_text())["manifest"]
    again, other = made(seed=1)
    late, before = scheduler_of(other), weights(again)
    for state in ([1], None, {"step": 5}):
        body["state"]["extra"]["scheduler"] = state
        file.write_bytes(signed(body))
        with pytest.raises(CheckpointError, match="scheduler"):
            load(tmp_path, again, other, extra={"scheduler": late})
        assert torch.equal(weights(again), before)
    late.step()


def test_a_rank_that_refuses_stops_all(ranks: Any, tmp_path: Path) -> None:
    def job(folder: str) -> bool:
        model, optimizer = made()
        scheduler = scheduler_of(optimizer)
        scheduler.step()
        save(folder, model, optimizer, step=1, extra={"scheduler": scheduler, "choosy": Choosy()})
        again, other = made(seed=1)
        late, before = scheduler_of(other), weights(again)
        given = {"scheduler": late, "choosy": Choosy()} if dist.get_rank() == 1 else {"scheduler": late}
        with pytest.raises(CheckpointError, match="choosy"):
            load(folder, again, other, extra=given)
        return late.last_epoch == 0 and torch.equal(weights(again), before)

    assert ranks(job, 2, str(tmp_path)) == [True, True]


def test_the_state_of_another_optimizer_is_refused_or_reported(tmp_path: Path) -> None:
    model, optimizer = made(torch.optim.SGD, momentum=0.9)
    save(tmp_path, model, optimizer, step=1)
    again, other = made(seed=1)
    with pytest.raises(CheckpointError, match="holds the state of a SGD as optimizer 0, and a AdamW was given"):
        load(tmp_path, again, other)
    found = load(tmp_path, again, other, strict=False)
    assert found.missing == ["optimizer 0 (AdamW)"] and found.unexpected == ["optimizer 0 (SGD)"]
    assert "momentum" not in other.param_groups[0] and torch.equal(weights(again), weights(model))
    again(torch.ones(2, 6)).sum().backward()
    other.step()


def test_adam_and_adamw_keep_the_same_state(tmp_path: Path) -> None:
    model, optimizer = made(torch.optim.AdamW)
    save(tmp_path, model, optimizer, step=1)
    again, other = made(torch.optim.Adam, seed=1)
    load(tmp_path, again, other)
    assert len(other.state) == len(optimizer.state) == 2, "of the weight and of the bias"
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_groups_in_another_order_keep_their_own_settings(tmp_path: Path) -> None:
    def groups(model: nn.Module, order: int) -> list[dict[str, Any]]:
        made = [{"params": [model.weight], "lr": 0.01}, {"params": [model.bias], "lr": 0.05}]
        return made[::order]

    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    model, optimizer = zeor.shard(first, torch.optim.SGD(groups(first, 1)))
    save(tmp_path, model, optimizer, step=1)
    again, other = zeor.shard(second, torch.optim.SGD([{**g, "lr": 1.0} for g in groups(second, -1)]))
    with pytest.raises(CheckpointError, match="hold other parameters"):
        load(tmp_path, again, other)
    load(tmp_path, again, other, strict=False)
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.01]


def test_an_average_that_was_not_saved_stays_and_is_reported(tmp_path: Path) -> None:
    model, optimizer = made()
    save(tmp_path, model, optimizer, step=1)
    again, other = made(seed=1)
    average = zeor.ema(again, decay=0.5)
    with pytest.raises(CheckpointError, match="has no average 'ema'"):
        load(tmp_path, again, other, extra={"ema": average})
    found = load(tmp_path, again, other, extra={"ema": average}, strict=False)
    assert found.missing == ["weight of the average 'ema'", "bias of the average 'ema'"]
    assert torch.equal(weights(again), weights(model))
