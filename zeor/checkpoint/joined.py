"""The plain values that ranks tell of a run, put together: what a manifest says beside its tensors.

Every rank tells of the optimizers' state that it writes; the first rank of a model, or of each stage of a pipeline, of
parameters and groups. Stages have an optimizer each, of the same class and with groups in the same order: the groups of
the whole model are theirs, one by one put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def joined(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`values`: of each rank, in rank order."""
    leads = sorted((rank for rank in values if "model" in rank), key=lambda rank: int(rank["model"]["first"]))
    readers = sorted((rank for rank in values if rank["reads"] is not None), key=lambda rank: int(rank["reads"]))
    return {
        **_model([lead["model"]["said"] for lead in leads]),
        **_wires(leads),
        "optimizers": [_optimizer(number, leads, values) for number in range(len(leads[0].get("optimizers", [])))],
        "rng": [rank.get("rng") for rank in values],
        "data": [rank.get("data") for rank in readers],
        "extra": values[0].get("extra", {}),
    }


def _model(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    params, aliases = {}, {}
    residual: dict[str, Any] = next((each for each in said if "averaged_over" in each), {})  # not always the first's
    averaged: dict[str, Any] = {name: residual[name] for name in ("averaged_over", "counted") if name in residual}
    for each in said:
        params.update({name: about for name, about in each["params"].items() if name not in params})
        aliases.update(each["aliases"])
    first = {name: value for name, value in said[0].items() if name != "wire"}
    return {**first, **averaged, "params": params, "aliases": aliases}


def _wires(leads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What wire="auto" has chosen: each stage for itself, by its number."""
    found = {str(lead["model"]["first"]): lead["model"]["said"].get("wire") for lead in leads}
    chosen = {first: wire for first, wire in found.items() if wire is not None}
    if not chosen:
        return {}
    return {"wire": next(iter(chosen.values()))} if len(leads) == 1 else {"wires": chosen}


def _optimizer(number: int, leads: Sequence[dict[str, Any]], values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged = {**leads[0]["optimizers"][number], "keys": {}, "scalars": {}}
    merged["groups"] = _groups([lead["optimizers"][number]["groups"] for lead in leads])
    for rank in values:
        merged["keys"].update(rank["optimizers"][number]["keys"])
        merged["scalars"].update(rank["optimizers"][number]["scalars"])
    return merged


def _groups(stages: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Groups at the same place with the same settings are one; one that is empty in a stage is whichever it is
    elsewhere. Of a parameter that is tied across stages the first one's group counts."""
    found: list[dict[str, Any]] = []
    places: list[int] = []  # of each, in its stage
    known: set[str] = set()
    for groups in stages:
        for place, group in enumerate(groups):
            params = [name for name in group["params"] if name not in known]
            known.update(params)
            at = next((n for n, other in enumerate(found) if places[n] == place and _are_one(other, group)), None)
            if at is None:
                found.append({**group, "params": params})
                places.append(place)
                continue
            settings = group["settings"] if params and not found[at]["params"] else found[at]["settings"]
            found[at] = {**found[at], "params": [*found[at]["params"], *params], "settings": settings}
    return [found[n] for n in sorted(range(len(found)), key=lambda n: places[n])]


def _are_one(group: dict[str, Any], other: dict[str, Any]) -> bool:
    return not group["params"] or not other["params"] or group["settings"] == other["settings"]
