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
from zeor.comm.mesh import Mesh, make_mesh

WORLDS = (1, 2, 3, 4)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.uint8)
NUMEL = 7  # of one slice


def mesh_here(timeout: float = 60.0) -> Mesh:
    return make_mesh(None, torch.device("cpu"), deterministic=False, timeout=timeout)


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that a sum in another order has other bits."""
    source = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 50, (numel,), generator=source).to(dtype)
    wide = torch.randn(numel, generator=source, dtype=torch.float64)
    return (wide * 10 ** torch.randint(-3, 4, (numel,), generator=source)).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_gather(mesh: Mesh, dtype: torch.dtype) -> None:
    parts = [values(rank, NUMEL, dtype) for rank in range(mesh.world)]
    full = torch.empty(mesh.world * NUMEL, dtype=dtype)
    result = verbs.gather(mesh, full, parts[mesh.rank], "gather").wait()
    assert result is full and same_bits(full, torch.cat(parts))


def check_gather_in_place(mesh: Mesh, dtype: torch.dtype) -> None:
    parts = [values(rank, NUMEL, dtype) for rank in range(mesh.world)]
    full = torch.zeros(mesh.world * NUMEL, dtype=dtype)
    mine = full[mesh.rank * NUMEL : (mesh.rank + 1) * NUMEL]
    mine.copy_(parts[mesh.rank])
    move = verbs.gather(mesh, full, mine, "gather in place")
    assert move.wait() is full and move.wait() is full
    assert same_bits(full, torch.cat(parts))


def summed(parts: list[Tensor], factor: float) -> Tensor:
    """The sum in rank order, in fp32 at least, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total * factor if factor != 1.0 else total).to(parts[0].dtype)


def start_reduce(mesh: Mesh, full: Tensor, factor: float = 1.0) -> verbs.Move:
    received = full.new_empty(verbs.reduce_receives(mesh, full.numel()))
    return verbs.reduce(mesh, full, received, factor, "reduce")


def check_reduce(mesh: Mesh, dtype: torch.dtype, factor: float) -> None:
    everyone = [values(rank, mesh.world * NUMEL, dtype) for rank in range(mesh.world)]
    mine = slice(mesh.rank * NUMEL, (mesh.rank + 1) * NUMEL)
    result = start_reduce(mesh, everyone[mesh.rank].clone(), factor).wait()
    assert same_bits(result, summed([full[mine] for full in everyone], factor))


def check_broadcast(mesh: Mesh, dtype: torch.dtype) -> None:
    for shape in [(NUMEL,), (), (3, 5), (0,)]:
        numel = torch.Size(shape).numel()
        tensor = values(mesh.rank + 1, numel, dtype).view(shape)
        verbs.broadcast(mesh, tensor, "broadcast")
        assert same_bits(tensor.view(-1), values(1, numel, dtype))
    turned = values(mesh.rank + 1, 15, dtype).view(3, 5).t()  # not contiguous
    verbs.broadcast(mesh, turned, "broadcast")
    assert torch.equal(turned, values(1, 15, dtype).view(3, 5).t())
    last = values(mesh.rank + 1, NUMEL, dtype)
    verbs.broadcast(mesh, last, "broadcast from the last rank", mesh.world - 1)
    assert same_bits(last, values(mesh.world, NUMEL, dtype))


def check_all_to_all(mesh: Mesh, dtype: torch.dtype) -> None:
    """Rank r sends rank q a part of r * q elements: some are empty, and rank 0 sends and gets nothing at all."""

    def parts(sender: int) -> list[Tensor]:
        return [values(10 * sender + taker, sender * taker, dtype) for taker in range(mesh.world)]

    sent, wanted = parts(mesh.rank), [parts(sender)[mesh.rank] for sender in range(mesh.world)]
    numels = [[part.numel() for part in each] for each in (wanted, sent)]
    received = torch.empty(sum(numels[0]), dtype=dtype)
    found = verbs.all_to_all(mesh, received, torch.cat(sent), *numels, "all to all").wait()
    assert found is received and same_bits(found, torch.cat(wanted))


def check_gather_vector(mesh: Mesh, dtype: torch.dtype) -> None:
    rows = verbs.gather_vector(mesh, values(mesh.rank, NUMEL, dtype), "vector")
    assert same_bits(rows, torch.stack([values(rank, NUMEL, dtype) for rank in range(mesh.world)]))
    every_other = values(mesh.rank, 2 * NUMEL, dtype)[::2]
    rows = verbs.gather_vector(mesh, every_other, "vector")
    assert same_bits(rows[0].clone(), values(0, 2 * NUMEL, dtype)[::2].clone())


def check_agree_max(mesh: Mesh) -> None:
    mine = torch.tensor([mesh.rank, -mesh.rank, 5], dtype=torch.int32)
    assert verbs.agree_max(mesh, mine, "agree").tolist() == [mesh.world - 1, 0, 5]


def check_traffic(mesh: Mesh) -> None:
    """What is counted is what a rank must send: a part of each verb's bytes for every other rank."""
    mesh.traffic.reset()
    others, nbytes = mesh.world - 1, NUMEL * 4
    verbs.gather(mesh, torch.zeros(mesh.world * NUMEL), torch.zeros(NUMEL), "gather").wait()
    start_reduce(mesh, torch.zeros(mesh.world * NUMEL)).wait()
    verbs.gather_vector(mesh, torch.zeros(3), "vector")
    counted = mesh.traffic.summary()
    if others == 0:
        assert counted == {"bytes_sent": 0, "collectives": 0, "calls": {}, "bytes_by_verb": {}}
        return
    assert counted["calls"] == {"gather": 1, "reduce": 1, "agree": 1}
    assert counted["bytes_by_verb"] == {"gather": nbytes * others, "reduce": nbytes * others, "agree": 12 * others}
    assert counted["collectives"] == 3 and counted["bytes_sent"] == (2 * nbytes + 12) * others


def check_verbs() -> int:
    mesh = mesh_here()
    for dtype in DTYPES:
        check_gather(mesh, dtype)
        check_gather_in_place(mesh, dtype)
        check_broadcast(mesh, dtype)
        check_all_to_all(mesh, dtype)
        check_gather_vector(mesh, dtype)
    for dtype in FLOATS:
        for factor in (1.0, 1.0 / mesh.world, 3.0):
            check_reduce(mesh, dtype, factor)
    check_agree_max(mesh)
    check_traffic(mesh)
    return mesh.world


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
    mesh = mesh_here()
    everyone = [values(rank, mesh.world * NUMEL, torch.float32) for rank in range(mesh.world)]
    fulls = [torch.empty(mesh.world * NUMEL) for _ in range(3)]
    gathers = [verbs.gather(mesh, full, everyone[mesh.rank][:NUMEL] + i, "gather") for i, full in enumerate(fulls)]
    reduces = [start_reduce(mesh, everyone[mesh.rank] + i) for i in range(3)]
    mine = slice(mesh.rank * NUMEL, (mesh.rank + 1) * NUMEL)
    right = []
    for i in (2, 0, 1):
        right.append(same_bits(reduces[i].wait(), summed([(full + i)[mine] for full in everyone], 1.0)))
        right.append(same_bits(gathers[i].wait(), torch.cat([full[:NUMEL] + i for full in everyone])))
    return right


def test_moves_may_overlap(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(several_moves, 3) == [[True] * 6] * 3


# Agreements


def exchanged(unequal: bool) -> list[Any]:
    mesh = mesh_here()
    value = {"rank": mesh.rank, "text": "ä" * (mesh.rank if unequal else 3), "nothing": None}
    return exchange(mesh, value, "exchange of values")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("unequal", [False, True])
def test_exchange_gives_every_rank_s_value_in_rank_order(ranks: Callable, world: int, unequal: bool) -> None:
    everyone = [{"rank": r, "text": "ä" * (r if unequal else 3), "nothing": None} for r in range(world)]
    assert ranks(exchanged, world, unequal) == [everyone] * world


def compared(lines_by_rank: list[list[str]]) -> str:
    mesh = mesh_here()
    try:
        same_everywhere(mesh, "plans", lines_by_rank[mesh.rank])
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
    mesh = mesh_here(timeout=1.0)
    before, stuck.GRACE_SECONDS = stuck.GRACE_SECONDS, 1.0
    try:
        if mesh.rank == absent:
            time.sleep(4.0)
            return "away"
        verbs.gather(mesh, torch.zeros(mesh.world * NUMEL), torch.zeros(NUMEL), "gather of unit 'x'").wait()
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
    mesh = mesh_here()
    return str(stuck.explain(mesh, labels[mesh.rank], RuntimeError(text)))


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
        mesh = make_mesh(groups[dist.get_rank() % 2], torch.device("cpu"), deterministic=False, timeout=60.0)
        full = torch.zeros(2)
        verbs.gather(mesh, full, torch.tensor([float(dist.get_rank())]), "gather").wait()
        tensor = torch.tensor([float(dist.get_rank())])
        verbs.broadcast(mesh, tensor, "broadcast")
        return mesh.rank, mesh.world, [*full.tolist(), *tensor.tolist()]

    assert ranks(pairs, 4) == [(0, 2, [0, 2, 0]), (0, 2, [1, 3, 1]), (1, 2, [0, 2, 0]), (1, 2, [1, 3, 1])]
