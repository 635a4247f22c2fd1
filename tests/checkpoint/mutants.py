"""Seeded mutations of bytes and of JSON trees: what a broken disk, a bug or an attacker would make of a checkpoint."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from zeor.checkpoint.manifest import digest


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ABSURD: list[Any] = [
    None, True, False, -1, 0, 1, 7, 2**31, 2**40, 2**60, 2**63, 2**64 + 1, 10**30, 1.5, -0.0, 1e308, 5e-324,
    "", "a", "nan", "../../etc/passwd", "/etc/passwd", "..", "x/../y.safetensors", "\u0000", "x" * 5000, "float32",
    [], {}, [[]], [0], [-1], [2**62], [0, 2**62], ["a", 2**40], [None], {"a": 1}, nested(70), nested(300),
    {"$float": "x"}, {"$float": []}, {"$stored": "nowhere"}, {"$stored": []}, {"$stored": "extra/tensor"},
    {"$tuple": 3}, {"$tuple": [1]}, {"$pairs": [[[], 1]]}, {"$pairs": [1]}, {"$pairs": [[1, 2]]},
    {"$tensor": {"dtype": "float32", "shape": [2**40], "values": []}},
    {"$tensor": {"dtype": "float32", "shape": [2**40, 0], "values": []}},
    {"$tensor": {"dtype": "float32", "shape": [1], "values": [{"$tuple": []}]}},
    {"$tensor": {"dtype": "int8", "shape": [1], "values": [10**9]}},
    {"$tensor": {"dtype": "float32", "shape": [2], "values": [1, 2]}},
]  # fmt: skip


def mutated_bytes(data: bytes, source: random.Random) -> bytes:
    """Never the same."""
    changed = bytearray(data)
    at, end = sorted(source.randrange(len(data)) for _ in range(2))
    match source.randrange(7):
        case 0:
            changed[at] ^= 1 << source.randrange(8)
        case 1:
            changed[at] = source.randrange(256)
        case 2:
            del changed[at:]
        case 3:
            del changed[at : min(end, at + 40) + 1]
        case 4:
            changed += source.randbytes(source.randrange(1, 50))
        case 5:
            changed[at:at] = data[at : min(end, at + 40) + 1]
        case _:
            changed[at : at + 4] = bytes(4)
    return bytes(changed) if changed != data else mutated_bytes(data, source)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value but the root."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutated_tree(tree: Any, source: random.Random, where: list[tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
    """(a changed copy, where it was changed). `where` is list(places(tree))."""
    changed = json.loads(json.dumps(tree))  # quicker than deepcopy
    path = source.choice(where)
    parent, key = _at(changed, path[:-1]), path[-1]
    value = parent[key]
    match source.randrange(8):
        case 0:
            del parent[key]
        case 1 | 2:
            parent[key] = copy.deepcopy(source.choice(ABSURD))
        case 3:
            parent[key] = copy.deepcopy(_at(tree, source.choice(where)))
        case 4 if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(value))
        case 5 if isinstance(parent, list):
            other = source.randrange(len(parent))
            parent[key], parent[other] = parent[other], parent[key]
        case 4 | 5:
            parent[source.choice(["a", "$tuple", "name", f"{key}x"])] = parent.pop(key)
        case _:
            parent[key] = _near(value, source)
    return changed, path


def _near(value: Any, source: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return source.choice([value + 1, value - 1, value * 2, -value, value * 1000003])
    if isinstance(value, str) and value:
        at = source.randrange(len(value))
        return value[:at] + source.choice("a0/.@,\u00e9") + value[at + 1 :]
    return copy.deepcopy(source.choice(ABSURD))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def signed(body: Any) -> bytes:
    """A manifest whose own hash fits: made with intent."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return signed_text(text)


def signed_text(text: bytes) -> bytes:
    return b'{"hash":"' + digest(text).encode() + b'","manifest":' + text + b"}\n"
