"""A loop as Accelerate's users write it: accumulation, clipping, a scheduler, checkpoints. With zeor or without."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch.utils.data import DataLoader

import zeor
from tests.integrations import tiny
from tests.integrations.launching import run

STEPS, JOINT, ACCUMULATED = 5, 8, 2


def fresh() -> None:
    """As in a process of its own."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()


def made(options: dict[str, Any] | None, **more: Any) -> Accelerator:
    fresh()
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    more = {"cpu": True, "gradient_accumulation_steps": ACCUMULATED, "dataloader_config": config, **more}
    if options is None:
        return Accelerator(**more)
    from zeor.integrations.accelerate import ZeorAccelerator

    return ZeorAccelerator(zeor=options, **more)


def train(
    options: dict[str, Any] | None, folder: str = "", save_at: int = 0, resume: bool = False, **more: Any
) -> dict[str, Any]:
    """Losses of the joint batches, and norms, from where a checkpoint stands."""
    accelerator = made(options, **more)
    set_seed(1)
    world = accelerator.num_processes
    loader = DataLoader(tiny.samples(), batch_size=JOINT // world, shuffle=True, collate_fn=tiny.stack)
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS * world)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = begun = 0
    if resume:
        accelerator.load_state(folder)
        step = begun = json.loads(Path(folder, "step.json").read_text())
    losses, norms, rates = [], [], []
    while step < STEPS:
        epoch, skipped = divmod(step * ACCUMULATED, len(loader))
        loader.set_epoch(epoch)
        total = torch.zeros(())
        for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                total += accelerator.reduce(loss.detach(), "mean") / ACCUMULATED
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(float(total))
                rates.append(optimizer.param_groups[0]["lr"])
                total, step = torch.zeros(()), step + 1
                if step == save_at and step > begun:
                    accelerator.save_state(folder)
                    if accelerator.is_main_process:
                        Path(folder, "step.json").write_text(json.dumps(step))
                if step == STEPS:
                    break
    accelerator.wait_for_everyone()
    found = {"losses": losses, "norms": norms, "rates": rates, "begun": begun}
    if options is not None:
        state = accelerator.get_state_dict(model)
        found["saved"] = sorted(state)[:1]
        if folder and not resume:
            accelerator.unwrap_model(model).save_pretrained(
                f"{folder}/weights", is_main_process=accelerator.is_main_process, state_dict=state
            )
            accelerator.save_model(model, f"{folder}/plain")
    else:
        found["sum"] = sum(param.detach().double().sum().item() for param in model.parameters())
    return found


def loaded(folder: str) -> dict[str, Any]:
    """What plain transformers and plain torch make of the folders."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/weights")
    other = tiny.llama(seed=7)
    other.load_state_dict(load_file(f"{folder}/plain/model.safetensors"))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return {"sum": sum(param.detach().double().sum().item() for param in model.parameters()), "same": same}


def errors() -> dict[str, str]:
    """What contradicts zeor, each in one sentence."""
    found = {}

    def note(name: str, do: Any) -> None:
        try:
            do()
            found[name] = ""
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = str(error)

    note("dispatch", lambda: made({}, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)))
    note("precision", lambda: made({"precision": "fp16"}, mixed_precision="bf16"))
    note("fsdp", lambda: made({}, fsdp_plugin=FullyShardedDataParallelPlugin()))
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # as `accelerate launch` says it
        os.environ[variable] = "true"
        note(variable, lambda: made({}))
        del os.environ[variable]

    def clipped_release() -> None:
        accelerator = made({"release": True})
        model = accelerator.prepare(tiny.llama())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)

    note("release", clipped_release)

    def wrapped() -> None:
        accelerator = made({})
        accelerator.prepare(torch.nn.parallel.DistributedDataParallel(tiny.llama()))

    note("ddp", wrapped)
    note("meta", lambda: made({}).prepare(torch.nn.Linear(2, 2, device="meta")))

    def again() -> None:
        accelerator = made({})
        model = tiny.llama()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))

    note("again", again)
    note("no checkpoint", no_checkpoint)
    return found


def no_checkpoint() -> None:
    accelerator = made({})
    accelerator.prepare(tiny.llama())
    accelerator.load_state("/")


def uneven() -> list[float]:
    """One rank has a batch more: zeor.join through join_uneven_inputs. The sum of the weights on every rank."""
    accelerator = made({"stage": 3}, gradient_accumulation_steps=1)
    model = tiny.llama()
    loader = DataLoader(tiny.samples(6), batch_size=2, collate_fn=tiny.stack)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    with zeor.full_params(model):
        return [float(batches), sum(param.detach().double().sum().item() for param in model.parameters())]


def main(arguments: Sequence[str]) -> Any:
    what, folder = arguments[0], arguments[1] if len(arguments) > 1 else ""
    if what == "launched":
        return train({"stage": 3})
    if what == "one":  # one process: without zeor, and with it from checkpoints that two ranks wrote
        found = {str(stage): train({"stage": stage}, f"{folder}/{stage}", resume=True) for stage in (1, 3)}
        return {"plain": train(None), **found}
    found: dict[str, Any] = {}
    for stage in (1, 3):
        at = f"{folder}/{stage}"
        found[str(stage)] = train({"stage": stage}, at, save_at=3)
        found[f"{stage} resumed"] = train({"stage": stage}, at, resume=True)
        PartialState().wait_for_everyone()
        found[f"{stage} loaded"] = loaded(at)
    found["bf16"] = train({"stage": 3}, mixed_precision="bf16")["losses"]
    found["compiled"] = train({"stage": 3}, dynamo_backend="eager")["losses"]
    found["uneven"] = uneven()
    found["errors"] = errors()
    return found


if __name__ == "__main__":
    run(main)
