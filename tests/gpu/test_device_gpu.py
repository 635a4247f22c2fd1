"""A model that was built on the CPU trains on the GPU without a word: it is moved, batches follow, and the result is
that of a model that was built there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zeor
from zeor.data import loader as loaders

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return self.body(x) * extra["gain"]


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 16, generator=generator), torch.randint(4, (64,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16)


def run(place: str, options: dict[str, Any], batches: Any) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = Net().to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, **options)
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x, {"gain": torch.full((4,), 2.0)}).float(), y.to("cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"stage": 0}, {"offload": "host"}], ids=str)
def test_a_model_from_the_cpu_trains_on_the_gpu(options):
    here, losses = run("cpu", options, zeor.data.shard(data()))
    there, expected = run("cuda", options, data())  # batches on the CPU: forward moves what is left
    assert losses == expected
    assert all(p.device == torch.device("cuda", 0) for p in (*here.parameters(), *here.buffers()))
    for mine, its in zip(here.state_dict().values(), there.state_dict().values(), strict=True):
        assert torch.equal(mine, its)


def test_batches_come_on_the_gpu_whole():
    model = nn.Linear(16, 4)
    zeor.shard(model)
    assert loaders.followed() == torch.device("cuda", 0)
    for x, y in zeor.data.shard(data()):
        assert x.is_cuda and y.is_cuda
    for x, y in zeor.data.shard(data(), device="cpu"):
        assert not x.is_cuda and not y.is_cuda


def test_the_cpu_can_be_asked_for():
    model = nn.Linear(16, 4)
    zeor.shard(model, device="cpu")
    assert next(model.parameters()).device.type == "cpu"
    assert model(torch.ones(2, 16)).device.type == "cpu"


def test_an_optimizer_that_has_stepped_on_the_cpu_goes_along():
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, place: str) -> None:
        for step in range(3):
            model(torch.full((2, 4), 1.0 + step, device=place)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    sharded = nn.Linear(4, 4)
    sharded.load_state_dict(plain.state_dict())
    for model in (plain, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps(model, optimizer, "cpu")
        if model is sharded:
            zeor.shard(model, optimizer)
        steps(model, optimizer, "cpu" if model is plain else "cuda")
    with zeor.full_params(sharded):
        for mine, its in zip(sharded.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.detach().cpu(), its.detach(), rtol=1e-4, atol=1e-5)


def test_a_drop_in_moves_nothing_and_says_what_to_write(caplog):
    model = nn.Linear(4, 4)
    with caplog.at_level("INFO", logger="zeor"):
        zeor.optim.AdamW(model.parameters())
    assert next(model.parameters()).device.type == "cpu"
    assert "write model.to('cuda:0') before zeor.optim.AdamW" in caplog.text


def test_what_happened_is_in_the_start_up_block(caplog):
    with caplog.at_level("INFO", logger="zeor"):
        zeor.shard(nn.Linear(4, 4))
    assert "the model was moved from the CPU to cuda:0" in caplog.text


def test_more_ranks_than_gpus_stay_on_the_cpu(monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 1))
    model = nn.Linear(4, 4)
    with caplog.at_level("INFO", logger="zeor"):
        zeor.shard(model)
    assert next(model.parameters()).device.type == "cpu"
    assert "the model stays on the CPU" in caplog.text
