"""TRL's SFT and DPO trainers with zeor's mixin in front, or as they are; DPO's reference model follows the policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import zeor
from tests.integrations import tiny
from tests.integrations.launching import run

JOINT, STEPS, SAVED_AT = 8, 4, 2


def tokenizer() -> Any:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, tiny.VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def text(number: int) -> str:
    return " ".join(f"w{3 + (number * 7 + at * at) % (tiny.VOCABULARY - 3)}" for at in range(4 + number % 5))


def common(folder: str, **more: Any) -> dict[str, Any]:
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    return {
        "output_dir": folder, "per_device_train_batch_size": JOINT // int(os.environ.get("WORLD_SIZE", "1")),
        "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 0.01, "max_grad_norm": 0.5,
        "logging_steps": 1, "save_steps": SAVED_AT, "report_to": "none", "use_cpu": True, "seed": 1, "bf16": False,
        "disable_tqdm": True, "gradient_checkpointing": False, "save_strategy": "steps", **more,
    }  # fmt: skip


def made(kind: Any, options: dict[str, Any] | None) -> Any:
    if options is None:
        return kind
    from zeor.integrations.transformers import ZeorTrainerMixin

    return type(f"Zeor{kind.__name__}", (ZeorTrainerMixin, kind), {})


def train(trainer: Any, folder: str, resume: bool) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AT}" if resume else None)
    log = trainer.state.log_history
    found = {key: [float(each[key]) for each in log if "loss" in each and key in each] for key in ("loss", "grad_norm")}
    if zeor.is_sharded(trainer.model):
        trainer.save_model(f"{folder}/pushed")
        PartialState().wait_for_everyone()
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/pushed")
        with zeor.full_params(trainer.model):
            pairs = zip(model.parameters(), trainer.model.parameters(), strict=True)
            found["same"] = all(torch.equal(mine, theirs) for mine, theirs in pairs)
    return found


def sft(folder: str, options: dict[str, Any] | None, resume: bool = False) -> dict[str, Any]:
    data = Dataset.from_list([{"text": text(number)} for number in range(64)])
    args = SFTConfig(**common(folder, max_length=16))
    given = {} if options is None else {"zeor": options}
    trainer = made(SFTTrainer, options)(
        model=tiny.llama(), args=args, train_dataset=data, processing_class=tokenizer(), **given
    )
    found = train(trainer, folder, resume)
    ids = torch.tensor([[1, 7, 9]])
    found["generated"] = trainer.model.generate(input_ids=ids, max_new_tokens=4, do_sample=False).tolist()
    return found


def dpo(folder: str, options: dict[str, Any] | None, resume: bool = False) -> dict[str, Any]:
    rows = [{"prompt": text(n), "chosen": f" {text(n + 1)}", "rejected": f" {text(n + 2)}"} for n in range(64)]
    args = DPOConfig(**common(folder, max_length=24, sync_ref_model=True, ref_model_sync_steps=2,
                              ref_model_mixup_alpha=0.6))  # fmt: skip
    given = {} if options is None else {"zeor": options}
    trainer = made(DPOTrainer, options)(
        model=tiny.llama(), ref_model=tiny.llama(seed=4), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(), **given,
    )  # fmt: skip
    return train(trainer, folder, resume)


def main(arguments: Sequence[str]) -> Any:
    what, folder = arguments
    if what == "one":
        found = {f"sft {stage}": sft(f"{folder}/sft-{stage}", {"stage": stage}, resume=True) for stage in (1, 3)}
        return {"sft": sft(f"{folder}/plain", None), "dpo": dpo(f"{folder}/plain-dpo", None), **found}
    found = {}
    for stage in (1, 3):
        found[f"sft {stage}"] = sft(f"{folder}/sft-{stage}", {"stage": stage})
        found[f"sft {stage} resumed"] = sft(f"{folder}/sft-{stage}", {"stage": stage}, resume=True)
        found[f"dpo {stage}"] = dpo(f"{folder}/dpo-{stage}", {"stage": stage})
    return found


if __name__ == "__main__":
    run(main)
