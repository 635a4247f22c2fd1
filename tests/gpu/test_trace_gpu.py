"""zeor.trace on a GPU: the format's rules hold, and the device's own times are there. Never run so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests.traces import read

pytestmark = pytest.mark.gpu


def traced(path: str, options: dict[str, Any]) -> int:
    """Two steps under a trace; the bytes that this rank has sent in them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, nonfinite="ignore", **options)

    def step() -> None:
        model(torch.ones(8, 256, device="cuda")).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = zeor.traffic(model)["bytes_sent"]
    with zeor.trace(model, path):
        step()
        step()
    return int(zeor.traffic(model)["bytes_sent"] - before)


def check(path: Path, sent: list[int]) -> set[str]:
    """The names of rank 0's tracks."""
    found = read(path)
    assert len(found.processes) == len(sent)
    for rank, nbytes in enumerate(sent):
        on_host = [bar for bar in found.of(rank, "move") if not found.tracks[rank, bar["tid"]].startswith("device: ")]
        assert sum(bar["args"]["bytes"] for bar in on_host) == nbytes
    forwards = [bar for bar in found.of(0, "pass") if bar["name"] == "forward 1"]
    device = [bar for bar in forwards if found.tracks[0, bar["tid"]].startswith("device: ")]
    assert len(forwards) == 4 and len(device) == 2, "each forward once by the host's times and once by the device's"
    assert min(bar["dur"] for bar in device) > 0
    return {name for (rank, _), name in found.tracks.items() if rank == 0}


@pytest.mark.parametrize("offload", [None, "host"])
def test_one_rank(tmp_path: Path, offload: str | None) -> None:
    path = tmp_path / "trace.json"
    sent = traced(str(path), {"precision": "bf16", "offload": offload})
    tracks = check(path, [sent])
    assert {"device: compute", "device: update"} <= tracks
    assert ("device: fetch and spill" in tracks) == (offload is not None)


def test_ranks_that_share_the_device(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sent = ranks(traced, 2, str(path), {"precision": "bf16", "stage": 3})
    assert {"device: compute", "device: gather", "device: reduce", "device: exposed wait"} <= check(path, sent)
