"""The state of the random numbers of the host and of a device, to go back to."""

from __future__ import annotations

import torch


class Rng:
    """As it is now."""

    def __init__(self, device: torch.device):
        self._device = None if device.type == "cpu" else torch.get_device_module(device)
        self._host = torch.get_rng_state()
        self._state = None if self._device is None else self._device.get_rng_state()

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._device is not None:
            self._device.set_rng_state(self._state)
