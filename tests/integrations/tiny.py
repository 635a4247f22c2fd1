"""A tiny Llama, texts as token ids, and a tokenizer: what the programs of this folder train."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, LENGTH, SAMPLES = 48, 8, 48


def llama(seed: int = 0, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **options})
    return LlamaForCausalLM(config)


def samples(count: int = SAMPLES, uneven: bool = False) -> list[dict[str, torch.Tensor]]:
    """Token ids and labels; `uneven`: texts of other lengths, padded, so that ranks have unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        if uneven:
            end = 3 + number % (LENGTH - 2)
            labels[end:], ids[end:], mask[end:] = -100, 0, 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def stack(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([each[key] for each in batch]) for key in batch[0]}
