"""Which rank of how many this process is, for dealing out data: by mesh, process group or environment.

Data may be sharded before zeor.shard() joins the process group, hence the environment. Nothing is communicated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def place(mesh: Any) -> tuple[int, int]:
    """(rank, world) in the mesh, the process group or the whole world; without any, from the environment."""
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        return place_from(os.environ)
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        rank, world = dist.get_rank(mesh), dist.get_world_size(mesh)
    else:
        members = mesh.mesh.flatten().tolist()
        rank = members.index(dist.get_rank()) if dist.get_rank() in members else -1
        world = len(members)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh it was asked to shard data over")
    return rank, world


def place_from(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world) by torchrun's or srun's variables: what zeor.shard() will join when it comes later."""
    if "RANK" in env:
        return int(env["RANK"]), int(env.get("WORLD_SIZE", 1))
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return 0, 1
