"""docs/compatibility-tests.md names the tests that hold what it says: all exist, and every row has an answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "compatibility-tests.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", TEXT, flags=re.MULTILINE)


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_has_an_answer_and_a_test_or_says_not_yet() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 29))
    for number, _, answer, tests in ROWS:
        assert "::" in tests or answer.startswith("Not yet"), f"row {number}"


def test_everything_that_looks_like_a_test_was_read() -> None:
    assert TEXT.count("::test_") == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", TEXT))
