"""Placement with offload="auto": which lanes' state goes to which tier, given what there is room for. Integers only.

The device is filled first, then the host, then the disk. Updates that follow backward all begin together, and forward
needs their results one after the other: the last lanes have the most time to travel, so these are the ones that rest
furthest away. Updates inside backward (release=True) each have about as long as their unit takes: there tiers alternate
in proportion along the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Room(NamedTuple):
    """Bytes each tier may still take."""

    device: int
    host: int
    disk: int


def size(nbytes: float) -> str:
    """For people: GiB, or MiB where that is more telling."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"


def choose(needs: Sequence[int], room: Room, spread: bool) -> list[str]:
    """A tier for each lane, in the order of forward, whose state takes so many bytes. `spread`: tiers alternate.
    ValueError with the numbers where they do not fit."""
    total = sum(needs)
    places: list[str | None] = [None] * len(needs)
    left = total
    for tier, nbytes in room._asdict().items():
        share = min(1.0, max(0, nbytes) / left) if spread and left else 1.0
        _fill(needs, places, tier, max(0, nbytes), share)
        left = sum(need for need, place in zip(needs, places) if place is None)
        if not left:
            return [str(place) for place in places]
    device, host, disk = (size(max(0, nbytes)) for nbytes in room)
    raise ValueError(
        f"The optimizer's state takes {size(total)} on this rank, but there is room for {device} on the device, "
        f"{host} on the host and {disk} on disk; allow more (device_budget=, host_budget=, folder= of "
        "zeor.Offload), use moments='int8', or more ranks."
    )


def _fill(needs: Sequence[int], places: list[str | None], tier: str, nbytes: int, share: float) -> None:
    """Give a tier some of the lanes that have no place: first by its share as they come, then whatever still fits."""
    passed = given = 0
    for number, need in enumerate(needs):
        if places[number] is None:
            passed += need
            if given + need <= min(nbytes, share * passed + need / 2):
                places[number], given = tier, given + need
    for number, need in enumerate(needs):
        if places[number] is None and given + need <= nbytes:
            places[number], given = tier, given + need
