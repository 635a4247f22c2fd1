"""shard() inside the loop over epochs: every epoch another order, from torch's seed, the same on all ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import zeor
from tests.data.test_parts import Numbers, check_cover, samples
from tests.data.test_position import take
from zeor.data import position, seeds


class Shuffled(IterableDataset):
    """Draws its order before its first sample."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(40).tolist())


def loaders(generator: torch.Generator | None = None) -> dict[str, Any]:
    random = RandomSampler(range(40), generator=generator)
    return {
        "samples": DataLoader(Numbers(40), batch_size=4, shuffle=True, generator=generator),
        "batches": DataLoader(Numbers(40), batch_sampler=BatchSampler(random, 4, drop_last=False)),
        "stream": DataLoader(Shuffled(), batch_size=4),
    }


def epochs(loader: Any, count: int = 3) -> list[list[int]]:
    """As a plain loop is written: the loader is sharded anew in every epoch."""
    return [samples(zeor.data.shard(loader)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["samples", "batches", "stream"])
def test_a_loader_sharded_in_the_loop_is_reshuffled_every_epoch(kind: str) -> None:
    torch.manual_seed(3)
    in_the_loop = epochs(loaders()[kind])
    assert all(sorted(epoch) == list(range(40)) for epoch in in_the_loop)
    assert len({tuple(epoch) for epoch in in_the_loop}) == 3
    once = zeor.data.shard(loaders()[kind])
    assert [samples(once) for _ in range(3)] == in_the_loop, "the same orders as of a loader that is sharded once"


@pytest.mark.parametrize("kind", ["samples", "batches", "stream"])
def test_torchs_seed_decides_the_order(kind: str) -> None:
    orders = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        orders.append(epochs(loaders()[kind], 2))
    assert orders[0] == orders[2] != orders[1]
    torch.manual_seed(5)
    assert samples(zeor.data.shard(loaders()[kind], seed=3)) == orders[0][0], "seed= is the same number, given"


@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_a_loaders_own_generator_decides_instead(kind: str) -> None:
    orders = []
    for torchs, own in ((0, 7), (1, 7), (1, 8)):
        torch.manual_seed(torchs)
        generator = torch.Generator().manual_seed(own)
        before = generator.get_state()
        orders.append(epochs(loaders(generator)[kind], 2))
        # A DataLoader draws its workers' seed from its own generator; the order itself takes nothing from it.
        assert generator.initial_seed() == own
        assert kind == "samples" or torch.equal(generator.get_state(), before)
    assert orders[0] == orders[1] != orders[2]


def on_a_rank(kind: str, own_generator: bool) -> list[list[int]]:
    torch.manual_seed(10 + dist.get_rank())  # each rank its own, as for dropout
    generator = torch.Generator().manual_seed(20 + dist.get_rank()) if own_generator else None
    return epochs(loaders(generator)[kind])


@pytest.mark.parametrize("kind", ["samples", "batches", "stream"])
def test_all_ranks_take_rank_0s_seed(ranks: Any, kind: str) -> None:
    for own_generator in (False, True):
        found = ranks(on_a_rank, 2, kind, own_generator)
        for epoch in zip(*found):
            check_cover(list(epoch), 40, drop_last=False)
        assert len({tuple(epoch) for epoch in found[0]}) == 3
        if not own_generator:
            torch.manual_seed(10)
            alone = epochs(loaders()[kind])
            dealt = [alone[0][0:4], alone[0][4:8]] if kind == "batches" else [alone[0][0:8:2], alone[0][1:8:2]]
            assert [part[0][:4] for part in found] == dealt, "the order that rank 0's seed gives one process"


def test_ranks_that_shard_different_data_are_told(ranks: Any) -> None:
    def job() -> str:
        loader = DataLoader(Numbers(8 + dist.get_rank()), shuffle=True)
        if dist.get_rank() == 0:
            zeor.data.shard(loader)  # rank 0, whose word counts, cannot know
            return ""
        with pytest.raises(ValueError) as found:
            zeor.data.shard(loader)
        return str(found.value)

    told = ranks(job, 2)[1]
    assert "a loader of Numbers of 9 samples on rank 1 and a loader of Numbers of 8 samples on rank 0" in told


def test_data_sharded_before_the_group_exists_takes_the_seed_when_it_does(ranks: Any) -> None:
    def job() -> tuple[list[int], int]:
        torch.manual_seed(30 + dist.get_rank())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(seeds, "_is_joined", lambda: False)
            loader = zeor.data.shard(DataLoader(Numbers(20), batch_size=2, shuffle=True))
            assert loader.state_dict()["seed"] is None
        return samples(loader), loader.state_dict()["seed"]

    found = ranks(job, 2)
    check_cover([order for order, _ in found], 20, drop_last=False)
    assert [seed for _, seed in found] == [30, 30]


def test_a_position_brings_its_seed_and_the_next_epochs() -> None:
    torch.manual_seed(3)
    wanted = epochs(loaders()["samples"])
    torch.manual_seed(3)
    first = zeor.data.shard(loaders()["samples"])
    samples(first)
    before, state = take(first, 4), first.state_dict()
    torch.manual_seed(99)
    mine = loaders()["samples"]
    zeor.data.shard(mine).load_state_dict(state)
    assert before + samples(zeor.data.shard(mine)) == wanted[1], "also where the loop shards it again"
    assert samples(zeor.data.shard(mine)) == wanted[2]
    given = zeor.data.shard(loaders()["samples"], seed=5)
    with pytest.raises(ValueError, match="seed=3, and here seed is 5"):
        given.load_state_dict(state)


def test_views_of_one_loader_keep_positions_of_their_own() -> None:
    mine = loaders()["samples"]
    first, second = zeor.data.shard(mine), zeor.data.shard(mine)
    batches = iter(first)
    next(batches)
    samples(second)
    next(batches)
    assert first.state_dict()["consumed"] == 8
    assert samples(zeor.data.shard(mine, shuffle=False)) == list(range(40)), "other options, another history"


def test_a_history_ends_with_the_users_loader() -> None:
    mine = loaders()["samples"]
    number, gone = id(mine), weakref.ref(mine)
    samples(zeor.data.shard(mine))
    assert number in position._histories
    del mine
    gc.collect()
    assert gone() is None and number not in position._histories


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_of_a_stream_reshuffles_and_goes_on(workers: int) -> None:
    """Its workers are new in every epoch, each with a copy of the stream."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def new() -> Any:
        torch.manual_seed(3)
        return stateful(Shuffled(), batch_size=4, num_workers=workers)

    once = zeor.data.shard(new())
    wanted = [samples(once) for _ in range(3)]
    assert len({tuple(epoch) for epoch in wanted}) == 3
    assert epochs(new()) == wanted
    first = zeor.data.shard(new())
    samples(first)
    batches = iter(first)
    before = [int(sample) for _ in range(3) for sample in next(batches)]
    second = zeor.data.shard(new())
    second.load_state_dict(first.state_dict())
    assert before + samples(second) == wanted[1]
    assert samples(second) == wanted[2]
