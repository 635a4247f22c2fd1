"""Random numbers by position: any range is drawn by itself, what comes out is what was asked for, and keys matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.access.draw import GOLDEN, Recipe, bits

HOST = torch.device("cpu")
NUMEL = 1 << 18


def recipe(*deeds: tuple[str, tuple[float, ...]], seed: int = 0, name: str = "w", dtype=torch.float32) -> Recipe:
    made = Recipe(seed, name, dtype)
    for verb, args in deeds:
        assert made.takes(verb, args, {}), verb
        made.add(verb, args, {})
    return made


def splitmix64(key: int, place: int) -> int:
    """As the paper writes it, in Python's integers."""
    mask = (1 << 64) - 1
    z = (key + place * GOLDEN) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@settings(deadline=None, max_examples=50)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 40))
def test_the_bits_are_those_of_splitmix64(key: int, begin: int, count: int) -> None:
    found = [number & ((1 << 64) - 1) for number in bits(key, begin, begin + count, HOST).tolist()]
    assert found == [splitmix64(key, place) for place in range(begin, begin + count)]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, NUMEL), st.integers(0, NUMEL), st.sampled_from(["normal_", "uniform_"]),
    st.sampled_from(["sigmoid_", "exp_", "tanh_", "erf_"]),
)  # fmt: skip
def test_a_range_is_drawn_by_itself(one: int, other: int, verb: str, then: str) -> None:
    begin, end = sorted((one, other))
    made = recipe((verb, (-1.0, 2.0)), ("mul_", (0.5,)), (then, ()))
    assert torch.equal(made.make(begin, end, HOST), made.make(0, NUMEL, HOST)[begin:end])


def test_chunks_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(("normal_", (0.0, 1.0)))
    whole = made.make(0, 1000, HOST)
    monkeypatch.setitem(__import__("zeor.access.draw", fromlist=["draw"]).CHUNK_NUMEL, "cpu", 7)
    assert torch.equal(made.make(0, 1000, HOST), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    values = recipe(("normal_", (3.0, 2.0)), dtype=dtype).make(0, NUMEL, HOST).double()
    standard = (values - 3.0) / 2.0
    # Five standard errors of each moment, and the share within one deviation; bf16 rounds by up to 2**-9.
    slack = 0.005 if dtype == torch.bfloat16 else 0.0
    assert abs(float(standard.mean())) < 5 / math.sqrt(NUMEL) + slack
    assert abs(float(standard.var()) - 1.0) < 5 * math.sqrt(2 / NUMEL) + slack
    assert abs(float(standard.pow(3).mean())) < 5 * math.sqrt(15 / NUMEL) + 3 * slack
    assert abs(float(standard.pow(4).mean()) - 3.0) < 5 * math.sqrt(96 / NUMEL) + 6 * slack
    assert abs(float((standard.abs() < 1).double().mean()) - math.erf(math.sqrt(0.5))) < 0.005 + slack


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_uniform_number_is_below_its_bound(dtype: torch.dtype) -> None:
    for low, high in ((0.0, 1.0), (-0.1, 0.1), (3.0, 3.5)):
        values = recipe(("uniform_", (low, high)), dtype=dtype).make(0, NUMEL, HOST).double()
        assert float(values.max()) < high and float(values.min()) >= float(torch.tensor(low, dtype=dtype)), (low, high)


def test_uniform_numbers_are_uniform() -> None:
    values = recipe(("uniform_", (-1.0, 3.0))).make(0, NUMEL, HOST).double()
    assert abs(float(values.mean()) - 1.0) < 5 * 4 / math.sqrt(12 * NUMEL)
    counts = torch.histc(values.float(), 64, -1.0, 3.0).double()
    chi_square = float(((counts - NUMEL / 64).square() / (NUMEL / 64)).sum())
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)


def test_neighbours_streams_and_seeds_are_not_correlated() -> None:
    first = recipe(("normal_", (0.0, 1.0))).make(0, NUMEL, HOST).double()
    others = {
        "the next place": first.roll(1),
        "another name": recipe(("normal_", (0.0, 1.0)), name="v").make(0, NUMEL, HOST).double(),
        "another seed": recipe(("normal_", (0.0, 1.0)), seed=1).make(0, NUMEL, HOST).double(),
        "the second draw": second_draw().make(0, NUMEL, HOST).double(),
    }
    for what, other in others.items():
        assert abs(float((first * other).mean())) < 5 / math.sqrt(NUMEL), what
        assert not torch.equal(first, other), what


def second_draw() -> Recipe:
    return recipe(("normal_", (0.0, 1.0)), ("normal_", (0.0, 1.0)))


def test_what_overwrites_begins_anew_and_what_does_not_leaves_nan() -> None:
    made = recipe(("fill_", (2.0,)), ("mul_", (3.0,)))
    assert made.is_whole and made.make(0, 3, HOST).tolist() == [6.0] * 3
    made.add("zero_", (), {})
    assert [deed.name for deed in made.deeds] == ["zero_"]
    partly = recipe(("mul_", (2.0,)))
    assert not partly.is_whole and bool(partly.make(0, 3, HOST).isnan().all())


def test_what_needs_more_than_numbers_is_not_taken() -> None:
    made = Recipe(0, "w", torch.float32)
    assert not made.takes("add_", (torch.ones(3),), {})
    assert not made.takes("normal_", (0.0, 1.0), {"generator": torch.Generator()})
    assert not made.takes("copy_", (1.0,), {})
    assert not Recipe(0, "w", torch.int64).takes("fill_", (1,), {})
