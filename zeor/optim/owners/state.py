"""The state of a parameter that an owner computes, brought to every rank.

An owner's state may be of any shape and nesting (a row's statistics, a list of preconditioners). First its
description travels, as JSON; then each tensor in it, from the owner's memory. Knows nothing of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.comm.mesh import Mesh
from zeor.optim.owners.owners import Owned


def state_from_owner(owned: Owned, state: dict[str, Any]) -> dict[str, Any]:
    """The owner's state of one parameter, on every rank; a collective. `state` counts on the owner alone."""
    mesh, name = owned.slot.lane.mesh, owned.slot.name
    mine = _describe(state, name) if mesh.rank == owned.owner else None
    everyone = exchange(mesh, mine, f"exchange about the optimizer's state of {name!r}")
    refused = _first_refusal(everyone[owned.owner])
    if refused:  # on every rank, so that none is left waiting
        raise RuntimeError(refused)
    label = f"broadcast of the optimizer's state of {name!r}"
    return _build(mesh, owned.owner, everyone[owned.owner], state if mesh.rank == owned.owner else None, label)


def _describe(value: Any, name: str) -> list[Any]:
    if type(value) is Tensor:
        dtype = str(value.dtype).removeprefix("torch.")
        where = value.device.type == "cpu"  # step counters stay on the host
        return ["tensor", dtype, list(value.shape), where]
    if isinstance(value, dict):
        return ["dict", [[key, _describe(part, name)] for key, part in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["tuple" if isinstance(value, tuple) else "list", [_describe(part, name) for part in value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    refused = (
        f"The optimizer keeps a {type(value).__name__} in its state of {name!r}, which zeor cannot bring to other "
        "ranks; continue sharded, or take the values alone inside zeor.full_params."
    )
    return ["refused", refused]


def _first_refusal(described: list[Any]) -> str:
    kind = described[0]
    if kind == "refused":
        return described[1]
    parts = {"dict": lambda: [p for _, p in described[1]], "list": lambda: described[1], "tuple": lambda: described[1]}
    return next(filter(None, map(_first_refusal, parts[kind]() if kind in parts else ())), "")


def _build(mesh: Mesh, owner: int, described: list[Any], value: Any, label: str) -> Any:
    """What was described, as a value: the owner's own, or memory the owner's tensors are sent into."""
    kind, rest = described[0], described[1:]
    if kind == "plain":
        return rest[0]
    if kind == "dict":
        have = value or {}
        return {key: _build(mesh, owner, part, have.get(key), label) for key, part in rest[0]}
    if kind in ("list", "tuple"):
        parts = [_build(mesh, owner, p, None if value is None else value[i], label) for i, p in enumerate(rest[0])]
        return tuple(parts) if kind == "tuple" else parts
    dtype, shape, on_host = getattr(torch, rest[0]), rest[1], rest[2]
    sent = torch.empty(shape, dtype=dtype, device=mesh.device)
    if value is not None:
        sent.copy_(value)
    verbs.broadcast(mesh, sent, label, owner)
    return sent.cpu() if on_host else sent
