"""What `offload` sees of the host while a run goes on: memory that is taken, page-locked bytes, what zeor says.

The process's own account (VmHWM) misses what a driver maps for it; the system's account (what is still available)
has other processes in it. Both are recorded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import GIB, available_nbytes, status_nbytes

LEAST_FREE_NBYTES = GIB // 2
GAVE_UP = 97  # the exit status of a run that ended itself before the kernel would


class HostWatch:
    """The least host memory that was available, looked at four times a second. Where almost none is left the run ends
    itself: the kernel would end some process, and not say why."""

    def __init__(self) -> None:
        self.base_nbytes = status_nbytes("VmRSS")
        self.before = self.least = available_nbytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            self.least = min(self.least, available_nbytes())
            if self.least < LEAST_FREE_NBYTES:
                taken = status_nbytes("VmRSS") / GIB
                print(f"MemoryError: the host is full; this process holds {taken:.1f} GiB of it", file=sys.stderr)
                sys.stderr.flush()
                os._exit(GAVE_UP)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def figures(self, parameters: int) -> dict[str, Any]:
        """Host memory above what the process had before the model, by both accounts."""
        self.least = min(self.least, available_nbytes())
        grown = status_nbytes("VmHWM") - self.base_nbytes
        return {
            "host_base_gib": round(self.base_nbytes / GIB, 3),
            "host_grown_gib": round(grown / GIB, 3),
            "host_bytes_per_parameter": round(grown / parameters, 2),
            "host_taken_gib": round((self.before - self.least) / GIB, 3),
            "pinned_gib": round(pinned_nbytes() / GIB, 3),
        }


def pinned_nbytes() -> int:
    """Page-locked bytes of torch's own allocator at their peak; what zeor registers itself is in zeor.report."""
    if not torch.cuda.is_available():
        return 0
    try:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    except (AttributeError, RuntimeError):
        return 0


def die_first() -> None:
    """Where the host runs full, the kernel is to end this process and not the suite that records it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Lines(logging.Handler):
    """What zeor logs, kept for the results and passed on to stderr: placements, kernels, warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        log = logging.getLogger("zeor")
        log.addHandler(self)
        log.setLevel("INFO")
        log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.lines.append(line)
        print(f"zeor: {line}", file=sys.stderr, flush=True)
