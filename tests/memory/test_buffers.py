"""Blocks that come and go, memory that is handed out again, pages that stay: what each gives, and how much is kept."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeor.memory.buffers import Ledger, lasting
from zeor.memory.pages import LARGE_NBYTES, PAGE_NBYTES, mapped

HOST = torch.device("cpu")


def idle_nbytes(ledger: Ledger) -> list[int]:
    return sorted(block.numel() for block in ledger._idle)


# ---- blocks: see Note [Idle blocks]


def test_a_block_that_was_given_back_is_handed_out_again_and_the_smallest_that_fits() -> None:
    ledger = Ledger()
    large, small = (ledger.take("grad", numel, torch.float32, HOST) for numel in (100, 10))
    addresses = large.data_ptr(), small.data_ptr()
    ledger.give("grad", large)
    ledger.give("grad", small)
    assert ledger.take("receive", 9, torch.float32, HOST).data_ptr() == addresses[1]
    assert ledger.take("receive", 11, torch.float32, HOST).data_ptr() == addresses[0]
    assert idle_nbytes(ledger) == [] and ledger.live == {"grad": 0, "receive": 80}


def test_a_block_that_is_too_small_makes_room_for_one_that_fits() -> None:
    ledger = Ledger()
    for numel in (10, 20, 30, 40, 5):
        ledger.give("grad", ledger.take("grad", numel, torch.uint8, HOST))
    assert idle_nbytes(ledger) == [40] and ledger.peak_nbytes == 40


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(2, 4),
)
def test_after_some_rounds_no_block_is_made_any_more(asked: list[tuple[int, int]], rounds: int) -> None:
    """Each of a round's buffers lives until so many others were taken. Kept is at most the most that were in use at
    once, each of the size of the largest, and what a round keeps does not grow for ever."""
    ledger, kept, most = Ledger(), [], 0
    for _ in range(rounds + len(asked) * len(asked)):
        alive: list[tuple[int, torch.Tensor]] = []
        for place, (numel, lives) in enumerate(asked):
            for _, flat in [each for each in alive if each[0] < place]:
                ledger.give("grad", flat)
                alive = [each for each in alive if each[1] is not flat]
            alive.append((place + lives, ledger.take("grad", numel, torch.uint8, HOST)))
            most = max(most, len(alive))
        for _, flat in alive:
            ledger.give("grad", flat)
        kept.append(idle_nbytes(ledger))
    assert kept[-1] == kept[-2]
    assert len(kept[-1]) <= most and ledger.live_nbytes == 0
    assert max(kept[-1]) == max(numel for numel, _ in asked)


# ---- memory that is free when nobody holds it


def test_memory_is_handed_out_again_once_nobody_holds_a_tensor_over_it() -> None:
    ledger = Ledger()
    first = ledger.reuse(8, torch.float32, HOST)
    address = first.data_ptr()
    part = first[2:4]
    second = ledger.reuse(8, torch.float32, HOST)
    del first
    third = ledger.reuse(8, torch.float32, HOST)  # the part still looks at the first
    assert len({address, second.data_ptr(), third.data_ptr()}) == 3
    del part
    assert ledger.reuse(6, torch.float32, HOST).data_ptr() == address


def test_an_array_over_it_counts_too() -> None:
    ledger = Ledger()
    array = ledger.reuse(4, torch.float32, HOST).fill_(7.0).numpy()
    ledger.reuse(4, torch.float32, HOST).fill_(1.0)
    assert array.tolist() == [7.0] * 4


def test_what_is_free_and_too_small_is_not_kept() -> None:
    ledger = Ledger()
    for numel in (1, 2, 3):
        ledger.reuse(numel, torch.float32, HOST)
    assert [block.numel() for block in ledger._reused] == [12]


# ---- pages


@pytest.mark.parametrize("nbytes", [1, PAGE_NBYTES, LARGE_NBYTES - 1, LARGE_NBYTES, LARGE_NBYTES + 12_345])
@pytest.mark.parametrize("residue", [0, 24])
def test_pages_are_zero_and_lie_where_they_are_asked_to(nbytes: int, residue: int) -> None:
    memory = mapped(nbytes, residue)
    assert memory.numel() == nbytes and memory.data_ptr() % PAGE_NBYTES == residue
    assert not memory.any()
    memory[-1] = 1
    assert int(memory.sum()) == 1


@pytest.mark.parametrize("numel", [16, LARGE_NBYTES // 4])
def test_what_a_forked_process_writes_is_its_own(numel: int) -> None:
    """As of every tensor of torch's: a loader's worker that writes into a parameter must not change the parent's."""
    memory = lasting(numel, torch.float32, HOST)
    child = os.fork()
    if child == 0:
        memory[0] = 5.0
        os._exit(int(memory[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert memory[0] == 0.0
