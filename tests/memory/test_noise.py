"""Noise by place: the same numbers however they are cut, with every bit as likely as it should be."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.memory.noise import Noise, mix

HOST = torch.device("cpu")


def lowbias32(word: int) -> int:
    """The hash in plain Python, for words."""
    word &= 0xFFFFFFFF
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    word = ((word ^ (word >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return word ^ (word >> 16)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40))
@settings(deadline=None, max_examples=40)
def test_it_is_the_hash_written_out_in_python(key, start):
    found = Noise(key, start).words(50, HOST)
    wanted = [lowbias32(key + place * 0x9E3779B1) for place in range(start, start + 50)]
    assert [int(word) & 0xFFFFFFFF for word in found] == wanted


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(1, 300), st.integers(1, 299))
@settings(deadline=None, max_examples=40)
def test_a_cut_changes_no_number(key, start, count, cut):
    cut = min(cut, count)
    noise = Noise(key, start)
    parts = [noise.words(cut, HOST), noise.beyond(cut).words(count - cut, HOST)]
    assert torch.equal(torch.cat(parts), noise.words(count, HOST))


def test_every_bit_is_by_chance_and_neighbours_do_not_resemble_each_other():
    words = torch.cat([Noise(mix(3, key)).words(1 << 14, HOST) for key in range(16)])
    for bit in range(32):
        share = float(((words >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 0.005, f"bit {bit}: {share}"  # 5 standard deviations
    fractions = torch.stack([Noise(mix(5, key)).fractions(1 << 14, HOST) for key in range(16)]).double()
    assert float(fractions.min()) >= 0.0 and float(fractions.max()) < 1.0
    assert abs(float(fractions.mean()) - 0.5) < 0.003
    correlated = torch.corrcoef(torch.cat([fractions[:, :-1].flatten()[None], fractions[:, 1:].flatten()[None]]))
    assert abs(float(correlated[0, 1])) < 0.01
    keys = torch.corrcoef(fractions)
    assert float((keys - torch.eye(16)).abs().max()) < 0.05


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=4), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_keys_depend_on_each_number_and_their_order(numbers, place):
    place = min(place, len(numbers) - 1)
    other = [*numbers[:place], numbers[place] + 1, *numbers[place + 1 :]]
    assert mix(*numbers) != mix(*other)
    assert mix(*numbers) == mix(*numbers) < 2**32
    if numbers != numbers[::-1]:
        assert mix(*numbers) != mix(*numbers[::-1])
