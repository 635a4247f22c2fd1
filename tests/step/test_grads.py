"""A lane's gradients: the states they go through, and that each field is written by the class that owns it alone.

The sources are parsed, not imported. What counts as a write: an assignment to an attribute or an element, `del`,
`setattr`, and a method that changes a list, a dictionary, a set or a tensor in place. Names are followed inside one
function: `has = lane.grads.has; has[0] = True` is found too.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zeor
from tests import loops, offloads
from tests.parity.models import Setting, placed
from zeor.memory.buffers import Ledger
from zeor.step import grads as module
from zeor.step.grads import State

OWNER = Path(module.__file__)
PACKAGE = OWNER.parents[1]
PARTS = {"_arrival", "_reduction", "_sum"}  # of a GradLane
CHANGES = {
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard",
    "sort", "reverse", "difference_update", "intersection_update",
}  # fmt: skip


def writes(source: str, roots: set[str]) -> list[int]:
    """Lines that write through `x.grads`, for each of these attributes, or through a name that is bound to one."""
    nodes = ast.walk(ast.parse(source))
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return sorted({line for function in functions for line in _writes_in(function, roots)})


def _writes_in(scope: ast.AST, roots: set[str]) -> Iterator[int]:
    names = _names(scope, roots)
    for node in ast.walk(scope):
        for target in _targets(node):
            if isinstance(target, (ast.Attribute, ast.Subscript)) and _reaches(target.value, names, roots):
                yield target.lineno
        changed = _changed(node) if isinstance(node, ast.Call) else None
        if changed is not None and _reaches(changed, names, roots):
            yield node.lineno


def _changed(call: ast.Call) -> ast.expr | None:
    """What a call changes, as far as the name of the function tells."""
    if isinstance(call.func, ast.Name):
        return call.args[0] if call.func.id == "setattr" else None
    if not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    return call.func.value if name in CHANGES or (name.endswith("_") and not name.endswith("__")) else None


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement writes, tuples taken apart."""
    found: list[Any] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        found = [node.target]
    while found:
        each = found.pop()
        if isinstance(each, (ast.Tuple, ast.List)):
            found += each.elts
        else:
            yield each


def _reaches(node: ast.expr, names: set[str], roots: set[str]) -> bool:
    """A chain of attributes and elements that goes through a root. What a method returns is the caller's."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and node.attr in roots:
            return True
        node = node.value
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "ready_grads"
    return isinstance(node, ast.Name) and node.id in names


def _names(scope: ast.AST, roots: set[str]) -> set[str]:
    """Names bound to what goes through a root: by assignment, a loop, or an annotation."""
    found: set[str] = set()
    for _ in range(3):  # a name of a name
        for node in ast.walk(scope):
            annotation = node.annotation if isinstance(node, ast.arg) else None
            if annotation is not None and ast.unparse(annotation).split(" | ")[0] == "GradLane":
                found.add(node.arg)  # type: ignore[attr-defined]
            for target, value in _bindings(node):
                if isinstance(target, ast.Name) and value is not None and _reaches(value, found, roots):
                    found.add(target.id)
    return found


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        pairs = [(node.target, node.value)]
    elif isinstance(node, (ast.For, ast.comprehension)):
        several = isinstance(node.iter, (ast.GeneratorExp, ast.ListComp, ast.SetComp))
        pairs = [(node.target, node.iter.elt if several else node.iter)]  # type: ignore[attr-defined]
    for target, value in pairs:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts)
        else:
            yield target, value


FOUND = """
def one(slot, unit, factor):
    slot.lane.grads.has[0] = True
    slot.lane.grads.released = True
    lane, grads = slot.lane, slot.lane.grads
    grads.scales[0], other = None, 1
    grads.folds += 1
    has = grads.has
    has[1] = True
    grads.partial.mul_(2)
    grads._sum.held.clear()
    slot.ready_grads().scales.append(None)
    setattr(grads, "folds", 2)
    for each in (lane.grads for lane in unit.lanes):
        each.reader = None

def two(lane: GradLane | None):
    del lane.parts[0]
"""
ALLOWED = """
def three(lane, tiers, grads: list):
    lane.grads = GradLane()
    lane.grads.drop(0)
    lane.grads.local(0).zero_()
    lane.behind = lane.grads.has[0]
    found = [lane.grads.scales[0]]
    found.append(1)
    grads.append(tiers.grads)
    grads[0] = None
"""


def test_the_search_finds_every_kind_of_write_and_nothing_else() -> None:
    wanted = [number for number, line in enumerate(FOUND.splitlines(), 1) if line and "def " not in line]
    wanted = [number for number in wanted if number not in (5, 8, 14)]  # names are bound, nothing is written
    assert writes(FOUND, {"grads"}) == wanted
    assert writes(ALLOWED, {"grads"}) == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nobody_else_writes_a_field_of_a_lanes_gradients(path: Path) -> None:
    if path != OWNER:
        assert writes(path.read_text(), {"grads", *PARTS}) == []


def test_each_part_of_a_lanes_gradients_writes_its_own_fields_alone() -> None:
    """Inside grads.py: nobody writes through a part, and what a GradLane shows of its parts it never changes."""
    source = OWNER.read_text()
    assert writes(source, PARTS) == []
    [lane] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "GradLane"]
    first, *others = [node for node in lane.body if isinstance(node, ast.FunctionDef)]
    assert first.name == "__init__"
    own = [target.attr for node in ast.walk(first) for target in _targets(node) if isinstance(target, ast.Attribute)]
    assert not {*PARTS, "has", "scales", "pending"} - set(own)
    assert [line for method in others for line in writes(ast.unparse(method), set(own))] == []
    targets = [target for method in others for node in ast.walk(method) for target in _targets(node)]
    assert not [target.lineno for target in targets if _is_of_self(target)]
    assert writes("def f(self):\n    total = self._sum\n    total.has[0] = True", PARTS) == [3]


def _is_of_self(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def states(model: Any) -> set[State]:
    units = zeor.api._state(model).engine.units
    return {lane.grads.state for unit in units for lane in unit.lanes if lane.grads is not None}


def live(stage: int) -> None:
    """A gradient's life, from nothing to nothing."""
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage, offload=zeor.Offload(grads="host") if stage > 1 else None)
    there = State.RESTING if stage > 1 else State.SUMMED
    assert states(model) == {State.EMPTY}
    with zeor.no_sync(model):
        loops.own_loss(model, 0).backward()
    assert states(model) == {State.UNREDUCED}
    loops.own_loss(model, 1).backward()
    assert states(model) == {there}
    zeor.clip_grad_norm_(model, 1e-3)
    with zeor.full_params(model, grads=True):
        assert all(param.grad is not None for param in model.parameters())
    assert states(model) == {State.SUMMED}  # whoever reads it brings it back
    optimizer.zero_grad()
    assert states(model) == {State.EMPTY}
    loops.own_loss(model, 2).backward()
    assert states(model) == {there}


def use_up() -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=2, release=True)
    loops.own_loss(model, 0).backward()
    assert states(model) == {State.RELEASED}
    optimizer.step()
    optimizer.zero_grad()
    assert states(model) == {State.EMPTY}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_states_of_a_lanes_gradients(ranks, stage, world):
    ranks(live, world, stage)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_released_until_they_are_dropped(ranks, world):
    ranks(use_up, world)


def uses(flat: torch.Tensor) -> int:
    """How many tensors lie over its memory."""
    return torch._C._storage_Use_Count(flat.untyped_storage()._cdata)


def given_back(stage: Any, wire: Any) -> tuple[int, list[int]]:
    """The uses of a buffer that nobody has, and of each one that gradients arrived in as it is given back."""
    give, seen = module.Arrival.give_buffer, []
    ledger = Ledger()  # it has one of them
    free = uses(ledger.take("grad", 8, torch.float32, torch.device("cpu")))

    def giving(arrival: module.Arrival) -> None:
        if arrival.buffer is not None:
            until = time.monotonic() + 10.0  # Gloo's thread lets go of what was sent a moment after the wait for it
            while uses(arrival.buffer) > free and time.monotonic() < until:
                time.sleep(0.001)
            seen.append(uses(arrival.buffer))
        give(arrival)

    where = {"stage": stage} if isinstance(stage, int) else placed(Setting(stage, shape=(2, 2)))
    with mock.patch.object(module.Arrival, "give_buffer", giving):
        model, optimizers = offloads.made(wire=wire, keep_whole=30, **where)
        offloads.one_step(model, optimizers, 0, "plain")
    return free, seen


@pytest.mark.parametrize(
    "stage, wire",
    [(2, zeor.PowerSGD(2, warmup=0)), ((2, 2), None), ((2, 2), zeor.Wire(across=zeor.PowerSGD(2, warmup=0)))],
    ids=str,
)
def test_nothing_lies_over_a_buffer_that_is_given_back(ranks, stage, wire):
    """An accelerator's memory is free only then."""
    for free, seen in ranks(given_back, 4 if stage == (2, 2) else 2, stage, wire):
        assert seen and set(seen) == {free}
