"""park on a GPU: its memory is another's while the model is parked, what rests there afterwards is the same bits, and
kernels that know addresses find the new ones. What a weight, a moment or a compiled block kept of an old address would
show as a difference, or as an illegal access."""

from __future__ import annotations

import pytest
import torch

import zeor
from tests.gpu.test_engine_gpu import Model, batch
from tests.gpu.test_offload_gpu import digest_of

pytestmark = pytest.mark.gpu


def train(parks: bool, steps: int = 6, **options) -> str:
    """A digest of all parameters and moments after some steps."""
    torch.manual_seed(0)
    model = Model(width=256, layers=6, recompute=False).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeor.shard(model, optimizer, **options)
    for step in range(steps):
        tokens = batch(step, 0, 1)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        del logits, loss
        if parks:
            zeor.park(model, optimizer)
            scribble()
            zeor.unpark(model, optimizer)
    return digest_of(model)


def scribble() -> None:
    """Somebody else has the memory meanwhile."""
    for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_run_that_was_parked_goes_on_in_every_bit(stage, precision):
    options = {"stage": stage, "precision": precision}
    assert train(True, **options) == train(False, **options)


@pytest.mark.parametrize("options", [{"offload": "host"}, {"moments": "int8"}, {"compile": True}, {"delay": 1}])
def test_with_tiers_formats_and_compiled_blocks(options):
    assert train(True, precision="bf16", **options) == train(False, precision="bf16", **options)


def test_nothing_of_the_model_is_left_on_the_device():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = Model(width=512, layers=8, recompute=False).to("cuda")
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeor.shard(model, optimizer, precision="bf16")
    model(batch(0, 0, 1)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    held = torch.cuda.memory_allocated() - before
    zeor.park(model, optimizer)
    left = torch.cuda.memory_allocated() - before
    assert held > 100 << 20 and left <= buffers + (1 << 20), (held, left)
    zeor.unpark(model, optimizer)
    assert abs(torch.cuda.memory_allocated() - before - held) <= 1 << 20


def test_an_unpark_without_room_stays_parked_and_works_later():
    model = Model(width=512, layers=8, recompute=False).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeor.shard(model, optimizer, precision="bf16")
    model(batch(0, 0, 1)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted = digest_of(model)
    zeor.park(model, optimizer)
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError):
        zeor.unpark(model, optimizer)
    assert zeor.report(model)["on_device"] == 0
    del taken
    torch.cuda.empty_cache()
    zeor.unpark(model, optimizer)
    assert digest_of(model) == wanted
