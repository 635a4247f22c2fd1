"""Codecs that leave elements out: stated bytes, which elements they send, and that nothing is lost where it is kept."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.memory.noise import Noise, mix
from zeor.memory.sparse import SIGN_BLOCK, SPAN, RandomK, Sign, TopK

CHOSEN = [TopK(0.01), TopK(0.3), RandomK(0.1), RandomK(0.34), RandomK(0.5)]
EACH = [*CHOSEN, Sign()]
NUMELS = [1, 2, 255, 257, SPAN, SPAN + 1, 2 * SPAN + 700]


def values(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def coded(codec, given_: torch.Tensor, key: int = 5) -> torch.Tensor:
    message = torch.full((codec.nbytes(given_.numel()),), 77, dtype=torch.uint8)
    codec.encode_into(message, given_, Noise(mix(key)))
    found = torch.full((given_.numel(),), 99.0)
    codec.decode_into(found, message, 0, Noise(mix(key)))
    pieces = torch.full_like(found, 99.0)  # as a sum takes them
    for begin in range(0, given_.numel(), SPAN):
        codec.decode_into(pieces[begin : begin + SPAN], message, begin, Noise(mix(key)))
    assert torch.equal(pieces.nan_to_num(7.0), found.nan_to_num(7.0))
    return found


@pytest.mark.parametrize("numel", NUMELS)
def test_stated_bytes(numel):
    whole, rest = divmod(numel, SPAN)
    for codec in CHOSEN:
        size, per = (4, codec.fraction) if isinstance(codec, TopK) else (2, 1 / round(1 / codec.fraction))
        assert codec.nbytes(numel) == size * (whole * math.ceil(per * SPAN) + math.ceil(per * rest)), codec
    assert Sign().nbytes(numel) == 34 * math.ceil(numel / SIGN_BLOCK)


@pytest.mark.parametrize("numel", NUMELS)
def test_the_largest_travel(numel):
    given_ = values(numel)
    for codec in (TopK(0.01), TopK(0.3)):
        found = coded(codec, given_)
        for begin in range(0, numel, SPAN):
            part, sent = given_[begin : begin + SPAN], found[begin : begin + SPAN]
            count = math.ceil(codec.fraction * part.numel())
            least = part.abs().sort(descending=True).values[count - 1]
            assert torch.equal(sent, torch.where(part.abs() >= least, part, 0.0).bfloat16().float())


@pytest.mark.parametrize("numel", NUMELS)
def test_one_of_each_run_travels_and_noise_says_which(numel):
    given_ = values(numel)
    for codec in (RandomK(0.1), RandomK(0.34), RandomK(0.5)):
        found = coded(codec, given_)
        where = found != 0
        for begin in range(0, numel, SPAN):
            for run in where[begin : begin + SPAN].split(codec.stride):
                assert int(run.sum()) == 1
        assert torch.equal(found[where], given_[where].bfloat16().float())
        assert torch.equal(where, coded(codec, torch.ones(numel)) != 0)
        if numel > 50:
            assert not torch.equal(where, coded(codec, given_, key=6) != 0)


def test_every_element_has_its_turn():
    codec, seen = RandomK(0.25), torch.zeros(102)
    for key in range(400):
        seen += coded(codec, torch.ones(102), key)
    assert seen[:100].min() > 50 and seen[:100].max() < 150
    assert seen[100:].min() > 150 and seen[100:].max() < 250  # the last run is shorter


@pytest.mark.parametrize("numel", [1, 256, 300, 5000])
def test_signs_and_the_mean_magnitude_of_a_block(numel):
    given_ = values(numel)
    found = coded(Sign(), given_)
    for part, sent in zip(given_.split(SIGN_BLOCK), found.split(SIGN_BLOCK), strict=True):
        assert torch.equal(sent.sign(), part.sign()) and len(sent.abs().unique()) == 1
        assert abs(float(sent.abs()[0]) / float(part.abs().mean()) - 1) < 1 / 250


NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-30, 1.0, -1.0, 3e36]),
)


@pytest.mark.parametrize("codec", CHOSEN, ids=str)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=200), key=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_what_is_sent_and_what_is_left_are_the_values(codec, numbers, key):
    given_ = torch.tensor(numbers, dtype=torch.float64).float()
    sent = coded(codec, given_, key)
    assert torch.equal(sent + (given_ - sent), given_)


@pytest.mark.parametrize("codec", EACH, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(codec, bad):
    for numel, at in ((300, 7), (SPAN + 900, SPAN - 3), (SPAN + 900, SPAN + 800)):
        given_ = values(numel)
        given_[at] = bad
        assert not bool(coded(codec, given_).isfinite().all())


@pytest.mark.parametrize("codec", EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_those_of_fp32(codec, dtype):
    given_ = values(1000).to(dtype)
    assert torch.equal(coded(codec, given_), coded(codec, given_.float()))


def test_zeros():
    for codec in EACH:
        assert not bool(coded(codec, torch.zeros(1000)).any())
        assert codec.nbytes(0) == 0
