"""The one file that talks to accelerators, always through `torch.accelerator`.

Everything else asks here: which device a model is on, what it is called, what the host may give back. Importing
it touches no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def device_of(model: nn.Module, wanted: Any = None, mesh_type: str | None = None) -> torch.device:
    """Where a sharded model is to live: where it is said to (`wanted`); else where its parameters are; else, as all
    are on the meta device, on the mesh's kind of device, this rank's accelerator or the CPU."""
    if wanted is not None:
        return _given(wanted)
    params = list(model.named_parameters())
    real = [(name, param) for name, param in params if param.device.type != "meta"]
    if real or not params:
        return one_device(real)
    return default_device() if mesh_type is None else _given(mesh_type)


def default_device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _given("cpu" if accelerator is None else accelerator.type)


def _given(wanted: Any) -> torch.device:
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={wanted!r} is not a device; give one such as 'cpu' or 'cuda'.") from error
    if device.type == "meta":
        raise ValueError("device='meta' holds no values; leave device= out or name where the slices are to live.")
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        found = "none" if accelerator is None else accelerator.type
        raise ValueError(f"device={str(wanted)!r} was asked for; the accelerator here is {found}.")
    current = torch.accelerator.current_device_index()
    if device.index not in (None, current):
        raise ValueError(
            f"device={str(wanted)!r} was asked for but this rank's current device is {device.type}:{current}; call "
            "torch.accelerator.set_device_index(LOCAL_RANK) first."
        )
    return torch.device(device.type, current)


@contextlib.contextmanager
def thread_beside(device: torch.device) -> Iterator[None]:
    """Work of a thread beside the loop: threads begin at device 0, and with gradients on."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    with torch.no_grad():
        yield


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
            f"Parameter {name!r} is still on the meta device, and a drop-in optimizer needs its values; initialise or "
            "load the model first, or use zeor.shard(model, optimizer), which takes such models."
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


def pin(tensor: Tensor) -> str | None:
    """Let the accelerator read and write this host memory by itself, its pages kept in place; None, or why not.

    Whole pages, mapped until `unpin`. All in one go: a copy must not cross from one registration into another.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "cuda":
        return "there is no accelerator" if accelerator is None else f"not known how for {accelerator.type} devices"
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) == 0:
        return None
    with contextlib.suppress(RuntimeError):  # the refusal stays behind for the next launch to find: let it be this one
        torch.ones(1, device=accelerator)
    return str(runtime.cudaGetErrorString(code))


def unpin(tensor: Tensor) -> None:
    """Undo `pin` of the same memory, after the copies under way -> who unmaps it next."""
    with contextlib.suppress(RuntimeError):  # a device that has failed has no copies under way
        torch.accelerator.synchronize()
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class Arriving:
    """A small result on its way to the host, which does not wait for it."""

    def __init__(self, result: Tensor):
        self.value, self._event = result, None
        if result.device.type != "cpu":
            self.value = torch.empty_like(result, device="cpu", pin_memory=True)
            self.value.copy_(result, non_blocking=True)
            self._event = torch.Event(device=result.device.type)
            self._event.record()

    def is_here(self) -> bool:
        return self._event is None or self._event.query()


def autocast_on(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name = torch.get_device_module(device).get_device_name(device)
    return f"{device} ({name})"


class DeviceMemory:
    """What an accelerator's memory is used for; on a host nothing is known of it."""

    def __init__(self, device: torch.device):
        self._device, self._module = device, None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)

    def total_nbytes(self) -> int | None:
        """What this process may use: what it has, and what is free."""
        if self._module is None:
            return None
        free, _ = self._module.mem_get_info(self._device)
        return int(free) + int(self._module.memory_reserved(self._device))

    def limit(self, nbytes: int) -> None:
        """This process must not take more: torch's allocator gives back what it caches before it would."""
        if self._module is not None:
            _, total = self._module.mem_get_info(self._device)
            self._module.set_per_process_memory_fraction(min(1.0, nbytes / total), self._device)

    def peak_nbytes(self) -> int:
        return 0 if self._module is None else int(self._module.max_memory_allocated(self._device))

    def failures(self) -> int:
        """How often memory ran out so far."""
        return 0 if self._module is None else int(self._module.memory_stats(self._device).get("num_ooms", 0))

    def room_for(self, sizes: Iterable[int]) -> list[bool]:
        """Whether blocks of so many bytes can be had now, all those together that can."""
        held, found = [], []
        for nbytes in sizes:
            try:
                held.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
                found.append(True)
            except torch.OutOfMemoryError:
                found.append(False)
        return found

    def give_back(self) -> None:
        """What is cached and unused, to the device."""
        if self._module is not None:
            self._module.empty_cache()
