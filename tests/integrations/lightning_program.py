"""Lightning's Trainer and Fabric as users write them: accumulation, clipping, a scheduler, checkpoints, two fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import zeor
from tests.integrations import tiny
from tests.integrations.launching import run

JOINT, STEPS, SAVED_AT = 8, 4, 2


def world() -> int:
    # Lightning's own launcher sets WORLD_SIZE late, and takes it away after a fit.
    return int(os.environ.get("RANKS_ASKED_FOR", os.environ.get("WORLD_SIZE", "1")))


def rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def loader() -> DataLoader[Any]:
    """In one order: rank r of W has the samples r, r + W, ..."""
    data: Any = tiny.samples(32)
    sampler: Any = DistributedSampler(data, world(), rank(), shuffle=False)
    return DataLoader(data, batch_size=JOINT // world(), collate_fn=tiny.stack, sampler=sampler)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.llama()
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.inner(**batch).loss
        self.losses.append(mean(loss))
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val", self.inner(**batch).loss, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def mean(loss: Tensor) -> float:
    value = loss.detach().clone()
    if world() > 1:
        torch.distributed.all_reduce(value)
    return float(value) / world()


def strategy(options: dict[str, Any] | None, kind: str = "ZeorStrategy") -> Any:
    if options is None:
        return "auto"
    from zeor.integrations import lightning as adapter

    return "zeor" if not options else getattr(adapter, kind)(zeor=options)


def total(model: Any) -> float:
    if not zeor.is_sharded(model):
        return sum(param.detach().double().sum().item() for param in model.parameters())
    with zeor.full_params(model):
        return sum(param.detach().double().sum().item() for param in model.parameters())


def trainer_of(folder: str, options: dict[str, Any] | None, **more: Any) -> Any:
    # At the end of an epoch: within one Lightning begins its data anew.
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True
    )
    common = {"max_steps": STEPS, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "logger": False,
              "accelerator": "cpu", "devices": world(), "enable_progress_bar": False, "callbacks": [saves],
              "enable_model_summary": False, "num_sanity_val_steps": 0,
              "use_distributed_sampler": False, "default_root_dir": folder}  # fmt: skip
    return lightning.Trainer(strategy=strategy(options), **{**common, **more})


def fit(folder: str, options: dict[str, Any] | None, resume: bool = False, twice: bool = False) -> dict[str, Any]:
    module = Module()
    trainer = trainer_of(folder, options)
    trainer.fit(module, loader(), loader(), ckpt_path=f"{folder}/step={SAVED_AT}.ckpt" if resume else None)
    found: dict[str, Any] = {"losses": module.losses, "rates": module.rates, "sum": total(module)}
    found["val"] = float(trainer.validate(module, loader(), verbose=False)[0]["val"])
    if options is not None and not resume:
        zeor.export(module.inner if not zeor.is_sharded(module) else module, f"{folder}/weights")
        found["files"] = sorted(each.name for each in Path(folder, f"step={SAVED_AT}.ckpt").iterdir())
    if twice:
        module.losses = []
        trainer_of(f"{folder}/second", options, max_steps=2).fit(module, loader(), loader())
        found["second"] = module.losses
    return found


def best(folder: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """The checkpoint with the largest loss is kept beside the last one, and validated: it must really be loaded."""
    module = Module()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=f"{folder}/best", filename="{step}", monitor="val", mode="max", save_top_k=1, save_last=True
    )
    trainer = trainer_of(folder, options, callbacks=[saves])
    trainer.fit(module, loader(), loader())
    last = float(trainer.validate(module, loader(), verbose=False)[0]["val"])
    again = float(trainer.validate(module, loader(), ckpt_path="best", verbose=False)[0]["val"])
    files = sorted(each.name for each in Path(folder, "best").iterdir())
    return {"score": float(saves.best_model_score), "best": again, "last": last, "files": files}


def exported(folder: str) -> float:
    """The sum of the weights as plain torch reads them."""
    from safetensors.torch import load_file

    module = Module()
    module.load_state_dict(load_file(f"{folder}/weights/model.safetensors"), strict=False)
    return total(module)


def fabric(folder: str, options: dict[str, Any] | None, resume: bool = False) -> dict[str, Any]:
    made = Fabric(accelerator="cpu", devices=world(), strategy=strategy(options, "ZeorFabricStrategy"))
    made.launch()
    torch.manual_seed(0)
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = made.setup(model, optimizer)
    data = made.setup_dataloaders(loader(), use_distributed_sampler=False)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        made.load(f"{folder}/fabric", state)
    losses, norms = [], []
    batches = list(data)
    for step in range(state["step"], STEPS):
        for micro in range(2):
            batch = batches[(2 * step + micro) % len(batches)]
            with made.no_backward_sync(model, enabled=micro == 0):
                loss = model(**batch).loss
                made.backward(loss / 2)
            losses.append(mean(loss))
        norms.append(float(made.clip_gradients(model, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        if step + 1 == SAVED_AT and options is not None and not resume:
            made.save(f"{folder}/fabric", state)
    return {"losses": losses, "norms": norms, "sum": total(model.module)}


def errors() -> dict[str, str]:
    found = {}
    for name, do in {
        "precision": lambda: trainer_of("/tmp/x", {}, precision="bf16-mixed").fit(Module(), loader()),
        "no checkpoint": lambda: trainer_of("/tmp/x", {}).validate(Module(), loader(), ckpt_path=__file__),
    }.items():
        try:
            do()
            found[name] = ""
        except (ValueError, RuntimeError, NotADirectoryError) as error:
            found[name] = str(error)
    return found


def main(arguments: Sequence[str]) -> Any:
    what, folder = arguments
    if what.startswith("launched"):  # by python alone: Lightning starts the other rank
        os.environ["RANKS_ASKED_FOR"] = "2"
    if what == "launched":
        return {"3": fit(folder, {"stage": 3}), "fabric 3": fabric(folder, {"stage": 3})}
    if what == "launched by fabric":
        return {"fabric 3": fabric(folder, {"stage": 3})}
    found: dict[str, Any] = {}
    if what == "one":
        found = {"plain": fit(f"{folder}/plain", None, twice=True), "fabric": fabric(f"{folder}/plain", None)}
        found["best"] = best(f"{folder}/plain", None)
        for stage in (1, 3):
            found[str(stage)] = fit(f"{folder}/{stage}", {"stage": stage}, resume=True)
            found[f"fabric {stage}"] = fabric(f"{folder}/{stage}", {"stage": stage}, resume=True)
        return found
    for stage in (1, 3):
        at = f"{folder}/{stage}"
        found[str(stage)] = fit(at, {"stage": stage}, twice=True)
        found[f"{stage} resumed"] = fit(at, {"stage": stage}, resume=True)
        found[f"{stage} exported"] = exported(at)
        found[f"fabric {stage}"] = fabric(at, {"stage": stage})
        found[f"fabric {stage} resumed"] = fabric(at, {"stage": stage}, resume=True)
        found[f"{stage} best"] = best(at, {"stage": stage})
    found["by name"] = fit(f"{folder}/named", {})
    found["errors"] = errors()
    return found


if __name__ == "__main__":
    run(main)
