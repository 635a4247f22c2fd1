"""TRL's GRPO whose texts come from a process of its own: weights go there by zeor.push, and the model is parked while
that process generates. Without zeor the same process is given the plain model's weights.

    main(["one" or "two", folder])
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import zeor
from examples import engine as engines
from tests.integrations import tiny, trl_program
from tests.integrations.launching import run
from zeor.integrations.accelerate import raw

GENERATIONS, NEW_TOKENS = 4, 6


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """More for odd tokens."""
    return [sum(token % 2 for token in row) / len(row) for row in completion_ids]


class Rollouts:
    """TRL's rollout_func. `update` brings weights to the engine of rank 0; `away` is entered while it generates."""

    def __init__(self, engine: Any, update: Callable[[Any, Any], None], away: Callable[[Any], Any]):
        self._engine, self._update, self._away = engine, update, away
        self.made: list[list[list[int]]] = []  # of all ranks, one entry for each time

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        own = trainer.processing_class(prompts)["input_ids"]
        joint, state = gather_object(own), PartialState()
        self._update(trainer.model, self._engine)
        made = [None]
        with self._away(trainer):
            if state.is_main_process:
                made = [self._engine.generate(joint, do_sample=True, max_new_tokens=NEW_TOKENS, seed=len(self.made))]
            broadcast_object_list(made)
        everyones: Any = made[0]
        self.made.append(everyones)
        begin = state.process_index * len(own)
        return {"prompt_ids": own, "completion_ids": everyones[begin : begin + len(own)], "logprobs": None}


def pushed(model: nn.Module, engine: Any) -> None:
    """In buckets that hold little more than the largest weight."""
    zeor.push(model, None if engine is None else engine.send, 8000)  # type: ignore[arg-type]  # rank 0 alone sends


@contextlib.contextmanager
def parked(trainer: Any) -> Any:
    zeor.park(trainer.model, raw(trainer.optimizer))
    yield
    zeor.unpark(trainer.model, raw(trainer.optimizer))


def sent(model: Any, engine: Any) -> None:
    """A plain model's weights, as one bucket."""
    if hasattr(model, "merge_adapter"):
        model.merge_adapter()
        values = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): value.detach().clone()
            for name, value in model.named_parameters() if ".lora_" not in name
        }  # fmt: skip
        model.unmerge_adapter()
    else:
        values = {name: value.detach() for name, value in model.named_parameters()}
    engine.send(bucket_of(values))


def bucket_of(values: dict[str, Tensor]) -> Any:
    flat = torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in values.values()])
    ends = torch.tensor([value.nbytes for value in values.values()]).cumsum(0).tolist()
    dtypes, shapes = [value.dtype for value in values.values()], [value.shape for value in values.values()]
    return SimpleNamespace(names=list(values), dtypes=dtypes, shapes=shapes, offsets=[0, *ends[:-1]], flat=flat)


def train(folder: str, begun: str, options: dict[str, Any] | None, lora: bool = False) -> dict[str, Any]:
    data = Dataset.from_list([{"prompt": trl_program.text(number)} for number in range(64)])
    args = GRPOConfig(**trl_program.common(
        folder, num_generations=GENERATIONS, max_completion_length=NEW_TOKENS, num_iterations=2, beta=0.1,
        max_steps=6, save_strategy="no",
    ))  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(begun)  # TRL reads the reference model from the same folder
    if lora:
        torch.manual_seed(6)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    given = {} if options is None else {"zeor": options}
    main = PartialState().is_main_process
    with engines.start(begun) if main else contextlib.nullcontext() as engine:
        if options is None:
            rollouts = Rollouts(engine, sent, lambda trainer: contextlib.nullcontext())
        else:
            rollouts = Rollouts(engine, pushed, parked)
        trainer = trl_program.made(GRPOTrainer, options)(
            model=model, reward_funcs=reward, args=args, train_dataset=data, rollout_func=rollouts,
            processing_class=trl_program.tokenizer(), **given,
        )  # fmt: skip
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        keys = ("loss", "grad_norm", "kl", "reward")  # rewards are logged where texts are new
        found: dict[str, Any] = {key: [float(entry[key]) for entry in log if key in entry] for key in keys}
        found["made"] = rollouts.made
        if options is not None:
            assert zeor.is_sharded(trainer.model) and (lora or zeor.is_sharded(trainer.ref_model))
            pushed(trainer.model, engine)
        if main and options is not None and not lora:  # in every bit what it pushes is what it has
            found["digests"] = engine.digests()
    if options is not None:
        with zeor.full_params(trainer.model):
            found["own"] = engines.digests(dict(trainer.model.named_parameters())) if not lora else {}
    return found


def main(arguments: Sequence[str]) -> Any:
    what, folder = arguments
    begun, state = f"{folder}/{what}-begun", PartialState(cpu=True)
    if state.is_main_process:
        tiny.llama().save_pretrained(begun)
    state.wait_for_everyone()
    if what == "one":
        return {"plain": train(f"{folder}/plain", begun, None), "lora": train(f"{folder}/lora", begun, None, lora=True)}
    found = {str(stage): train(f"{folder}/{stage}", begun, {"stage": stage}) for stage in (1, 3)}
    return {**found, "lora": train(f"{folder}/lora-3", begun, {"stage": 3}, lora=True)}


if __name__ == "__main__":
    run(main)
