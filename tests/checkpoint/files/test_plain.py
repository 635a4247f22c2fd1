"""Plain values come back as they were, type and bits; what cannot is refused when it is saved."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.plain import DTYPES, decode, encode

texts = st.one_of(st.text(), st.sampled_from(["$float", "$tuple", "$pairs", "$tensor", "$stored", "a/b"]))
numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(2**4000), 2**4000), st.floats(), texts)
keys = st.one_of(numbers, st.tuples(numbers, numbers))
trees = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    held: dict[str, Tensor] = {}

    def store(where: str, tensor: Tensor) -> str:
        held[where] = tensor
        return where

    text = json.dumps(encode(value, "it", store), allow_nan=False)
    return decode(json.loads(text), held.__getitem__)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return one == other


@settings(max_examples=400, deadline=None)
@given(trees)
def test_any_plain_value_comes_back_in_type_and_bits(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2, 2), (4, 5)])
def test_tensors_of_every_dtype_come_back_in_every_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    raw = torch.randint(0, 2 if name == "bool" else 120, (torch.Size(shape).numel() * dtype.itemsize,))
    value = raw.to(torch.uint8).view(dtype).reshape(shape)
    found = round_trip(value)
    assert found.dtype == dtype and found.shape == value.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_infinities_signed_zeros_and_the_smallest_come_back(name: str) -> None:
    dtype = DTYPES[name]
    value = torch.tensor(
        [math.inf, -math.inf, -0.0, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max], dtype=dtype
    )
    found = round_trip(value)
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    assert round_trip(torch.tensor(math.nan, dtype=dtype)).isnan()


@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_the_largest_unsigned_numbers_come_back(value: int) -> None:
    assert round_trip(torch.tensor([value], dtype=torch.uint64)).tolist() == [value]


def test_mappings_and_enums_come_back_as_plain_ones() -> None:
    class Color(enum.IntEnum):
        RED = 3

    assert round_trip(OrderedDict(a=Color.RED)) == {"a": 3}


def holds_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [object()]}, r"it/a\[0\] is a object"),
        ({1, 2}, "it is a set"),
        (b"bytes", "it is a bytes"),
        (10**5000, "an integer of 16610 bits"),
        (torch.eye(2).to_sparse(), "which a checkpoint cannot hold"),
        (torch.zeros(1, dtype=torch.complex128), "which a checkpoint cannot hold"),
        (holds_itself(), "nested too deep"),
    ],
    ids=["object", "set", "bytes", "integer", "sparse", "complex128", "itself"],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        encode(value, "it", lambda where, tensor: where)


def test_what_is_nested_as_deep_as_can_be_saved_can_be_loaded() -> None:
    value: Any = torch.tensor([1.0])
    for deep in range(200):
        try:
            encode(value, "it")
        except CheckpointError:
            break
        assert decode(encode(value, "it"), lambda name: torch.empty(0)) is not None
        value = [value] if deep % 2 else (value,)
    assert 60 <= deep < 70


MALFORMED: list[Any] = [
    {"$float": "1"}, {"$float": 1}, {"$float": []}, {"$tuple": {}}, {"$tuple": "ab"}, {"$pairs": [[1]]}, {"$pairs": 1},
    {"$pairs": [[[1], 2]]}, {"$stored": "nowhere"}, {"$tensor": 1}, {"$tensor": {}},
    {"$tensor": {"dtype": "object", "shape": [], "values": [1]}},
    {"$tensor": {"dtype": "float32", "shape": [2], "values": [1]}},
    {"$tensor": {"dtype": "float32", "shape": [-1, -1], "values": [1]}},
    {"$tensor": {"dtype": "float32", "shape": [2**70, 0], "values": []}},
    {"$tensor": {"dtype": "int8", "shape": [1], "values": [1000]}},
    {"$tensor": {"dtype": "float32", "shape": [1], "values": ["x"]}},
]  # fmt: skip


@pytest.mark.parametrize("value", MALFORMED, ids=[str(value)[:60] for value in MALFORMED])
def test_a_malformed_value_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(value, {}.__getitem__)
