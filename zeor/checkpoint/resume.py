"""Going on exactly where a run was saved: its loader's position and its random generators.

A position that is counted over all ranks together, as zeor.data's, fits any number of ranks; one of each rank's own
(torchdata's loader, a stream cut by files) and the generators belong to the world they were saved at.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.urls import Place
from zeor.comm.mesh import Mesh


def position_of(path: Place, saved: Any, mesh: Mesh, strict: bool) -> Any:
    """The entry of the manifest's `data` that this rank goes on from, encoded; None where none was saved."""
    entries = saved if isinstance(saved, list) else []
    if not any(entry is not None for entry in entries):
        if strict:
            raise CheckpointError(f"{path} holds no position of a data loader; leave out data=, or pass strict=False.")
        return None
    entry = entries[mesh.rank % len(entries)]
    anywhere = isinstance(entry, dict) and "zeor_data" in entry and all(each == entry for each in entries)
    if len(entries) != mesh.world and not anywhere:
        raise CheckpointError(
            f"{path} holds a position of the data loader for each of {len(entries)} ranks, and there are {mesh.world} "
            f"here; load at {len(entries)} ranks, or leave out data= and begin an epoch, or use zeor.data.shard's "
            "loader on data that all ranks share: its position fits any number of ranks."
        )
    return entry


def go_to(loader: Any, position: Any) -> None:
    """Before the generators come back: torchdata's loader goes to its position when it is iterated first, and draws
    random numbers on the way which the saved run did not draw there; so it is sent there now."""
    loader.load_state_dict(position)
    if hasattr(loader, "next_iter_state"):
        loader.state_dict()


def set_rng(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
