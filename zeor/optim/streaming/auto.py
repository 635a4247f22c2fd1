"""Automatic placement: the device is filled first, then the host, then the disk.

Decided at the first update, when one forward (and, but for release=True, one backward) has shown what the model's own
activations take: what is left of the device's memory, or of `device_budget`, goes to the state of as many lanes as
fit (`choose`). After the second step the peak is compared with what was expected, and lanes are
moved once if it is too high; the same after memory ran out. Each rank decides for itself: where state rests changes no
bit.

Note [Who goes furthest]
~~~~~~~~~~~~~~~~~~~~~~~~
Updates that follow backward all begin together, and forward needs their results one after the other: the last lanes
have the most time to travel, so these are the ones that rest furthest away. Updates inside backward (release=True) each
have about as long as their unit takes: there tiers alternate in proportion along the model.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zeor.comm.agree import exchange
from zeor.comm.axes import Axes
from zeor.memory.device import DeviceMemory
from zeor.optim.streaming.streaming import Streaming
from zeor.optim.streaming.windows import WINDOWS
from zeor.plan import Plan
from zeor.spec.places import Places
from zeor.step.lane import Lane
from zeor.step.unit import Unit
from zeor.tiers.folders import free_disk_nbytes
from zeor.tiers.host import free_host_nbytes

HOST_SHARE = 0.95  # of what is free there: the rest is the system's and the loader's
DISK_SHARE = 0.98
log = logging.getLogger("zeor")


class Auto:
    """`drain` waits for everything under way."""

    def __init__(
        self, streaming: Streaming, plan: Plan, axes: Axes, units: list[Unit], places: Places, drain: Callable[[], None]
    ):
        offload = plan.offload
        assert offload is not None
        self._streaming, self._plan, self._offload, self._axes = streaming, plan, offload, axes
        self._units, self._places, self._drain = units, places, drain
        self._moments = streaming.moments.nbytes_per_element()
        self._memory = DeviceMemory(axes.device)
        if isinstance(offload.device_budget, int):
            self._memory.limit(offload.device_budget)
        self._steps = 0
        self._moved = False
        self._failures = self._memory.failures()
        self._sharing = self._ranks_here()
        self._free_at_start = self._free_nbytes()
        self._refuse_together()

    # ---- sizes

    @property
    def _lanes(self) -> list[Lane]:
        """In the order they are used."""
        lanes = [lane for unit in self._units for lane in unit.lanes]
        return [lane for lane in lanes if lane.grads is not None and lane.master is not None]

    def _need(self, lane: Lane) -> int:
        """Bytes of a lane's state: the moments, and the remainder where there is one."""
        assert lane.master is not None
        kept = 2 if lane.master.remainder is not None else 0
        wide = lane.master.dtype.itemsize / 4 if self._plan.moments == "exact" else 1
        return int(lane.master.numel * (self._moments * wide + kept))

    def _budget(self) -> int | None:
        """Of the device; None where nobody says and nobody knows (on a CPU)."""
        total = self._memory.total_nbytes()
        budget = self._offload.device_budget
        if isinstance(budget, int):
            return budget if total is None else min(budget, total)
        return total

    def _window_nbytes(self) -> int:
        largest = max((lane.master.numel for lane in self._lanes if lane.master is not None), default=0)
        return int(WINDOWS * min(self._streaming.chunk_numel, largest) * (self._moments + 2))

    def _fixed_nbytes(self) -> int:
        """What the device must hold whatever is placed where: compute, gradients until the step, a whole master."""
        found = 0
        for lane in self._lanes:
            assert lane.grads is not None and lane.master is not None
            found += 0 if lane.rest.tiers.compute != "device" else lane.mine.nbytes
            own = lane.master.own if lane.master.format == "wide" else None  # of a master beside compute
            found += 0 if own is None or own.away else own.nbytes
            if not self._plan.release and lane.grads.resting is None:
                found += lane.spec.held("grad") * lane.key.reduce_dtype.itemsize
        return found

    def _ranks_here(self) -> int:
        """How many ranks share this host's memory and disk."""
        if self._axes.everyone.fake:
            return 1
        hosts = exchange(self._axes.everyone, socket.gethostname(), "count of the ranks on each host")
        return max(hosts.count(hosts[self._axes.everyone.rank]), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def _refuse_together(self) -> None:
        """Where one rank cannot go on the others must not wait for it."""
        problem = ""
        try:
            self._refuse_hopeless()
        except ValueError as error:
            problem = str(error)
        for rank, theirs in enumerate(exchange(self._axes.everyone, problem, "check of offload=auto")):
            if theirs:
                raise ValueError(problem or f"Rank {rank} cannot place its state: {theirs}")

    def _refuse_hopeless(self) -> None:
        """Before anything of the state is allocated."""
        budget = self._budget()
        if budget is None:
            return
        fixed = self._fixed_nbytes()
        if fixed + self._window_nbytes() > budget:
            raise ValueError(
                f"Compute and gradients alone take {size(fixed)} on the device and the window for offloaded state "
                f"{size(self._window_nbytes())}, but the budget is {size(budget)}; allow more, use release=True or "
                "zeor.Offload(grads='host', compute='host'), a smaller chunk=, or more ranks."
            )
        self._chosen(self._lanes, self._room(budget - fixed - self._window_nbytes()))

    def _free_nbytes(self) -> tuple[int | None, int]:
        """On the host (None: nobody knows) and on disk: this rank's share."""
        host, folder = free_host_nbytes(), self._offload.folder
        disk = 0 if folder is None else free_disk_nbytes(folder)
        return None if host is None else host // self._sharing, disk // self._sharing

    def _room(self, device_nbytes: int) -> Room:
        # Beside others what was free at the start is divided: by now some of it may be what they have taken.
        free, disk = self._free_nbytes() if self._sharing == 1 else self._free_at_start
        # What rests there is part of what will be placed, and no longer free.
        resting = sum(_remainder_nbytes(lane, "host") for lane in self._lanes)
        host = 1 << 62 if free is None else int(HOST_SHARE * free) + resting
        if isinstance(self._offload.host_budget, int):
            host = min(host, self._offload.host_budget)
        return Room(device_nbytes, host, int(DISK_SHARE * disk))

    # ---- deciding

    def before_update(self) -> None:
        """Something is about to be updated."""
        if not self._places.decided:  # by another optimizer of the same model, say
            self._places.decided = True
            self._decide()

    def after_step(self) -> None:
        self._steps += 1
        failed = self._memory.failures() > self._failures
        budget = self._budget()
        if budget is not None and not self._moved and (failed or self._steps == 2):
            over = self._memory.peak_nbytes() + self._margin(budget) // 2 - budget
            if failed:
                over = max(over, budget // 20)
            if over > 0 and self._memory.total_nbytes() is not None:
                self._moved = True
                self._relieve(over)
        self._failures = self._memory.failures()

    def _margin(self, budget: int) -> int:
        """For what was not seen yet: holes between blocks, and with release=True the rest of backward."""
        if self._memory.total_nbytes() is None:
            return 0
        rest = 0
        if self._plan.release:
            rest = max(sum(lane.mine.nbytes for lane in unit.lanes) for unit in self._units)
        return holes_nbytes(budget, self._offload.device_budget is not None) + rest

    def _decide(self) -> None:
        budget, lanes, used = self._budget(), self._lanes, 0
        if budget is None:
            tiers = ["device"] * len(lanes)
        else:
            resting = sum(_remainder_nbytes(lane, "device") for lane in lanes)
            used = max(self._memory.peak_nbytes() - resting, self._fixed_nbytes())
            room = self._room(budget - used - self._window_nbytes() - self._margin(budget))
            tiers = self._chosen(lanes, room)
            for lane, tier in zip(lanes, tiers):
                if tier != "device":  # first: what leaves makes room for what stays
                    self._place(lane, tier)
            tiers = self._tried(lanes, tiers, room)
        for lane, tier in zip(lanes, tiers):
            self._place(lane, tier)
        self._memory.give_back()
        self._failures = self._memory.failures()
        self._say(tiers, budget, used)

    def _chosen(self, lanes: list[Lane], room: Room) -> list[str]:
        return choose([self._need(lane) for lane in lanes], room, spread=self._plan.release)

    def _tried(self, lanes: list[Lane], tiers: list[str], room: Room) -> list[str]:
        """What turns out not to fit on the device goes further: its memory may be in pieces, or others' by now."""
        if self._memory.total_nbytes() is None:
            return tiers
        self._memory.give_back()
        chosen = [lane for lane, tier in zip(lanes, tiers) if tier == "device"]
        more = [self._need(lane) - _remainder_nbytes(lane, "device") for lane in chosen]
        fits = dict(zip(chosen, self._memory.room_for(more)))
        left = {
            tier: getattr(room, tier) - sum(self._need(x) for x, t in zip(lanes, tiers) if t == tier)
            for tier in ("host", "disk")
        }
        return [self._further(lane, left) if not fits.get(lane, True) else tier for lane, tier in zip(lanes, tiers)]

    def _further(self, lane: Lane, left: dict[str, int]) -> str:
        """The next tier that has room for a lane, which is taken; `left`: bytes there."""
        need = self._need(lane)
        for tier in left:
            if need <= left[tier]:
                left[tier] -= need
                return tier
        raise ValueError(
            f"The device has no room for {size(need)} of state that should have fitted there, and the host and the "
            "disk are full; let nothing else use the device, or allow more (host_budget=, folder= of zeor.Offload)."
        )

    def _place(self, lane: Lane, tier: str) -> None:
        assert lane.master is not None
        lane.rest = made = lane.rest._replace(tiers=lane.rest.tiers._replace(moments=tier))
        if lane.master.remainder is not None:  # a master that is kept whole stays: segments lie over it
            lane.rest = made = made._replace(tiers=made.tiers._replace(master=tier))
            if lane.master.remainder.tier != tier:
                lane.master.move(lambda numel, dtype, what: made.make("master", numel, dtype, what))
        self._streaming.moments.move(lane)

    def _relieve(self, nbytes: int) -> None:
        """More than was expected is used: lanes off the device until it is less by so much."""
        moved = 0
        self._drain()
        lanes = self._lanes
        for lane in lanes[::2] + lanes[1::2] if self._plan.release else reversed(lanes):
            if moved < nbytes and lane.rest.tiers.moments == "device":
                self._place(lane, "host")
                self._streaming.adopt(lane)
                moved += self._need(lane)
        self._memory.give_back()
        log.info("offload=auto: %s too much were used; %s of state moved to the host", size(nbytes), size(moved))

    def _say(self, tiers: list[str], budget: int | None, used: int) -> None:
        if self._axes.everyone.rank != 0:
            return
        held = {tier: sum(self._need(x) for x, t in zip(self._lanes, tiers) if t == tier) for tier in Room._fields}
        told = ", ".join(f"{tiers.count(t)} lanes ({size(n)}) on the {t}" for t, n in held.items() if n)
        expected = ""
        if budget is not None and self._memory.total_nbytes() is not None:
            most = used + held["device"] + self._window_nbytes() + self._margin(budget)
            expected = f"; expected on the device at most {size(most)} of {size(budget)}"
        log.info("offload=auto: %s%s", told or "nothing to place", expected)


def holes_nbytes(budget: int, limited: bool) -> int:
    """Left for what lies between the allocator's blocks; a limit counts what it keeps for later as well."""
    return int((0.04 if limited else 0.02) * budget)


def _remainder_nbytes(lane: Lane, tier: str) -> int:
    """Of a lane's state on a tier before it is placed: the remainder."""
    remainder = None if lane.master is None else lane.master.remainder
    return remainder.nbytes if remainder is not None and remainder.tier == tier else 0


# ---- which tier, in integers only


class Room(NamedTuple):
    """Bytes each tier may still take: see Note [Who goes furthest]."""

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
