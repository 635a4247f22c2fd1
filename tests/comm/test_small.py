"""Small messages in log N rounds: every rank ends with the same numbers, at any world size, with few messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.comm import small
from zeor.comm.axes import Axis, make_axis


def axis_here(timeout: float = 60.0) -> Axis:
    return make_axis(None, torch.device("cpu"), False, timeout)


# ---- real ranks


def agree_on_numbers() -> tuple[list[int], list[list[float]]]:
    axis = axis_here()
    values = torch.full((7,), axis.rank)
    values[axis.rank] = 100 + axis.rank
    return small.largest(axis, values).tolist(), small.rows(axis, torch.tensor([axis.rank, 0.5])).tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_knows_the_largest_and_all_rows(ranks, world):
    wanted = [100 + rank if rank < world else world - 1 for rank in range(7)]
    for largest, rows in ranks(agree_on_numbers, world):
        assert largest == wanted
        assert rows == [[rank, 0.5] for rank in range(world)]


def ask_in_turns() -> list[tuple[int, int]]:
    """Answers that nobody waits for yet, and between them one that is waited for."""
    axis = axis_here()
    channel, found = small.channel_of(axis), []
    for number in range(10):
        later = channel.start(axis, torch.tensor([number + axis.rank]))
        now = channel.ask(axis, torch.tensor([-axis.rank]))
        found.append((int(later.result()), int(now)))
    assert small.channel_of(axis) is channel
    return found


def test_answers_come_in_the_order_of_the_questions(ranks):
    for found in ranks(ask_in_turns, 3):
        assert found == [(number + 2, 0) for number in range(10)]


def ask_alone() -> str:
    """Rank 1 asks too, but only when rank 0 has given up."""
    axis = axis_here()
    channel = small.Channel()
    if axis.rank == 1:
        dist.barrier()
        return str(int(channel.ask(axis, torch.tensor([5]), 30.0)))
    with pytest.raises(NotInTime):
        channel.ask(axis, torch.tensor([7]), 0.2)
    dist.barrier()
    return "gave up"


def test_a_question_that_others_do_not_ask_is_given_up(ranks):
    assert ranks(ask_alone, 2) == ["gave up", "7"]


def lengths_apart() -> int:
    """Messages of different lengths wait for their own kind."""
    axis = axis_here()
    channel = small.Channel()
    first, second = (torch.tensor([1 + axis.rank]), torch.tensor([10, 20 + axis.rank]))
    if axis.rank == 1:
        first, second = second, first
    waiting = channel.start(axis, first)
    small.largest(axis, second, small.PASS)
    return int(waiting.result().sum() + second.sum())


def test_messages_of_different_lengths_do_not_meet(ranks):
    assert ranks(lengths_apart, 2) == [33, 33]


# ---- imagined ranks: the same functions, over messages that stay in this process


class Post:
    """Messages between imagined ranks. A rank is played until it has to hear what was not sent yet."""

    def __init__(self, size: int) -> None:
        self.size, self.boxes, self.sent = size, {}, [0] * size

    def play(self, what: Callable[[Axis], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Rounds of all ranks: what a rank needs first in round k was sent by others in round k or before."""
        found: list[Any] = [None] * self.size
        for _ in range(2 + math.ceil(math.log2(self.size + 1))):
            for rank in range(self.size):
                if found[rank] is None:
                    found[rank] = self._try(rank, what, monkeypatch)
        return found

    def _try(self, rank: int, what: Callable[[Axis], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
        """From the beginning each time; what it sent before it sends again, which changes nothing."""
        count = 0

        def swap(axis: Axis, sent: torch.Tensor, to: int, heard: torch.Tensor, of: int, kind: int) -> None:
            nonlocal count
            self.boxes[rank, to % self.size, count] = sent.clone()
            heard.copy_(self.boxes[of % self.size, rank, count])  # KeyError: not sent yet
            count += 1

        monkeypatch.setattr(small, "_swap", swap)
        try:
            return what(Axis(rank, self.size, torch.device("cpu")))
        except KeyError:
            return None
        finally:
            self.sent[rank] = count


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 70), seed=st.integers(0, 2**31 - 1))
def test_any_number_of_ranks_agrees_in_log_n_messages(size, seed):
    numbers = torch.randint(-(2**31), 2**31 - 1, (size, 3), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for what, wanted in (
            (lambda axis: small.largest(axis, numbers[axis.rank].clone()).tolist(), numbers.amax(0).tolist()),
            (lambda axis: small.rows(axis, numbers[axis.rank]).tolist(), numbers.tolist()),
        ):
            post = Post(size)
            assert post.play(what, monkeypatch) == [wanted] * size
            assert post.sent == [math.ceil(math.log2(size))] * size
