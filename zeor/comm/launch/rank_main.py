"""What a rank started by `launch` does: receive a function, run it, send its Outcome, leave with the others.

It talks to the parent over one duplex pipe. Parent to rank: the function, then LEAVE once every rank is done.
Rank to parent: the Outcome. End of file means that the parent is gone, and the rank goes too.
A rank that has finished or failed keeps its process groups (and rank 0 the store) until it is told to leave
or is ended: closing them while others still work would fail those with errors that hide the real one.
This file is run by its path and imports neither zeor nor torch: the function decides what a rank loads.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

LEAVE = b"leave"

# How the loss of a peer reads in the errors of Gloo, NCCL and the store.
_PEER_LOST = re.compile(
    r"(connection|socket) (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited",
    re.IGNORECASE,
)


class Outcome(NamedTuple):
    """How a rank ended."""

    ok: bool
    when: float  # time.monotonic(), which is one clock for all processes of a machine
    peer_lost: bool  # the error is that another rank is gone, so the other one is to blame
    body: bytes  # cloudpickle of the result; or, as text, what happened: "failed: ...", "was killed by ..."


def main(conn_fd: int) -> None:
    """Run the function that arrives on the pipe `conn_fd`."""
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):  # lines are printed at once
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    conn = Connection(conn_fd)
    try:
        payload = conn.recv_bytes()
    except (EOFError, OSError):
        return  # the parent died while this rank was starting
    may_leave = threading.Event()
    threading.Thread(target=_watch_parent, args=(conn, may_leave), daemon=True).start()
    outcome = _run(payload)
    sys.stdout.flush()
    conn.send(tuple(outcome))  # the parent knows the class by another module name
    may_leave.wait()
    _destroy_groups()


def _watch_parent(conn: Connection, may_leave: threading.Event) -> None:
    try:
        while conn.recv_bytes() != LEAVE:
            pass
        may_leave.set()
        conn.recv_bytes()  # nothing comes any more, but the parent may still die while this rank leaves
    except (EOFError, OSError):
        # The rank leads a process group of its own, so this also ends what it forked (DataLoader workers).
        os.killpg(0, signal.SIGKILL)


def _run(payload: bytes) -> Outcome:
    try:
        fn, args, kwargs = cloudpickle.loads(payload)
        body = _pickle_result(_call(fn, args, kwargs))
        return Outcome(True, time.monotonic(), False, body)
    except BaseException as error:
        when = time.monotonic()
        text = f"failed:\n{_format(error)}"
        return Outcome(False, when, _is_peer_lost(error), text.encode(errors="replace"))


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function's result; `sys.exit(0)` counts as returning None, since it ends a script well."""
    try:
        return fn(*args, **kwargs)
    except SystemExit as stop:
        if stop.code in (None, 0):
            return None
        raise


def _pickle_result(result: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(result)
        return pickled
    except Exception as error:
        raise ValueError(
            f"the function returned a {type(result).__name__} that cannot be sent to the parent process "
            f"({error}): return tensors, numbers or plain containers instead"
        ) from error


def _format(error: BaseException) -> str:
    """The traceback, from the user's function on."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def _is_peer_lost(error: BaseException | None) -> bool:
    """Whether the error, or one that led to it, is that a connection to another rank broke."""
    while error is not None:
        if isinstance(error, ConnectionError) or _PEER_LOST.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _destroy_groups() -> None:
    """Close the process groups that the function left open: torch warns of them; NCCL may hang at exit."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
