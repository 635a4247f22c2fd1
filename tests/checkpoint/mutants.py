"""Seeded mutations of bytes and of JSON trees: what a broken disk, a bug or an attacker would make of a checkpoint."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import torch

from zeor.checkpoint.files.manifest import digest


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


# ---- an optimizer's state, changed with care: every hash fits, and files say what the manifest says

OTHER_NUMBERS: list[Any] = [
    7, -1, 0, 2.0, -3.5, 2.5, True, None, "2", "", [], {}, [1], 2**70, 1e30,
    {"$float": "nan"}, {"$float": "inf"}, {"$tuple": [2.0]}, {"$stored": "extra/tensor"}, {"$pairs": []},
    *({"$tensor": {"dtype": dtype, "shape": shape, "values": values}} for dtype, shape, values in [
        ("float32", [], [9.0]), ("float32", [], [-1.0]), ("float32", [], [{"$float": "nan"}]), ("float64", [], [2.0]),
        ("int64", [], [2]), ("int32", [], [-5]), ("bool", [], [True]), ("float32", [1], [2.0]), ("bfloat16", [], [2.0]),
        ("float32", [2], [2.0, 2.0]), ("float32", [0], []), ("uint8", [], [2]), ("float32", [], [2.5])]),
]  # fmt: skip
OTHER_SETTINGS: list[Any] = [
    *OTHER_NUMBERS, 0.5, 1, False, {"$tuple": []}, {"$tuple": [0.9]}, {"$tuple": [0.9, 0.99, 0.999]}, [0.8, 0.9],
    {"$tuple": [0.8, "x"]}, {"$tuple": [1.9, 0.9]}, {"$tuple": [None, 0.001]}, {"$tuple": [True, 0.9]}, {"a": 1},
    {"$tensor": {"dtype": "float32", "shape": [], "values": [0.25]}},
]  # fmt: skip
OTHER_PATHS: list[Any] = [["exp_avg", 0], ["step"], ["exp_avg", "x"], [], [0], "step", None, ["steps"], [2**40]]


def mutated_state(body: Any, tensors: dict[Any, Any], source: random.Random) -> tuple[Any, dict[Any, Any], str]:
    """(a changed manifest, changed tensors by role and name, what was done). `tensors` are those of optimizers."""
    body, tensors = json.loads(json.dumps(body)), dict(tensors)
    entry = body["state"]["optimizers"][0]
    if source.random() < 0.35:
        return body, tensors, _mutate_tensor(body, entry, tensors, source)
    return body, tensors, _mutate_values(body, entry, source)


def _mutate_values(body: Any, entry: Any, source: random.Random) -> str:
    scalars = [(name, pair) for name, pairs in entry["scalars"].items() for pair in pairs]
    group = source.choice(entry["groups"])
    ways = ["number", "setting", "setting", "path", "lost", "settings", "groups", "entry", "beside", "any"]
    what = source.choice(ways)
    if what == "number" and scalars:
        name, pair = source.choice(scalars)
        pair[1] = copy.deepcopy(source.choice(OTHER_NUMBERS))
        return f"{pair[0]} of {name} is {pair[1]}"
    if what == "path" and scalars:
        name, pair = source.choice(scalars)
        before, pair[0] = pair[0], copy.deepcopy(source.choice(OTHER_PATHS))
        return f"{before} of {name} is at {pair[0]}"
    if what == "lost" and entry["scalars"]:
        name = source.choice(list(entry["scalars"]))
        other = source.choice([None, "head.other", *entry["scalars"]])
        pairs = entry["scalars"].pop(name)
        if other is not None:
            entry["scalars"][other] = pairs
        return f"numbers of {name} are those of {other}"
    if what in ("setting", "number", "path", "lost"):
        key = source.choice(list(group["settings"]))
        group["settings"][key] = copy.deepcopy(source.choice(OTHER_SETTINGS))
        return f"{key} is {group['settings'][key]}"
    if what == "settings":
        key = source.choice(list(group["settings"]))
        other = source.choice([None, f"{key}x", "params", "param_names", *group["settings"]])
        value = group["settings"].pop(key)
        if other is not None:
            group["settings"][other] = value
        return f"{key} becomes {other}"
    if what == "groups":
        return _mutate_groups(entry, group, source)
    holder: Any = body["state"] if what == "beside" else entry
    if what == "any":
        changed, path = mutated_tree(entry, source, list(places(entry)))
        body["state"]["optimizers"][0] = changed
        return f"something at {path}"
    key = source.choice([key for key in holder if what != "beside" or key != "optimizers"])
    holder[key] = copy.deepcopy(source.choice(ABSURD))
    return f"{key} is {str(holder[key])[:40]}"


def _mutate_groups(entry: Any, group: Any, source: random.Random) -> str:
    what = source.choice(["without", "twice", "named", "dropped", "doubled", "turned", "order"])
    names = group["params"]
    if what in ("without", "named", "twice") and names:
        at = source.randrange(len(names))
        names[at : at + 1] = {"without": [], "named": ["head.other"], "twice": [names[at]] * 2}[what]
    elif what == "dropped":
        entry["groups"].remove(group)
    elif what == "doubled":
        entry["groups"].append(copy.deepcopy(group))
    elif what == "order":
        names.reverse()
    else:
        entry["groups"].reverse()
    return f"groups are {what}"


def _mutate_tensor(body: Any, entry: Any, tensors: dict[Any, Any], source: random.Random) -> str:
    """One tensor of an optimizer's state: its kind, shape, name, or that it is there."""
    role, name = source.choice(list(tensors))
    value = tensors.pop((role, name))
    what = source.choice(["kind", "kind", "shape", "shape", "length", "gone", "name", "role", "again", "values"])
    if what == "kind":
        dtype = source.choice(["float64", "bfloat16", "float16", "int32", "int64", "bool", "uint8"])
        tensors[role, name] = value.to(getattr(torch, dtype))
        return f"{role} of {name} is {dtype}"
    if what == "shape":
        shape = source.choice([[value.numel()], [1, *value.shape], [*value.shape, 1], list(reversed(value.shape))])
        tensors[role, name] = value.reshape(shape)
    elif what == "length":
        tensors[role, name] = value.reshape(-1)[: source.randrange(value.numel() + 1)].clone()
    elif what == "name":
        tensors[role, source.choice(["head.other", *(n for _, n in tensors)])] = value
    elif what == "role":
        other = source.choice(["optimizer.0.other", "optimizer.0.step", "optimizer.1.exp_avg", "extra", role + "/0"])
        tensors[other, name] = value
        if source.random() < 0.7:
            entry["keys"][other] = [*other.removeprefix("optimizer.0.").split("/")]
    elif what == "again":
        tensors[role, name], tensors[role + "x", name] = value, value.clone()
        entry["keys"][role + "x"] = [*entry["keys"][role][:-1], str(entry["keys"][role][-1]) + "x"]
    elif what == "values":
        tensors[role, name] = value * 3 + 1
    return f"{role} of {name}: {what}"
