"""What `make test` leaves to `make test-all` is there, and what stays is spread over the whole list."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from tests.selection import SOME, kept, kept_stages

TESTS = Path(__file__).parent


def test_cases_that_stay_are_spread_evenly():
    assert kept(0, 5) == set()
    assert kept(1, 5) == {0}
    assert kept(3, 5) == {0, 2, 4}
    assert kept(9, 4) == {0, 1, 2, 3}
    for total in range(2, 40):
        for count in range(2, total + 1):
            stay = sorted(kept(count, total))
            assert len(stay) == count and stay[0] == 0 and stay[-1] == total - 1
            gaps = {after - before for before, after in itertools.pairwise(stay)}
            assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("file", sorted(SOME))
def test_every_test_of_the_table_exists(file):
    names = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert set(SOME[file]) <= names


def test_both_pairs_of_stages_stay_somewhere():
    names = [f"tests/some/test_file.py::test_{number}" for number in range(60)]
    pairs = [kept_stages(name) for name in names]
    assert {frozenset(pair) for pair in pairs} == {frozenset({1, 3}), frozenset({0, 2})}
    assert 10 <= sum(pair == {0, 2} for pair in pairs) <= 30
