"""precision="fp8" on one GPU with float8 units: codes give the bits of casting at each call, and blocks compile.

It needs torchao. The CPU tests (tests/features/test_fp8.py) compare stages, by emulation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeor

pytestmark = pytest.mark.gpu

WIDTH, WORDS, STEPS = 64, 96, 3
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(precision: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Model().to("cuda")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeor.shard(model, optimizer, precision=precision, **options)
    losses = []
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, WORDS, (4, 65), generator=generator, device="cuda")
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with zeor.full_params(model):
        return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def as_fp8(**options: Any) -> zeor.Precision:
    return zeor.Precision(fp8=zeor.Float8(**options))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_codes_give_the_bits_of_casting_at_each_call(stage: int) -> None:
    losses, params = train(as_fp8(codes=False), stage=stage)
    coded_losses, coded_params = train(as_fp8(codes=True), stage=stage)
    assert coded_losses == losses and len(set(losses)) == STEPS
    assert all(torch.equal(value, params[name]) for name, value in coded_params.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_near_bf16(recipe: str) -> None:
    wide, narrow = train("bf16")[0], train(as_fp8(recipe=recipe))[0]
    assert narrow != wide and max(abs(a - b) for a, b in zip(narrow, wide, strict=True)) < 0.1


@pytest.mark.parametrize("codes", [False, True])
def test_compiled_blocks_train(codes: bool) -> None:
    eager, compiled = train(as_fp8(codes=codes))[0], train(as_fp8(codes=codes), compile=True)[0]
    assert max(abs(a - b) for a, b in zip(eager, compiled, strict=True)) < 0.05
