"""zeor.data: the parts of all ranks together, loaders' settings, refusals, and the batch fingerprint.

Pure: ranks are imagined by passing rank and world to the function behind shard(); no process group exists.
"""

from __future__ import annotations

import random
from collections import Counter, UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from zeor import data
from zeor.data import fingerprint
from zeor.data.parts import shard_for
from zeor.data.position import History


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __len__(self) -> int:
        return self.numel

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.numel:
            raise IndexError(index)
        return index


def parts(loader: Any, world: int, **options: Any) -> list[Any]:
    return [shard_for(loader, rank, world, **options) for rank in range(world)]


def samples(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


def check_cover(per_rank: list[list[int]], numel: int, drop_last: bool) -> None:
    world = len(per_rank)
    assert len({len(part) for part in per_rank}) == 1
    seen = Counter(sample for part in per_rank for sample in part)
    if drop_last:
        assert max(seen.values(), default=1) == 1
        assert len(seen) == numel // world * world
    else:
        assert set(seen) == set(range(numel))
        assert 0 <= seen.total() - numel < world


sizes = st.integers(0, 60)
worlds = st.integers(1, 7)


@settings(deadline=None)
@given(numel=sizes, world=worlds, batch_size=st.integers(1, 9), shuffle=st.booleans(), drop=st.booleans())
def test_loader_parts_cover_everything_once(
    numel: int, world: int, batch_size: int, shuffle: bool, drop: bool
) -> None:
    loader = DataLoader(Numbers(numel), batch_size=batch_size, shuffle=shuffle and numel > 0)
    sharded = parts(loader, world, ends="drop" if drop else "pad")
    for _epoch in range(2):
        batches = [list(part) for part in sharded]
        assert [len(part) for part in batches] == [len(part) for part in sharded]
        if world > 1:
            check_cover([[int(x) for batch in part for x in batch] for part in batches], numel, drop)


@settings(deadline=None)
@given(numel=sizes, world=worlds, shuffle=st.sampled_from([None, True, False]), drop=st.booleans())
def test_dataset_parts_cover_everything_once(
    numel: int, world: int, shuffle: bool | None, drop: bool
) -> None:
    sharded = parts(Numbers(numel), world, shuffle=shuffle, ends="drop" if drop else "pad")
    if world > 1:
        check_cover([list(part) for part in sharded], numel, drop)


def test_strided_so_that_global_batches_are_runs_of_the_order() -> None:
    first, second = parts(DataLoader(Numbers(7), batch_size=2), 2)
    assert [batch.tolist() for batch in first] == [[0, 2], [4, 6]]
    assert [batch.tolist() for batch in second] == [[1, 3], [5, 0]]


def test_each_epoch_is_shuffled_anew_and_can_be_set() -> None:
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True)
    sharded = shard_for(loader, 0, 2)
    epochs = [samples(sharded) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    sharded.set_epoch(1)
    assert samples(sharded) == epochs[1]
    assert samples(sharded) == epochs[2], "epochs count on from the one that was set"
    sharded.sampler.set_epoch(0)
    assert samples(sharded) == epochs[0]
    assert samples(shard_for(loader, 0, 2, history=History(5))) != epochs[0]


def test_order_does_not_depend_on_the_ranks_own_random_state() -> None:
    per_rank = []
    for rank in range(2):
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(rank)
        loader = DataLoader(Numbers(21), batch_size=3, shuffle=True, generator=generator)
        per_rank.append(samples(shard_for(loader, rank, 2)))
    check_cover(per_rank, 21, drop_last=False)


def test_random_states_are_left_as_they_were() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    list(shard_for(DataLoader(Numbers(9), shuffle=True), 0, 2).sampler)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_shuffle_overrides_the_loader() -> None:
    shuffled = DataLoader(Numbers(30), batch_size=5, shuffle=True)
    assert samples(shard_for(shuffled, 0, 2, shuffle=False)) == list(range(0, 30, 2))
    assert samples(shard_for(DataLoader(Numbers(30), batch_size=5), 0, 2, shuffle=True)) != list(
        range(0, 30, 2)
    )
    assert sorted(samples(shard_for(DataLoader(Numbers(30)), 0, 1, shuffle=True))) == list(range(30))


def test_settings_and_class_are_taken_over() -> None:
    class Loader(DataLoader):
        pass

    def collate(batch: list[int]) -> list[int]:
        return [-x for x in batch]

    loader = Loader(Numbers(10), batch_size=3, collate_fn=collate, num_workers=1, drop_last=True, timeout=60)
    sharded = shard_for(loader, 1, 2)
    assert isinstance(sharded, Loader)
    for name in ("batch_size", "collate_fn", "num_workers", "pin_memory", "drop_last", "timeout", "dataset"):
        assert getattr(sharded, name) == getattr(loader, name)
    assert list(sharded) == [[-1, -3, -5]]
    assert isinstance(loader.sampler, SequentialSampler), "the user's own loader stays as it was"


def test_drop_last_follows_the_loader() -> None:
    keep = shard_for(DataLoader(Numbers(9), batch_size=5), 0, 2)
    drop = shard_for(DataLoader(Numbers(9), batch_size=4, drop_last=True), 0, 2)
    assert (len(keep.sampler), len(drop.sampler)) == (5, 4)


def test_custom_sampler_is_cut_from_one_common_draw() -> None:
    drawn = []
    for rank in range(3):
        torch.manual_seed(100 + rank)
        loader = DataLoader(
            Numbers(12), batch_size=2, sampler=WeightedRandomSampler([1.0] * 12, 12, replacement=False)
        )
        drawn.append(samples(shard_for(loader, rank, 3)))
    check_cover(drawn, 12, drop_last=False)


def test_batch_sampler_deals_whole_batches() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    sharded = parts(DataLoader(Numbers(10), batch_sampler=batches), 2)
    assert [[batch.tolist() for batch in part] for part in sharded] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    assert [len(part) for part in sharded] == [3, 3]
    with pytest.raises(ValueError, match="batch_sampler"):
        shard_for(DataLoader(Numbers(10), batch_sampler=batches), 0, 2, shuffle=True)


def test_shuffling_batch_sampler_draws_alike_on_all_ranks() -> None:
    drawn = []
    for rank in range(2):
        torch.manual_seed(rank)
        batches = BatchSampler(RandomSampler(range(12)), 3, drop_last=False)
        drawn.append(samples(shard_for(DataLoader(Numbers(12), batch_sampler=batches), rank, 2)))
    check_cover(drawn, 12, drop_last=False)


def test_unbatched_loader() -> None:
    loader = DataLoader(Numbers(5), batch_size=None)
    assert list(shard_for(loader, 1, 2)) == [1, 3, 0]


def test_passes_through_what_is_already_right() -> None:
    plain = DataLoader(Numbers(4))
    sampler: DistributedSampler = DistributedSampler(Numbers(4), num_replicas=2, rank=0)
    distributed = DataLoader(Numbers(4), sampler=sampler)
    assert shard_for(distributed, 0, 2) is distributed
    sharded = shard_for(plain, 0, 2)
    assert shard_for(sharded, 0, 2) is sharded


def test_dataset_is_a_subset() -> None:
    part = shard_for(Numbers(6), 1, 2)
    assert isinstance(part, Subset)
    assert next(iter(DataLoader(part, batch_size=3))).tolist() == [1, 3, 5]
    assert list(shard_for([10, 11, 12], 0, 2)) == [10, 12]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="list_iterator, which can be read only once"):
        shard_for(iter([1, 2]), 0, 2)
    with pytest.raises(ValueError, match="int is none of these"):
        shard_for(3, 0, 2)
    with pytest.raises(ValueError, match="uneven=True is for streams"):
        shard_for(DataLoader(Numbers(3)), 0, 2, ends="uneven")
    with pytest.raises(ValueError, match="mapping"):
        shard_for({"train": [1], "test": [2]}, 0, 2)
    with pytest.raises(ValueError, match="does not exist"):
        shard_for([1], 2, 2)

    class Endless:
        def __iter__(self) -> Any:
            return iter(int, 1)

    with pytest.raises(ValueError, match="__len__"):
        shard_for(DataLoader(Numbers(3), sampler=Endless()), 0, 2)


def test_place_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    numbers = [1, 2, 3, 4]
    assert data.shard(numbers) is numbers
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert list(data.shard(numbers)) == [3]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(data.shard(numbers)) == [2, 4]


@dataclass
class Pair:
    x: torch.Tensor
    name: str


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_fingerprint_sees_contents_shape_and_dtype(dtype: torch.dtype) -> None:
    zeros = torch.zeros(100, 3).to(dtype)
    other = zeros.clone()
    other[57, 1] = 1
    assert fingerprint(zeros) == fingerprint(zeros.clone())
    assert 0 <= fingerprint(zeros) < 2**63
    assert len({fingerprint(x) for x in (zeros, other, zeros.T, torch.zeros(100, 3).double())}) == 4


def test_fingerprint_reads_nested_batches() -> None:
    x = torch.arange(6.0)
    for wrap in (
        lambda t: (t, None, 3),
        lambda t: [t, "label"],
        lambda t: {"x": t, "more": [t, {"y": t}]},
        lambda t: UserDict(x=t),
        lambda t: Pair(t, "a"),
        lambda t: t.numpy(),
        lambda t: (t, object()),
    ):
        assert fingerprint(wrap(x)) == fingerprint(wrap(x.clone()))
        assert fingerprint(wrap(x)) != fingerprint(wrap(x + 1))
    assert fingerprint((x, "a")) != fingerprint((x, "b"))
    assert fingerprint([x[:2], x[2:]]) != fingerprint([x[:3], x[3:]])


def test_fingerprint_of_large_tensors_is_spread_over_them() -> None:
    rows = torch.zeros(64, 100_000)
    other = rows.clone()
    other[40:] = 1  # far behind the first 64 KiB
    assert fingerprint(rows) != fingerprint(other)
    assert fingerprint(rows.T) == fingerprint(rows.T.contiguous())


def test_fingerprint_without_a_tensor_equals_no_other() -> None:
    assert fingerprint((1, "a")) != fingerprint((1, "a"))
    meta = torch.empty(3, device="meta")
    assert fingerprint(meta) != fingerprint(meta)
    assert fingerprint((meta, torch.empty(0), torch.tensor(1.0))) == fingerprint(
        (meta, torch.empty(0), torch.tensor(1.0))
    )
