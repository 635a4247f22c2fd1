"""Adapters: peft's LoRA on a tiny Llama, quantised bases, and what must not be lost on the way.

The reference is the same peft model trained by plain PyTorch on the joint batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import zeor
from tests import loops

STAGES = (0, 1, 2, 3)


def llama(tie: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tie, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(base: torch.dtype, adapter: torch.dtype, **options: Any) -> nn.Module:
    """LoRA over a frozen base, each in its own dtype; dropout off, and adapters that do something from the start."""
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, **options}
    model = peft.get_peft_model(
        llama(options.pop("tie", False)).to(base), peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **options)
    )
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(adapter)
    return model


def tokens(step: int) -> Tensor:
    return torch.randint(0, 48, (4, 8), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, take: Callable = lambda x: x, steps: int = 3) -> None:
    for step in range(steps):
        ids = take(tokens(step))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


def same_at_every_stage(ranks: Callable, check: Callable, *args: Any) -> None:
    found = [ranks(check, 2, stage, *args)[0] for stage in STAGES]
    for other in found[1:]:
        loops.assert_equal(other, found[0])


def check_lora(stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    plain, model = (adapted(torch.float64, torch.float64, **options) for _ in range(2))
    start = loops.values(plain)
    theirs, mine = (torch.optim.AdamW(trainable(m), lr=0.01) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    train(plain, theirs)
    train(model, mine, loops.mine)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in plain.named_parameters() if p.requires_grad
    ]
    assert {p.grad for p in model.parameters() if not p.requires_grad} == {None}
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    for name, param in plain.named_parameters():
        if not param.requires_grad:
            assert torch.equal(found[name], start[name]), "the base keeps every bit"
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"modules_to_save": ["lm_head"]}, {"tie": True}, {"tie": True, "target_modules": ["embed_tokens", "q_proj"]}],
    ids=["plain", "modules_to_save", "tied embeddings", "adapted tied embeddings"],
)
@pytest.mark.long
def test_lora_equals_one_process(ranks, options):
    same_at_every_stage(ranks, check_lora, options)


def check_mixed(stage: int) -> dict[str, Any]:
    """A bf16 base and fp32 adapters, as everybody does it: bytes only for the adapters."""
    model = adapted(torch.bfloat16, torch.float32)
    start = loops.values(model)
    optimizer = torch.optim.AdamW(trainable(model), lr=0.01)
    zeor.shard(model, optimizer, stage=stage)
    train(model, optimizer, loops.mine, steps=2)
    ids = loops.mine(tokens(9))
    model(input_ids=ids, labels=ids).loss.backward()
    report = zeor.report(model)
    found = values(model)
    for name, value in found.items():
        assert value.dtype == (torch.float32 if "lora" in name else torch.bfloat16)
        assert torch.equal(value, start[name]) != ("lora" in name), name
    return {"values": found, "report": report}


def test_a_bf16_base_with_fp32_adapters_costs_gradients_and_state_for_the_adapters_alone(ranks):
    found = [ranks(check_mixed, 2, stage)[0] for stage in STAGES]
    adapters = sum(v.numel() for n, v in found[0]["values"].items() if "lora" in n)
    base = sum(v.numel() for n, v in found[0]["values"].items() if "lora" not in n)
    for stage, each in enumerate(found):
        loops.assert_equal(each["values"], found[0]["values"])
        report, part, gap = each["report"], 1 if stage == 0 else 2, 1.05
        assert report["master"] == 0, "a frozen bf16 base has no master, and an fp32 adapter is its own"
        assert 4 * adapters / (part if stage >= 2 else 1) <= report["grad"] <= gap * 4 * adapters
        assert abs(report["moments"] - 8 * adapters / part) <= 0.05 * 8 * adapters
        held = 2 * base + 4 * adapters
        assert report["compute"] <= gap * (held / 2 if stage == 3 else held)


def check_merge(stage: int, folder: str) -> None:
    plain, model = (adapted(torch.float64, torch.float64) for _ in range(2))
    theirs, mine = (torch.optim.SGD(trainable(m), lr=0.1) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    train(plain, theirs)
    train(model, mine, loops.mine)
    ids = tokens(7)
    with torch.no_grad():
        wanted = plain(input_ids=ids).logits
    with zeor.full_params(model):
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/adapter")
        merged = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, **loops.TIGHT)
        torch.testing.assert_close(model(input_ids=ids).logits, wanted, **loops.TIGHT)
    dist.barrier()
    loaded = peft.PeftModel.from_pretrained(llama().double(), f"{folder}/adapter", autocast_adapter_dtype=False)
    names = [path.name for path in Path(folder, "adapter").glob("*.safetensors")]
    assert names == ["adapter_model.safetensors"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, wanted, **loops.TIGHT)
    train(model, mine, loops.mine, steps=1)  # and on it goes


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_are_saved_and_merged_inside_full_params(ranks, tmp_path, stage):
    ranks(check_merge, 2, stage, str(tmp_path))


def check_checkpointing(stage: int, reentrant: bool) -> dict[str, Tensor]:
    """Sharded first, then gradient checkpointing is switched on over frozen embeddings."""
    plain, model = (adapted(torch.float64, torch.float64) for _ in range(2))
    theirs, mine = (torch.optim.AdamW(trainable(m), lr=0.01) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    for each in (plain, model):
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        each.train()
    train(plain, theirs)
    train(model, mine, loops.mine)
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


@pytest.mark.parametrize("reentrant", [True, False], ids=["re-entrant", "non-re-entrant"])
def test_gradient_checkpointing_over_frozen_embeddings(ranks, reentrant):
    same_at_every_stage(ranks, check_checkpointing, reentrant)


def check_unfreezing(stage: int) -> dict[str, Tensor]:
    plain, model = (adapted(torch.float64, torch.float64) for _ in range(2))
    theirs, mine = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    for step in range(4):
        for each, optimizer, take in ((plain, theirs, lambda x: x), (model, mine, loops.mine)):
            if step == 2:
                each.base_model.model.model.layers[1].requires_grad_(True)
            ids = take(tokens(step))
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


def test_a_layer_of_the_base_is_unfrozen_in_the_middle_of_lora_training(ranks):
    same_at_every_stage(ranks, check_unfreezing)


# ---- quantised bases


class Quantised(nn.Module):
    """A 4-bit linear layer of bitsandbytes under a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.base(x)))


def quantised() -> nn.Module:
    torch.manual_seed(3)
    return Quantised().to("cpu")  # quantises


def check_quantised(stage: int) -> None:
    plain, model = quantised(), quantised()
    theirs, mine = (torch.optim.SGD(trainable(m), lr=0.1) for m in (plain, model))
    zeor.shard(model, mine, stage=stage, units=[model.base])
    codes, kind = plain.base.weight.data.clone(), type(plain.base.weight)
    assert model.base.weight.dtype == torch.uint8 and model.base.weight.quant_state is not None
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for each, optimizer, take in ((plain, theirs, lambda t: t), (model, mine, loops.mine)):
            each(take(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with zeor.full_params(model):
        assert type(model.base.weight) is kind and torch.equal(model.base.weight.data, codes)
        torch.testing.assert_close(model.head.weight, plain.head.weight, rtol=1e-5, atol=1e-6)
    zeor.unshard(model)
    assert type(model.base.weight) is kind and torch.equal(model.base.weight.data, codes)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_4_bit_base_of_bitsandbytes_is_carried_as_it_is(ranks, stage):
    ranks(check_quantised, 2, stage)


class Tagged(nn.Parameter):
    """A parameter class of the user's own."""


def check_attributes(stage: int) -> None:
    model = loops.net()
    model.head.weight = Tagged(model.head.weight.detach().clone())
    model.head.weight.decays = "slowly"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage)
    seen = []
    model.head.register_forward_pre_hook(lambda module, _: seen.append((module.weight.decays, type(module.weight))))
    assert model.head.weight.decays == "slowly", "it is the same object"
    loops.train(model, optimizer, range(1), loops.own_loss)
    assert [(decays, issubclass(kind, Tagged)) for decays, kind in seen] == [("slowly", True)]
    with zeor.full_params(model):
        assert type(model.head.weight) is Tagged and model.head.weight.decays == "slowly"
    zeor.unshard(model)
    assert type(model.head.weight) is Tagged and model.head.weight.decays == "slowly"


@pytest.mark.parametrize("stage", STAGES)
def test_attributes_and_the_class_of_a_parameter_last(ranks, stage):
    ranks(check_attributes, 2, stage)
