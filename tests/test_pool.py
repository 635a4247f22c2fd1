"""The pool of ranks that other tests stand on: right worlds, and failures that stay with their own test."""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.pool import MOST_GROUPS, RankFailure


class Seen(NamedTuple):
    rank: int
    world: int
    total: float


def sum_of_ranks() -> Seen:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return Seen(dist.get_rank(), dist.get_world_size(), total.item())


def fail_on_rank_1_while_others_wait() -> None:
    answer = 41
    if dist.get_rank() == 1:
        assert answer == 42, "wrong answer"
    dist.barrier()


def wait_for_a_rank_that_never_comes() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


@pytest.mark.parametrize("world", [1, 4, 2, 2, 3])
def test_world_sizes_switch(ranks, world):
    seen = ranks(sum_of_ranks, world)
    assert seen == [Seen(rank, world, world * (world - 1) / 2) for rank in range(world)]


def test_functions_of_a_test_and_their_closures_are_sent(ranks):
    offset = torch.arange(3)

    def shifted(by, scale=1):
        return offset * scale + by + dist.get_rank()

    results = ranks(shifted, 2, 10, scale=2)
    assert [result.tolist() for result in results] == [[10, 12, 14], [11, 13, 15]]


def test_each_task_starts_from_the_same_seed_on_one_thread(ranks):
    first = ranks(lambda: (torch.rand(3), torch.get_num_threads()), 2)
    second = ranks(lambda: (torch.rand(3), torch.get_num_threads()), 2)
    assert all(torch.equal(numbers, first[0][0]) and threads == 1 for numbers, threads in first + second)


def test_groups_are_reused_unless_there_are_many_or_ranks_are_at_different_places_in_one(ranks):
    def renewed():
        return len(dist.distributed_c10d._world.pg_map) == 1

    def meet(numel):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(numel), group=group, async_op=True) if numel else None
        return group.size(), work is None

    def make(count):
        return len([dist.new_group() for _ in range(count)])

    ranks(os.getpid, 3)
    assert ranks(renewed, 2) == [True, True]
    ranks(make, 2, 1)
    assert ranks(renewed, 2) == [False, False]
    ranks(make, 2, MOST_GROUPS)
    assert ranks(renewed, 2) == [True, True]
    ranks(lambda: meet(2), 2)
    assert ranks(renewed, 2) == [False, False]
    ranks(lambda: meet(dist.get_rank()), 2)  # rank 0 takes no part
    assert ranks(renewed, 2) == [True, True]


def test_an_error_shows_the_first_failing_rank_and_the_workers_live_on(ranks):
    pids = ranks(os.getpid, 3)
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks(fail_on_rank_1_while_others_wait, 3)
    assert time.monotonic() - started < 4, "closed connections should free the other ranks at once"
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 failed first:")
    assert "AssertionError: wrong answer" in text and "fail_on_rank_1_while_others_wait" in text
    assert "answer=41" in text
    assert ranks(os.getpid, 3) == pids
    assert ranks(sum_of_ranks, 3)[0].total == 3


def test_a_killed_rank_is_named_and_replaced(ranks):
    def kill_rank_1():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match=r"rank 1 of 2 failed first:\nThe process was killed by SIGKILL"):
        ranks(kill_rank_1, 2)
    assert ranks(sum_of_ranks, 2)[0].total == 1


def test_a_timeout_shows_the_stacks_and_the_pool_recovers(ranks):
    ranks(sum_of_ranks, 2)  # so that the two seconds below are not spent on starting workers
    with pytest.raises(RankFailure) as caught:
        ranks(wait_for_a_rank_that_never_comes, 2, timeout=2)
    text = str(caught.value)
    assert text.startswith("ranks [0] of 2 had not finished after 2 s")
    assert "in wait_for_a_rank_that_never_comes" in text
    assert ranks(sum_of_ranks, 2)[0].total == 1


def test_a_world_that_the_pool_does_not_have_is_refused(ranks):
    with pytest.raises(ValueError, match="the pool has 4 ranks; a test asked for a world of 5"):
        ranks(sum_of_ranks, 5)
