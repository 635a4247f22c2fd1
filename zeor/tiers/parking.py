"""Parking: memory of the device is copied to host memory and given back, while every tensor over it stays an object.

    Parking(tensors, voids) --copy_out--> --free-->  away  --allocate--> --copy_in-->  as it was

A storage keeps its identity and loses its bytes, so views of it (parameters, segments, kernels' arguments) need not be
told; only its address changes. The copies lie in one stretch of pinned memory, which may be kept for the next time: to
pin it takes longer than to fill it. Where the device is the host nothing can be made smaller that somebody may read:
its pages go back to the system and read as zeros. Knows nothing of lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from zeor.memory.pages import give_back
from zeor.tiers.host import HostArena, room_nbytes
from zeor.tiers.streams import current_event


class _Place(NamedTuple):
    storage: UntypedStorage
    nbytes: int
    begin: int  # of its copy, in the stretch of host memory; -1: its values are not kept


class Parking:
    """`tensors`: whose values come back. `voids`: whose memory alone does. Several over one storage count once."""

    def __init__(self, device: torch.device, tensors: Iterable[Tensor], voids: Iterable[Tensor] = ()):
        self._device = device
        self.host_nbytes, self.here = 0, True
        self._places: dict[int, _Place] = {}
        for tensor in tensors:
            self._add(tensor, keeps=True)
        for tensor in voids:
            self._add(tensor, keeps=False)
        self._host: Tensor | None = None

    def _add(self, tensor: Tensor, keeps: bool) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not nbytes or tensor.device.type != self._device.type or storage.data_ptr() in self._places:
            return
        self._places[storage.data_ptr()] = _Place(storage, nbytes, self.host_nbytes if keeps else -1)
        self.host_nbytes += room_nbytes(nbytes, torch.uint8) if keeps else 0

    @property
    def device_nbytes(self) -> int:
        """On the device now."""
        return sum(place.nbytes for place in self._places.values()) if self.here else 0

    def copy_out(self, host: Tensor | None = None) -> None:
        """Values to the host; into memory of an earlier time (`take_host`) where that is large enough. May raise;
        nothing on the device is changed."""
        if host is None or host.numel() < self.host_nbytes:
            del host  # before more is asked for
            host = HostArena(pin=self._device.type != "cpu").take(self.host_nbytes, torch.uint8)
        self._host = host
        for copy, on_device in self._pairs():
            copy.copy_(on_device, non_blocking=True)
        current_event(self._device).wait()  # copies -> whoever frees or writes

    def free(self) -> None:
        """The device's memory goes; the values must have been copied."""
        for place in self._places.values():
            if self._device.type == "cpu":
                give_back(_bytes_of(place))
            else:
                place.storage.resize_(0)
        self.here = False

    def allocate(self) -> None:
        """Memory again, without values. Where there is not enough all that came goes again, and the error is raised."""
        try:
            if self._device.type != "cpu":
                for place in self._places.values():
                    place.storage.resize_(place.nbytes)
        except BaseException:
            self.free()
            raise
        self.here = True

    def copy_in(self) -> None:
        for copy, on_device in self._pairs():
            on_device.copy_(copy, non_blocking=True)
        current_event(self._device).wait()  # copies -> whoever writes the host memory anew

    def take_host(self) -> Tensor | None:
        """The host memory, for the next time."""
        host, self._host = self._host, None
        return host

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """(copy, values on the device) of each storage whose values are kept."""
        assert self._host is not None
        for place in self._places.values():
            if place.begin >= 0:
                yield self._host[place.begin : place.begin + place.nbytes], _bytes_of(place)


def _bytes_of(place: _Place) -> Tensor:
    """With a version counter of its own: to autograd nothing has changed."""
    made = torch.empty(0, dtype=torch.uint8, device=place.storage.device)
    made.set_(place.storage, 0, (place.nbytes,))  # type: ignore[call-overload]  # the stub knows three more
    return made
