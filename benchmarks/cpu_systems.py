"""The systems compared on CPU ranks: how each one takes a model and AdamW, and nothing about timing.

    compute         no communication at all: every rank trains alone (the floor)
    ddp             DistributedDataParallel
    ddp+zero        DDP + ZeroRedundancyOptimizer, as documented (overlap off)
    ddp+zero-views  the same with gradients and parameters as views of their buckets (its leanest setting)
    fsdp2           fully_shard on every block and on the root, fp32
    zeor0 .. zeor3  zeor.shard at that stage, fp32

All of them get the same model, the same AdamW arguments and an initialised process group.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from benchmarks.decoder import Decoder

LEARNING_RATE = 3e-4
SYSTEMS = ("compute", "ddp", "ddp+zero", "fsdp2", "zeor1", "zeor2", "zeor3")
EXTRA_SYSTEMS = ("ddp+zero-views", "zeor0")


class Trained(NamedTuple):
    """A model and its optimizer, ready for the plain loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def adamw_arguments(adamw: str) -> dict[str, Any]:
    """Arguments of torch.optim.AdamW for one of its implementations: default, foreach or fused."""
    chosen = {} if adamw == "default" else {adamw: True}
    return {"lr": LEARNING_RATE, "weight_decay": 0.1, **chosen}


def prepare(system: str, model: Decoder, adamw: str = "fused") -> Trained:
    """Hand `model` to the named system."""
    arguments = adamw_arguments(adamw)
    if system == "compute":
        return Trained(model, torch.optim.AdamW(model.parameters(), **arguments))
    if system.startswith("ddp"):
        return _prepare_ddp(system, model, arguments)
    if system == "fsdp2":
        return _prepare_fsdp2(model, arguments)
    if system.startswith("zeor"):
        zeor = importlib.import_module("zeor")
        optimizer = torch.optim.AdamW(model.parameters(), **arguments)
        return Trained(*zeor.shard(model, optimizer, stage=int(system[4:]), precision="fp32"))
    raise ValueError(f"unknown system {system!r}: choose from {', '.join(SYSTEMS + EXTRA_SYSTEMS)}")


def _prepare_ddp(system: str, model: Decoder, arguments: dict[str, Any]) -> Trained:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    views = system.endswith("-views")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    if system == "ddp":
        return Trained(wrapped, torch.optim.AdamW(wrapped.parameters(), **arguments))
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, **arguments
    )
    return Trained(wrapped, optimizer)


def _prepare_fsdp2(model: Decoder, arguments: dict[str, Any]) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trained(model, torch.optim.AdamW(model.parameters(), **arguments))


def clip(system: str, model: nn.Module, limit: float) -> None:
    """Clip the global norm the way each system documents it."""
    if system.startswith("zeor"):
        importlib.import_module("zeor").clip_grad_norm_(model, limit)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def settle(system: str, model: nn.Module) -> None:
    """Wait for what a system still has under way after step(), so that none of it escapes the clock.

    zeor's stages 1 and 2 publish parameters behind the next forward: without this the last publish of a
    window falls outside it (seen: an interface count of 0.9 of what was sent). Raises where it cannot wait.
    """
    if system.startswith("zeor"):
        importlib.import_module("zeor.api")._state(model).engine.drain()


def traffic(system: str, model: nn.Module) -> dict[str, Any] | None:
    """The system's own counters ("bytes_sent" by this rank so far, "collectives"); None where it has none."""
    if system.startswith("zeor"):
        counters = getattr(importlib.import_module("zeor"), "traffic", None)
        if counters is not None:
            return dict(counters(model))
    return None


def zeor_present() -> bool:
    """Whether zeor can be imported and offers shard(); importing it is left to the rank that runs it."""
    try:
        return hasattr(importlib.import_module("zeor"), "shard")
    except ImportError:
        return False
