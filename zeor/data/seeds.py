"""The seed that all ranks draw an order from: rank 0's, told to the others through the process group's store.

A store, not a collective: rank 0 never waits for the others here, and no message of a training step can be taken for
this one. Nothing is asked where the user gave a seed.
"""

from __future__ import annotations

import json
import logging
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

WITHOUT_A_GROUP = 0  # where ranks cannot ask each other yet
WAIT_SECONDS = 600.0

log = logging.getLogger("zeor")

# How many seeds a group has agreed on: the n-th on one rank is the n-th on every rank.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Seed:
    """One seed for one user's loader or stream. It is asked for once, and kept.

    own     this rank's own seed; rank 0's is taken
    what    names the data, so that ranks which shard different data are told so
    world   ranks that draw from it
    """

    def __init__(self, own: int, what: str, world: int, mesh: Any) -> None:
        self._own, self._what, self._world, self._mesh = own % 2**63, what, world, mesh
        self.agreed: int | None = None

    def ask_early(self) -> None:
        """When the data are sharded: all ranks are there. Without a process group it waits for the first epoch."""
        if self.agreed is None and (self._world == 1 or _is_joined()):
            self.agreed = self._ask()

    def now(self) -> int:
        if self.agreed is None:
            self.agreed = self._ask()
        return self.agreed

    def _ask(self) -> int:
        if self._world == 1:
            return self._own
        if get_worker_info() is not None or not _is_joined():
            log.warning(
                "zeor: %s is read before the ranks have a process group, so torch's seed does not decide its order; "
                "call zeor.shard or torch.distributed.init_process_group first, or give zeor.data.shard(seed=).",
                self._what,
            )
            return WITHOUT_A_GROUP
        return rank_0_says(self._own, self._what, self._mesh)

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: they are given the answer, and ask nobody."""
        return {"_own": self._own, "_what": self._what, "_world": self._world, "_mesh": None, "agreed": self.agreed}


def rank_0_says(own: int, what: str, mesh: Any) -> int:
    """Rank 0's number, on every rank of the mesh. Every rank calls it, for the same data."""
    is_mesh = mesh is not None and not isinstance(mesh, dist.ProcessGroup)
    group: Any = mesh.get_group() if is_mesh else mesh or dist.group.WORLD
    if "fake" in str(dist.get_backend_config(group)):
        return own
    count = _counts[group] = _counts.get(group, 0) + 1
    ranks = dist.get_process_group_ranks(group)
    key = f"zeor/data/seed/{ranks[0]}-{ranks[-1]}-{len(ranks)}/{group.group_name}/{count}"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank(group) == 0:
        store.set(key, json.dumps([own, what]))
        return own
    try:
        store.wait([key], timedelta(seconds=WAIT_SECONDS))
    except RuntimeError as error:
        raise RuntimeError(
            f"zeor.data.shard({what}): rank 0 did not shard it within {WAIT_SECONDS:g} s; every rank must call "
            "zeor.data.shard on the same data, or give seed=."
        ) from error
    seed: int
    seed, theirs = json.loads(store.get(key))
    if theirs != what:
        raise ValueError(
            f"zeor.data.shard was given {what} on rank {dist.get_rank(group)} and {theirs} on rank 0; every rank must "
            "shard the same data in the same order, or give seed=."
        )
    return seed


def own_seed(data: Any) -> int:
    """What a loader's own generator was seeded with; without one torch's seed: the one of torch.manual_seed."""
    held = (generator_of(each) for each in (data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)))
    generator = next((each for each in held if each is not None), None)
    return torch.initial_seed() if generator is None else generator.initial_seed()


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator that a sampler, or the one that it takes from, draws from; None: torch's own."""
    for each in (sampler, getattr(sampler, "sampler", None)):  # a BatchSampler has its sampler there
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()
