"""Ray Train: a train_func that reports a checkpoint per save to Ray, and goes on at any number of workers.

    pip install ray
    python examples/ray_train.py --workers 2 --steps 40 --storage /tmp/ray           # a path that all nodes share
    python examples/ray_train.py --workers 3 --steps 80 --storage /tmp/ray           # goes on at 40, on three workers

Where a worker dies Ray starts all of them again (--failures times), and they go on from the last checkpoint that was
reported. A byte-level GPT on the text that comes with zeor; it was run on CPU workers over Gloo, never on GPUs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from zeor.tools import gpt

ROOT = str(Path(__file__).resolve().parents[1])
TEXT = Path(gpt.__file__).parent / "text" / "moby-dick.txt"


def run_of(settings: dict[str, Any], workers: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and loader. The joint batch is the same at any number of workers."""
    torch.manual_seed(settings["seed"])
    rows = gpt.encode(TEXT.read_bytes()).unfold(0, 65, 64)[: settings["texts"]]
    model = gpt.GPT(gpt.GPTConfig(layers=2, width=64, heads=2, context=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(rows), batch_size=settings["batch"] // workers, shuffle=True)
    return model, optimizer, loader


def train_func(settings: dict[str, Any]) -> None:
    """What every worker does. Ray has made the process group, which zeor uses."""
    context = ray.train.get_context()
    folder = context.get_storage().experiment_fs_path
    model, optimizer, loader = run_of(settings, context.get_world_size())
    model, optimizer = zeor.shard(model, optimizer, stage=settings["stage"])
    loader = zeor.data.shard(loader)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=1000)
    step, begun = 0, ray.train.get_checkpoint()
    if begun is not None:  # an earlier run, or this one before a worker died
        step = zeor.load(begun.path, model, optimizer, extra={"scheduler": scheduler}, data=loader).step
    while step < settings["steps"]:
        for (rows,) in loader:
            loss = gpt.loss(model(rows[:, :-1]), rows[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % settings["save_every"] == 0 or step == settings["steps"]:
                # keep=None: Ray deletes old ones (num_to_keep).
                path = zeor.save(
                    folder, model, optimizer, step=step, extra={"scheduler": scheduler}, data=loader, keep=None
                )
                summed, ranks = zeor.total(loss.item(), 1)
                report({"step": step, "loss": summed / ranks, "workers": ranks}, str(path))
            if step == settings["steps"]:
                break


def report(metrics: dict[str, Any], path: str) -> None:
    """Every worker reports, so that Ray knows that all have come here; the checkpoint lies in its storage already."""
    first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint.from_directory(path) if first else None,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def trainer_of(func: Any, settings: dict[str, Any], workers: int, storage: str, failures: int = 3) -> TorchTrainer:
    """Ray's trainer. Its name is the same each time, so a later run goes on from what an earlier one reported."""
    gpus = torch.cuda.device_count() >= workers
    return TorchTrainer(
        func,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        run_config=RunConfig(
            name="zeor",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--workers", type=int, default=2)
    asked.add_argument("--storage", required=True, help="a folder that all nodes share")
    asked.add_argument("--failures", type=int, default=3, help="how often Ray starts the workers again")
    asked.add_argument("--steps", type=int, default=40)
    asked.add_argument("--save-every", type=int, default=10)
    asked.add_argument("--batch", type=int, default=12, help="windows per step, of all workers together")
    asked.add_argument("--texts", type=int, default=2000)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--seed", type=int, default=0)
    settings = vars(asked.parse_args())
    workers, storage, failures = settings.pop("workers"), settings.pop("storage"), settings.pop("failures")
    if settings["batch"] % workers:
        raise SystemExit(f"--workers {workers} does not divide --batch {settings['batch']}.")
    ray.init(num_cpus=workers + 1, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})  # on a cluster: ray.init()
    found = trainer_of(train_func, settings, workers, storage, failures).fit()
    print(f"step {found.metrics['step']}  loss {found.metrics['loss']:.3f}")
    print(f"plain weights: zeor export {found.checkpoint.path} FOLDER")


if __name__ == "__main__":
    main()
