"""What the benchmarks read off the machine: memory of this process, the machine in words, and JSON files.

Everything here is about the process or the host as Linux shows them; it knows no system under test.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
GIB = 2**30


def status_nbytes(field: str) -> int:
    """A memory line of /proc/self/status (VmRSS, VmHWM) in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {field}: these benchmarks need Linux")


def reset_peak_rss() -> bool:
    """Start VmHWM again from the present RSS; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_machine(date: str | None = None) -> dict[str, Any]:
    """CPU, cores, memory, versions and, where there is one, the GPU."""
    import torch

    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["gpu_gib"] = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
        machine["cuda"] = torch.version.cuda
        machine["triton"] = _version("triton")
    if date is not None:
        machine["date"] = date
    return machine


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def command_line() -> str:
    """How this run was started, with paths made relative so that results do not name a home directory."""
    name = Path(sys.argv[0]).stem
    return " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write through a temporary name, so that a run killed half-way leaves the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)


def available_nbytes() -> int:
    """Host memory that could still be had: the kernel's estimate, or less where a control group sets a limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return found
    return min(found, limit - used + int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0)))


def io_nbytes() -> tuple[int, int]:
    """Bytes this process has made a disk read and write, past the page cache or through it; zeros where unknown."""
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0, 0
    return int(lines["read_bytes"]), int(lines["write_bytes"])
