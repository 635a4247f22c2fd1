"""Checkpoints of a run on a GPU: staged in its memory, on the host, or read twice, they come back in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeor
from tests.checkpoint.test_reshard import everything
from zeor.checkpoint import staging

pytestmark = pytest.mark.gpu


def made(seed: int) -> tuple[Any, Any]:
    """Of several blocks of a file, with parameters that end inside them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1500, 1501), nn.GELU(), nn.Linear(1501, 3), nn.BatchNorm1d(3)).to("cuda")
    model, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3)
    for _ in range(2):
        model(torch.randn(8, 1500, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


WAYS = {
    "on the device": {},
    "on the host": {"DEVICE_SHARE": 0.0},
    "twice": {"DEVICE_SHARE": 0.0, "STAGED_SHARE": 0.0, "BATCH_NBYTES": 1 << 20},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_comes_back_in_every_bit(tmp_path: Path, way: str, asynchronous: Any) -> None:
    model, optimizer = made(1)
    saved = zeor.save(tmp_path, model, optimizer, step=2, asynchronous=asynchronous)
    if asynchronous:
        saved.wait()
    wanted = everything(model, optimizer)
    again = made(2)
    placed: list[bool] = []
    plain = staging.Staging.read

    def read(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        placed.extend(put.need.into.is_cuda for put in self._staged)

    with patch.multiple(staging, **WAYS[way]) if WAYS[way] else patch.object(staging, "DEVICE_SHARE", 0.8):
        with patch.object(staging.Staging, "read", read):
            assert zeor.load(tmp_path, *again).step == 2
    assert all(placed) == (way != "on the host") and bool(placed) == (way != "twice")
    found = everything(*again)
    assert found.keys() == wanted.keys() and all(torch.equal(value, wanted[key]) for key, value in found.items())


def test_damage_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = made(1)
    path = zeor.save(tmp_path, model, optimizer, step=2)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again = made(2)
    before = everything(*again)
    with pytest.raises(zeor.CheckpointError, match="do not match their hash"):
        zeor.load(tmp_path, *again)
    found = everything(*again)
    assert all(torch.equal(value, before[key]) for key, value in found.items())
