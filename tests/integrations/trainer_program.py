"""transformers.Trainer as its users write it: token-mean losses over unequal texts, accumulation, clipping, evaluation,
the best model, checkpoints. With zeor or without."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import Trainer, TrainingArguments

import zeor
from tests.integrations import tiny
from tests.integrations.launching import run

JOINT, STEPS, SAVED_AT = 8, 6, 4


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def arguments(folder: str, kind: type = TrainingArguments, **more: Any) -> Any:
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    common = {
        "output_dir": folder,
        "per_device_train_batch_size": JOINT // world(), "per_device_eval_batch_size": 4 // world(),
        "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 0.01, "warmup_steps": 2,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1, "save_steps": 2, "eval_steps": 2,
        "eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True, "report_to": "none",
        "use_cpu": True, "seed": 1, "disable_tqdm": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best is not the last: it must really be loaded
    }  # fmt: skip
    return kind(**{**common, **more})


def trainer_of(
    folder: str, options: dict[str, Any] | None, model: Any = None, kind: Any = TrainingArguments, **more: Any
) -> Any:
    from zeor.integrations.transformers import ZeorTrainer

    made: Any = Trainer if options is None else ZeorTrainer
    given = {} if options is None else {"zeor": options}
    data = {"train_dataset": tiny.samples(40, uneven=True), "eval_dataset": tiny.samples(8, uneven=True)}
    model = tiny.llama() if model is None else model
    return made(model=model, args=arguments(folder, kind, **more), data_collator=tiny.stack, **data, **given)


def history(trainer: Any) -> dict[str, list[float]]:
    wanted = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {key: [float(entry[key]) for entry in trainer.state.log_history if key in entry] for key in wanted}


def total(model: Any) -> float:
    with zeor.full_params(model):
        return sum(param.detach().double().sum().item() for param in model.parameters())


def train(folder: str, options: dict[str, Any] | None, resume: bool = False, **more: Any) -> dict[str, Any]:
    trainer = trainer_of(folder, options, **more)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AT}" if resume else None)
    found: dict[str, Any] = history(trainer)
    found["best"] = trainer.state.best_model_checkpoint
    if options is None:
        found["sum"] = sum(param.detach().double().sum().item() for param in trainer.model.parameters())
    else:
        found["sum"] = total(trainer.model)
        found["evaluated"] = trainer.evaluate()["eval_loss"]
        if not resume:
            trainer.save_model(f"{folder}/pushed")
    PartialState().wait_for_everyone()
    return found


def loaded(folder: str) -> dict[str, Any]:
    """What plain transformers makes of a folder that could be pushed, and which files lie in a checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/pushed")
    files = sorted(each.name for each in Path(f"{folder}/checkpoint-{SAVED_AT}").iterdir())
    return {"sum": sum(param.detach().double().sum().item() for param in model.parameters()), "files": files}


def lora(folder: str, options: dict[str, Any] | None, resume: bool = False) -> dict[str, Any]:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = trainer_of(folder, options, model=get_peft_model(tiny.llama(), config))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AT}" if resume else None)
    found: dict[str, Any] = history(trainer)
    if options is None:
        return found
    trainer.save_model(f"{folder}/adapter")
    PartialState().wait_for_everyone()
    plain = PeftModel.from_pretrained(tiny.llama(), f"{folder}/adapter").eval()
    batch, model = tiny.stack(tiny.samples(2)), trainer.model.eval()
    with torch.no_grad():
        wanted = model(**batch).logits
        found["apart"] = float((plain(**batch).logits - wanted).abs().max())
        found["refused"] = sentence(model.merge_and_unload)
        with zeor.full_params(model, to_rank=0):
            if world() == 1 or os.environ["RANK"] == "0":
                merged = copy.deepcopy(model).merge_and_unload()
                found["merged apart"] = float((merged(**batch).logits - wanted).abs().max())
    found["files"] = sorted(each.name for each in Path(folder, "adapter").iterdir())
    return found


def sentence(do: Any) -> str:
    """What an error said; "" where nothing was raised."""
    try:
        do()
    except (ValueError, RuntimeError, TypeError) as error:
        return str(error)
    return ""


def seq2seq(folder: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Texts generated during evaluation: their lengths differ from rank to rank."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from zeor.integrations.transformers import ZeorSeq2SeqTrainer

    torch.manual_seed(0)
    config = T5Config(vocab_size=tiny.VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                      dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)  # fmt: skip
    kind: Any = Seq2SeqTrainer if options is None else ZeorSeq2SeqTrainer
    seen: list[Any] = []

    def metrics(given: Any) -> dict[str, float]:
        seen.append(given.predictions.tolist())
        return {"longest": float(given.predictions.shape[1])}

    trainer = kind(
        model=T5ForConditionalGeneration(config),
        args=arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=9,
                       load_best_model_at_end=False, save_strategy="no"),
        train_dataset=tiny.samples(40), eval_dataset=tiny.samples(8), data_collator=tiny.stack, compute_metrics=metrics,
        **({} if options is None else {"zeor": options}),
    )  # fmt: skip
    trainer.train()
    return {**history(trainer), "generated": seen}


def options(folder: str) -> dict[str, Any]:
    """What is chosen by training arguments, and a model that has no values before it is sharded."""
    from transformers import HfArgumentParser

    from zeor.integrations.transformers import ZeorTrainer, ZeorTrainingArguments, check_arguments

    found: dict[str, Any] = {}
    quiet = {"load_best_model_at_end": False, "save_strategy": "no", "eval_strategy": "no"}
    found["compiled"] = train_alone(folder, {}, torch_compile=True, torch_compile_backend="eager", **quiet)
    found["release"] = train_alone(folder, {"release": True}, max_grad_norm=0, **quiet)
    found["unclipped"] = train_alone(folder, {}, max_grad_norm=0, **quiet)
    found["bf16"] = train_alone(folder, {}, bf16=True, **quiet)
    found["recomputed"] = train_alone(folder, {}, gradient_checkpointing=True, **quiet)
    if os.environ["RANK"] == "0":
        tiny.llama().save_pretrained(f"{folder}/weights")
    PartialState().wait_for_everyone()
    with zeor.on_meta():
        blank = tiny.llama()
    found["meta"] = train_alone(folder, {"weights": f"{folder}/weights"}, model=blank, **quiet)
    line = [
        "--output_dir",
        folder,
        "--zeor_stage",
        "2",
        "--zeor_options",
        '{"prefetch": 2}',
        "--use_cpu",
        "--max_steps",
        "1",
    ]
    (parsed,) = HfArgumentParser(ZeorTrainingArguments).parse_args_into_dataclasses(line)
    by_line = ZeorTrainer(model=tiny.llama(), args=parsed, train_dataset=tiny.samples(4), data_collator=tiny.stack)
    found["line"] = by_line.accelerator.zeor_options
    refused = {
        "twice": ({"stage": 1}, {"kind": ZeorTrainingArguments, "zeor_stage": 3}),
        "release": ({"release": True}, {}),
        "fsdp": ({}, {"fsdp": "full_shard"}),
        "json": ({}, {"kind": ZeorTrainingArguments, "zeor_options": "{stage"}),
        "dispatch": ({}, {"accelerator_config": {"dispatch_batches": True}}),
    }
    found["errors"] = {
        name: sentence(lambda given=given, more=more: trainer_of(folder, given, **more))
        for name, (given, more) in refused.items()
    }
    asked = arguments(folder)
    asked.deepspeed = {"zero_optimization": {"stage": 3}}  # given to TrainingArguments it asks for the package itself
    found["errors"]["deepspeed"] = sentence(lambda: check_arguments(asked))
    wrapped = torch.nn.parallel.DistributedDataParallel(tiny.llama())
    found["errors"]["ddp"] = sentence(lambda: trainer_of(folder, {}, model=wrapped, **quiet).train())
    return found


def train_alone(folder: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    trainer = trainer_of(f"{folder}/alone", options, **more)
    trainer.train()
    return {**history(trainer), "sum": total(trainer.model)}


def main(arguments: Sequence[str]) -> Any:
    what, folder = arguments
    if what == "one":
        found = {str(stage): train(f"{folder}/{stage}", {"stage": stage}, resume=True) for stage in (1, 3)}
        return {"plain": train(f"{folder}/plain", None), **found}
    if what == "launched":
        return train(f"{folder}/launched", {"stage": 3})
    if what == "more, one":
        return {"lora": lora(f"{folder}/lora", None), "lora 3": lora(f"{folder}/lora-3", {"stage": 3}, resume=True)}
    found = {}
    if what == "more, two":
        # Trainer itself scales T5's loss by the number of ranks, so the like of it is Trainer with DDP.
        found["seq2seq plain"] = seq2seq(f"{folder}/seq2seq", None)
        for stage in (1, 3):
            found[f"lora {stage}"] = lora(f"{folder}/lora-{stage}", {"stage": stage})
            found[f"lora {stage} resumed"] = lora(f"{folder}/lora-{stage}", {"stage": stage}, resume=True)
            found[f"seq2seq {stage}"] = seq2seq(f"{folder}/seq2seq-{stage}", {"stage": stage})
        return {**found, "options": options(folder)}
    for stage in (1, 3):
        at = f"{folder}/{stage}"
        found[str(stage)] = train(at, {"stage": stage})
        found[f"{stage} loaded"] = loaded(at)
        found[f"{stage} resumed"] = train(at, {"stage": stage}, resume=True)
    return found


if __name__ == "__main__":
    run(main)
