"""The one file that talks to accelerators, always through `torch.accelerator`.

Everything else asks here: which device a model is on, what it is called, what the host may give back. Importing
it touches no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

BACKEND_VARIABLE = "ZEOR_BACKEND"  # of accelerators, in place of their own: "gloo" lets ranks share one, for trying out


class Home(NamedTuple):
    """Where a sharded model is to live, and what the user should hear of it."""

    device: torch.device
    note: str = ""


def home_of(model: nn.Module, wanted: Any = None, mesh_type: str | None = None) -> Home:
    """Where it is said to (`wanted`); else where its parameters are, but a model on the CPU goes to this rank's
    accelerator where there is one for each rank of this host; one on the meta device goes there or to the CPU. The
    accelerator is the current device from here on."""
    if wanted is not None:
        return Home(_given(wanted))
    params = list(model.named_parameters())
    real = [(name, param) for name, param in params if param.device.type != "meta"]
    here = one_device(real) if real or not params else None
    if here is not None and here.type != "cpu":
        return Home(here)
    if mesh_type is not None:
        return Home(_given(mesh_type))
    device, why_not = _of_rank()
    if device.type == "cpu":
        return Home(device, why_not and f"the model stays on the CPU: {why_not}")
    return Home(device, "" if here is None else f"the model was moved from the CPU to {device}")


def device_of(model: nn.Module) -> torch.device:
    """Where a model is; one on the meta device has this rank's accelerator, or the CPU, before it."""
    real = [(name, param) for name, param in model.named_parameters() if param.device.type != "meta"]
    return one_device(real) if real or not list(model.parameters()) else default_device()


def default_device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    return _of_rank()[0]


# ---- which accelerator is this rank's


def _of_rank() -> tuple[torch.device, str]:
    """This rank's accelerator, made the current device; or the CPU and, where there is an accelerator, why."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), ""
    count, ranks = torch.accelerator.device_count(), local_world()
    why_not = too_few(count, ranks) or _group_without(accelerator.type)
    if why_not:
        return torch.device("cpu"), why_not
    return _made_current(accelerator.type), ""


def too_few(count: int, ranks: int) -> str:
    """Why the accelerators of a host do not do for its ranks."""
    if count >= ranks or BACKEND_VARIABLE in os.environ or "SLURM_GPUS_PER_TASK" in os.environ:
        return ""  # enough; shared on purpose; or each task sees its own alone
    return (
        f"{ranks} ranks of this host see {count} accelerator(s); start as many ranks as there are, or, if each rank "
        "sees one of its own, give device= its kind, such as 'cuda'"
    )


def _group_without(kind: str) -> str:
    """Why the process group that the user has made does not do for an accelerator."""
    if not dist.is_available() or not dist.is_initialized() or BACKEND_VARIABLE in os.environ:
        return ""
    own = dist.get_default_backend_for_device(kind)
    if own in str(dist.get_backend_config()) or "fake" in str(dist.get_backend_config()):
        return ""
    return f"the process group is {dist.get_backend()}'s; leave it to zeor.shard, or initialise it with {own}"


def _made_current(kind: str) -> torch.device:
    device = torch.device(kind, _index())
    torch.accelerator.set_device_index(device.index)
    return device


def _index() -> int:
    return index_of_rank(torch.accelerator.device_count(), torch.accelerator.current_device_index())


def idle_accelerator() -> str:
    """The name of the accelerator that this rank has, if it has one; nothing is changed."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or too_few(torch.accelerator.device_count(), local_world()):
        return ""
    return f"{accelerator.type}:{_index()}"


def index_of_rank(count: int, current: int) -> int:
    """By LOCAL_RANK, unless the user has chosen another device than the first."""
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    if current or not local.isdigit():
        return current
    if BACKEND_VARIABLE in os.environ:
        return int(local) % count  # ranks may share one
    return int(local) if int(local) < count else current  # it may be the only one that this rank sees


def local_world() -> int:
    """Ranks on this host, as torchrun, zeor.launch or SLURM say."""
    found = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not found and "SLURM_LOCALID" in os.environ:
        found = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(found) if found.isdigit() else 1


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
    if device.index is None:
        return _made_current(device.type)
    torch.accelerator.set_device_index(device.index)
    return device


@contextlib.contextmanager
def thread_beside(device: torch.device) -> Iterator[None]:
    """Work of a thread beside the loop: threads begin at device 0, and with gradients on."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    with torch.no_grad():
        yield


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """torch computes with so many threads when called from this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name = torch.get_device_module(device).get_device_name(device)
    return f"{device} ({name})"


class DeviceMemory:
    """What an accelerator's memory is used for; on a host nothing is known of it."""

    _peaks: ClassVar[dict[torch.device, int]] = {}  # from before torch's own count was reset here
    _meters: ClassVar[weakref.WeakSet[DeviceMemory]] = weakref.WeakSet()  # each may reset that count

    def __init__(self, device: torch.device):
        self._device, self._module = device, None
        self._most = 0  # in use since this one's last reset, as others' resets have told
        DeviceMemory._meters.add(self)
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

    def used_nbytes(self) -> int:
        return 0 if self._module is None else int(self._module.memory_allocated(self._device))

    def peak_nbytes(self) -> int:
        """The most that was ever in use, or since somebody else reset torch's count."""
        if self._module is None:
            return 0
        return max(int(self._module.max_memory_allocated(self._device)), self._peaks.get(self._device, 0))

    def reset_peak(self) -> int:
        """The most that was in use since the last time; torch's count starts anew."""
        if self._module is None:
            return 0
        peak = int(self._module.max_memory_allocated(self._device))
        self._peaks[self._device] = max(peak, self._peaks.get(self._device, 0))
        self._module.reset_peak_memory_stats(self._device)
        for meter in self._meters:
            if meter._device == self._device:
                meter._most = max(meter._most, peak)
        most, self._most = self._most, 0
        return most

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


def compiles() -> bool:
    """Whether torch.compile has what it makes kernels for the accelerator with."""
    return importlib.util.find_spec("triton") is not None


def lacks_float8(device: torch.device, recipe: str) -> str:
    """Why this device cannot multiply in 8 bits by a recipe of torchao's; "" where it can. A CPU emulates it."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"needs a GPU with float8 units, and {device.type} is not known to have any"
    if torch.version.hip is not None:
        return ""  # torchao knows which of AMD's have them
    least = (8, 9) if recipe == "tensorwise" else (9, 0)
    found = torch.cuda.get_device_capability(device)
    if found >= least:
        return ""
    name = torch.cuda.get_device_name(device)
    has, needs = (".".join(map(str, version)) for version in (found, least))
    return f"needs a GPU with float8 units (compute capability {needs} or newer), and {name} has {has}"
