"""zeor inside transformers.Trainer, and inside trainers made of it: Seq2SeqTrainer, and TRL's SFT, DPO and GRPO.

    trainer = ZeorTrainer(model, args, train_dataset=data, zeor={"stage": 3})
    class SFT(ZeorTrainerMixin, trl.SFTTrainer): ...

A checkpoint-N folder holds what Trainer writes (plain weights, so that it can be pushed, scheduler, random generators,
trainer_state.json) and, in place of optimizer.pt, a folder `zeor` with masters and optimizer state for any number of
ranks. Only methods of Trainer are overridden; models and optimizers are ZeorAccelerator's business.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

import zeor
from zeor.integrations.accelerate import ZeorAccelerator

FOLDER = "zeor"
_PREFIX = "zeor_"


@dataclass
class ZeorArguments:
    """Options of zeor.shard as training arguments, in front of any class of them:

        @dataclass
        class Arguments(ZeorArguments, trl.SFTConfig): ...

    What stays None is left to zeor. bf16=True, torch_compile=True and gradient_checkpointing=True choose precision=,
    compile= and recompute="auto"."""

    zeor_stage: int | None = field(default=None, metadata={"help": "0, 1, 2 or 3: what is cut over the ranks."})
    zeor_precision: str | None = field(default=None, metadata={"help": "'bf16', 'fp16', 'fp8' or 'fp32'."})
    zeor_offload: str | None = field(default=None, metadata={"help": "'host', 'disk' or 'auto'."})
    zeor_plan: str | None = field(default=None, metadata={"help": "'auto' leaves choices to zeor."})
    zeor_weights: str | None = field(default=None, metadata={"help": "Weights for a model on the meta device."})
    zeor_options: str | None = field(default=None, metadata={"help": "More options of zeor.shard, as a JSON object."})


@dataclass
class ZeorTrainingArguments(ZeorArguments, TrainingArguments):
    """TrainingArguments with options of zeor."""


class ZeorTrainerMixin:
    """In front of a Trainer. `zeor` holds options of zeor.shard; those of ZeorArguments count where it says nothing."""

    args: Any
    model: Any
    accelerator: Any
    state: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zeor: Mapping[str, Any] | None = None, **kwargs: Any):
        self._zeor_given = dict(zeor or {})
        super().__init__(*args, **kwargs)
        for callback in self.callback_handler.callbacks:  # type: ignore[attr-defined]  # Trainer's
            follow_on_slices(callback)

    # ---- set-up

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        options = options_of(self.args, self._zeor_given)
        _leave_recomputation(self.args, options)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # Trainer's
        ZeorAccelerator.adopt(self.accelerator, options)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """zeor.shard moves it, slice by slice; one on the meta device could not be moved at all."""

    def add_callback(self, callback: Any) -> None:
        super().add_callback(callback)  # type: ignore[misc]  # Trainer's
        for each in self.callback_handler.callbacks:  # type: ignore[attr-defined]  # Trainer's
            follow_on_slices(each)

    # ---- norms: Trainer asks for one after every step, with max_grad_norm=0 too

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.accelerator.zeor_options.get("release"):
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]  # Trainer's

    # ---- weights out: Trainer lets the main process alone read the model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not zeor.is_sharded(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]  # Trainer's
            return
        everywhere = self.args.save_on_each_node
        with zeor.full_params(self.model, to_rank=None if everywhere else 0, device="cpu"):
            if self.args.should_save:
                self._save(output_dir)  # type: ignore[attr-defined]  # Trainer's
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    # ---- checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not zeor.is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]  # Trainer's
            return
        zeor.save(os.path.join(output_dir, FOLDER), self.model, step=self.state.global_step, keep=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """What is in `zeor` is loaded when the model is sharded; other folders (save_only_model, a plain Trainer's)
        before that."""
        if not os.path.isdir(os.path.join(resume_from_checkpoint, FOLDER)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]  # Trainer's

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isdir(os.path.join(checkpoint, FOLDER)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]  # Trainer's
            return
        zeor.load(os.path.join(checkpoint, FOLDER), self.model)
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        """Each rank reads its own part, where Trainer would read all of it on every rank."""
        folder = os.path.join(self.state.best_model_checkpoint, FOLDER)
        if zeor.is_sharded(self.model) and os.path.isdir(folder):
            zeor.load(folder, self.model, only="weights")
        else:
            super()._load_best_model()  # type: ignore[misc]  # Trainer's


class ZeorTrainer(ZeorTrainerMixin, Trainer):
    """transformers.Trainer whose model is sharded."""


class ZeorSeq2SeqTrainer(ZeorTrainerMixin, Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer whose model is sharded; it generates during evaluation."""


def check_arguments(args: Any) -> None:
    """ValueError where training arguments ask for another way to shard."""
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise ValueError(
                f"{name}= is set in the training arguments, and zeor shards the model itself; leave it out."
            )
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer found {args.n_gpu} GPUs and one process, and would use DataParallel; start one process for each "
            f"GPU: torchrun --nproc-per-node {args.n_gpu} ..."
        )


def options_of(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of zeor.shard out of training arguments and of what the trainer was given."""
    found = dict(_of_arguments(args))
    for name, value in given.items():
        if found.setdefault(name, value) != value:
            raise ValueError(
                f"zeor's {name} is {found[name]!r} in the training arguments and {value!r} in zeor=; leave one of them "
                "out."
            )
    if found.get("release") and args.max_grad_norm:
        raise ValueError(
            f"zeor's release=True updates inside backward and cannot clip (max_grad_norm={args.max_grad_norm}); set "
            "max_grad_norm=0, or leave release= out."
        )
    return found


def _of_arguments(args: Any) -> dict[str, Any]:
    fields = {each.name.removeprefix(_PREFIX): each.name for each in dataclasses.fields(ZeorArguments)}
    found = {option: getattr(args, name, None) for option, name in fields.items()}
    more = found.pop("options")
    try:
        parsed = json.loads(more) if isinstance(more, str) else dict(more or {})
    except ValueError as error:
        raise ValueError(f"zeor_options={more!r} is no JSON object.") from error
    return {**parsed, **{option: value for option, value in found.items() if value is not None}}


def _leave_recomputation(args: Any, options: dict[str, Any]) -> None:
    """gradient_checkpointing=True becomes recompute="auto": as many blocks as memory has room for keep what they
    computed. An own recompute= leaves both as they are."""
    if getattr(args, "gradient_checkpointing", False) and "recompute" not in options:
        options["recompute"] = "auto"
        for name in ("activation_checkpointing", "gradient_checkpointing"):  # two names of one, by the version
            if hasattr(args, name):
                setattr(args, name, False)


def follow_on_slices(callback: Any) -> None:
    """TRL's SyncRefModelCallback writes the policy into the reference model element by element; between sharded models
    zeor.lerp does so on slices."""
    if any(base.__name__ == "SyncRefModelCallback" for base in type(callback).__mro__):
        callback.sync_target_model = _sync


def _sync(model: Any, target_model: Any, alpha: float) -> None:
    zeor.lerp(target_model, model, alpha)
