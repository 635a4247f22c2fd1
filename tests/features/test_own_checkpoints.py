"""recompute="auto" for models that checkpoint themselves: the same bits as computing everything again, and less work.

As in test_keeping.py three steps compute everything twice; from the fourth on what is kept is computed once.
"""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeor
from tests.every_product import every_product
from tests.loops import assert_equal, values
from zeor.access.sharded import state_of
from zeor.features import keeping
from zeor.features.own_checkpoints import frame_on_top
from zeor.features.products import Counted
from zeor.features.recompute import AutoRecompute

WIDTH, ROWS, BLOCKS, STEPS, EXACT_STEPS = 8, 4, 4, 6, 3
ONCE, TWICE = [1] * BLOCKS, [2] * BLOCKS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x, side=None, *, scale=1.0):
        self.calls += 1
        inner = nn.functional.dropout(self.up(x).tanh(), 0.3, self.training)
        y = x + self.down(inner) * scale
        return (y if side is None else y * side["gate"]), inner.mean()


class Checkpoints(nn.Module):
    """`how`: what the function that it gives to checkpoint does."""

    def __init__(self, reentrant, how="a block"):
        super().__init__()
        self.reentrant, self.how = reentrant, how
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        gate = torch.sigmoid(x.mean(dim=1, keepdim=True))
        x, extra = self.embed(x), 0.0
        size = 2 if self.how == "two blocks" else 1
        for first in range(0, BLOCKS, size):
            run = functools.partial(self.part, list(self.blocks[first : first + size]), gate)
            x, mean = checkpoint(run, x, use_reentrant=self.reentrant)
            extra = extra + mean
        return self.head(x) + extra

    def part(self, blocks, gate, x):
        mean = 0.0
        if self.how == "more before":
            x = x.tanh()
        for block in blocks:
            x, each = block(x, {"gate": gate}, scale=0.5)
            mean = mean + each
        if self.how == "more behind":
            x = nn.functional.dropout(x, 0.2, self.training)
        return x, mean


def train(stage, recompute, reentrant, how="a block", room=None, micro=1, **options):
    torch.manual_seed(5)
    model = Checkpoints(reentrant, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, units=[Block], recompute=recompute, **options)
    before, keeping.free_host_nbytes = keeping.free_host_nbytes, lambda: room
    calls, losses = [], []
    torch.manual_seed(8)
    try:
        for step in range(STEPS):
            for block in model.blocks:
                block.calls = 0
            parts = []
            for part in range(micro):  # all forwards before any backward
                seed = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
                parts.append(model(torch.randn(ROWS, 3, generator=seed)).float().square().mean())
            for loss in parts:
                loss.backward()
            losses += [loss.item() for loss in parts]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            calls.append([block.calls for block in model.blocks])
    finally:
        keeping.free_host_nbytes = before
    found = state_of(model).engine.find(AutoRecompute)
    needs = [] if found is None else list(found.keeping._needs)
    with zeor.full_params(model):
        return losses, values(model), calls, needs


def compare(reentrant, stages=(0, 1, 2, 3), expected=None, **setting):
    for stage in stages:
        losses, params, calls, _ = train(stage, False, reentrant, **setting)
        micro = setting.get("micro", 1)
        assert calls == [[2 * micro] * BLOCKS] * STEPS
        found = train(stage, "auto", reentrant, **setting)
        assert found[0] == losses, (stage, setting)
        assert_equal(found[1], params)
        wanted = expected or [[2 * micro] * BLOCKS] * EXACT_STEPS + [[micro] * BLOCKS] * (STEPS - EXACT_STEPS)
        assert found[2] == wanted, (stage, found[2])


BOTH = pytest.mark.parametrize("reentrant", [False, True])


@BOTH
def test_what_fits_is_computed_once_in_the_same_bits(ranks, reentrant):
    for world in (1, 2):
        ranks(compare, world, reentrant)


@BOTH
@pytest.mark.parametrize("setting", [{"micro": 2}, {"precision": "bf16"}], ids=str)
def test_loops_and_formats(ranks, reentrant, setting):
    ranks(compare, 2, reentrant, stages=(1, 3), **setting)


LATER = STEPS - EXACT_STEPS
SEVERAL = {  # by (re-entrant, what the function does): how often blocks are computed from the fourth step on
    (False, "two blocks"): [ONCE] * LATER,
    # Dropout's mask is the checkpoint's own: the function is computed again whatever the block keeps.
    (False, "more behind"): [TWICE] * LATER,
    (True, "more behind"): [ONCE] * LATER,
    # What tanh saves is all that the checkpoint has: it stops before the block.
    (False, "more before"): [ONCE] * LATER,
    # The block's input is another tensor when it is computed again: it is never measured.
    (True, "more before"): [TWICE] * LATER,
}


@pytest.mark.parametrize("reentrant, how", SEVERAL)
def test_checkpoints_around_more_than_a_block(ranks, reentrant, how):
    ranks(compare, 2, reentrant, stages=(3,), expected=[TWICE] * EXACT_STEPS + SEVERAL[reentrant, how], how=how)


def several_in_reentrant():
    """The second block of a checkpoint is given another tensor in backward, so that its call is not known again."""
    for stage in (1, 3):
        losses, params, calls, _ = train(stage, False, True, "two blocks")
        found = train(stage, "auto", True, "two blocks")
        assert found[0] == losses
        assert_equal(found[1], params)
        assert calls == [TWICE] * STEPS
        assert all(each <= 2 for step in found[2] for each in step) and found[2][-1][2] == 1, found[2]


def test_several_blocks_in_a_reentrant_checkpoint(ranks):
    ranks(several_in_reentrant, 2)


def limited(reentrant):
    """Room for two calls; what one keeps the first run has measured."""
    (need,) = set(train(3, "auto", reentrant)[3])
    gc.collect()  # what the first model keeps counts as long as it lives
    room = int(2 * need.whole / keeping.HOST_SHARE) + 1
    compare(reentrant, (3,), [TWICE] * EXACT_STEPS + [[2, 2, 1, 1]] * (STEPS - EXACT_STEPS), room=room)


@BOTH
def test_no_more_than_fits(ranks, reentrant):
    ranks(limited, 1, reentrant)


@every_product()
def with_products(how):
    """Room for the products of all calls, and for no more."""
    needs = train(3, "auto", False, how)[3]
    gc.collect()
    assert all(0 < need.products < need.whole for need in needs), needs
    room = int(sum(need.products for need in needs) / keeping.HOST_SHARE) + 1
    run = []
    for recompute in (False, "auto"):
        with Counted() as counted:
            run.append((train(3, recompute, False, how, room=room), counted))
        gc.collect()
    (wanted, again), (found, fewer) = run
    assert found[0] == wanted[0] and found[2] == wanted[2] == [TWICE] * STEPS
    assert_equal(found[1], wanted[1])
    return again.count - fewer.count


@pytest.mark.parametrize("how", ["two blocks", "more behind"])
def test_a_checkpoint_that_is_not_reentrant_computes_its_blocks_again_with_their_products(ranks, how):
    assert ranks(with_products, 2, how)[0] == LATER * BLOCKS * 2


# ---- torch's own record of a checkpoint


def test_the_frame_is_the_same_in_forward_and_when_it_is_computed_again():
    frames, weight = [], torch.ones(3, requires_grad=True)

    def run(x):
        frames.append(frame_on_top())
        return (x * weight).tanh()

    assert frame_on_top() is None
    checkpoint(run, torch.ones(3), use_reentrant=False).sum().backward()
    assert len(frames) == 2 and frames[0] is frames[1] is not None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert frame_on_top() is None


class Siamese(nn.Module):
    """One block twice with the very same input: by inputs alone nobody can tell the calls apart."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Linear(3, WIDTH), Block()

    def forward(self, x):
        x = self.embed(x)
        return sum(checkpoint(self.block, x, use_reentrant=True)[0] * weight for weight in (1.0, 2.0))


def siamese():
    found = []
    for recompute in (False, "auto"):
        torch.manual_seed(5)
        model = Siamese()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zeor.shard(model, optimizer, stage=3, units=[Block], recompute=recompute)
        torch.manual_seed(6)
        for step in range(STEPS):
            model(torch.full((ROWS, 3), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(ROWS, 3))
        assert model.block.calls == 4 * STEPS + 2
        with zeor.full_params(model):
            found.append(values(model))
    assert_equal(found[1], found[0])


def test_two_calls_with_one_input_are_both_computed_again(ranks):
    ranks(siamese, 1)


# ---- transformers


def train_language_model(recompute, reentrant):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    model = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=3, n_head=2, vocab_size=50))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    computed = []
    for block in model.transformer.h:
        block.mlp.register_forward_pre_hook(lambda *_: computed.append(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=3, recompute=recompute)
    torch.manual_seed(9)
    losses = []
    for step in range(5):
        tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(step + 7 * dist.get_rank()))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with zeor.full_params(model):
        return losses, values(model), len(computed)


def compare_language_models(reentrant):
    losses, params, computed = train_language_model(False, reentrant)
    again = train_language_model("auto", reentrant)
    assert again[0] == losses
    assert_equal(again[1], params)
    assert (computed, again[2]) == (5 * 2 * 3, (EXACT_STEPS * 2 + 2) * 3), (computed, again[2])


@pytest.mark.long
@BOTH
def test_a_language_model_of_transformers(ranks, reentrant):
    ranks(compare_language_models, 2, reentrant)
