"""Streams over ranks x workers: nothing twice, nothing lost, equal ends, epochs, positions, and self-made cuts.

Pure: ranks are imagined by passing rank and world to the function behind shard(); workers are real processes.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from zeor.data.parts import shard_for
from zeor.data.position import History
from zeor.data.stream import RankStream


class Stream(IterableDataset):
    """The numbers below numel, one after the other."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.numel))


class Sized(Stream):
    def __len__(self) -> int:
        return self.numel


class SplitsByWorker(Stream):
    """As torch's documentation teaches: a worker reads every num_workers-th number."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, self.numel, info.num_workers) if info else range(self.numel))


def flat(part: Any) -> list[int]:
    return [int(sample) for batch in part for sample in (batch if torch.is_tensor(batch) and batch.dim() else [batch])]


def take(part: Any, count: int) -> list[int]:
    return flat(itertools.islice(part, count))


def parts(data: Any, world: int, **options: Any) -> list[Any]:
    return [shard_for(data, rank, world, **options) for rank in range(world)]


def resumed(part: Any, state: dict) -> Any:
    part.load_state_dict(json.loads(json.dumps(state)))
    return part


sizes, worlds, batch_sizes = st.integers(0, 50), st.integers(1, 5), st.integers(1, 6)


# ---- who gets what


@settings(deadline=None)
@given(
    numel=sizes, world=worlds, batch_size=batch_sizes, drop=st.booleans(), uneven=st.booleans(), shuffle=st.booleans()
)
def test_no_sample_twice_and_none_lost(
    numel: int, world: int, batch_size: int, drop: bool, uneven: bool, shuffle: bool
) -> None:
    loader = DataLoader(Stream(numel), batch_size=batch_size)
    ends = "uneven" if uneven else "drop" if drop else "pad"
    sharded = parts(loader, world, ends=ends, shuffle=5 if shuffle else None)
    for _epoch in range(2):
        got = [flat(part) for part in sharded]
        seen, lengths = Counter(sample for part in got for sample in part), {len(part) for part in got}
        if uneven:
            assert seen == Counter(range(numel)) and max(lengths) - min(lengths) <= 1
        elif drop:
            assert len(lengths) == 1 and max(seen.values(), default=1) == 1
            assert seen.total() == numel // world * world
        else:
            assert len(lengths) == 1 and set(seen) == set(range(numel)) and seen.total() - numel < world


def test_the_last_round_is_filled_up_from_itself() -> None:
    assert [flat(part) for part in parts(Stream(10), 4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 8], [3, 7, 9]]
    assert [flat(part) for part in parts(Stream(2), 3)] == [[0], [1], [0]]
    assert [flat(part) for part in parts(Stream(10), 4, ends="drop")] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("stream", [Stream(23), SplitsByWorker(23)], ids=["plain", "splits itself by worker"])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shuffle", [None, 7])
def test_batches_are_the_same_with_any_number_of_workers(stream: Stream, drop: bool, shuffle: int | None) -> None:
    expected = [b.tolist() for b in shard_for(DataLoader(stream, batch_size=3, drop_last=drop), 1, 2, shuffle=shuffle)]
    for workers in (1, 2):
        loader = DataLoader(stream, batch_size=3, drop_last=drop, num_workers=workers)
        assert [batch.tolist() for batch in shard_for(loader, 1, 2, shuffle=shuffle)] == expected
    assert len(expected) == (3 if drop else 4)


def test_a_sharded_stream_in_the_users_own_loader_is_shared_by_workers() -> None:
    for workers in (0, 2):
        got = [flat(DataLoader(part, batch_size=4, num_workers=workers)) for part in parts(Stream(21), 2)]
        assert Counter(got[0] + got[1]) == Counter([*range(21), 20])


def test_generator_functions_and_any_iterable() -> None:
    def numbers() -> Iterator[int]:
        yield from range(6)

    class Lines:
        def __iter__(self) -> Iterator[str]:
            return iter(["a", "b", "c"])

    part = shard_for(numbers, 1, 2)
    assert isinstance(part, RankStream) and flat(part) == [1, 3, 5] == flat(part)
    assert list(shard_for(Lines(), 0, 2)) == ["a", "c"]
    assert shard_for(part, 1, 2) is part
    with pytest.raises(ValueError, match="generator, which can be read only once"):
        shard_for(numbers(), 0, 2)


def test_lengths_are_known_where_the_stream_knows_its_own() -> None:
    assert [len(part) for part in parts(Sized(7), 2)] == [4, 4]
    assert len(shard_for(DataLoader(Sized(7), batch_size=3), 0, 2)) == 2
    assert len(shard_for(Sized(7), 0, 2, ends="drop")) == 3
    with pytest.raises(TypeError, match="Stream has no length"):
        len(shard_for(Stream(7), 0, 2))


def test_datapipes_with_their_own_sharding_and_shuffling() -> None:
    wrapper = pytest.importorskip("torch.utils.data.datapipes.iter").IterableWrapper
    pipe = wrapper(range(20)).shuffle().sharding_filter()
    for workers in (0, 2):
        got = []
        for rank in range(2):
            torch.manual_seed(rank)
            got.append(flat(shard_for(DataLoader(pipe, batch_size=2, num_workers=workers), rank, 2)))
        assert sorted(got[0] + got[1]) == list(range(20))


# ---- epochs


class DrawsFirst(Stream):
    """An order drawn from the global generators before the first sample, as of files in a folder."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.numel))
        random.shuffle(order)
        np.random.shuffle(order)
        yield from (order[i] for i in torch.randperm(self.numel).tolist())


def test_an_order_drawn_first_is_the_same_on_all_ranks_and_new_each_epoch() -> None:
    got = []
    for rank in range(2):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        state = torch.get_rng_state()
        part = shard_for(DrawsFirst(20), rank, 2)
        got.append([flat(part), flat(part)])
        assert torch.equal(torch.get_rng_state(), state)
    for epoch in range(2):
        assert sorted(got[0][epoch] + got[1][epoch]) == list(range(20))
    assert got[0][0] != got[0][1]


class ByEpoch(Stream):
    """Its own set_epoch decides what it yields."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.numel))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_epochs_reach_the_stream_also_in_workers(workers: int, persistent: bool) -> None:
    loader = DataLoader(ByEpoch(8), batch_size=2, num_workers=workers, persistent_workers=persistent)
    part = shard_for(loader, 1, 2)
    assert [flat(part), flat(part)] == [[1, 3, 5, 7], [101, 103, 105, 107]]
    part.set_epoch(4)
    assert flat(part) == [401, 403, 405, 407]
    assert part.epoch == 5


def test_shuffling_through_a_buffer() -> None:
    part = shard_for(DataLoader(Stream(100), batch_size=10), 0, 1, shuffle=20, history=History(3))
    epochs = [flat(part) for _ in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert all(sample < position + 20 for position, sample in enumerate(epochs[0])), "from the buffer only"
    part.set_epoch(0)
    assert flat(part) == epochs[0]
    assert flat(shard_for(Stream(100), 0, 1, shuffle=20, history=History(4))) != epochs[0]
    assert flat(shard_for(Stream(100), 0, 1, shuffle=True)) != list(range(100))


# ---- position


class Stateful(Stream):
    """Knows where it stands, and counts what it was made to read."""

    def __init__(self, numel: int) -> None:
        super().__init__(numel)
        self.at = self.reads = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.at, self.numel):
            self.at, self.reads = number + 1, self.reads + 1
            yield number
        self.at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


@settings(deadline=None)
@given(
    numel=sizes, before=worlds, after=worlds, batch_size=batch_sizes, done=st.integers(0, 9), drop=st.booleans(),
    shuffle=st.booleans(), stateful=st.booleans(),
)  # fmt: skip
def test_a_stream_goes_on_in_any_world(
    numel: int, before: int, after: int, batch_size: int, done: int, drop: bool, shuffle: bool, stateful: bool
) -> None:
    def loader() -> DataLoader:
        return DataLoader(Stateful(numel) if stateful else Stream(numel), batch_size=batch_size)

    options: dict[str, Any] = {"ends": "drop" if drop else "pad", "shuffle": 4 if shuffle else None}
    part_numel = numel // before if drop else -(-numel // before)
    done = min(done, -(-part_numel // batch_size))  # the pass is left there, not ended
    first = [shard_for(loader(), rank, before, **options) for rank in range(before)]
    seen = Counter(sample for part in first for sample in take(part, done))
    states = [part.state_dict() for part in first]
    assert all(state == states[0] for state in states), "one state serves every rank"
    rest = [flat(resumed(shard_for(loader(), rank, after, **options), states[0])) for rank in range(after)]
    assert len({len(part) for part in rest}) == 1
    seen.update(sample for part in rest for sample in part)
    if drop:
        assert max(seen.values(), default=1) == 1 and numel - seen.total() < before + after
    else:
        assert set(seen) == set(range(numel)) and seen.total() - numel <= before - 1 + after - 1
    if before == after:
        whole = [shard_for(loader(), rank, before, **options) for rank in range(before)]
        assert [flat(part)[done * batch_size :] for part in whole] == rest


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_batches_that_workers_prefetched_do_not_count(workers: int, persistent: bool) -> None:
    loader = DataLoader(ByEpoch(40), batch_size=2, num_workers=workers, persistent_workers=persistent)
    first = shard_for(loader, 1, 2, shuffle=6)
    epochs = [flat(first) for _ in range(3)]
    first.set_epoch(1)
    before = take(first, 3)
    assert first.state_dict()["consumed"] == 12
    second = resumed(shard_for(loader, 1, 2, shuffle=6), first.state_dict())
    assert before + flat(second) == epochs[1]
    assert flat(second) == epochs[2]
    assert before + flat(resumed(first, second.state_dict() | {"epoch": 1, "consumed": 12})) == epochs[1]


def test_a_stream_that_knows_its_place_is_not_read_up_to_it() -> None:
    first = shard_for(DataLoader(Stateful(1000), batch_size=10), 1, 2)
    before = take(first, 30)
    source = Stateful(1000)
    second = resumed(shard_for(DataLoader(source, batch_size=10), 1, 2), first.state_dict())
    assert before + flat(second) == list(range(1, 1000, 2))
    assert source.reads == 400
    assert flat(second) == list(range(1, 1000, 2)), "and begins anew afterwards"
    alone = shard_for(Stateful(9), 0, 2)
    assert take(alone, 2) == [0, 2]
    assert flat(resumed(shard_for(Stateful(9), 0, 2), alone.state_dict())) == [4, 6, 8]


def test_a_state_that_is_no_json_is_left_out() -> None:
    class Odd(Stateful):
        def state_dict(self) -> dict:
            return {"at": object()}

    first = shard_for(DataLoader(Odd(10), batch_size=2), 0, 1)
    before = take(first, 2)
    assert "dataset" not in first.state_dict()
    assert before + flat(resumed(shard_for(Odd(10), 0, 1), first.state_dict())) == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_asks_its_workers(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = stateful(Stream(41), batch_size=2, num_workers=workers)
    got = [flat(part) for part in parts(loader, 2)]
    assert Counter(got[0] + got[1]) == Counter([*range(41), 40])
    first = shard_for(loader, 1, 2)
    before = take(first, 5)
    second = shard_for(loader, 1, 2)
    second.load_state_dict(first.state_dict())
    assert before + flat(second) == got[1]


def test_a_position_in_another_order_is_refused() -> None:
    first = shard_for(DataLoader(Stream(12), batch_size=2), 0, 2, shuffle=4)
    take(first, 1)
    with pytest.raises(ValueError, match="shuffle=4, and here shuffle is 0"):
        shard_for(DataLoader(Stream(12)), 0, 2).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="saved for a stream, and this loader reads map-style"):
        shard_for(DataLoader([1, 2, 3]), 0, 2).load_state_dict(first.state_dict())


# ---- streams that cut themselves


class Files(Stream):
    """Like Hugging Face's: some files of ten samples each, and .shard() takes every num_shards-th file."""

    _distributed: Any = None

    def __init__(self, files: list[int]) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield from range(10 * file, 10 * file + 10)


def test_uneven_cuts_a_stream_of_files_by_files() -> None:
    sharded = parts(DataLoader(Files([0, 1, 2]), batch_size=4, num_workers=2), 2, ends="uneven")
    assert [flat(part) for part in sharded] == [[*range(10), *range(20, 30)], list(range(10, 20))]
    few = [flat(part) for part in parts(Files([0]), 2, ends="uneven")]
    assert few == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], "fewer files than ranks are dealt out"
    even = [flat(part) for part in parts(Files([0, 1, 2]), 2)]
    assert len(even[0]) == len(even[1]) == 15, "and by default ranks end together"


def test_the_position_in_ones_own_files_belongs_to_that_rank() -> None:
    first = shard_for(DataLoader(Files([0, 1, 2]), batch_size=4), 1, 2, ends="uneven")
    before = take(first, 2)
    again = shard_for(DataLoader(Files([0, 1, 2]), batch_size=4), 1, 2, ends="uneven")
    assert before + flat(resumed(again, first.state_dict())) == list(range(10, 20))
    with pytest.raises(ValueError, match=r"own=\[1, 2\], and here own is \[0, 2\]"):
        shard_for(Files([0, 1, 2]), 0, 2, ends="uneven").load_state_dict(first.state_dict())


def test_a_stream_split_by_rank_already_is_left_whole_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    split = Files([0])
    split._distributed = ("rank 1", "world 2")

    def split_by_node() -> None: ...

    class Pipeline(Stream):
        pipeline = [split_by_node]  # noqa: RUF012

    for source, expected in ((split, list(range(10))), (Pipeline(3), [0, 1, 2])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="zeor"):
            assert flat(shard_for(source, 1, 2)) == expected
        assert "split by rank already" in caplog.text and "zeor.join" in caplog.text
