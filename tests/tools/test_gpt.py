"""The built-in GPT: shapes, causality, that it learns, and generate()."""

from __future__ import annotations

import pytest
import torch

from zeor.tools import gpt
from zeor.tools.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=16, heads=2, context=8, vocab=256)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def test_logits_shape_and_first_loss(model: GPT) -> None:
    tokens = torch.randint(256, (3, 8))
    logits = model(tokens)
    assert logits.shape == (3, 8, 256)
    assert gpt.loss(logits, tokens).item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_parameter_count(model: GPT) -> None:
    width = SMALL.width
    block = 12 * width**2 + 13 * width
    outside = (256 + 8) * width + 2 * width + 256 * width
    assert sum(p.numel() for p in model.parameters()) == 2 * block + outside


def test_a_token_sees_none_after_it(model: GPT) -> None:
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


def test_learns_a_line_by_heart_and_says_it(model: GPT) -> None:
    line = gpt.encode("abcdefgh" * 4)
    x, y = line[:8][None], line[1:9][None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        gpt.loss(model(x), y).backward()
        optimizer.step()
    assert gpt.decode(gpt.generate(model, gpt.encode("a"), 7, temperature=0)) == "abcdefgh"


def test_generate_goes_past_the_context_and_repeats_with_its_seed(model: GPT) -> None:
    model.train()
    texts = [
        gpt.generate(model, gpt.encode("ab"), 20, generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 1, 2)
    ]
    assert len(texts[0]) == 22
    assert texts[0] == texts[1] != texts[2]
    assert model.training
    with pytest.raises(ValueError, match="prompt"):
        gpt.generate(model, gpt.encode(""), 1)


def test_encode_and_decode_are_inverse() -> None:
    text = "Ahab—said “no”\n"
    assert gpt.decode(gpt.encode(text)) == text


def test_sizes_that_cannot_be(model: GPT) -> None:
    with pytest.raises(ValueError, match="heads do not divide"):
        GPTConfig(width=10, heads=3)
    with pytest.raises(ValueError, match="layers of at least 1"):
        GPTConfig(layers=0)
    with pytest.raises(ValueError, match="context of 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_the_loss_is_computed_in_fp32_whatever_the_model_computes_in() -> None:
    logits = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(6).view(2, 3)
    found = gpt.loss(logits, targets)
    assert found.dtype == torch.float32
    assert torch.equal(found, gpt.loss(logits.float(), targets))
