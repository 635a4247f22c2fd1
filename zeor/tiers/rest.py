"""Rest: one flat array of a lane, and the tier it rests on.

    device   a tensor beside the computation
    host     a part of pinned blocks (host.py)
    disk     a file (files.py), read and written past the page cache; `tensor` maps it for whoever is not in a hurry

A `Store` makes them and owns what is behind them: one arena of host memory and one folder of one's own on disk. Where
the computation is on the CPU the tiers are the same, so that everything can be tried without an accelerator.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.memory.buffers import lasting
from zeor.plan import Offload
from zeor.tiers.files import DiskArray, DiskFolder
from zeor.tiers.host import HostArena
from zeor.tiers.streams import Leaving, SideStream


class Rest:
    """`tensor` holds all values, on the device or the host; on disk it is a map of the file."""

    def __init__(self, tensor: Tensor, tier: str = "device", file: DiskArray | None = None):
        self._tensor, self.tier, self.file = tensor, tier, file

    @property
    def tensor(self) -> Tensor:
        """To be used at once: of a file it is known only now that it is as long as the map."""
        if self.file is not None:
            self.file.check()
        return self._tensor

    def read(self, begin: int, end: int) -> Tensor:
        """Values to look at: on disk a copy, read past the map, which a file that something shortens meanwhile only
        fails; else the memory itself."""
        if self.file is None:
            return self._tensor[begin:end]
        into = torch.empty(end - begin, dtype=self.dtype)
        self.file.read(begin, end, into)
        return into

    @property
    def version(self) -> int:
        """Another one after each in-place write, through whichever view of it."""
        return self._tensor._version

    @property
    def away(self) -> bool:
        return self.tier != "device"

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes


class Tiers(NamedTuple):
    """Where the roles of one lane rest."""

    compute: str = "device"
    master: str = "device"
    grads: str = "device"
    moments: str = "device"

    @property
    def away(self) -> bool:
        return any(tier != "device" for tier in self)


class LaneRest(NamedTuple):
    """How one lane rests: where, under which name, and what its update asks for."""

    tiers: Tiers
    store: Store
    name: str
    wide: bool = False  # the master is kept as it is, for an update on the host
    delayed: bool = False  # forward reads what the last update but one left: see Note [Delayed] in step/lane.py

    def make(self, role: str, numel: int, dtype: torch.dtype, what: str) -> Rest:
        return self.store.make(getattr(self.tiers, role), numel, dtype, f"{self.name}-{what}")


class Store:
    """Makes arrays on tiers. Nothing is allocated before it is asked for."""

    def __init__(self, offload: Offload | None, device: torch.device):
        self._offload, self._device = offload, device
        self.nbytes = {"device": 0, "host": 0, "disk": 0}  # made so far
        self.fetches, self.spills = SideStream(device), SideStream(device)  # host -> device, and back
        self.leaving = Leaving()  # gradients on their way there

    def make(self, tier: str, numel: int, dtype: torch.dtype, name: str) -> Rest:
        """An array of zeros."""
        self.nbytes[tier] += numel * dtype.itemsize
        if tier == "device" or numel == 0:
            return Rest(lasting(numel, dtype, self._device), "device" if numel else tier)
        if tier == "host":
            return Rest(self.arena.take(numel, dtype), "host")
        file = self.folder.array(name, numel, dtype)
        return Rest(file.tensor, "disk", file)

    @cached_property
    def arena(self) -> HostArena:
        return HostArena(pin=(self._offload is None or self._offload.pin) and self._device.type != "cpu")

    @cached_property
    def folder(self) -> DiskFolder:
        assert self._offload is not None and self._offload.folder is not None
        return DiskFolder(self._offload.folder)
