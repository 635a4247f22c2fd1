"""examples/ray_train.py with a worker that is killed, with other numbers of workers, and its like without Ray.

    main(["whole" or "killed", storage, workers, steps])     a run under Ray; it goes on from what `storage` holds
    main(["plain", "", "1", steps])                          the same loop in one process, by plain PyTorch

A worker kills itself by SIGKILL at the end of a step that is no step of a save, once in a storage.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import zeor
from examples import ray_train
from tests.integrations.launching import ROOT, run
from zeor.tools import gpt

KILLED_AT = 5  # a step; checkpoints are of every second one
SETTINGS = {"save_every": 2, "batch": 12, "texts": 60, "stage": 3, "seed": 0}


def killed(settings: dict[str, Any]) -> None:
    """train_func, in which the last worker dies once. Every worker notes that it began."""
    import ray.train

    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(context.get_storage().experiment_fs_path)
    done, begun = folder / "killed", folder / f"begun-{rank}"
    with begun.open("a") as file:
        file.write(f"{os.getpid()}\n")
    steps = 0

    def after_a_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == KILLED_AT and rank == context.get_world_size() - 1 and not done.exists():
            done.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    hook = register_optimizer_step_post_hook(after_a_step)
    try:
        ray_train.train_func(settings)
    finally:
        hook.remove()


def under_ray(what: str, storage: str, workers: int, steps: int) -> dict[str, Any]:
    import ray

    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": path})
    func = killed if what == "killed" else ray_train.train_func
    found = ray_train.trainer_of(func, {**SETTINGS, "steps": steps}, workers, storage).fit()
    folder = Path(found.path)
    begun = {each.name: len(each.read_text().split()) for each in sorted(folder.glob("begun-*"))}
    ray.shutdown()
    return {
        "kept": {Path(point.path).name: metrics for point, metrics in found.best_checkpoints},
        "last": Path(found.checkpoint.path).name,
        "folders": sorted(each.name for each in folder.glob("step-*")),
        "begun": begun, "killed": (folder / "killed").exists(), "weights": weights(found.checkpoint.path),
    }  # fmt: skip


def weights(checkpoint: str) -> dict[str, Any]:
    """Of each parameter, as plain tools read it out of a checkpoint."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        zeor.export(checkpoint, f"{folder}/weights")
        return {name: told(value) for name, value in load_file(f"{folder}/weights/model.safetensors").items()}


def told(value: torch.Tensor) -> list[Any]:
    """A digest of the bits, and the sum of squares."""
    value = value.detach().contiguous()
    return [hashlib.sha256(value.numpy().tobytes()).hexdigest(), value.double().square().sum().item()]


def plain(steps: int) -> dict[str, Any]:
    """One process, no Ray, nothing sharded: the joint batches in the order of the loader."""
    model, optimizer, loader = ray_train.run_of({**SETTINGS, "steps": steps})
    loader = zeor.data.shard(loader)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=1000)
    losses: list[float] = []
    while len(losses) < steps:
        for (rows,) in loader:
            loss = gpt.loss(model(rows[:, :-1]), rows[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return {"losses": losses, "weights": {name: told(param) for name, param in model.named_parameters()}}


def main(arguments: Sequence[str]) -> Any:
    what, storage, workers, steps = arguments
    return plain(int(steps)) if what == "plain" else under_ray(what, storage, int(workers), int(steps))


if __name__ == "__main__":
    run(main)
