"""Two hosts: a pair of network namespaces with a link between them, one rank in each, started by torchrun.

One job does it all, as two machines would: it trains a small float64 model at every stage, and counts what really
crosses the interface while a larger fp32 one trains. The tests then read what the two ranks wrote down.
The same file is the script that torchrun starts; it finds the process group's variables, and zeor does the rest.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from benchmarks import netns
from zeor import api

pytestmark = [pytest.mark.netns, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[1]
STAGES = (0, 1, 2, 3)
STEPS, BATCH = 3, 8  # of the small model; BATCH is that of both ranks together
COUNTED_STEPS = 3
WIDTH, LAYERS = 512, 16  # of the larger model: 4.2 million parameters


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.LayerNorm(13)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(13, 5)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, 13, generator=source, dtype=torch.float64),
        torch.randn(BATCH, 5, generator=source, dtype=torch.float64),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


# The script: one rank


def work(folder: Path) -> None:
    for stage in STAGES:
        train_small(stage, folder)
    counts = {stage: count_bytes(stage) for stage in STAGES}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(counts))
    dist.barrier()  # nobody leaves while the other still speaks to it
    dist.destroy_process_group()


def train_small(stage: int, folder: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer, stage=stage)
    rank, half = dist.get_rank(), BATCH // 2
    train(model, optimizer, slice(rank * half, (rank + 1) * half))
    with zeor.full_params(model):
        values = {name: param.detach().numpy().copy() for name, param in model.named_parameters()}
    np.savez(folder / f"stage{stage}rank{rank}.npz", **values)


def count_bytes(stage: int) -> dict[str, float]:
    """Bytes per step: on the interface, by zeor's own count, and in theory."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    numel = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    zeor.shard(model, optimizer, stage=stage)

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            model(torch.randn(1, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        api._state(model).engine.drain()
        dist.barrier()
        return netns.sent_nbytes(os.environ["GLOO_SOCKET_IFNAME"]), zeor.traffic(model)["bytes_sent"]

    before, after = steps(2), steps(COUNTED_STEPS)
    interface, counted = ((b - a) / COUNTED_STEPS for a, b in zip(before, after))
    models = 3 - 1 / LAYERS if stage == 3 else 2  # the last unit stays between forward and backward
    return {"interface": interface, "counted": counted, "theory": models * 4 * numel / 2}


# The tests


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that a finished job of two hosts has written to."""
    if reason := netns.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with netns.two_hosts() as hosts:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        script = ["-m", "tests.test_hosts", str(folder)]
        finished = netns.torchrun(hosts, script, environment=environment, timeout_s=240)
    for node, (status, output) in enumerate(finished):
        assert status == 0, f"node {node} ended with status {status}:\n{output[-4000:]}"
    yield folder


def values(job: Path, stage: int, rank: int) -> dict[str, np.ndarray]:
    with np.load(job / f"stage{stage}rank{rank}.npz") as file:
        return dict(file)


def test_both_hosts_and_all_stages_end_with_the_same_bits(job: Path) -> None:
    reference = values(job, 3, 0)
    for stage in (1, 2, 3):
        for rank in (0, 1):
            found = values(job, stage, rank)
            assert found.keys() == reference.keys()
            assert all(np.array_equal(found[name], reference[name]) for name in reference)


def test_they_end_where_plain_pytorch_does_on_the_joint_batch(job: Path) -> None:
    model = small_model()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), slice(None))
    for stage in STAGES:
        found = values(job, stage, 1)
        for name, param in model.named_parameters():
            assert (param - start[name]).abs().max() > 1e-3
            assert np.abs(found[name] - param.detach().numpy()).max() < 1e-10


@pytest.mark.parametrize("stage", STAGES)
def test_the_interface_sends_what_is_counted_and_hardly_more(job: Path, stage: int) -> None:
    for rank in (0, 1):
        found: dict[str, Any] = json.loads((job / f"rank{rank}.json").read_text())[str(stage)]
        assert found["theory"] <= found["counted"] <= 1.01 * found["theory"]
        assert found["counted"] <= found["interface"] <= 1.1 * found["counted"]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
