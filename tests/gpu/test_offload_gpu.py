"""Offload on a GPU: where the update runs on the device, every tier gives the bits of a run without offload.

Chunks are small and steps many, so that windows go round often: a missing wait between streams would show as a
difference now and then.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

import zeor
from tests.gpu.test_engine_gpu import Model, batch
from zeor.access.sharded import state_of

pytestmark = pytest.mark.gpu

CHUNK = 1 << 14


def train(rank: int, world: int, steps: int = 8, clip: bool = True, optimizer: str = "AdamW", **options) -> str:
    """A digest of all parameters and moments after some steps."""
    torch.manual_seed(0)
    model = Model(width=256, layers=6).to("cuda")
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    model, made = zeor.shard(model, made, precision="bf16", **options)
    for step in range(steps):
        tokens = batch(step, rank, world)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()
        made.zero_grad()
    return digest_of(model)


def summed(offload: zeor.Offload, steps: int = 6) -> tuple[str, int, int]:
    """Micro-batches of 4 in a step: the digest, the most windows that were filled ahead, and the peak after step 3."""
    torch.manual_seed(0)
    model = Model(width=256, layers=6).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeor.shard(model, optimizer, precision="bf16", offload=offload)
    ahead, filled, peak = state_of(model).steppers[0].streaming.ahead, 0, 0
    for step in range(steps):
        for part in range(4):
            tokens = batch(4 * step + part, 0, 1)
            logits = model(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
            peak = max(peak, torch.cuda.max_memory_allocated() if step > 3 else 0)
        filled = max(filled, 0 if ahead is None else ahead._windows.spares)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return digest_of(model), filled, peak


def test_what_is_fetched_ahead_changes_no_bit_and_raises_no_peak():
    """Never run: there was no GPU when it was written."""
    digest, filled, peak = summed(zeor.Offload(chunk=CHUNK))
    found = summed(zeor.Offload(chunk=CHUNK, ahead="auto"))
    assert filled == 0 < found[1] and found[0] == digest
    assert found[2] <= 1.02 * peak


def digest_of(model: torch.nn.Module) -> str:
    """Of all parameters and moments."""
    digest = hashlib.sha256()
    with zeor.full_params(model):
        for param in model.parameters():
            digest.update(param.detach().float().cpu().numpy().tobytes())
    for piece in (p for p in state_of(model).steppers[0].state.pieces() if p.begin is not None):
        digest.update(piece.value.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def rank_train(**options) -> str:
    import torch.distributed as dist

    return train(dist.get_rank(), dist.get_world_size(), **options)


@pytest.fixture(scope="module")
def reference() -> dict[bool, str]:
    return {clip: train(0, 1, clip=clip) for clip in (True, False)}


OFFLOADS = {
    "host": {"offload": zeor.Offload(chunk=CHUNK)},
    "host, one chunk": {"offload": "host"},
    "half": {"offload": zeor.Offload({"device": 0.5, "host": 0.5}, {"device": 0.5, "host": 0.5}, chunk=CHUNK)},
    "grads": {"offload": zeor.Offload(grads="host", chunk=CHUNK)},
    "compute": {"offload": zeor.Offload(compute="host", chunk=CHUNK)},
    "all": {"offload": zeor.Offload(grads="host", compute="host", chunk=CHUNK)},
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_tiers_give_the_bits_of_none(name, reference):
    for clip in (True, False):
        for _ in range(3):
            assert train(0, 1, clip=clip, **OFFLOADS[name]) == reference[clip]


@pytest.mark.parametrize("name", OFFLOADS)
def test_release_gives_the_bits_of_a_step(name, reference):
    for _ in range(3):
        assert train(0, 1, clip=False, release=True, **OFFLOADS[name]) == reference[False]


def test_disk_gives_the_bits_of_none(reference, tmp_path):
    offload = zeor.Offload("disk", "disk", folder=str(tmp_path), chunk=CHUNK)
    for clip in (True, False):
        assert train(0, 1, clip=clip, offload=offload) == reference[clip]
    assert train(0, 1, clip=False, release=True, offload=offload) == reference[False]
    everything = zeor.Offload("disk", "disk", "disk", "disk", folder=str(tmp_path), chunk=CHUNK)
    assert train(0, 1, offload=everything) == reference[True]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_offload_alike(stage, reference):
    assert train(0, 1, stage=stage, **OFFLOADS["host"]) == reference[True]


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_small_formats_are_the_same_on_every_tier(moments):
    here = train(0, 1, moments=moments)
    assert train(0, 1, moments=moments, **OFFLOADS["host"]) == here
    assert train(0, 1, moments=moments, **OFFLOADS["all"]) == here
    assert train(0, 1, clip=False, moments=moments, release=True, **OFFLOADS["host"]) == train(
        0, 1, clip=False, moments=moments
    )


def test_stock_steps_stream_alike():
    for optimizer in ("RMSprop", "Adagrad"):
        assert train(0, 1, optimizer=optimizer, **OFFLOADS["host"]) == train(0, 1, optimizer=optimizer)


def test_a_delayed_update_is_the_same_on_every_tier():
    here = train(0, 1, delay=1)
    for _ in range(3):
        assert train(0, 1, delay=1, **OFFLOADS["host"]) == here


def test_an_update_on_the_host_is_close():
    """The stock CPU kernel rounds otherwise: the weights differ by some of their last bits."""
    found = []
    for options in ({}, {"offload": zeor.Offload(update="host", chunk=CHUNK)}):
        torch.manual_seed(0)
        model = Model(width=256, layers=2).to("cuda")
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, made = zeor.shard(model, made, precision="fp32", **options)
        for step in range(4):
            tokens = batch(step, 0, 1)
            model(tokens[:, :-1]).float().square().mean().backward()
            made.step()
            made.zero_grad()
        with zeor.full_params(model):
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    different = (found[0] - found[1]).abs()
    assert 0 < different.max() < 1e-3 * 4 * 1e-2  # of four steps of at most lr each
    assert different.mean() < 1e-7


def test_two_ranks_offload_alike(ranks):
    for stage in (2, 3):
        reference = ranks(rank_train, 2, stage=stage, steps=4)
        assert ranks(rank_train, 2, stage=stage, steps=4, **OFFLOADS["host"]) == reference
        assert ranks(rank_train, 2, stage=stage, steps=4, **OFFLOADS["grads"]) == reference
    assert ranks(rank_train, 2, stage=3, steps=4, **OFFLOADS["all"]) == reference
