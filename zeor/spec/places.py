"""Places: which tier each role of each lane rests on, as the plan says; streaming/auto.py chooses for "auto".

Fractions are kept by whole lanes, one after another as lanes are made: each goes to the tier that is furthest behind
its share, so that tiers alternate along the model and neither a forward nor a link waits for long. The same on every
rank, as it follows from the plan and the layout alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from zeor.memory.device import DeviceMemory
from zeor.plan import OFFLOADED, Plan, Share
from zeor.spec.keys import LaneKey
from zeor.tiers.rest import LaneRest, Store, Tiers

CROWDED = 0.7  # of the device


def crowds(numel: int, release: bool, budget: int) -> bool:
    """Whether compute, master and gradients would leave no room on the device to measure a first step in."""
    return numel * (4 if release else 6) > CROWDED * budget


class Places:
    def __init__(self, plan: Plan, device: torch.device):
        self._plan, self._device = plan, device
        self.store = Store(plan.offload, device)
        self.decided = False  # offload=auto has placed every lane
        self._crowded = False  # compute and master together would fill the device
        self._given: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # role -> tier -> elements

    def expect(self, numel: int) -> None:
        """So many elements will be updated here. With offload=auto the master begins on the device where that leaves
        room to measure a first step in."""
        plan, total = self._plan, DeviceMemory(self._device).total_nbytes()
        if plan.offload is not None and plan.offload.auto and total is not None:
            budget = plan.offload.device_budget
            limit = min(budget, total) if isinstance(budget, int) else total
            self._crowded = crowds(numel, plan.release, limit)

    def of_lane(self, name: str, key: LaneKey, values: Sequence[Tensor]) -> LaneRest:
        offload = self._plan.offload
        wide = offload is not None and offload.update == "host" and offload.away
        numel = sum(value.numel() for value in values)
        tiers = Tiers()
        if offload is not None:
            roles: tuple[str, ...] = OFFLOADED if key.trainable else ("compute",)
            if key.stays_whole:
                roles = tuple(role for role in roles if role != "compute")
            if offload.auto:  # moments and master are placed at the first update: see optim/streaming/auto.py
                roles = tuple(role for role in roles if role not in ("moments", "master"))
                tiers = Tiers(master="host" if self._crowded and key.trainable else "device")
            tiers = tiers._replace(**{role: self._next(role, getattr(offload, role), numel) for role in roles})
            if offload.update == "host":  # the master goes with the moments: both are where the step is
                tiers = tiers._replace(master=tiers.moments)
        wide = wide and tiers.moments == "host"
        return LaneRest(tiers, self.store, name, wide, self._plan.delay > 0)

    def _next(self, role: str, share: Share, numel: int) -> str:
        given = self._given[role]
        total = sum(given.values()) + numel
        tier = max(share, key=lambda each: each[1] * total - given[each[0]])[0]
        given[tier] += numel
        return tier
