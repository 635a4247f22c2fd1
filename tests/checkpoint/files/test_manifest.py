"""A manifest says again what it was told, and one that cannot be true is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.mutants import signed
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import (
    HEAD_NBYTES,
    Branch,
    FileInfo,
    Manifest,
    Stored,
    StoredPiece,
    branch_in,
    digest,
    parse,
)
from zeor.layout.boxes import Box, boxes_of_range

HASH = digest(b"")


def example() -> Manifest:
    files = [FileInfo("rank-00000.safetensors", 5000, [HASH, HASH]), FileInfo("rank-00001.safetensors", 100, [HASH])]
    weight = Stored(
        "param", "weight", (4, 5), "float32", [StoredPiece(0, Box((0, 0), (3, 5))), StoredPiece(1, Box((3, 0), (1, 5)))]
    )
    scalar = Stored("buffer", "count", (), "int64", [StoredPiece(0, Box((), ()))])
    empty = Stored("extra", "none", (0, 3), "bfloat16", [])
    branch = Branch("0123456789abcdef" * 2, 5, "f" * 32, "step-000000000003")
    return Manifest(7, 2, files, [weight, scalar, empty], {"extra": {"a": [1, 2.5, None, "\u00e9"]}}, 4096, branch)


def body() -> Any:
    return json.loads(example().to_bytes())["manifest"]


def test_what_is_written_is_read() -> None:
    data = example().to_bytes()
    assert parse(data, "it") == example()
    assert parse(data, "it").to_bytes() == data


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_any_cut_of_a_tensor_into_ranges_is_read(shape: list[int], data: st.DataObject) -> None:
    numel = 1
    for size in shape:
        numel *= size
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    boxes = [box for a, b in itertools.pairwise(cuts) for box in boxes_of_range(shape, a, b)]
    file = FileInfo("rank-00000.safetensors", 100 + 8 * numel, [HASH])
    stored = Stored("param", "w", tuple(shape), "float64", [StoredPiece(0, box) for box in boxes])
    assert parse(Manifest(0, 1, [file], [stored]).to_bytes(), "it").tensors == [stored]
    if len(boxes) > 1:
        gap = Stored("param", "w", tuple(shape), "float64", [StoredPiece(0, box) for box in boxes[1:]])
        with pytest.raises(CheckpointError, match="leave a gap"):
            parse(Manifest(0, 1, [file], [gap]).to_bytes(), "it")


WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("format",), "another", "of another format"),
    (("hash",), "md5", "of another format"),
    (("version",), 2, "has format version 2; this zeor reads version 1"),
    (("block_nbytes",), 1, "block_nbytes is '1'"),
    (("block_nbytes",), 1 << 40, "block_nbytes is 1099511627776, more than"),
    (("step",), -1, "step is '-1'"),
    (("step",), True, "step is 'True'"),
    (("world",), 0, "world is '0'"),
    (("state",), [], "its state is no object"),
    (("files", 1, "name"), "rank-00000.safetensors", "a file is listed twice"),
    (("files", 0, "name"), "../rank.safetensors", "no plain file name"),
    (("files", 0, "name"), "manifest.json", "no plain file name"),
    (("files", 0, "nbytes"), 20, "one hash per block"),
    (("files", 0, "blocks"), [HASH, "x"], "is no hash"),
    (("tensors", 0, "dtype"), "object", "the unknown dtype 'object'"),
    (("tensors", 0, "shape"), [2**40, 2**40], "an absurd shape"),
    (("tensors", 0, "shape"), [0, 2**60, 2**60], "an absurd shape"),
    (("tensors", 0, "pieces", 0, 0), 2, "lies in no listed file"),
    (("tensors", 0, "pieces", 0, 2), [4, 5], "overlap"),
    (("tensors", 0, "pieces", 0, 2), [2, 5], "leave a gap"),
    (("tensors", 0, "pieces", 0, 1), [0], "outside its shape"),
    (("tensors", 2, "pieces"), [[0, [0, 0], [0, 3]]], "outside its shape"),
    (("tensors", 1), {"role": "param", "name": "weight", "shape": [0], "dtype": "int8", "pieces": []}, "listed twice"),
    (("tensors", 0), 5, "TypeError"),
    (("files",), {}, "lies in no listed file"),
    (("branch",), None, "TypeError"),
    (("branch", "more"), 1, "TypeError"),
    (("branch", "id"), "", "its branch is none"),
    (("branch", "id"), 5, "its branch is none"),
    (("branch", "id"), "F" * 32, "its branch is none"),
    (("branch", "parent"), "x", "its branch is none"),
    (("branch", "parent"), None, "its branch is none"),
    (("branch", "parent_name"), "../x", "its branch comes from '../x'"),
    (("branch", "order"), 0, "the order of its branch is '0'"),
    (("branch", "order"), True, "the order of its branch is 'True'"),
    (("branch", "order"), 1 << 61, "the order of its branch is"),
]


def test_the_beginning_of_a_manifest_tells_its_branch() -> None:
    data = example().to_bytes()
    assert branch_in(data[:HEAD_NBYTES]) == example().branch
    old = dataclasses.replace(example(), branch=None)
    assert parse(old.to_bytes(), "it") == old and branch_in(old.to_bytes()[:HEAD_NBYTES]) is None
    for damaged in (b"", data[:50], b"x" + data[1:], data.replace(b'"order":5', b'"order":0')):
        with pytest.raises(ValueError):
            branch_in(damaged)


@pytest.mark.parametrize(("path", "value", "words"), WRONG, ids=[f"{path}={value}"[:50] for path, value, _ in WRONG])
def test_what_cannot_be_true_is_refused(path: tuple[Any, ...], value: Any, words: str) -> None:
    tree = changed = body()
    for key in path[:-1]:
        changed = changed[key]
    changed[path[-1]] = value
    with pytest.raises(CheckpointError, match="^it .*" + words):
        parse(signed(tree), "it")


@pytest.mark.parametrize(
    "key", ["format", "version", "hash", "block_nbytes", "step", "world", "files", "tensors", "state"]
)
def test_a_missing_field_is_refused(key: str) -> None:
    tree = body()
    del tree[key]
    with pytest.raises(CheckpointError, match=f"KeyError '{key}'"):
        parse(signed(tree), "it")


def test_a_file_shorter_than_what_it_holds_is_refused() -> None:
    tree = body()
    tree["tensors"][0]["pieces"] = [[1, [0, 0], [4, 5]]]
    tree["files"][1]["nbytes"] = 79
    with pytest.raises(CheckpointError, match="of 79 bytes is said to hold 80"):
        parse(signed(tree), "it")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b'"x"', b"\xff", b'{"manifest":{}}', b"[" * 100_000, b'{"manifest":1e999}']
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^it "):
        parse(data, "it")


def test_the_same_values_written_otherwise_are_refused() -> None:
    data = example().to_bytes()
    for other in (data + b" ", data.replace(b",", b", ", 1), data.replace(b'"step":7', b'"step":7,"step":7')):
        with pytest.raises(CheckpointError, match="does not match its own hash"):
            parse(other, "it")
