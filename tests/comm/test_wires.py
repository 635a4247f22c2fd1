"""Gathers and reduces by codes: what each leaves on every rank, against the codec's own arithmetic written out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
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


def check_differences(axis: Axis) -> None:
    """Each time what is sent is what is missing still, so receivers come as near as they like."""
    codec = Codec("int4")
    parts = [values(rank, NUMEL, torch.float32) * 1e-2 for rank in range(axis.size)]
    full, exact = torch.zeros(axis.size * NUMEL), torch.cat(parts)
    apart = []
    for _ in range(8):
        Gather(axis, full, parts[axis.rank], "gather", Coded(codec, NUMEL, Ledger(), differs=True)).start().wait()
        apart.append(float((full - exact).abs().max() / exact.abs().max()))
        assert same_bits(full, verbs.gather(axis, full.clone(), full.view(axis.size, -1)[axis.rank], "same").wait())
    assert apart[0] < 0.1 and apart[-1] < 1e-6, apart


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
    check_differences(axis)


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
