"""Map-style loaders continue where they stood: in the same world exactly, in another one with nothing twice or lost.

Pure: ranks are imagined by passing rank and world to the function behind shard(); no process group exists.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tests.data.test_parts import Numbers, parts, samples
from zeor.data.parts import shard_for
from zeor.data.position import History

sizes = st.integers(0, 60)
worlds = st.integers(1, 5)
batch_sizes = st.integers(1, 7)


def take(loader: Any, count: int) -> list[int]:
    """The samples of the next `count` batches, or of all there are; the pass is left there, not ended."""
    batches = iter(loader)
    return [int(sample) for _, batch in zip(range(min(count, len(loader))), batches) for sample in batch]


def resumed(loader: Any, state: dict) -> Any:
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


@settings(deadline=None)
@given(
    numel=sizes, world=worlds, batch_size=batch_sizes, shuffle=st.booleans(), drop=st.booleans(), done=st.integers(0, 9)
)
def test_the_same_world_goes_on_exactly(
    numel: int, world: int, batch_size: int, shuffle: bool, drop: bool, done: int
) -> None:
    loader = DataLoader(Numbers(numel), batch_size=batch_size, shuffle=shuffle and numel > 0, drop_last=drop)
    for rank in range(world):
        whole = shard_for(loader, rank, world)
        epochs = [samples(whole) for _ in range(3)]
        first = shard_for(loader, rank, world)
        samples(first)
        before = take(first, done)
        second = resumed(shard_for(loader, rank, world), first.state_dict())
        assert before + samples(second) == epochs[1]
        assert samples(second) == epochs[2], "epochs count on"


@settings(deadline=None)
@given(
    numel=sizes, before=worlds, after=worlds, batch_size=batch_sizes, other_size=batch_sizes, shuffle=st.booleans(),
    done=st.integers(0, 9),
)  # fmt: skip
def test_another_world_and_batch_size_see_the_rest_of_the_epoch(
    numel: int, before: int, after: int, batch_size: int, other_size: int, shuffle: bool, done: int
) -> None:
    loader = DataLoader(Numbers(numel), batch_size=batch_size, shuffle=shuffle and numel > 0)
    first = parts(loader, before)
    seen = Counter(sample for part in first for sample in take(part, done))
    states = [part.state_dict() for part in first]
    assert all(state == states[0] for state in states), "one state serves every rank"
    assert states[0]["consumed"] == min(numel, done * batch_size * before)
    loader = DataLoader(Numbers(numel), batch_size=other_size, shuffle=shuffle and numel > 0)
    rest = [samples(resumed(part, states[0])) for part in parts(loader, after)]
    assert len({len(part) for part in rest}) == 1, "all ranks get equally many"
    seen.update(sample for part in rest for sample in part)
    assert set(seen) == set(range(numel))
    # Only an end that does not divide is filled up: that of the first world, if it came so far, and the second's.
    assert seen.total() - numel <= max(0, before - 1) + max(0, after - 1)
    if numel % before == 0 and (numel - states[0]["consumed"]) % after == 0:
        assert seen.total() == numel


@settings(deadline=None)
@given(numel=sizes, before=worlds, after=worlds, batch_size=batch_sizes, done=st.integers(0, 9))
def test_with_drop_last_no_sample_is_seen_twice(
    numel: int, before: int, after: int, batch_size: int, done: int
) -> None:
    loader = DataLoader(Numbers(numel), batch_size=batch_size, drop_last=True)
    first = parts(loader, before)
    seen = Counter(sample for part in first for sample in take(part, done))
    rest = [resumed(part, first[0].state_dict()) for part in parts(loader, after)]
    seen.update(sample for part in rest for sample in samples(part))
    assert max(seen.values(), default=1) == 1
    assert numel - seen.total() < before * batch_size + after * batch_size


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_workers_prefetched_do_not_count(persistent: bool) -> None:
    loader = DataLoader(
        Numbers(48), batch_size=2, shuffle=True, num_workers=2, prefetch_factor=4, persistent_workers=persistent
    )
    whole = samples(shard_for(DataLoader(Numbers(48), batch_size=2, shuffle=True), 1, 2))
    first = shard_for(loader, 1, 2)
    before = take(first, 3)
    assert first.state_dict()["consumed"] == 3 * 2 * 2
    second = resumed(shard_for(loader, 1, 2), first.state_dict())
    assert before + samples(second) == whole
    # The loader itself can be sent back too, its workers alive or not.
    assert before + samples(resumed(first, second.state_dict() | {"epoch": 0, "consumed": 12})) == whole


def test_the_position_within_an_epoch_and_between_epochs() -> None:
    loader = shard_for(DataLoader(Numbers(8), batch_size=2), 0, 2)

    def now() -> tuple[int, int]:
        state = loader.state_dict()
        assert loader.epoch == state["epoch"]
        return state["epoch"], state["consumed"]

    assert now() == (0, 0)
    found = []
    for _ in loader:
        found.append(now())
    assert found == [(0, 4), (0, 8)]
    assert now() == (1, 0)
    batches = iter(loader)
    assert now() == (1, 0)
    next(batches)
    assert now() == (1, 4)
    loader.set_epoch(7)
    assert now() == (7, 0)
    next(batches)
    assert now() == (7, 0), "a pass that was given up counts no longer"


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only() -> None:
    loader = DataLoader(Numbers(12), batch_size=2)
    first = shard_for(loader, 0, 2)
    take(first, 2)
    second = resumed(shard_for(loader, 0, 2), first.state_dict())
    second.set_epoch(0)  # what a loop over epochs says before each of them
    assert samples(second) == [8, 10]
    third = resumed(shard_for(loader, 0, 2), first.state_dict())
    third.set_epoch(1)
    assert samples(third) == [0, 2, 4, 6, 8, 10]


def test_the_end_of_an_epoch_is_a_position_too() -> None:
    loader = DataLoader(Numbers(6), batch_size=2)
    first = shard_for(loader, 0, 2)
    take(first, 2)  # the last batch is with the user, the loop not over yet
    second = resumed(shard_for(loader, 0, 2), first.state_dict())
    assert samples(second) == []
    assert samples(second) == [0, 2, 4]


def test_one_process_has_a_position_too() -> None:
    loader = DataLoader(Numbers(6), batch_size=2, shuffle=True)
    whole = samples(shard_for(loader, 0, 1))
    first = shard_for(loader, 0, 1)
    before = take(first, 1)
    assert before + samples(resumed(shard_for(loader, 0, 1), first.state_dict())) == whole
    assert sorted(whole) == list(range(6))


def test_whole_batches_are_counted_where_they_are_dealt_out() -> None:
    batches = BatchSampler(RandomSampler(range(20)), 3, drop_last=False)
    loader = DataLoader(Numbers(20), batch_sampler=batches)
    whole = samples(shard_for(loader, 1, 2))
    first = shard_for(loader, 1, 2)
    before = take(first, 2)
    assert first.state_dict()["consumed"] == 4
    assert before + samples(resumed(shard_for(loader, 1, 2), first.state_dict())) == whole
    rest = samples(resumed(shard_for(loader, 0, 1), first.state_dict()))
    taken = take(shard_for(loader, 0, 2), 2)
    assert sorted(before + taken + rest) == list(range(20))


def test_unbatched_samples_are_counted() -> None:
    loader = DataLoader(Numbers(7), batch_size=None)
    first = shard_for(loader, 0, 2)
    batches = iter(first)
    assert [int(next(batches)), int(next(batches))] == [0, 2]
    assert [int(x) for x in resumed(shard_for(loader, 0, 2), first.state_dict())] == [4, 6]


def test_a_position_in_other_data_or_another_order_is_refused() -> None:
    first = shard_for(DataLoader(Numbers(12), batch_size=2, shuffle=True), 0, 2)
    take(first, 1)
    state = first.state_dict()
    for other, options, message in (
        (DataLoader(Numbers(13), shuffle=True), {}, "numel=12, and here numel is 13"),
        (DataLoader(Numbers(12), shuffle=True), {"history": History(5)}, "seed=0, and here seed is 5"),
        (DataLoader(Numbers(12)), {}, "order='RandomSampler', and here order is 'SequentialSampler'"),
        (DataLoader(Numbers(12), batch_sampler=[[0, 1], [2]]), {}, "saved for map-style samples"),
    ):
        with pytest.raises(ValueError, match=message):
            shard_for(other, 0, 2, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="no position"):
        first.load_state_dict({"epoch": 1})
    samples(first)
    samples(resumed(shard_for(DataLoader(Numbers(13), batch_size=2, shuffle=True), 0, 2), first.state_dict()))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_keeps_working(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = stateful(Numbers(30), batch_size=2, shuffle=True, num_workers=workers)
    whole = shard_for(loader, 1, 2)
    epochs = [samples(whole) for _ in range(2)]
    assert sorted(epochs[0] + samples(shard_for(loader, 0, 2))) == list(range(30))
    first = shard_for(loader, 1, 2)
    assert isinstance(first, stateful)
    samples(first)
    before = take(first, 3)
    second = shard_for(loader, 1, 2)
    second.load_state_dict(first.state_dict())
    assert before + samples(second) == epochs[1]


def train(state: dict | None, steps: int) -> tuple[list[list[int]], dict]:
    """On a rank of a real process group: `steps` batches, on from `state`."""
    import zeor

    loader = zeor.data.shard(DataLoader(Numbers(24), batch_size=2, shuffle=True))
    if state is not None:
        loader.load_state_dict(state)
    batches = [batch.tolist() for _, batch in zip(range(steps), loader)]
    return batches, loader.state_dict()


def test_ranks_go_on_in_another_world(ranks: Any) -> None:
    first = ranks(train, 3, None, 2)
    states = [state for _, state in first]
    assert states == [states[0]] * 3 and states[0]["consumed"] == 12
    rest = ranks(train, 2, states[0], 9)
    seen = [sample for batches, _ in first + rest for batch in batches for sample in batch]
    assert sorted(seen) == list(range(24))
    assert torch.distributed.is_initialized() is False
