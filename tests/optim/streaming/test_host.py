"""The update on the host by itself: batches across lanes, errors, and threads given back."""

from __future__ import annotations

import contextlib
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeor.memory.device import use_threads
from zeor.optim.streaming.host import (
    AHEAD,
    CUT_NUMEL,
    Batch,
    HostPart,
    HostUpdate,
    _cut,
    _joined,
    _Slot,
    _Turns,
    batch_numel,
    default_threads,
)
from zeor.tiers.rest import Rest
from zeor.tiers.streams import StreamEvent

CPU = torch.device("cpu")


class Segment:
    """As much of a Begun as the cutting looks at."""

    def __init__(self, begin: int, end: int):
        self.begin, self.end = begin, end

    @property
    def run(self) -> Segment:
        return self


@given(numels=st.lists(st.integers(1, 700), min_size=1, max_size=12), most=st.integers(1, 8))
def test_batches_hold_every_element_once_and_fit_their_slot(numels: list[int], most: int) -> None:
    most *= CUT_NUMEL
    segments: list[Any] = []
    for numel in numels:
        begin = segments[-1].end if segments else 0
        segments.append(Segment(begin, begin + numel))
    batches = list(_cut(segments, most))
    cuts = [cut for batch in batches for cut in batch]
    assert cuts[0].begin == 0 and cuts[-1].end == sum(numels)
    assert all(before.end == after.begin for before, after in pairwise(cuts))
    for begun, begin, end in cuts:  # where a segment is cut, kernels go on as they would
        assert begun.begin <= begin < end <= begun.end
        assert not (begin - begun.begin) % CUT_NUMEL
    for batch in batches:
        parts = [HostPart(begin, end, Rest(torch.empty(0)), 0) for _, begin, end in batch]
        places = Batch(parts, [(torch.empty(0), torch.empty(0))], None, lambda given: None).places()
        assert places[-1].stop <= most and all(not place.start % CUT_NUMEL for place in places)
        assert all(before.stop <= after.start for before, after in pairwise(places))
        assert _joined(batch) == [(batch[0].begin, batch[-1].end)]
    assert batch_numel(1 << 30, [(sum(numels), len(numels))]) >= places[-1].stop


def lane_of(count: int, length: int, fails: int | None = None) -> tuple[torch.Tensor, torch.Tensor, list[Batch]]:
    """Master, compute and batches of a lane whose step takes off a tenth of the gradient; gradients are 1, 2, ..."""
    master, compute = torch.zeros(count * length), torch.zeros(count * length, dtype=torch.bfloat16)
    grads = torch.arange(1, count * length + 1, dtype=torch.float32)

    def batch(number: int) -> Batch:
        begin, end = number * length, (number + 1) * length

        def step(given: list[torch.Tensor]) -> None:
            if number == fails:
                raise ArithmeticError("no step today")
            master[begin:end].sub_(given[0], alpha=0.1)

        published = [(master[begin:end], compute[begin:end])]
        return Batch([HostPart(begin, end, Rest(grads), begin)], published, 0.5, step)

    return master, compute, [batch(number) for number in range(count)]


def test_lanes_follow_one_another_and_an_error_is_its_lane_s_alone() -> None:
    host = HostUpdate(CPU, 64, threads=2)
    before = torch.get_num_threads(), sys.getswitchinterval()
    ready: list[int] = []
    host.reserve(torch.float32)
    lanes = [lane_of(5, 64, fails=2 if number == 1 else None) for number in range(3)]
    found = [host.start(batches, lambda n=number: ready.append(n)) for number, (*_, batches) in enumerate(lanes)]
    with pytest.raises(ArithmeticError, match="no step today"):
        found[1].result(timeout=30)
    for number in (0, 2):
        assert isinstance(found[number].result(timeout=30).updated, StreamEvent)
        master, compute, _ = lanes[number]
        wanted = torch.zeros(320).sub_(torch.arange(1, 321.0).mul_(0.5), alpha=0.1)
        assert torch.equal(master, wanted)
        assert torch.allclose(compute.float(), wanted, rtol=2**-8)
    assert ready == [0, 1, 2]
    assert not lanes[1][0][192:].any()  # what came after the error was left alone
    assert host.nbytes == 3 * 2 * 64 * 4
    host.leave()
    assert host.nbytes == 0
    host.close()
    assert (torch.get_num_threads(), sys.getswitchinterval()) == before


def test_an_end_in_mid_way_leaves_nobody_waiting() -> None:
    """As when the interpreter ends: copies can no more be queued."""
    host = HostUpdate(CPU, 64, threads=1)
    host.reserve(torch.float32)
    host._mover.shutdown(wait=True)
    found = [host.start(lane_of(3, 64)[2], lambda: None) for _ in range(3)]
    for future in found:
        with pytest.raises(RuntimeError, match="cannot schedule new futures"):
            future.result(timeout=30)


def test_slots_turn_while_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that queues copies turns them whenever it likes: here, at every one that is looked at."""
    host = HostUpdate(CPU, CUT_NUMEL, threads=1)
    host.reserve(torch.float32)
    made = _Slot.make_room
    monkeypatch.setattr(_Slot, "make_room", lambda self: (host._slot(torch.float32), made(self))[1])
    host.reserve(torch.float32)
    assert host.nbytes == (AHEAD + 1) * 2 * CUT_NUMEL * 4
    host.close()


def test_nothing_to_do_is_done() -> None:
    host = HostUpdate(CPU, 64, threads=1)
    assert host.start([], lambda: None).done()
    host.close()


def test_threads_are_this_rank_s_share_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert default_threads() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_threads() == 4
    before = torch.get_num_threads(), sys.getswitchinterval()
    with contextlib.suppress(KeyError), use_threads(2), _Turns.short():
        assert torch.get_num_threads() == 2 and sys.getswitchinterval() < before[1]
        raise KeyError
    assert (torch.get_num_threads(), sys.getswitchinterval()) == before


def test_two_updates_at_once_leave_the_turns_as_they_were() -> None:
    before = sys.getswitchinterval()
    first, second = _Turns.short(), _Turns.short()
    with contextlib.ExitStack() as second_ends:
        with first:
            second_ends.enter_context(second)
        assert sys.getswitchinterval() < before  # the second still wants it
    assert sys.getswitchinterval() == before
