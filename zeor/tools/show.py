"""What the command line draws: byte counts, tables, and a progress bar. Standard library only.

On a terminal the bar redraws one line in place; elsewhere (a log file, CI) it prints a line every few
seconds. Nothing here knows what is being counted.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

WIDTH = 79  # of every line: a terminal of 80 columns shows it unbroken
_LINE_EVERY_S = 5.0  # in a log file
_REDRAW_EVERY_S = 0.1  # on a terminal


def human_bytes(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def common_unit(sizes: Iterable[int]) -> tuple[str, int]:
    """The name and the bytes of the unit in which a table shows all of these: the largest of them sets it."""
    largest = max(sizes, default=0)
    for name, nbytes in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if largest >= nbytes:
            return name, nbytes
    return "KiB", 1 << 10


def in_unit(nbytes: int, unit_nbytes: int) -> str:
    """A cell of such a table."""
    return f"{nbytes / unit_nbytes:,.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first flush left, the others flush right, a rule below the header. A name in
    the header may have several lines."""
    names = [name.split("\n") for name in header]
    height = max(map(len, names))
    tops = [[name[line - height] if len(name) >= height - line else "" for name in names] for line in range(height)]
    widths = [max(len(row[column]) for row in [*tops, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        return "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([*map(line, tops), "  ".join("-" * width for width in widths), *map(line, rows)])


def paragraph(text: str, indent: str = "") -> str:
    """The text in lines of at most WIDTH, all but the first behind `indent`; a long path stays in one piece."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plain_lines(text: str) -> str:
    """Any text, such as a model's, as a terminal may be given it: no control characters, no line beyond WIDTH."""
    printable = "".join(char if char.isprintable() or char == "\n" else "?" for char in text.expandtabs(4))
    return "\n".join(line for long in printable.split("\n") for line in textwrap.wrap(long, WIDTH) or [""])


class _Wrapping(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return paragraph("zeor: " + super().format(record).removeprefix("zeor: "), indent="      ")


@contextmanager
def wrapped_log(enabled: bool) -> Iterator[None]:
    """Inside, what zeor logs goes to stderr in lines of at most WIDTH. Nothing changes where it is not enabled, or
    where somebody has set logging up already."""
    log, handler = logging.getLogger("zeor"), logging.StreamHandler()
    if not enabled or log.handlers or logging.getLogger().handlers:
        yield
        return
    handler.setFormatter(_Wrapping())
    before = (log.level, log.propagate)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@contextmanager
def warnings_only() -> Iterator[None]:
    """Inside, zeor logs warnings and errors, and no start-up block."""
    log = logging.getLogger("zeor")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


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
    """A line about `total` steps, or of what `unit` names. Does nothing when not enabled, so that every rank may call
    it alike. `start` of them were done before, by an earlier run: they say nothing of how long the others take."""

    def __init__(
        self, total: int, *, unit: str = "step", start: int = 0, stream: TextIO | None = None, enabled: bool = True
    ) -> None:
        self.total, self.unit, self.start = total, unit, start
        self.stream = sys.stdout if stream is None else stream
        self.enabled = enabled
        self.in_place = self.stream.isatty()
        self.started_s = time.monotonic()
        self._shown_s = float("-inf")

    def due(self, done: int) -> bool:
        """Whether update(done, ...) would draw: ask first where the text is costly to make."""
        wait_s = _REDRAW_EVERY_S if self.in_place else _LINE_EVERY_S
        return self.enabled and (done >= self.total or time.monotonic() - self._shown_s >= wait_s)

    def update(self, done: int, *fields: str) -> None:
        """Draw `done` of `total` and the fields, if it is time to. The first field matters most."""
        if not self.due(done):
            return
        self._shown_s = time.monotonic()
        if self.in_place:  # a line that wraps cannot be redrawn in place
            line = self._line(done, list(fields), shutil.get_terminal_size().columns - 1)
            self.stream.write("\r\x1b[K" + line + ("\n" if done >= self.total else ""))
        else:
            self.stream.write(self._line(done, list(fields), WIDTH) + "\n")
        self.stream.flush()

    def _line(self, done: int, fields: list[str], columns: int) -> str:
        """As much as `columns` hold: fields go from the last on, whole, as half a number is a wrong number. A bar
        takes what is left, if that is worth it."""
        left_s = (time.monotonic() - self.started_s) / max(done - self.start, 1) * (self.total - done)
        count, left = (
            f"{self.unit} {done:>{len(str(self.total))}}/{self.total}",
            f"{int(left_s) // 60}:{int(left_s) % 60:02d} left",
        )
        while fields and len("  ".join([count, *fields, left])) > columns:
            fields.pop()
        text = "  ".join([count, *fields, left])
        width = min(20, columns - len(text) - 3)
        if width < 4:
            return text[:columns]
        filled = width * done // max(self.total, 1)
        return "[" + "#" * filled + "." * (width - filled) + "] " + text
