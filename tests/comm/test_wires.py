"""Gathers and reduces by codes: what each leaves on every rank, against the codec's own arithmetic written out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.comm.test_verbs import mesh_here, same_bits, values
from zeor.comm import verbs, wires
from zeor.comm.axes import Axis
from zeor.comm.wires import Coded, Gather, Reduce
from zeor.memory.buffers import Ledger
from zeor.memory.codecs import BLOCK_FORMATS, Codec
from zeor.memory.noise import Noise, mix

NUMEL, SLICES = 300, 2  # of a fine slice, and how many a rank's part has
CODECS = [Codec("bf16"), *(Codec(name, True, turns) for name in BLOCK_FORMATS for turns in (False, True))]


def decoded(codec: Codec, part: Tensor, noise: Noise | None = None) -> Tensor:
    """What one fine slice decodes to."""
    message = torch.empty(codec.nbytes(part.numel()), dtype=torch.uint8)
    codec.encode_into(message, part, noise)
    found = torch.empty(part.numel())
    codec.decode_into(found, message)
    return found


def coded_for(axis: Axis, codec: Codec, rank: int, **more: Any) -> Coded:
    return Coded(codec, NUMEL, Ledger(), noise=Noise(mix(5, rank)), **more)


def check_gather(axis: Axis, codec: Codec, dtype: torch.dtype) -> None:
    parts = [values(rank, SLICES * NUMEL, torch.float32).to(dtype) for rank in range(axis.size)]
    wanted = []
    for rank, part in enumerate(parts):
        for number, piece in enumerate(part.view(SLICES, -1)):
            wanted.append(decoded(codec, piece, Noise(mix(5, rank)).beyond(number * NUMEL)).to(dtype))
    full, how = torch.zeros(axis.size * SLICES * NUMEL, dtype=dtype), coded_for(axis, codec, axis.rank)
    move = Gather(axis, full, parts[axis.rank], "gather", how).start()
    move.wait()
    move.wait()
    assert same_bits(full, torch.cat(wanted)), codec
    assert how.ledger.live_nbytes == 0 < how.ledger.peak_nbytes
    if not codec.chance:
        assert same_bits(how.image(parts[axis.rank]), full.view(axis.size, -1)[axis.rank].contiguous())


def check_reduce(axis: Axis, codec: Codec, dtype: torch.dtype) -> None:
    """The others' parts decoded, this rank's own exact, in rank order."""
    numel = SLICES * NUMEL
    given = [values(rank, axis.size * numel, torch.float32).to(dtype) for rank in range(axis.size)]
    for factor, in_place in itertools.product((1.0, 0.5), (False, True)):
        full, total = given[axis.rank].clone(), torch.zeros(numel)
        for rank, source in enumerate(given):
            first = axis.rank * numel
            part = source[first : first + numel]
            if rank == axis.rank:
                piece = part.float()
            else:
                noise = [Noise(mix(5, rank)).beyond(first + number * NUMEL) for number in range(SLICES)]
                pieces = part.view(SLICES, -1).unbind()
                piece = torch.cat([decoded(codec, *each) for each in zip(pieces, noise, strict=True)])
            total = piece if rank == 0 else total + piece
        wanted = (total * factor).to(dtype)
        into = full.view(axis.size, -1)[axis.rank] if in_place else torch.empty(numel, dtype=dtype)
        how = coded_for(axis, codec, axis.rank)
        move = Reduce(axis, full, how, factor, into.detach).start("reduce")
        found = move.wait()
        assert same_bits(found, wanted) and found.data_ptr() == into.data_ptr(), (codec, factor)
        assert move.wait() is found and how.ledger.live_nbytes == 0


def check_differences(axis: Axis, codec: Codec, falls: float) -> None:
    """Each time what is sent is what is missing still, so receivers come as near as they like."""
    parts = [values(rank, NUMEL, torch.float32) * 1e-2 for rank in range(axis.size)]
    full, exact = torch.zeros(axis.size * NUMEL), torch.cat(parts)
    apart = []
    for _ in range(12):
        Gather(axis, full, parts[axis.rank], "gather", Coded(codec, NUMEL, Ledger(), differs=True)).start().wait()
        apart.append(float((full - exact).abs().max() / exact.abs().max()))
        assert same_bits(full, verbs.gather(axis, full.clone(), full.view(axis.size, -1)[axis.rank], "same").wait())
    before = [1.0, *apart[:-1]]
    assert all(now <= falls * last + 1e-7 for last, now in zip(before, apart, strict=True)), apart
    assert apart[-1] < 1e-6, apart


def check(dtype: torch.dtype) -> None:
    axis = mesh_here()
    before = axis.observer.traffic.sent_nbytes.copy()
    for codec in CODECS:
        check_gather(axis, codec, dtype)
        check_reduce(axis, codec, dtype)
    sent = axis.observer.traffic.sent_nbytes - before
    row = sum(SLICES * codec.nbytes(NUMEL) for codec in CODECS) * (axis.size - 1)
    assert sent == {("ranks", "gather"): row, ("ranks", "reduce"): 4 * row}
    saved = axis.observer.traffic.saved_nbytes
    exact = len(CODECS) * SLICES * NUMEL * dtype.itemsize * (axis.size - 1)
    assert saved["ranks", "gather"] == exact - row and saved["ranks", "reduce"] == 4 * (exact - row)
    check_differences(axis, Codec("int4"), 1.008 / 14)
    check_differences(axis, Codec("int2"), 1.008 / 4)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_and_reduces_by_every_codec(ranks, world, dtype):
    ranks(check, world, dtype)


def test_an_empty_part_has_no_codes():
    how = Coded(Codec("int8"), 0, Ledger())
    assert how.nbytes(0) == 0 and how.slices(0) == [] and wires.Coded(Codec("int4"), 7, Ledger()).nbytes(14) == 132


def test_a_nan_of_one_rank_is_seen_by_all(ranks):
    """A gradient that overflowed must not become a number on the way."""

    def check() -> None:
        axis = mesh_here()
        full = torch.ones(axis.size * NUMEL)
        if axis.rank == 1:
            full[3] = float("inf")
        how = Coded(Codec("int4", rotates=True), NUMEL, Ledger())
        found = Reduce(axis, full, how, 1.0, lambda: torch.empty(NUMEL)).start("reduce").wait()
        block = found[:128]
        assert bool(block.isnan().all()) == (axis.rank == 0) and bool(found[128:].isfinite().all())

    ranks(check, 2)


# ---- what arrives when changes no sum


def check_order(codec: Codec) -> list[float]:
    """Several reduces under way, which each rank waits for in an order of its own, and one at a time."""
    axis, numel, count = mesh_here(), 2 * NUMEL, 4
    given = [values(10 * axis.rank + number, axis.size * numel, torch.float32) for number in range(count)]

    def begun(number: int) -> Reduce:
        how = coded_for(axis, codec, axis.rank)
        return Reduce(axis, given[number].clone(), how, 1.0, lambda: torch.empty(numel)).start(f"reduce {number}")

    alone = [begun(number).wait() for number in range(count)]
    moves = [begun(number) for number in range(count)]
    order = sorted(range(count), key=lambda number: (number * (axis.rank + 2)) % (count + 1))
    found = {number: moves[number].wait() for number in order}
    assert all(same_bits(found[number], alone[number]) for number in range(count)), order
    return order


@pytest.mark.parametrize("codec", [Codec("int8"), Codec("int4", True, True)], ids=str)
def test_a_sum_does_not_depend_on_what_is_waited_for_first(ranks, codec):
    orders = ranks(check_order, 3, codec)
    assert len({tuple(order) for order in orders}) > 1, "all ranks waited in one order"


@given(
    st.sampled_from(CODECS),
    st.integers(2, 5),
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_sums_are_in_rank_order_whatever_the_numbers(codec, size, numel, dtype, data):
    """Of the parts of any number of ranks, large beside small, with this rank's own exact among them."""
    numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, 1e-40, math.inf, math.nan, 3e38])
    rank = data.draw(st.integers(0, size - 1))
    parts = [torch.tensor(data.draw(st.lists(numbers, min_size=numel, max_size=numel))).to(dtype) for _ in range(size)]
    axis = Axis(rank, size, torch.device("cpu"))
    move = Reduce(axis, torch.cat(parts), Coded(codec, numel, Ledger()), 0.5, lambda: torch.empty(0))
    messages: list[Tensor | None] = [None] * size
    for number in data.draw(st.permutations(range(size))):  # as they arrive
        if number != rank:
            messages[number] = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
            codec.encode_into(messages[number], parts[number], Noise(mix(5, number)))
    found = torch.empty(numel, dtype=dtype)
    move._sum_up(found, messages)
    wide, total = torch.promote_types(dtype, torch.float32), torch.zeros(numel)
    for number, part in enumerate(parts):
        piece = torch.empty(numel, dtype=wide)
        if number == rank:
            piece.copy_(part)
        else:
            codec.decode_into(piece, messages[number])
        total = piece if number == 0 else total + piece
    assert torch.equal(found.nan_to_num(nan=7.0), (total * 0.5).to(dtype).nan_to_num(nan=7.0))
    bound = sum(codec.error_bound(part) for number, part in enumerate(parts) if number != rank)
    exact = sum(part.double() for part in parts)
    away = (found.double() / 0.5 - exact).abs()
    slack = 2.0 ** -(7 if dtype == torch.bfloat16 else 20) * sum(part.double().abs() + bound for part in parts) + 1e-37
    known = exact.isfinite() & torch.as_tensor(bound).isfinite() & (exact.abs() + bound < 1e38)
    assert bool((away[known] <= (bound + slack)[known]).all())
    assert bool(found[torch.as_tensor(bound).isnan()].isnan().all()), "a NaN or inf of another rank became a number"
