"""Joining the process group when nobody has: from torchrun's variables, from SLURM's, or alone.

Called by `shard()`. A process without such variables is a world of one and needs no group at all.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist

from zeor.memory.device import BACKEND_VARIABLE

STORE_VARIABLE = "ZEOR_STORE"  # HOST:PORT of a store that outlives the ranks; set by launch.py


def ensure_process_group(device: torch.device, timeout: float) -> None:
    """Initialise torch.distributed's default group if the environment asks for one and it is not there."""
    if not dist.is_available() or dist.is_initialized():
        return
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _take_over_slurm()
    if "RANK" not in os.environ:
        return
    if STORE_VARIABLE in os.environ:
        return _join_launch(device, timeout)
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"RANK is set but {', '.join(missing)} is not; start the script with torchrun or python, "
            "or call torch.distributed.init_process_group before zeor.shard."
        )
    dist.init_process_group(backend_for(device), timeout=timedelta(seconds=timeout))


_joined: list[None] = []  # one for each time this process has joined


def _join_launch(device: torch.device, timeout: float) -> None:
    """By the store of zeor.launch, which outlives every rank; with names of its own each time."""
    host, _, port = os.environ[STORE_VARIABLE].rpartition(":")
    limit = timedelta(seconds=timeout)
    _joined.append(None)
    store = dist.PrefixStore(f"zeor/{len(_joined)}", dist.TCPStore(host, int(port), is_master=False, timeout=limit))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=world, timeout=limit)


def backend_for(device: torch.device) -> str:
    """Gloo for CPU tensors always; the accelerator's own backend beside it."""
    if device.type == "cpu":
        return "gloo"
    own = os.environ.get(BACKEND_VARIABLE) or dist.get_default_backend_for_device(device)
    return f"cpu:gloo,{device.type}:{own}"


def _take_over_slurm() -> None:
    """srun's variables in torchrun's words."""
    env = os.environ
    host = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "localhost"))
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    env.setdefault("MASTER_ADDR", host)
    # One port per job step, the same on all its ranks, above the well-known ones.
    job = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", "0"))
    env.setdefault("MASTER_PORT", str(20000 + job % 20000))


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list such as `gpu[003-005,9],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)  # up to the first comma that is not in brackets
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())
