"""Batches come on the device of the model. The meta device stands in for an accelerator: what is there is elsewhere,
though it has no values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import zeor
from zeor.data import loader as following

META = torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    name: str
    inner: dict[str, Tensor]
    seen: int = field(default=0, init=False)


class Encoding:
    """As a tokenizer's: an object of its own kind that can be moved."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def to(self, device: Any) -> Encoding:
        return Encoding(self.ids.to(device))


def test_tensors_are_moved_wherever_they_are():
    x = torch.ones(2)
    batch = {
        "pair": Pair(x, x), "list": [x, "text", 3, None], "sample": Sample(x, "a", {"y": x}), "code": Encoding(x),
        "packed": pack_sequence([x]),
    }  # fmt: skip
    moved = following.move(batch, META)
    assert isinstance(moved["pair"], Pair) and moved["pair"].x.is_meta and moved["pair"].y.is_meta
    assert moved["list"][0].is_meta and moved["list"][1:] == ["text", 3, None]
    assert moved["sample"].x.is_meta and moved["sample"].inner["y"].is_meta and moved["sample"].name == "a"
    assert moved["code"].ids.is_meta
    assert moved["packed"].data.is_meta and not moved["packed"].batch_sizes.is_meta
    assert x.device.type == "cpu" and batch["list"][0] is x, "the caller's own batch is as it was"
    assert following.move(batch, torch.device("cpu"))["pair"].x is x


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0).unbind())


def loaders() -> dict[str, DataLoader]:
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    return {
        "shuffled": DataLoader(data, batch_size=2, shuffle=True),
        "batches of its own": DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),
        "a stream": DataLoader(Numbers(), batch_size=2),
        "endless": DataLoader(data, batch_size=2, sampler=Endless()),
        "workers": DataLoader(data, batch_size=2, num_workers=1),
    }


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(8))


@pytest.fixture
def nobody_said():
    before = following._followed[:]
    following._followed.clear()
    yield
    following._followed[:] = before


@pytest.mark.parametrize("kind", list(loaders()))
def test_a_loader_follows_the_model_or_what_it_was_told(nobody_said, kind):
    sharded, told = zeor.data.shard(loaders()[kind]), zeor.data.shard(loaders()[kind], device="meta")
    assert not any(tensor.is_meta for batch in sharded for tensor in _tensors(batch))
    assert all(tensor.is_meta for batch in told for tensor in _tensors(batch))
    following.follow(META)
    assert all(tensor.is_meta for batch in sharded for tensor in _tensors(batch))
    kept = zeor.data.shard(loaders()[kind], device="cpu")
    assert not any(tensor.is_meta for batch in kept for tensor in _tensors(batch))


def _tensors(batch: Any) -> list[Tensor]:
    found = [batch] if isinstance(batch, Tensor) else list(batch)
    assert found and all(isinstance(tensor, Tensor) for tensor in found)
    return found


def test_a_sharded_model_is_followed(nobody_said):
    model = nn.Linear(2, 2)
    zeor.shard(model, device="cpu")
    assert following.followed() == torch.device("cpu")


def test_a_position_is_counted_as_before(nobody_said):
    loader = zeor.data.shard(loaders()["shuffled"], device="meta")
    batches = iter(loader)
    next(batches)
    assert len(batches) == 4 and len(loader) == 4
    state = loader.state_dict()
    again = zeor.data.shard(loaders()["shuffled"], device="meta")
    again.load_state_dict(state)
    assert len(list(again)) == 3


def test_device_is_for_loaders():
    with pytest.raises(ValueError, match="device='meta' is for a DataLoader"):
        zeor.data.shard(TensorDataset(torch.arange(3)), device="meta")
