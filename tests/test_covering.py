"""A selection really holds every triple, and is much smaller than the product it stands for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.checkpoint import test_reshard
from tests.covering import covering, product
from tests.parity import test_offload
from tests.parity.models import FACTORS

SMALL: dict[str, Any] = {"a": (0, 1, 2), "b": ("x", "y"), "c": (True, False), "d": (None, "d")}


def not_covered(rows: list[dict[str, Any]], factors: dict[str, Any], strength: int) -> list[Any]:
    """The combinations of values that no row holds, counted in the plainest way."""
    return [
        (names, values)
        for names in itertools.combinations(factors, strength)
        for values in itertools.product(*(factors[name] for name in names))
        if not any(all(row[name] == value for name, value in zip(names, values, strict=True)) for row in rows)
    ]


@pytest.mark.parametrize(("factors", "most"), [(SMALL, 14), (FACTORS, 60)], ids=["small", "parity"])
def test_every_triple_is_in_a_row(factors: dict[str, Any], most: int) -> None:
    rows = covering(factors)
    assert not not_covered(rows, factors, 3)
    assert len(rows) <= most < len(product(factors))
    assert all(row in product(factors) for row in rows)


def test_every_pair_is_in_a_row() -> None:
    rows = covering(FACTORS, strength=2)
    assert not not_covered(rows, FACTORS, 2)
    assert not_covered(rows, FACTORS, 3), "so few rows cannot hold every triple"
    assert len(rows) <= 16


def test_no_row_is_there_twice_and_every_call_gives_the_same() -> None:
    rows = covering(FACTORS)
    assert len({tuple(row.values()) for row in rows}) == len(rows)
    assert rows == covering(FACTORS)


def test_with_no_more_factors_than_the_strength_it_is_the_product() -> None:
    two = {"a": (0, 1, 2), "b": ("x", "y")}
    by_values = lambda row: tuple(row.values())
    assert sorted(covering(two), key=by_values) == sorted(product(two), key=by_values)
    assert sorted(covering({"a": (2, 1)}), key=by_values) == [{"a": 1}, {"a": 2}]


def test_rows_that_are_not_allowed_stay_out_and_so_does_what_only_they_hold() -> None:
    allowed = lambda row: not (row["a"] == 2 and row["b"] == "y")
    rows = covering(SMALL, allowed=allowed)
    assert all(allowed(row) for row in rows)
    missing = not_covered(rows, SMALL, 3)
    assert missing, "nothing with both values is held"
    assert all(dict(zip(names, values)).items() >= {"a": 2, "b": "y"}.items() for names, values in missing)


def test_what_reshard_and_offload_take_holds_every_triple() -> None:
    assert not not_covered(covering(test_reshard.FACTORS), test_reshard.FACTORS, 3)
    factors, allowed = test_offload.FACTORS, test_offload.is_there
    rows = covering(factors, allowed=allowed)
    assert all(allowed(row) for row in rows) and len(rows) < 250
    # What is missing is what no stage allows: counted over the whole product, the same is missing.
    assert not_covered(rows, factors, 3) == not_covered(product(factors, allowed), factors, 3)
