"""TRL's SFT of SmolLM2-135M-Instruct, a real pretrained Llama, on Shakespeare: all parameters, or LoRA by peft.

    main(["full" or "lora", folder, steps])     two ranks at stage 3, or one process without zeor

Learning rates do not change, so that a run of few steps is the beginning of one of many.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import zeor
from examples.fetch import fetch
from tests.integrations import trl_program
from tests.integrations.launching import run

JOINT, LENGTH, HELD_OUT, NEW_TOKENS = 4, 64, 16, 16
PROMPT = "Enter HAMLET, alone.\n\nHAMLET.\n"
LEARNING_RATE = {"full": 2e-5, "lora": 5e-4}


def texts(tokenizer: Any, count: int) -> list[dict[str, list[int]]]:
    """Windows of two plays, one after the other."""
    found: list[int] = []
    for name in ("hamlet_gut.txt", "othello_gut.txt"):
        found += tokenizer((fetch("shakespeare") / name).read_text(encoding="utf-8"))["input_ids"]
    return [{"input_ids": found[at * LENGTH : (at + 1) * LENGTH]} for at in range(count)]


@torch.no_grad()
def continued(model: Any, tokenizer: Any) -> list[int]:
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = model.eval().generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2,
    )  # fmt: skip
    return made[0, prompt.shape[1] :].tolist()


def main(arguments: Sequence[str]) -> Any:
    what, folder, steps = arguments[0], arguments[1], int(arguments[2])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    begun = fetch("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(begun)
    rows = texts(tokenizer, 100 * JOINT + HELD_OUT)
    args = SFTConfig(**trl_program.common(
        f"{folder}/{what}-{world}", per_device_train_batch_size=JOINT // world, per_device_eval_batch_size=2,
        gradient_accumulation_steps=1, max_steps=steps, learning_rate=LEARNING_RATE[what], max_length=LENGTH,
        lr_scheduler_type="constant", max_grad_norm=1.0, save_strategy="no", eval_strategy="no",
    ))  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(begun, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = {"peft_config": LoraConfig(r=8, target_modules=targets, init_lora_weights=True)} if what == "lora" else {}
    options = {"stage": 3} if world > 1 else None
    given = {} if options is None else {"zeor": options}
    torch.manual_seed(0)
    trainer = trl_program.made(SFTTrainer, options)(
        model=model, args=args, train_dataset=Dataset.from_list(rows[:-HELD_OUT]), processing_class=tokenizer,
        eval_dataset=Dataset.from_list(rows[-HELD_OUT:]), **lora, **given,
    )  # fmt: skip
    found: dict[str, Any] = {}
    whole = world > 1  # the other is only to say how the first steps go
    if whole:
        found["before"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    found |= {key: [float(entry[key]) for entry in log] for key in ("loss", "grad_norm")}
    found["trained"] = sum(param.numel() for param in trainer.model.parameters() if param.requires_grad)
    if whole:
        assert zeor.is_sharded(trainer.model)
        found["after"] = trainer.evaluate()["eval_loss"]
        found["made"] = continued(trainer.model, tokenizer)
        found["text"] = tokenizer.decode(found["made"])
        saved = f"{folder}/{what}-saved"
        trainer.save_model(saved)
        PartialState().wait_for_everyone()
        found["files"] = sorted(each.name for each in Path(saved).iterdir() if each.suffix == ".safetensors")
        kind: Any = AutoPeftModelForCausalLM if what == "lora" else AutoModelForCausalLM
        if PartialState().is_main_process:  # by plain transformers and peft
            found["loaded"] = continued(kind.from_pretrained(saved, dtype=torch.float32), tokenizer)
        PartialState().wait_for_everyone()
    return found


if __name__ == "__main__":
    run(main)
