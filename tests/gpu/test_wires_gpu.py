"""Training by wires with the fused kernels, which take the messages of all ranks at a time, beside plain operations.

Gloo ranks share the GPU. Without a GPU, Triton's interpreter runs the same on CPU ranks:
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_wires_gpu.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from zeor.comm import verbs
from zeor.memory.codecs import Codec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]  # the mark skips a test where there is no GPU
WIRES = {
    "int8": "int8",
    "int4, differences": "int4",
    "int4 rotated, by chance": zeor.Wire(gather="int8", reduce="int4", rotate=True, rounding="stochastic"),
    "bf16": "bf16",
    "fp8 by chance": zeor.Wire(gather="fp8", reduce="fp8_e5m2", rounding="stochastic"),
    "kept": zeor.Wire(gather="int8", reduce="int4", feedback=True),
}


def trained(wire: str, stage: int, fused: bool, device: str) -> tuple[list[float], int, bool]:
    """(losses, a sum over the bits of all weights, whether a sum of gradients was one operation) on this rank."""
    from zeor.memory import triton_codecs

    at_once, stock = [], triton_codecs.sum_up

    def counted(*args):
        at_once.append(True)
        return stock(*args)

    here = triton_codecs if fused else None
    kernels = mock.patch.object(Codec, "_kernels", lambda self, values: here)
    # As on a device: this rank's own part has a place among what is received.
    places = mock.patch.object(verbs, "_keeps_own", lambda axis: False)
    with kernels, places, mock.patch.object(triton_codecs, "sum_up", counted):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 6)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = zeor.shard(
            model, optimizer, stage=stage, wire=WIRES[wire], keep_whole=0, units=[nn.Linear], device=device
        )
        losses = []
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            loss = model(torch.randn(9, 24).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with zeor.full_params(model):
            weights = sum(int(p.detach().view(torch.int32).long().sum()) for p in model.parameters())
    return losses, weights, bool(at_once)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("wire", WIRES)
def test_the_bits_are_those_of_plain_operations(ranks: Callable, wire: str, stage: int, world: int) -> None:
    if stage == 3 and "differences" in wire:
        pytest.skip("differences need ranks that hold weights")
    device = "cpu" if INTERPRETED else "cuda"
    fused = ranks(trained, world, wire, stage, True, device)
    plain = ranks(trained, world, wire, stage, False, device)
    assert [each[:2] for each in fused] == [each[:2] for each in plain]
    assert all(at_once for _, _, at_once in fused) and not any(at_once for _, _, at_once in plain)
