"""`generate()` of transformers models at every stage, with texts of different lengths on each rank, inside `zeor.join`.

The tokens are compared with those of a plain model in one process. A tiny Llama made from a config: nothing is
downloaded.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zeor

transformers = pytest.importorskip("transformers")

LENGTHS = [5, 20, 1]


def llama(seed=4):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def prompt(rank):
    return torch.randint(3, 61, (1, 4), generator=torch.Generator().manual_seed(50 + rank))


def texts(step, rank):
    return torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(70 + 10 * step + rank))


def generate(model, rank, **options):
    """Greedy, or drawn by a seed of the rank's own; exactly LENGTHS[rank] new tokens."""
    torch.manual_seed(rank)
    length = LENGTHS[rank]
    mask = torch.ones_like(prompt(rank))
    return model.generate(
        prompt(rank), attention_mask=mask, min_new_tokens=length, max_new_tokens=length, pad_token_id=0, **options
    )


def train(model, optimizer, world, rank=None):
    """Two steps; by all ranks together, or by one process on what they have."""
    for step in range(2):
        for each in range(world) if rank is None else [rank]:
            loss = model(input_ids=texts(step, each), labels=texts(step, each)).loss
            (loss / (world if rank is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(stage, steps, use_cache, do_sample=False):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = llama()
    if steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        zeor.shard(model, optimizer, stage=stage)
        train(model, optimizer, world, rank)
    else:
        zeor.shard(model, stage=stage)
    model.eval()
    with zeor.join(model):
        found = generate(model, rank, use_cache=use_cache, do_sample=do_sample)
    model.train()
    if steps:  # training goes on as if nothing had been
        train(model, optimizer, world, rank)
    with zeor.full_params(model):
        return found, model.model.layers[1].mlp.up_proj.weight.detach().clone()


def plain(world, steps, use_cache, do_sample=False):
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if steps:
        train(model, optimizer, world)
    model.eval()
    found = [generate(model, rank, use_cache=use_cache, do_sample=do_sample) for rank in range(world)]
    model.train()
    if steps:
        train(model, optimizer, world)
    return found, model.model.layers[1].mlp.up_proj.weight.detach()


def check(found, wanted, rtol=1e-10):
    for rank, (tokens, weight) in enumerate(found):
        assert tokens.shape == (1, 4 + LENGTHS[rank])
        assert torch.equal(tokens, wanted[0][rank]), rank
        torch.testing.assert_close(weight, wanted[1], rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_tokens_on_one_rank_and_twenty_on_another_before_any_optimizer_exists(ranks, stage):
    check(ranks(on_ranks, 2, stage, False, True), plain(2, False, True))


@pytest.mark.parametrize("use_cache", [True, False])
def test_after_training_steps_at_stage_3_with_and_without_a_cache(ranks, use_cache):
    check(ranks(on_ranks, 2, 3, True, use_cache), plain(2, True, use_cache))


@pytest.mark.long
def test_three_ranks_that_draw_their_tokens(ranks):
    # Llama's norms compute in float32, where a third of a loss is rounded.
    check(ranks(on_ranks, 3, 3, True, True, True), plain(3, True, True, True), rtol=1e-6)


def train_and_generate_unevenly():
    """Inside one block each rank trains on its own number of texts and generates after each step."""
    rank = dist.get_rank()
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=3)
    found = []
    with zeor.join(model):
        for step in range(1 + rank):
            model(input_ids=texts(step, rank), labels=texts(step, rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with zeor.join(model):
        found.append(generate(model, rank, use_cache=True))
    return found[0], zeor.total(len(found))


def test_uneven_training_then_generation(ranks):
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        there = [rank for rank in range(2) if step < 1 + rank]
        sum(model(input_ids=texts(step, r), labels=texts(step, r)).loss / len(there) for r in there).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (tokens, count) in enumerate(ranks(train_and_generate_unevenly, 2)):
        assert torch.equal(tokens, generate(model, rank, use_cache=True))
        assert count == 2
