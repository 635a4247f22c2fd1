"""The house: a folder imports only from folders above it, and names say what is inside.

The sources are parsed, not imported, so an import inside a function counts too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zeor"
# From the leaves down; what stands in a row may import from the rows before it and from its own folder.
ORDER = [
    {"plan", "data"}, {"layout"}, {"memory"}, {"tiers"}, {"comm"}, {"model"}, {"spec"}, {"step"}, {"access"},
    {"features"}, {"optim"}, {"checkpoint"}, {"planner"}, {"replan"}, {"parallel"}, {"tools"},
    {"integrations"},
]  # fmt: skip
# Sub-packages of a folder, in the same way: each may import from those before it, none from its folder's own modules.
PARTS = {
    "comm": ["launch"],
    "optim": ["owners", "parts", "kernels", "streaming"], "checkpoint": ["files", "weights"], "tools": ["importers"],
}  # fmt: skip
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}
EMPTY_WORDS = {"utils", "util", "common", "misc", "helpers", "helper"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def place(path: Path) -> str:
    """The folder of a module inside zeor, or its own name where it lies at the top."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, what of zeor is imported), as 'step.lane' or 'api'; '' for zeor itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "zeor":
                    yield node.lineno, alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            module = (node.module or "").split(".")
            if module == ["zeor"]:
                for alias in node.names:
                    is_module = (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").exists()
                    yield node.lineno, alias.name if is_module else ""
            elif module[0] == "zeor":
                for alias in node.names:
                    yield node.lineno, ".".join([*module[1:], alias.name])


def may_import(importer: str, target: str) -> bool:
    if importer in ("__init__", "tools"):
        return target != "integrations"  # the public names, and the command line that is written with them
    if importer == "integrations":
        return target != "tools"  # written with the public names, as a user would
    if importer == "api":
        return target not in ("", "__init__", "tools", "integrations")
    if target not in RANKS:
        return False  # zeor itself, or api
    same_leaf = importer in ORDER[0] and importer != target
    return not same_leaf and RANKS[target] <= RANKS[importer]


def may_import_inside(importer: tuple[str, ...], target: list[str]) -> bool:
    """Of modules in one folder, both by their path in zeor: what a module of a sub-package may import there."""
    parts = PARTS.get(importer[0], [])
    if len(importer) < 3 or target[0] != importer[0]:
        return True
    return target[1] in parts[: parts.index(importer[1]) + 1]


def module_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_rules_themselves() -> None:
    assert may_import("step", "comm") and may_import("step", "step") and may_import("api", "planner")
    assert not may_import("comm", "step") and not may_import("step", "features") and not may_import("layout", "memory")
    assert not may_import("optim", "api") and not may_import("planner", "") and not may_import("api", "tools")
    assert may_import("integrations", "") and not may_import("api", "integrations")
    assert not may_import("tools", "integrations") and not may_import("integrations", "tools")
    assert not may_import("plan", "data") and may_import("tools", "api")
    inside = lambda importer, target: may_import_inside(tuple(importer.split(".")), target.split("."))
    assert inside("checkpoint.save", "checkpoint.files.disk") and inside("checkpoint.files.disk", "comm.axes.Axis")
    assert inside("checkpoint.weights.export", "checkpoint.files.disk")
    assert not inside("checkpoint.files.disk", "checkpoint.weights.export")
    assert not inside("checkpoint.files.disk", "checkpoint.save")
    assert inside("optim.stepper", "optim.kernels.run") and inside("optim.parts.probe", "comm.axes.Axis")
    assert inside("optim.streaming.auto", "optim.kernels.run")
    assert not inside("optim.kernels.run", "optim.streaming.auto")
    assert not inside("optim.kernels.run", "optim.stepper")


def test_every_folder_has_its_place_in_the_order() -> None:
    places = {place(path) for path in SOURCES} - {"__init__", "api"}
    assert places <= set(RANKS), f"give {sorted(places - set(RANKS))} a place in ORDER"
    inner = {path.parent.relative_to(PACKAGE).parts for path in SOURCES} - {(), *((name,) for name in places)}
    assert inner == {(name, part) for name, parts in PARTS.items() for part in parts}
    assert all((PACKAGE.joinpath(*parts) / "__init__.py").is_file() for parts in inner)


@pytest.mark.parametrize("path", SOURCES, ids=module_id)
def test_a_folder_imports_only_from_folders_above_it(path: Path) -> None:
    importer = place(path)
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    wrong = [
        f"line {line}: zeor.{target}"
        for line, target in imported(path)
        if not (may_import(importer, target.split(".")[0]) and may_import_inside(inside, target.split(".")))
    ]
    assert not wrong, f"{module_id(path)} may not import {', '.join(wrong)}"


def test_no_two_modules_import_each_other() -> None:
    """Neither at run time nor for a type."""
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in SOURCES}

    def module(target: str) -> str:
        while target and target not in names:
            target = target.rpartition(".")[0]
        return target

    edges = {name: {module(target) for _, target in imported(path)} - {"", name} for name, path in names.items()}
    for name in edges:
        reached, ahead = set(), list(edges[name])
        while ahead:
            each = ahead.pop()
            if each not in reached:
                reached.add(each)
                ahead += edges[each]
        assert name not in reached, f"zeor.{name} imports what imports it"


@pytest.mark.parametrize("path", SOURCES, ids=module_id)
def test_modules_say_what_they_hold(path: Path) -> None:
    text = path.read_text()
    assert path.stem not in EMPTY_WORDS
    assert not EMPTY_WORDS & set(path.relative_to(PACKAGE).parts[:-1])
    assert ast.get_docstring(ast.parse(text)), "a module begins with what it holds"


def test_only_one_file_speaks_of_cuda() -> None:
    """Device code goes through torch.accelerator and memory/; kernels are written for one kind of device."""
    allowed = {"memory/device.py", "optim/kernels/triton.py"}
    for path in SOURCES:
        if str(path.relative_to(PACKAGE)) not in allowed:
            attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            assert not [node.lineno for node in attributes if node.attr == "cuda"], module_id(path)
