"""Which device is this rank's, as far as that can be decided without one; tests/gpu has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeor
from zeor.memory import device as devices


@pytest.mark.parametrize(
    ("env", "count", "current", "index"),
    [
        ({}, 4, 0, 0),
        ({"LOCAL_RANK": "3"}, 4, 0, 3),
        ({"LOCAL_RANK": "3"}, 4, 1, 1),  # the user has chosen
        ({"LOCAL_RANK": "3"}, 1, 0, 0),  # each rank sees one of its own
        ({"SLURM_LOCALID": "2"}, 4, 0, 2),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "2"}, 4, 0, 1),
        ({"LOCAL_RANK": "3", "ZEOR_BACKEND": "gloo"}, 2, 0, 1),  # shared
    ],
)
def test_a_rank_has_the_device_of_its_local_number(monkeypatch, env, count, current, index):
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "ZEOR_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert devices.index_of_rank(count, current) == index


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 1),  # of a job, outside any srun
    ],
)
def test_ranks_on_this_host_are_counted(monkeypatch, env, ranks):
    for name in ("LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert devices.local_world() == ranks


def test_fewer_accelerators_than_ranks_are_told_of(monkeypatch):
    for name in ("ZEOR_BACKEND", "SLURM_GPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    assert devices.too_few(4, 4) == devices.too_few(8, 4) == ""
    assert "4 ranks of this host see 1 accelerator(s)" in devices.too_few(1, 4)
    for name in ("ZEOR_BACKEND", "SLURM_GPUS_PER_TASK"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert devices.too_few(1, 4) == ""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_without_an_accelerator_the_model_stays_and_nothing_is_said():
    model = nn.Linear(2, 2)
    assert devices.home_of(model) == devices.Home(torch.device("cpu"), "")
    assert devices.home_of(model.to("meta")) == devices.Home(torch.device("cpu"), "")
    with pytest.raises(ValueError, match="'cuda' was asked for; the accelerator here is none"):
        zeor.shard(nn.Linear(2, 2), device="cuda")
    assert devices.idle_accelerator() == ""
