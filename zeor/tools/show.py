"""What the command line draws: byte counts, tables, and a progress bar. Standard library only.

On a terminal the bar redraws one line in place; elsewhere (a log file, CI) it prints a line every few
seconds. Nothing here knows what is being counted.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

_LINE_EVERY_S = 5.0  # in a log file
_REDRAW_EVERY_S = 0.1  # on a terminal


def human_bytes(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """75 -> '1:15'."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first flush left, the others flush right, a rule below the header."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        return "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def resident_nbytes() -> int:
    """This process's resident memory now, or its peak where the system does not tell (0 where neither)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    try:
        import resource  # absent on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Progress:
    """A bar over `total` steps. Does nothing when not enabled, so that every rank may call it alike."""

    def __init__(self, total: int, *, stream: TextIO | None = None, enabled: bool = True) -> None:
        self.total = total
        self.stream = sys.stdout if stream is None else stream
        self.enabled = enabled
        self.in_place = self.stream.isatty()
        self.started_s = time.monotonic()
        self._shown_s = float("-inf")

    def due(self, done: int) -> bool:
        """Whether update(done, ...) would draw: ask first where the text is costly to make."""
        wait_s = _REDRAW_EVERY_S if self.in_place else _LINE_EVERY_S
        return self.enabled and (done >= self.total or time.monotonic() - self._shown_s >= wait_s)

    def update(self, done: int, text: str) -> None:
        """Draw `done` of `total` and the text, if it is time to."""
        if not self.due(done):
            return
        self._shown_s = time.monotonic()
        if self.in_place:
            # A line that wraps cannot be redrawn in place: the bar takes what the text leaves, then cut.
            columns = shutil.get_terminal_size().columns - 1
            line = self._line(done, text, columns)[:columns]
            self.stream.write("\r\x1b[K" + line + ("\n" if done >= self.total else ""))
        else:
            self.stream.write(self._line(done, text, 100) + "\n")
        self.stream.flush()

    def _line(self, done: int, text: str, columns: int) -> str:
        left_s = (time.monotonic() - self.started_s) / max(done, 1) * (self.total - done)
        told = f" {done:>{len(str(self.total))}}/{self.total} {text} {human_seconds(left_s)}"
        width = min(20, max(4, columns - len(told) - 2))
        filled = width * done // max(self.total, 1)
        return "[" + "#" * filled + "." * (width - filled) + "]" + told
