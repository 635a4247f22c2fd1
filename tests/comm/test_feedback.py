"""Error feedback: what was sent and what is left are the gradient, in the order it is computed; and sums on ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.comm.test_verbs import mesh_here, same_bits, values
from tests.comm.test_wires import NUMEL, SLICES, decoded
from zeor.comm.feedback import Residual
from zeor.comm.wires import Coded, Reduce
from zeor.layout import Span
from zeor.memory.buffers import Ledger
from zeor.memory.codecs import Codec, Encoding
from zeor.memory.noise import Noise, mix
from zeor.memory.sparse import RandomK, Sign, TopK

EXACT = [TopK(0.05), RandomK(0.2), Codec("int8"), Codec("int4"), Codec("bf16"), Codec("fp8_e4m3"), Codec("fp8_e5m2")]
ROUNDED = [Sign(), Codec("int4", True), Codec("int8", rotates=True), Codec("int4", True, True)]
CODECS = [*EXACT, *ROUNDED]
NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**80), max_value=2.0**80),
    st.sampled_from([0.0, 1e-38, -1e-30, 1.0, -1.0, 2.0**-99, 3e20]),
)


def noise_of(codec: Encoding, rank: int) -> Noise:
    return Noise(mix(5, 0 if isinstance(codec, RandomK) else rank))


def kept(codec: Encoding, gradient: Tensor, residual: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """(what a receiver decodes, what is left) of slices of NUMEL elements."""
    how = Coded(codec, NUMEL, Ledger(), noise=noise)
    message, left = torch.empty(how.nbytes(gradient.numel()), dtype=torch.uint8), residual.clone()
    how.encode_kept(message, gradient, left, 0)
    sent = torch.empty(gradient.numel())
    for elements, codes in how.slices(gradient.numel()):
        codec.decode_into(sent[elements], message[codes], 0, noise.beyond(elements.start))
    return sent, left


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(data=st.data(), key=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=25, deadline=None)
def test_residual_and_sent_are_the_gradient(codec, data, key, dtype):
    drawn = data.draw(st.lists(NUMBERS, min_size=2, max_size=NUMEL))
    repeats = math.ceil(NUMEL / len(drawn))
    gradient = torch.tensor(drawn, dtype=torch.float64).clamp(-6e4, 6e4).to(dtype).repeat(repeats)[:NUMEL]
    residual = torch.tensor(drawn[::-1], dtype=torch.float64).float().repeat(repeats)[:NUMEL]
    sent, left = kept(codec, gradient, residual, Noise(mix(key)))
    x = residual + gradient  # in fp32: this is the order
    assert torch.equal(left, torch.where((x - sent).isfinite(), x - sent, 0.0))
    if codec in EXACT:
        tiny = x.abs() < 2.0**-99  # of blocks that decode to zeros, and numbers that bf16 has no bits for
        assert torch.equal((left + sent)[~tiny], x[~tiny])
    wrong = (left.double() + sent.double() - x.double()).abs()
    assert bool((wrong <= 2.0**-24 * (x.abs() + sent.abs()) + 1e-45).all())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_sent_and_then_forgotten(codec, bad):
    gradient, residual = values(0, NUMEL, torch.float32), values(1, NUMEL, torch.float32)
    gradient[11] = bad
    sent, left = kept(codec, gradient, residual, Noise(1))
    assert not bool(sent.isfinite().all()) and bool(left.isfinite().all())
    again, left = kept(codec, values(2, NUMEL, torch.float32), left, Noise(2))
    assert bool(again.isfinite().all()) and bool(left.isfinite().all())


def check_reduces(codec: Encoding, dtype: torch.dtype) -> None:
    """Three reduces of two blocks, the residual of each rank written out."""
    axis = mesh_here()
    numel, blocks = SLICES * NUMEL, 2
    residual = Residual((blocks, axis.size, numel), axis.rank, torch.device("cpu"))
    left = torch.zeros(axis.size, blocks, axis.size * numel)
    for step in range(3):
        for block in range(blocks):
            given_ = [values(10 * step + block + 3 * rank, axis.size * numel, dtype) for rank in range(axis.size)]
            first, total = block * axis.size * numel, torch.zeros(())
            for rank, source in enumerate(given_):
                mine = slice(axis.rank * numel, (axis.rank + 1) * numel)
                for to in range(axis.size):  # all that this rank sends, so that its residual is known
                    here = slice(to * numel, (to + 1) * numel)
                    if to == rank:
                        continue
                    x = left[rank, block, here] + source[here]
                    pieces = [
                        decode(codec, part, noise_of(codec, rank).beyond(first + here.start + number * NUMEL))
                        for number, part in enumerate(x.split(NUMEL))
                    ]
                    sent = torch.cat(pieces)
                    left[rank, block, here] = x - sent
                    if to == axis.rank:
                        part = sent
                part = source[mine].float() if rank == axis.rank else part
                total = part if rank == 0 else total + part
            how = Coded(codec, NUMEL, Ledger(), noise=noise_of(codec, axis.rank), residual=residual)
            into = torch.empty(numel, dtype=dtype)
            move = Reduce(axis, given_[axis.rank], how, 0.5, into.detach, first).start("reduce")
            assert same_bits(move.wait(), (total * 0.5).to(dtype)), (codec, step, block)
            assert how.ledger.live_nbytes == 0
    found = residual.copy_to(torch.empty(residual.numel)).view(blocks, -1)
    own = left[axis.rank]
    own.view(blocks, axis.size, -1)[:, axis.rank].zero_()
    assert same_bits(found, own) and bool(found.any())
    assert residual.flat.numel() == blocks * (axis.size - 1) * numel


def decode(codec: Encoding, part: Tensor, noise: Noise) -> Tensor:
    if isinstance(codec, Codec):
        return decoded(codec, part, noise)
    message, found = torch.empty(codec.nbytes(part.numel()), dtype=torch.uint8), torch.empty(part.numel())
    codec.encode_into(message, part, noise)
    codec.decode_into(found, message, 0, noise)
    return found


def check(dtype: torch.dtype) -> None:
    for codec in (TopK(0.05), RandomK(0.2), Sign(), Codec("int4", rotates=True), Codec("int8", True)):
        check_reduces(codec, dtype)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduces_keep_what_they_do_not_send(ranks, world, dtype):
    ranks(check, world, dtype)


@given(spans=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), max_size=4), rank=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_elements_are_forgotten(spans, rank):
    for whole in (False, True):
        residual = Residual((2, 3, 10), rank, torch.device("cpu"), whole)
        residual.flat.fill_(1.0)
        wanted = residual.copy_to(torch.empty(60))
        assert int(wanted.sum()) == (60 if whole else 40)
        chosen = [Span(min(span), max(span)) for span in spans]
        residual.wipe(chosen)
        for span in chosen:
            wanted[span.begin : span.end] = 0
        assert torch.equal(residual.copy_to(torch.empty(60)), wanted)
        residual.clear()
        assert not bool(residual.flat.any())


def test_the_shape_of_a_residual():
    residual: Any = Residual((1, 4, 5), 2, torch.device("cpu"))
    assert [row is None for row in residual.block(0)] == [False, False, True, False]
