"""The one file that talks to accelerators, always through `torch.accelerator`.

Everything else asks here: which device a model is on, what it is called, what the host may give back. Importing
it touches no device.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device:
    """The one device a model's parameters are on, or a sentence that says what is wrong."""
    return one_device(model.named_parameters())


def one_device(params: Iterable[tuple[str, Tensor]]) -> torch.device:
    """The one device these parameters are on."""
    found: dict[torch.device, str] = {}
    for name, param in params:
        found.setdefault(param.device, name)
    if not found:
        raise ValueError("The model has no parameters: there is nothing to shard.")
    if any(device.type == "meta" for device in found):
        name = next(name for device, name in found.items() if device.type == "meta")
        raise ValueError(
            f"Parameter {name!r} is still on the meta device; call model.to_empty(device=...) and initialise "
            "or load its values, then zeor.shard."
        )
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise ValueError(
            f"The model lies on two devices: {a!r} on {first}, {b!r} on {second}; "
            f"move it with model.to({str(first)!r}) before zeor.shard."
        )
    device = next(iter(found))
    if device.type != "cpu" and device.index is not None and device.index != torch.accelerator.current_device_index():
        raise ValueError(
            f"The model is on {device} but this rank's current device is {device.type}:"
            f"{torch.accelerator.current_device_index()}; call torch.accelerator.set_device_index(LOCAL_RANK) "
            "first and build the model there."
        )
    return device


def trim_host_memory() -> None:
    """Give freed host memory back to the system where the C library can (glibc keeps it otherwise).

    Sharding frees the whole model piece by piece, and a first step the holes around the optimizer's new
    state: without this a process's size stays at what it once was. Costs milliseconds; called once each.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def autocast_on(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name = torch.get_device_module(device).get_device_name(device)
    return f"{device} ({name})"
