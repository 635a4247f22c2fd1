"""Assertions that cannot fail, found by reading the tests' own sources.

Each rule is a way in which a test has looked right and held nothing. The sources are parsed, not run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "tests").rglob("*.py"))


def always_true(test: ast.expr) -> str:
    """Why this expression after `assert` holds whatever happens, or nothing."""
    if isinstance(test, ast.IfExp):
        return "`assert a if b else c` checks c alone where b is false; write two assertions, or choose the value first"
    if isinstance(test, ast.Tuple):
        return "a tuple is always true"
    if isinstance(test, ast.JoinedStr) or (isinstance(test, ast.Constant) and test.value):
        return "a constant is always true"
    if isinstance(test, ast.GeneratorExp | ast.Lambda):
        return "a generator or a function is always true"
    if is_call(test, "all") and any(each.ifs for each in generators(test)):
        return "all() of what a filter lets through holds when nothing is let through; compare the set of values"
    return ""


def is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def generators(call: ast.AST) -> list[ast.comprehension]:
    """Of the comprehension that a call is given."""
    assert isinstance(call, ast.Call)
    return [each for arg in call.args if isinstance(arg, ast.GeneratorExp | ast.ListComp) for each in arg.generators]


def compares_with_itself(node: ast.Compare) -> bool:
    """Calls are let through: two calls of one function may well differ."""
    texts = [ast.unparse(part) for part in (node.left, *node.comparators)]
    calls = any(isinstance(each, ast.Call) for each in ast.walk(node))
    return not calls and any(one == other for one, other in pairwise(texts))


def ends_early(iterated: ast.expr) -> bool:
    """zip() without strict=True: it ends with the shortest, so that what is missing is never compared."""
    calls = [each for each in ast.walk(iterated) if is_call(each, "zip")]
    return any(len(each.args) > 1 and not each.keywords for each in calls if isinstance(each, ast.Call))


def compared_in_pairs(node: ast.AST) -> bool:
    """A loop or an all() that asserts something of each pair of a zip() that may end early."""
    if isinstance(node, ast.For) and any(isinstance(each, ast.Assert) for each in node.body):
        return ends_early(node.iter)
    return is_call(node, "all") and any(ends_early(each.iter) for each in generators(node))


def weak(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of everything in a test's source that can hide an error."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and always_true(node.test):
            yield node.lineno, always_true(node.test)
        elif isinstance(node, ast.Compare) and compares_with_itself(node):
            yield node.lineno, "a value is compared with itself"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
            yield node.lineno, "a comparison whose result nobody looks at"
        elif isinstance(node, ast.With) and any(is_call(item.context_expr, "pytest.raises") for item in node.items):
            if len(node.body) > 1:
                yield node.lineno, "one statement inside pytest.raises: with more, the wrong one may raise"
        elif compared_in_pairs(node):
            yield node.lineno, "zip() ends with the shortest: write strict=True"
        elif isinstance(node, ast.ExceptHandler) and any(is_call(each, "pytest.skip") for each in ast.walk(node)):
            yield node.lineno, "a test that skips when something raises never fails"


WEAK = {
    "a choice": "assert lines == 'a' if short else 'b'",
    "a tuple": "assert (x == 1, 'a message')",
    "a constant": "assert 'text'",
    "an f-string": "assert f'{x}'",
    "a generator": "assert (x == 1 for x in xs)",
    "a filter": "assert all(x == 1 for x in xs if x.name == 'step')",
    "itself": "assert found['a'] == found['a']",
    "itself, deep inside": "assert all(x.y == x.y for x in xs)",
    "no assert": "x == 1",
    "a short zip": "assert all(a == b for a, b in zip(found, wanted))",
    "a short zip in a loop": "for a, b in zip(found, wanted):\n    assert a == b",
    "many statements": "with pytest.raises(ValueError):\n    x = make()\n    x.use()",
    "a skip": "try:\n    run()\nexcept OSError:\n    pytest.skip('no disk')",
}
SOUND = [
    "assert lines == ('a' if short else 'b')",
    "assert x == 1, 'a message'",
    "assert False, 'never comes here'",
    "assert all(x == 1 for x in xs)",
    "assert {x for x in xs if x.name == 'step'} == {3}",
    "for a, b in zip(found, wanted, strict=True):\n    assert a == b",
    "assert hash_of(x) == hash_of(x)",
    "with pytest.raises(ValueError, match='x'):\n    make()",
    "try:\n    run()\nexcept OSError as error:\n    text = str(error)",
]


@pytest.mark.parametrize("source", WEAK.values(), ids=WEAK)
def test_each_rule_finds_its_kind(source: str) -> None:
    assert len(list(weak(source))) == 1


@pytest.mark.parametrize("source", SOUND)
def test_what_can_fail_is_left_alone(source: str) -> None:
    assert list(weak(source)) == []


def test_assertions_can_fail() -> None:
    assert Path(__file__).resolve() in SOURCES
    found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path in SOURCES for line, what in weak(path.read_text())]
    assert not found, "\n".join(found)
