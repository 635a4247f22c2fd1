"""Recomputation, offloaded inputs and the chunked loss on a GPU: bits, memory, no wait of the host, slow copies.

Inputs are 4 MiB each. A copy that is not waited for, or memory that is reused too early, shows as other bits, the
more so where copies are made slow on purpose.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeor
from zeor.access.sharded import state_of
from zeor.features import activations
from zeor.features.levels import Kept, expected_nbytes
from zeor.features.recompute import AutoRecompute, Recompute

pytestmark = pytest.mark.gpu

WIDTH, ROWS, LAYERS = 512, 2048, 8
INPUT_NBYTES = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, *, x):  # by keyword alone: random numbers must be repeated all the same
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x=x)
        return self.last(x)


def made(recompute, compiled=False, **options):
    torch.manual_seed(0)
    model = Model().to("cuda")
    if compiled:
        model.eval()  # a compiled dropout has random numbers of its own
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zeor.shard(model, optimizer, units=[Block], recompute=recompute, **options)


def shelf_of(model):
    return state_of(model).engine.feature(Recompute).shelf


def step(model, optimizer, number, micros=1):
    losses = []
    for micro in range(micros):
        generator = torch.Generator("cuda").manual_seed(100 * number + micro)
        losses.append(model(torch.randn(ROWS, 16, device="cuda", generator=generator)).float().square().mean())
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses[-1].detach()


def train(recompute, steps=4, micros=1, **options):
    model, optimizer = made(recompute, **options)
    torch.manual_seed(1)
    losses = [step(model, optimizer, number, micros) for number in range(steps)]
    with zeor.full_params(model):
        return torch.stack(losses).cpu(), {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def assert_same(found, want):
    assert torch.equal(found[0], want[0])
    for name, value in want[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"micros": 2}], ids=str)
def test_the_bits_are_those_without(options):
    want = train(False, **options)
    for recompute in (True, "offload", "products"):
        assert_same(train(recompute, **options), want)


@contextmanager
def slow(direction):
    """Every copy waits some milliseconds on its stream first."""
    plain = activations.Shelved._copy

    def copy(self, into, source):
        if (into.device.type == "cpu") == (direction == "out"):
            with self._shelf._stream:
                torch.cuda._sleep(10_000_000)
        plain(self, into, source)

    activations.Shelved._copy = copy
    try:
        yield
    finally:
        activations.Shelved._copy = plain


@pytest.mark.parametrize("direction", ["out", "back"])
def test_slow_copies_change_nothing(direction):
    want = train(False, micros=2)
    for _ in range(3):
        with slow(direction):
            assert_same(train("offload", micros=2), want)


def test_losses_that_are_dropped_while_copies_are_under_way_change_nothing():
    want = train(True)
    model, optimizer = made("offload")
    torch.manual_seed(1)
    losses = []
    for number in range(4):
        state = torch.cuda.get_rng_state()
        with slow("out"):
            model(torch.randn(ROWS, 16, device="cuda"))  # its graph dies at once
        torch.cuda.set_rng_state(state)
        losses.append(step(model, optimizer, number))
    with zeor.full_params(model):
        found = torch.stack(losses).cpu(), {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    assert_same(found, want)


def kept_by(recompute):
    """Bytes that a forward leaves for its backward."""
    model, optimizer = made(recompute)
    for number in range(2):
        step(model, optimizer, number)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(torch.randn(ROWS, 16, device="cuda")).square().mean()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return kept


def test_memory_falls_by_the_inputs_and_the_host_holds_them_once():
    everything, inputs, offloaded = kept_by(False), kept_by(True), kept_by("offload")
    assert inputs < everything - (LAYERS - 2) * 4 * INPUT_NBYTES
    assert offloaded <= inputs - (LAYERS - activations.HELD_CALLS - 1) * INPUT_NBYTES
    model, optimizer = made("offload")
    for number in range(3):
        step(model, optimizer, number)
    assert shelf_of(model).nbytes <= max(2 * LAYERS * INPUT_NBYTES, activations.BLOCK_NBYTES)
    assert all(block.is_pinned() for block in shelf_of(model).blocks)


def test_the_host_waits_for_nothing():
    model, optimizer = made("offload")
    for number in range(2):
        step(model, optimizer, number)
    torch.cuda.synchronize()
    x = torch.randn(ROWS, 16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_blocks():
    want = train(False, compiled=True)
    for recompute in (True, "offload"):
        found = train(recompute, compiled=True)
        torch.testing.assert_close(found[0], want[0], rtol=1e-4, atol=1e-6)
    model, optimizer = made("offload", compiled=True)
    step(model, optimizer, 0)
    assert shelf_of(model).nbytes > 0


def expected_with(keeping, kept):
    return expected_nbytes(keeping._needs, keeping._intervals, kept)


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_keeps_what_the_allocator_has_room_for(compiled):
    """Measured by the allocator, and in a compiled block by a trial: see keeping.py and probing.py."""
    torch._dynamo.reset()
    want = train(True, compiled=compiled)
    peaks, needs = [], []
    # All of three calls; of the others their products, where blocks are not compiled.
    less = Kept(3 if compiled else LAYERS, 3)
    for room in (None, less):
        torch._dynamo.reset()
        gc.collect()  # the model before, whose memory would be in the second peak
        model, optimizer = made("auto", compiled=compiled)
        keeping = state_of(model).engine.feature(AutoRecompute).keeping
        if room is not None:
            keeping._limit_nbytes = partial(expected_with, keeping, room)
        for number in range(3):
            step(model, optimizer, number)
        assert keeping._most == ((LAYERS, LAYERS) if room is None else room)
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, 3)
        peaks.append(torch.cuda.max_memory_allocated())
        needs.append(list(keeping._needs))
        assert peaks[-1] <= 1.02 * expected_nbytes(keeping._needs, keeping._intervals, keeping._most)
        del model, optimizer, keeping
    assert needs[0] == needs[1] and min(need.whole for need in needs[0]) > INPUT_NBYTES
    assert peaks[0] > peaks[1] + 4 * min(need.whole - (0 if compiled else need.products) for need in needs[0])
    found = train("auto", compiled=compiled)
    torch.testing.assert_close(found[0], want[0], rtol=1e-4, atol=1e-6)


# ---- the chunked loss


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_the_chunked_loss_is_the_plain_one_in_less_memory(dtype, bound):
    rows, width, classes = 8192, 512, 32_000
    torch.manual_seed(0)
    head = nn.Linear(width, classes, bias=False, device="cuda", dtype=dtype)
    hidden = torch.randn(rows, width, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(classes, (rows,), device="cuda")
    targets[::5] = -100
    found = []
    for compute in (
        lambda: F.cross_entropy(head(hidden).float(), targets),
        lambda: zeor.chunked_cross_entropy(hidden, head, targets, chunk=1024),
    ):
        hidden.grad = head.weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = compute()
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        found.append((loss.item(), hidden.grad.clone(), head.weight.grad.clone(), peak))
        del loss
    (loss, of_hidden, of_weight, peak), (again, hidden_again, weight_again, less) = found
    assert again == pytest.approx(loss, rel=1e-5)
    assert (hidden_again - of_hidden).norm() < bound * of_hidden.norm()
    assert (weight_again - of_weight).norm() < bound * of_weight.norm()
    assert less < peak / 2 and less < rows * classes * 4


def test_the_chunked_loss_of_a_sharded_head_waits_for_nothing():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

        def forward(self, tokens):
            x = self.embed(tokens[:, :-1])
            for block in self.blocks:
                x = block(x)
            return zeor.chunked_cross_entropy(x, self.head, tokens[:, 1:], chunk=100)

    torch.manual_seed(0)
    model = Language().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer, precision="bf16", recompute=True)
    tokens = torch.randint(1000, (16, 33), device="cuda")
    losses = []
    for number in range(6):
        if number == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        loss = model(tokens)
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
