"""Each rank its own part of the data: shard(loader) or shard(dataset), for map-style data.

Every rank computes the same order of all samples (a pure function of seed and epoch, see RankSampler)
and takes every world-th of it, so nothing is communicated. All ranks get equally many samples, hence
equally many batches: a rank with one batch more would wait for the others forever. fingerprint() tells
whether ranks were fed the same batch by mistake. This file knows ranks and samples, not models.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

FINGERPRINT_NBYTES = 64 * 1024  # per tensor

T = TypeVar("T")


def shard(
    data: Any, *, shuffle: bool | None = None, seed: int = 0, drop_last: bool | None = None, mesh: Any = None
) -> Any:
    """This rank's part of a DataLoader or of a map-style dataset (anything with __len__ and __getitem__).

    A DataLoader comes back as a DataLoader of the same class and settings, whose batches hold this rank's
    samples only. Its batch_size is per rank: the global batch is world size times as large. A loader that
    shuffles is reshuffled every epoch, all ranks by the same permutation; epochs advance by themselves at
    each iter(), and `set_epoch(n)` on the loader (or its sampler) sets the next one, say after a resume.
    Other samplers are cut the same way: they run on every rank from one common seed, a batch_sampler's whole
    batches dealt out in turn. A loader that has a DistributedSampler already is returned as it is.

    A dataset comes back as a torch Subset, a fixed part of it. To reshuffle across ranks every epoch, shard
    the loader instead.

    shuffle     None: as the loader does (a dataset: no). True or False overrides that.
    seed        of the permutation. The loader's own generator has no say in it: it may differ by rank.
    drop_last   for samples that the ranks cannot share evenly. False: up to world - 1 samples are seen
                twice. True: as many are left out. None: as the loader does with its last batch (a dataset:
                False).
    mesh        a DeviceMesh or process group to shard over; default: all ranks.

    With one rank (no process group, and no torchrun or srun variables) data is returned unchanged.
    """
    rank, world = _place(mesh)
    return _shard_for(data, rank, world, shuffle=shuffle, seed=seed, drop_last=drop_last)


def _place(mesh: Any) -> tuple[int, int]:
    """(rank, world) in the mesh, the process group or the whole world; without any, from the environment."""
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        return _place_from(os.environ)
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        rank, world = dist.get_rank(mesh), dist.get_world_size(mesh)
    else:
        members = mesh.mesh.flatten().tolist()
        rank = members.index(dist.get_rank()) if dist.get_rank() in members else -1
        world = len(members)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh it was asked to shard data over")
    return rank, world


def _place_from(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world) by torchrun's or srun's variables: what zeor.shard() will join when it comes later."""
    if "RANK" in env:
        return int(env["RANK"]), int(env.get("WORLD_SIZE", 1))
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return 0, 1


def _shard_for(
    data: Any,
    rank: int,
    world: int,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
) -> Any:
    """shard() for a given rank of a given world."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} does not exist in a world of {world}")
    if world == 1 and shuffle is None:
        return data
    if isinstance(data, DataLoader):
        _check_map_style(data.dataset)
        return _shard_loader(data, rank, world, shuffle=shuffle, seed=seed, drop_last=drop_last)
    _check_map_style(data)
    order: RankSampler = RankSampler(
        _sampler(data, bool(shuffle)), rank, world, seed=seed, drop_last=bool(drop_last)
    )
    return Subset(data, list(order))


def _shard_loader(
    loader: DataLoader, rank: int, world: int, *, shuffle: bool | None, seed: int, drop_last: bool | None
) -> DataLoader:
    if _is_sharded(loader):
        return loader
    dealt: RankSampler
    replaced: dict[str, Any]
    if loader.batch_size is None and loader.batch_sampler is not None:
        if shuffle is not None:
            raise ValueError("shuffle= has no meaning for a loader with its own batch_sampler: set it there")
        dealt = RankSampler(loader.batch_sampler, rank, world, seed=seed, drop_last=bool(drop_last))
        replaced = {"batch_sampler": dealt}
    else:
        sampler = loader.sampler if shuffle is None else _sampler(loader.dataset, shuffle)
        drop_last = loader.drop_last if drop_last is None else drop_last
        dealt = RankSampler(sampler, rank, world, seed=seed, drop_last=drop_last)
        replaced = {"sampler": dealt}
        if loader.batch_size is not None:
            replaced["batch_sampler"] = BatchSampler(dealt, loader.batch_size, loader.drop_last)
    return _replace(loader, set_epoch=dealt.set_epoch, **replaced)


def _is_sharded(loader: DataLoader) -> bool:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, RankSampler | DistributedSampler) for sampler in samplers)


def _replace(loader: DataLoader, **changed: Any) -> DataLoader:
    """A shallow copy with some attributes changed.

    Copying keeps subclasses and every setting, those of other torch versions included; calling the
    constructor again would not. DataLoader forbids setting a sampler later, hence object.__setattr__.
    """
    fresh = copy.copy(loader)
    changed["_iterator"] = None  # persistent workers belong to the original
    for name, value in changed.items():
        object.__setattr__(fresh, name, value)
    return fresh


def _check_map_style(data: Any) -> None:
    name = type(data).__name__
    if isinstance(data, Mapping):
        raise ValueError(
            f"zeor.data.shard takes one dataset, not a mapping of them ({name}): shard its values"
        )
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            f"zeor.data.shard takes map-style data (__len__ and __getitem__) so far, and {name} is not:"
            " give each rank its own part of the stream in the dataset's __iter__"
        )


def _sampler(data: Any, shuffle: bool) -> Sampler:
    # RandomSampler refuses an empty dataset in some torch versions; there is nothing to shuffle in one.
    return RandomSampler(data) if shuffle and len(data) else SequentialSampler(data)


class RankSampler(Sampler[T]):
    """Every world-th item, from `rank` on, of what another sampler (or batch sampler) yields.

        epoch order      7 2 9 4 0 5 8 | 7      the tail wraps around (or is cut off, with drop_last)
        rank 0 of 2      7   9   0   8
        rank 1 of 2        2   4   5     7

    The order must be the same on all ranks, so the inner sampler runs to its end at the start of an epoch,
    with every global random generator, and its own if it has one, seeded by seed + epoch for that moment.
    """

    def __init__(self, inner: Any, rank: int, world: int, *, seed: int = 0, drop_last: bool = False) -> None:
        if not hasattr(inner, "__len__"):
            raise ValueError(
                f"zeor.data.shard needs a sampler with a length, and {type(inner).__name__} has no __len__"
            )
        self.inner = inner
        self.rank = rank
        self.world = world
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iter() is epoch `epoch`, and later ones count on from there."""
        self.epoch = epoch

    def __len__(self) -> int:
        return _part_numel(len(self.inner), self.world, self.drop_last)

    def __iter__(self) -> Iterator[T]:
        order = self._order()
        self.epoch += 1
        numel = _part_numel(len(order), self.world, self.drop_last)
        return (order[(self.rank + i * self.world) % len(order)] for i in range(numel))

    def _order(self) -> Sequence[T]:
        if type(self.inner) is SequentialSampler:
            return range(len(self.inner))  # type: ignore[return-value]
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(self.epoch)
        with _seeded(self.seed + self.epoch):
            generator = getattr(self.inner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(self.seed + self.epoch)
            return list(self.inner)


def _part_numel(numel: int, world: int, drop_last: bool) -> int:
    """How many of `numel` items each rank gets: the same number on all."""
    return numel // world if drop_last else -(-numel // world)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch (CPU), random and numpy inside, and put them back as they were after."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def fingerprint(batch: Any) -> int:
    """A number below 2**63, the same for equal batches on any rank and different for different ones.

    Cheap: of each tensor or array anywhere in the batch's mappings, sequences and dataclasses at most 64 KiB
    count, spread evenly over it (its head alone may be padding or a border). So equal fingerprints of large
    batches are a strong hint, no proof. A batch without a tensor to read gets a random number: it equals no
    other.
    """
    parts = list(_parts(batch))
    if not any(isinstance(part, memoryview) for part in parts):
        return random.SystemRandom().getrandbits(63)
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """What tells a batch from another, piece by piece: tensors' contents as memoryview, all else as bytes."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if (
            type(value) in (Tensor, torch.nn.Parameter)
            and value.layout is torch.strided
            and not value.is_meta
        ):
            yield memoryview(_spread(value))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield from _parts(torch.from_numpy(np.array(value)))
    elif isinstance(value, Mapping):
        for key in value:
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield from _parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield repr(value).encode()
    else:
        # Not its repr: the address in a default repr would make equal batches differ.
        yield type(value).__name__.encode()


def _spread(tensor: Tensor) -> bytes:
    """Every k-th element's bytes, at most FINGERPRINT_NBYTES of them."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    kept_numel = FINGERPRINT_NBYTES // flat.element_size()
    stride = max(1, -(-flat.numel() // kept_numel))
    return flat[::stride].cpu().contiguous().view(torch.uint8).numpy().tobytes()
