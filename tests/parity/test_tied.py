"""Tied weights under the default units: one storage, one state, the sum of both uses, saved and loaded strictly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zeor
from tests.parity.calls import STAGES, Parts, compare, finish, mean

VOCAB = 11


class Language(nn.Module):
    """Embedding and head share a weight; two blocks of three share theirs; a bias is shared across units."""

    def __init__(self, dim: int = 6):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.head.weight = self.embed.weight
        self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].bias = self.blocks[2].bias

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def tokens_of(x: Tensor) -> Tensor:
    return (x * 7).long().abs() % VOCAB


def language_step(model: Any, optimizer: Any, parts: Parts) -> None:
    losses = []
    for x, _ in parts:
        tokens = tokens_of(x)
        losses.append(F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 0).flatten()))
    mean(losses).backward()
    finish(optimizer)


@pytest.mark.parametrize("world", [2, 3])
def test_tied_weights_train_as_in_one_process(ranks, world):
    ranks(compare, world, language_step, Language, timeout=60)


def one_of_each() -> None:
    tokens = tokens_of(torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank())))
    for stage in STAGES:
        torch.manual_seed(2)
        model = Language().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ids = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
        zeor.shard(model, optimizer, stage=stage)
        slots = vars(model)["_zeor_sharded"].engine.slots
        # embed = head, two block weights, two biases (one of them tied)
        assert sorted(slot.name for slot in slots) == [
            "blocks.0.bias", "blocks.0.weight", "blocks.1.bias", "blocks.1.weight", "embed.weight",
        ]  # fmt: skip
        for _ in range(2):
            model(tokens).pow(2).mean().backward()
            finish(optimizer)
        again = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
        assert again == ids, f"stage {stage}: other objects than before"
        assert model.head.weight is model.embed.weight and model.blocks[2].weight is model.blocks[0].weight
        state = zeor.unshard(model, optimizer)[1].state
        assert len(state) == 5 and state[model.head.weight]["exp_avg"].shape == (VOCAB, 6)
        assert state[model.embed.weight]["step"] == 2


def test_tied_weights_have_one_storage_and_one_state_and_stay_the_same_object(ranks):
    ranks(one_of_each, 2)


def there_and_back() -> None:
    tokens = tokens_of(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
    for stage in STAGES:
        torch.manual_seed(2)
        model = Language().double()
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        with zeor.full_params(model):
            values = {name: value.clone() for name, value in model.state_dict().items()}
        assert set(values) == set(Language().state_dict()), "names are the plain model's"
        assert torch.equal(values["head.weight"], values["embed.weight"])
        plain = Language().double()
        plain.load_state_dict(values, strict=True)
        assert plain.head.weight is plain.embed.weight
        torch.manual_seed(9)
        other = Language().double()
        zeor.shard(other, torch.optim.SGD(other.parameters(), lr=0.1), stage=stage)
        other.load_state_dict(values, strict=True)
        assert other.head.weight is other.embed.weight
        want = plain(tokens)
        torch.testing.assert_close(model(tokens), want, rtol=0, atol=1e-12)
        torch.testing.assert_close(other(tokens), want, rtol=0, atol=1e-12)


def test_tied_weights_are_saved_and_loaded_strictly(ranks):
    ranks(there_and_back, 2)
