"""The verbs: what each leaves on every rank, for every dtype and world, and the words of one that does not complete.

Each rank's values are a function of its number, so every rank can compute what all of them should get. Sums are
compared bit for bit with an explicit loop over the ranks in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zeor.comm import stuck, verbs
from zeor.comm.agree import exchange, first_difference, same_everywhere
from zeor.comm.axes import Axis, make_axis
from zeor.comm.observe import Observer

WORLDS = (1, 2, 3, 4)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.uint8)
NUMEL = 7  # of one slice


def mesh_here(timeout: float = 60.0) -> Axis:
    return make_axis(None, torch.device("cpu"), deterministic=False, timeout=timeout)


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that a sum in another order has other bits."""
    source = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 50, (numel,), generator=source).to(dtype)
    wide = torch.randn(numel, generator=source, dtype=torch.float64)
    return (wide * 10 ** torch.randint(-3, 4, (numel,), generator=source)).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_gather(axis: Axis, dtype: torch.dtype) -> None:
    parts = [values(rank, NUMEL, dtype) for rank in range(axis.size)]
    full = torch.empty(axis.size * NUMEL, dtype=dtype)
    result = verbs.gather(axis, full, parts[axis.rank], "gather").wait()
    assert result is full and same_bits(full, torch.cat(parts))


def check_gather_in_place(axis: Axis, dtype: torch.dtype) -> None:
    parts = [values(rank, NUMEL, dtype) for rank in range(axis.size)]
    full = torch.zeros(axis.size * NUMEL, dtype=dtype)
    mine = full[axis.rank * NUMEL : (axis.rank + 1) * NUMEL]
    mine.copy_(parts[axis.rank])
    move = verbs.gather(axis, full, mine, "gather in place")
    assert move.wait() is full and move.wait() is full
    assert same_bits(full, torch.cat(parts))


def summed(parts: list[Tensor], factor: float) -> Tensor:
    """The sum in rank order, in fp32 at least, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total * factor if factor != 1.0 else total).to(parts[0].dtype)


def start_reduce(axis: Axis, full: Tensor, factor: float = 1.0) -> verbs.Move:
    received = full.new_empty(verbs.reduce_receives(axis, full.numel()))
    return verbs.reduce(axis, full, received, factor, "reduce")


def check_reduce(axis: Axis, dtype: torch.dtype, factor: float) -> None:
    everyone = [values(rank, axis.size * NUMEL, dtype) for rank in range(axis.size)]
    mine = slice(axis.rank * NUMEL, (axis.rank + 1) * NUMEL)
    result = start_reduce(axis, everyone[axis.rank].clone(), factor).wait()
    assert same_bits(result, summed([full[mine] for full in everyone], factor))


def check_broadcast(axis: Axis, dtype: torch.dtype) -> None:
    for shape in [(NUMEL,), (), (3, 5), (0,)]:
        numel = torch.Size(shape).numel()
        tensor = values(axis.rank + 1, numel, dtype).view(shape)
        verbs.broadcast(axis, tensor, "broadcast")
        assert same_bits(tensor.view(-1), values(1, numel, dtype))
    turned = values(axis.rank + 1, 15, dtype).view(3, 5).t()  # not contiguous
    verbs.broadcast(axis, turned, "broadcast")
    assert torch.equal(turned, values(1, 15, dtype).view(3, 5).t())
    last = values(axis.rank + 1, NUMEL, dtype)
    verbs.broadcast(axis, last, "broadcast from the last rank", axis.size - 1)
    assert same_bits(last, values(axis.size, NUMEL, dtype))


def check_all_to_all(axis: Axis, dtype: torch.dtype) -> None:
    """Rank r sends rank q a part of r * q elements: some are empty, and rank 0 sends and gets nothing at all."""

    def parts(sender: int) -> list[Tensor]:
        return [values(10 * sender + taker, sender * taker, dtype) for taker in range(axis.size)]

    sent, wanted = parts(axis.rank), [parts(sender)[axis.rank] for sender in range(axis.size)]
    numels = [[part.numel() for part in each] for each in (wanted, sent)]
    received = torch.empty(sum(numels[0]), dtype=dtype)
    found = verbs.all_to_all(axis, received, torch.cat(sent), *numels, "all to all").wait()
    assert found is received and same_bits(found, torch.cat(wanted))


def check_gather_vector(axis: Axis, dtype: torch.dtype) -> None:
    rows = verbs.gather_vector(axis, values(axis.rank, NUMEL, dtype), "vector")
    assert same_bits(rows, torch.stack([values(rank, NUMEL, dtype) for rank in range(axis.size)]))
    every_other = values(axis.rank, 2 * NUMEL, dtype)[::2]
    rows = verbs.gather_vector(axis, every_other, "vector")
    assert same_bits(rows[0].clone(), values(0, 2 * NUMEL, dtype)[::2].clone())


def check_agree_max(axis: Axis) -> None:
    mine = torch.tensor([axis.rank, -axis.rank, 5], dtype=torch.int32)
    assert verbs.agree_max(axis, mine, "agree").tolist() == [axis.size - 1, 0, 5]


def check_traffic(axis: Axis) -> None:
    """What is counted is what a rank must send: a part of each verb's bytes for every other rank."""
    axis.observer = Observer()
    others, nbytes = axis.size - 1, NUMEL * 4
    verbs.gather(axis, torch.zeros(axis.size * NUMEL), torch.zeros(NUMEL), "gather").wait()
    start_reduce(axis, torch.zeros(axis.size * NUMEL)).wait()
    verbs.gather_vector(axis, torch.zeros(3), "vector")
    counted = axis.traffic.summary()
    if others == 0:
        assert counted["bytes_sent"] == counted["collectives"] == 0
        assert counted["calls"] == counted["bytes_by_verb"] == counted["bytes_by_axis"] == counted["last_step"] == {}
        return
    assert counted["calls"] == {"gather": 1, "reduce": 1, "agree": 1}
    assert counted["bytes_by_verb"] == {"gather": nbytes * others, "reduce": nbytes * others, "agree": 12 * others}
    assert counted["collectives"] == 3 and counted["bytes_sent"] == (2 * nbytes + 12) * others


def check_verbs() -> int:
    axis = mesh_here()
    for dtype in DTYPES:
        check_gather(axis, dtype)
        check_gather_in_place(axis, dtype)
        check_broadcast(axis, dtype)
        check_all_to_all(axis, dtype)
        check_gather_vector(axis, dtype)
    for dtype in FLOATS:
        for factor in (1.0, 1.0 / axis.size, 3.0):
            check_reduce(axis, dtype, factor)
    check_agree_max(axis)
    check_traffic(axis)
    return axis.size


@pytest.mark.parametrize("world", WORLDS)
def test_every_verb_for_every_dtype(ranks: Callable[..., list[Any]], world: int) -> None:
    assert ranks(check_verbs, world) == [world] * world


def test_the_order_of_a_sum_can_be_seen_in_its_bits() -> None:
    """Else the comparison above would prove nothing."""
    for dtype in (torch.float32, torch.float64):
        parts = [values(rank, 1000, dtype) for rank in range(4)]
        assert not same_bits(summed(parts, 1.0), summed(parts[::-1], 1.0))


def several_moves() -> list[bool]:
    """Gathers and reduces under way at once, waited for in another order than they were started."""
    axis = mesh_here()
    everyone = [values(rank, axis.size * NUMEL, torch.float32) for rank in range(axis.size)]
    fulls = [torch.empty(axis.size * NUMEL) for _ in range(3)]
    gathers = [verbs.gather(axis, full, everyone[axis.rank][:NUMEL] + i, "gather") for i, full in enumerate(fulls)]
    reduces = [start_reduce(axis, everyone[axis.rank] + i) for i in range(3)]
    mine = slice(axis.rank * NUMEL, (axis.rank + 1) * NUMEL)
    right = []
    for i in (2, 0, 1):
        right.append(same_bits(reduces[i].wait(), summed([(full + i)[mine] for full in everyone], 1.0)))
        right.append(same_bits(gathers[i].wait(), torch.cat([full[:NUMEL] + i for full in everyone])))
    return right


def test_moves_may_overlap(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(several_moves, 3) == [[True] * 6] * 3


def asked_while_profiled() -> list[float]:
    """Asks again and again whether gathers are done, under a profiler and hooks on saved tensors."""
    axis, full = mesh_here(), torch.empty(4_000)
    mine, sums = torch.full((2_000,), 1.0 + dist.get_rank()), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), hooks:
        for _ in range(500):
            move = verbs.gather(axis, full.zero_(), mine, "gather")
            while not move.arrives_within(0):
                pass
            sums.append(float(move.wait().sum()))
    return sums


def test_asking_gloo_whether_a_gather_is_done_does_not_hang_under_a_profiler(ranks: Callable[..., list[Any]]) -> None:
    """See Note [Asking Gloo whether a collective is done]."""
    assert ranks(asked_while_profiled, 2) == [[6_000.0] * 500] * 2


# Agreements


def exchanged(unequal: bool) -> list[Any]:
    axis = mesh_here()
    value = {"rank": axis.rank, "text": "ä" * (axis.rank if unequal else 3), "nothing": None}
    return exchange(axis, value, "exchange of values")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("unequal", [False, True])
def test_exchange_gives_every_rank_s_value_in_rank_order(ranks: Callable, world: int, unequal: bool) -> None:
    everyone = [{"rank": r, "text": "ä" * (r if unequal else 3), "nothing": None} for r in range(world)]
    assert ranks(exchanged, world, unequal) == [everyone] * world


def compared(lines_by_rank: list[list[str]]) -> str:
    axis = mesh_here()
    try:
        same_everywhere(axis, "plans", lines_by_rank[axis.rank])
    except ValueError as error:
        return str(error)
    return "same"


def test_what_is_the_same_everywhere_passes_and_what_is_not_is_named_on_every_rank(ranks: Callable) -> None:
    assert ranks(compared, 3, [["a", "b"]] * 3) == ["same"] * 3
    told = "The ranks' plans differ: rank 0 has b, rank 2 has c."
    assert ranks(compared, 3, [["a", "b"], ["a", "b"], ["a", "c"]]) == [told] * 3
    told = "The ranks' plans differ: rank 1 has b, rank 0 has nothing there."
    assert ranks(compared, 2, [["a"], ["a", "b"]]) == [told] * 2


def test_the_first_difference_is_told() -> None:
    assert first_difference(["a", "b"], ["a", "c"], 3) == "rank 0 has b, rank 3 has c"
    assert first_difference(["a", "b"], ["a"], 1) == "rank 0 has b, rank 1 has nothing there"


# A collective that does not complete


def gather_alone(absent: int) -> str:
    """Every rank but one gathers, with a timeout of a second."""
    axis = mesh_here(timeout=1.0)
    before, stuck.GRACE_SECONDS = stuck.GRACE_SECONDS, 1.0
    try:
        if axis.rank == absent:
            time.sleep(4.0)
            return "away"
        verbs.gather(axis, torch.zeros(axis.size * NUMEL), torch.zeros(NUMEL), "gather of unit 'x'").wait()
    except RuntimeError as error:
        return str(error)
    finally:
        stuck.GRACE_SECONDS = before
    return "completed"


def test_a_rank_that_never_comes_is_named_by_the_others(ranks: Callable[..., list[Any]]) -> None:
    told = ranks(gather_alone, 3, 1)
    for rank in (0, 2):
        assert told[rank].startswith(f"zeor: gather of unit 'x' did not complete within 1 s on rank {rank} of 3; ")
        assert "rank 1 did not take part (it crashed, is busy, took another path" in told[rank]


def explained(labels: list[str], text: str) -> str:
    axis = mesh_here()
    return str(stuck.explain(axis, labels[axis.rank], RuntimeError(text)))


def test_ranks_at_different_places_are_told_where_the_others_were(ranks: Callable[..., list[Any]]) -> None:
    told = ranks(explained, 2, ["gather of a", "reduce of b"], "Connection closed by peer\nat line 7")
    first = "zeor: gather of a failed on rank 0 of 2; rank 1 was at reduce of b. The backend said: Connection closed"
    assert told[0] == first + " by peer"
    assert "rank 0 was at gather of a" in told[1]


def test_ranks_at_the_same_place_are_told_that_all_were_there(ranks: Callable[..., list[Any]]) -> None:
    told = ranks(explained, 3, ["gather of a"] * 3, "Timed out waiting 600000ms")  # a group without earlier notes
    assert all("did not complete within 60 s" in text and "all ranks were there" in text for text in told)


# Meshes


def test_a_mesh_of_some_ranks_counts_and_speaks_of_them_alone(ranks: Callable[..., list[Any]]) -> None:
    def pairs() -> tuple[int, int, list[float]]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        axis = make_axis(groups[dist.get_rank() % 2], torch.device("cpu"), deterministic=False, timeout=60.0)
        full = torch.zeros(2)
        verbs.gather(axis, full, torch.tensor([float(dist.get_rank())]), "gather").wait()
        tensor = torch.tensor([float(dist.get_rank())])
        verbs.broadcast(axis, tensor, "broadcast")
        return axis.rank, axis.size, [*full.tolist(), *tensor.tolist()]

    assert ranks(pairs, 4) == [(0, 2, [0, 2, 0]), (0, 2, [1, 3, 1]), (1, 2, [0, 2, 0]), (1, 2, [1, 3, 1])]
