"""shard(): each rank its own part of a loader, a dataset or a stream. Decides which way; the ways are elsewhere.

Every rank computes the same order and takes its turns in it; only the seed of that order is rank 0's, told once. By
default all ranks get equally many batches, because a rank with one batch more would wait for the others forever.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from zeor.data.loader import is_sharded, loader_of_batches, loader_of_samples, loader_of_stream, moving, sampler_for
from zeor.data.position import History, history_of, seed_now
from zeor.data.sampler import RankSampler
from zeor.data.seeds import Seed, own_seed
from zeor.data.stream import RankStream, Share

SHUFFLE_BUFFER = 1000  # samples, where a stream is asked to shuffle and not told how far

log = logging.getLogger("zeor")


def shard(  # noqa: PLR0913 (public: each option is a keyword)
    data: Any,
    *,
    shuffle: bool | int | None = None,
    seed: int | None = None,
    drop_last: bool | None = None,
    uneven: bool = False,
    mesh: Any = None,
    device: Any = None,
) -> Any:
    """This rank's part of a DataLoader, of a dataset or of a stream.

    A DataLoader comes back as a DataLoader of the same class and settings, whose batches hold this rank's
    samples only. Its batch_size is per rank: the global batch is batch_size x ranks, and an epoch has that many times
    fewer steps. A loader that shuffles is reshuffled every epoch, all ranks by the same permutation; epochs advance by
    themselves at each iter(), and `set_epoch(n)` on the loader (or its sampler) sets the next one. Your own loader
    remembers how many epochs were begun, so `for batch in zeor.data.shard(loader)` inside `for epoch in ...` reshuffles
    too; shard it once, before the loop, to keep worker processes alive and to save its position.
    Other samplers are cut the same way: they run on every rank from one common seed, a batch_sampler's whole
    batches dealt out in turn. A loader that has a DistributedSampler already is returned as it is.

    `loader.state_dict()` says how much of the epoch the user has been given (not what workers prefetched);
    after `loader.load_state_dict()` the next iter() goes on exactly there, also on another number of ranks: the
    rest of the epoch is then dealt out anew, no sample twice and none lost.

    A map-style dataset (__len__ and __getitem__) comes back as a torch Subset, a fixed part of it. To reshuffle
    across ranks every epoch, and for a position, shard the loader instead.

    A stream (an IterableDataset, any iterable that can be read anew each epoch, a generator function), alone or
    in a DataLoader, is dealt out sample by sample over ranks and workers. It must be the same on all ranks: what
    is random in it is to be drawn before its first sample, or seeded by its own set_epoch(), which is called.
    Every rank and worker reads all of it, so do what is costly (decoding, tokenizing) in collate_fn, which sees
    only this rank's samples. Its position is reached by reading up to it, or by its own state_dict() if it has
    one (and num_workers=0 when it is saved).

    shuffle     None: as the loader does (a dataset or stream: no). True or False overrides that. A stream is
                shuffled through a buffer of that many samples (True: 1000).
    seed        of the permutation. None: rank 0's, and the same on all ranks: that of the loader's own generator if
                it has one, else torch's (torch.manual_seed), as it is when the loader is sharded first. A position that
                was loaded brings the seed of its run.
    drop_last   for samples that the ranks cannot share evenly. False: up to world - 1 samples are seen
                twice. True: as many are left out. None: as the loader does with its last batch (a dataset
                or stream: False).
    uneven      True, for streams: no sample twice and none left out, but a rank may get a batch more than another:
                loop inside `with zeor.join(model):`. A stream of files that can cut itself
                (`.shard(num_shards=, index=)`, as Hugging Face's) is then cut by files, each rank reading its own.
    mesh        a DeviceMesh or process group to shard over; default: all ranks.
    device      where a loader's batches come, whole, targets too. None: where the model is that was sharded last, so
                that a loop needs no `.to(...)`; "cpu": they stay where they are made.
    """
    rank, world = place(mesh)
    options = (rank, world, shuffle, seed, drop_last, uneven)
    own = lambda: seed if seed is not None else Seed(own_seed(data), _described(data), world, mesh)
    history = history_of(data, options, own)
    ends = "uneven" if uneven else None if drop_last is None else "drop" if drop_last else "pad"
    found = shard_for(data, rank, world, shuffle=shuffle, ends=ends, history=history)
    if device is not None and not isinstance(data, DataLoader):
        raise ValueError(f"device={device!r} is for a DataLoader, whose batches it places; leave it out here.")
    if isinstance(found, DataLoader) and (found is not data or not is_sharded(found)):
        return moving(found, None if device is None else torch.device(device))
    return found


def shard_for(
    data: Any,
    rank: int,
    world: int,
    *,
    shuffle: bool | int | None = None,
    ends: str | None = None,
    history: History | None = None,
) -> Any:
    """shard() for a given rank of a given world; without a history it begins epoch 0 of seed 0. `ends`: what becomes of
    samples that the ranks cannot share evenly ("pad", "drop" or "uneven"); None: as the loader does."""
    history = History(0) if history is None else history
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} does not exist in a world of {world}")
    if isinstance(data, RankStream) or (isinstance(data, DataLoader) and is_sharded(data)):
        return data
    loader = data if isinstance(data, DataLoader) else None
    source = data if loader is None else loader.dataset
    if _is_stream(source):
        if ends is None:
            ends = "drop" if loader is not None and loader.drop_last else "pad"
        buffer_numel = SHUFFLE_BUFFER if shuffle is True else int(shuffle or 0)
        _ask(history)
        stream = _stream(source, Share(rank, world, shuffle=buffer_numel, ends=ends), history)
        return stream if loader is None else loader_of_stream(loader, stream)
    if ends == "uneven":
        raise ValueError(f"uneven=True is for streams, and {type(source).__name__} is map-style: leave it out")
    drop_last = None if ends is None else ends == "drop"
    if loader is not None:
        return _shard_loader(loader, rank, world, shuffle=shuffle, history=history, drop_last=drop_last)
    if world == 1 and shuffle is None:
        return data
    inner = sampler_for(data, bool(shuffle))
    fixed = History(seed_now(history) if shuffle else 0)
    return Subset(data, list(RankSampler(inner, rank, world, history=fixed, drop_last=bool(drop_last))))


def _shard_loader(
    loader: DataLoader[Any], rank: int, world: int, *,
    shuffle: bool | int | None, history: History, drop_last: bool | None,
) -> DataLoader[Any]:
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    if own_batches and shuffle is not None:
        raise ValueError("shuffle= has no meaning for a loader with its own batch_sampler: set it there")
    dealt = loader.batch_sampler if own_batches else loader.sampler
    if world == 1 and shuffle is None and not hasattr(dealt, "__len__"):
        return loader  # perhaps an endless sampler: nothing to share, and nothing that a position could count in
    if own_batches:
        _ask(history)
        return loader_of_batches(loader, rank, world, history, drop_last)
    shuffle = None if shuffle is None else bool(shuffle)
    if shuffle or (shuffle is None and type(dealt) is not SequentialSampler):
        _ask(history)
    return loader_of_samples(loader, rank, world, shuffle=shuffle, history=history, drop_last=drop_last)


# ---- the seed


def _ask(history: History) -> None:
    """The order will be drawn: agree on the seed while all ranks are here."""
    if isinstance(history.seed, Seed):
        history.seed.ask_early()


def _described(data: Any) -> str:
    source: Any = data.dataset if isinstance(data, DataLoader) else data
    name = getattr(source, "__name__", type(source).__name__)
    try:
        numel = f" of {len(source)} samples"
    except TypeError:  # a stream
        numel = ""
    return f"{'a loader of ' if source is not data else ''}{name}{numel}"


# ---- streams


def _is_stream(data: Any) -> bool:
    name = type(data).__name__
    if isinstance(data, Mapping):
        raise ValueError(f"zeor.data.shard takes one dataset, not a mapping of them ({name}): shard its values")
    if isinstance(data, IterableDataset):
        return True
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return False
    if isinstance(data, Iterator):
        raise ValueError(
            f"zeor.data.shard was given a {name}, which can be read only once: give it the function that makes it, "
            "or an object whose __iter__ begins anew each epoch"
        )
    if not hasattr(data, "__iter__") and not callable(data):
        raise ValueError(
            f"zeor.data.shard takes a DataLoader, a dataset (__len__ and __getitem__), an iterable or a function that "
            f"returns one, and {name} is none of these"
        )
    return True


def _stream(source: Any, share: Share, history: History) -> RankStream:
    """The source dealt out; or, where it is or can be cut by ranks itself, this rank's own cut of it."""
    alone = replace(share, rank=0, world=1, own=(share.rank, share.world))
    if share.world > 1 and _is_cut_by_rank(source):
        log.warning(
            "zeor: %s is split by rank already, so ranks may run out of data at different times: loop inside "
            "`with zeor.join(model):`.",
            type(source).__name__,
        )
        return RankStream(source, alone, history)
    if share.world > 1 and share.ends == "uneven" and _shards_numel(source) >= share.world:
        return RankStream(source.shard(num_shards=share.world, index=share.rank), alone, history)
    return RankStream(source, share, history)


def _is_cut_by_rank(source: Any) -> bool:
    """Hugging Face's split_dataset_by_node, or webdataset's split_by_node in a pipeline."""
    stages = getattr(source, "pipeline", None)
    named = [getattr(stage, "__name__", "") for stage in stages] if isinstance(stages, (list, tuple)) else []
    return getattr(source, "_distributed", None) is not None or "split_by_node" in named


def _shards_numel(source: Any) -> int:
    """Into how many parts the source can cut itself; 0: it cannot."""
    numel = getattr(source, "num_shards", getattr(source, "n_shards", 0))
    return numel if callable(getattr(source, "shard", None)) and isinstance(numel, int) else 0


# ---- which rank of how many


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
