"""A launched rank as its parent sees it: the process, the pipe to it, how it ended, and what it prints.

Ranks inherit a real stdout and stderr. Where the parent's are something else (a notebook cell, a test's
capture) a Relay copies the rank's output there, line by line, from the parent's own thread.
This file starts, hears and signals one rank; what the ranks together mean is decided in launch.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from typing import TextIO

from zeor.comm.launch import rank_main
from zeor.comm.launch.rank_main import Outcome


class RankProcess:
    """One rank. `outcome` is None until update() has seen it finish, fail or die."""

    def __init__(self, rank: int, env: dict[str, str]) -> None:
        self.rank = rank
        self.outcome: Outcome | None = None
        self.conn, child_conn = Pipe()
        with child_conn:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _program(child_conn.fileno())],
                env=env,
                pass_fds=[child_conn.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=None if _is_real(sys.stdout, 1) else subprocess.PIPE,
                stderr=None if _is_real(sys.stderr, 2) else subprocess.PIPE,
                # In a session of its own, Ctrl-C reaches the parent alone, which ends the ranks without a
                # traceback from each; and a signal to the rank's group reaches what the rank has forked.
                start_new_session=True,
            )
        outputs = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self.relays = [Relay(source.fileno(), target) for source, target in outputs if source is not None]

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the rank is dead: update() finds out
            self.conn.send_bytes(message)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def update(self) -> None:
        """Look for the outcome: a message from the rank, or its exit without one."""
        if self.outcome is not None:
            return
        dead = not self.is_alive()  # asked before reading, so that a last message is not missed
        try:
            if self.conn.poll():
                self.outcome = Outcome(*self.conn.recv())
                return
        except (EOFError, OSError):
            dead = True
        if dead:
            how = _describe_exit(self.process.wait())
            self.outcome = Outcome(False, time.monotonic(), False, how.encode())

    def pump(self) -> None:
        for relay in self.relays:
            relay.pump()

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Release what is left of a rank that has exited."""
        self.process.wait()
        for relay in self.relays:
            relay.finish()
        for pipe in (self.conn, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class Relay:
    """Copies what arrives on the pipe `fd` to the stream `target`, whole lines at a time."""

    def __init__(self, fd: int, target: TextIO) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.target = target
        self.is_open = True
        self._partial_line = b""

    def fileno(self) -> int:
        return self.fd

    def pump(self) -> None:
        """Print the lines that are there now, without waiting for more."""
        text = self._partial_line + self._read()
        # Progress bars end their lines in \r.
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._partial_line = text[end:]
        self._print(text[:end])

    def finish(self) -> None:
        self.pump()
        self._print(self._partial_line)

    def _read(self) -> bytes:
        chunks = []
        while self.is_open:
            try:
                chunks.append(os.read(self.fd, 1 << 16))
            except BlockingIOError:
                break
            self.is_open = chunks[-1] != b""
        return b"".join(chunks)

    def _print(self, text: bytes) -> None:
        if text:
            print(text.decode(errors="replace"), end="", file=self.target, flush=True)


def _program(conn_fd: int) -> str:
    """What the rank's interpreter runs; it looks for modules where the parent does."""
    path = rank_main.__file__
    return f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_path({path!r})['main']({conn_fd})"


def _is_real(stream: TextIO | None, fd: int) -> bool:
    """Whether `stream` writes to the process's own stdout (1) or stderr (2). A notebook's does not."""
    try:
        return stream is None or stream.fileno() == fd
    except (AttributeError, OSError, ValueError):
        return False


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code} before its function returned"
    hint = " (often the system's answer to running out of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"
