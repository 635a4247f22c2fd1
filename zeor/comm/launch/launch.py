"""`launch`: run a function on several local ranks, from a script or a notebook, without torchrun.

The function travels to the ranks by cloudpickle over a pipe, so `__main__` is never imported again: a script
needs no `if __name__ == "__main__"` guard, and functions of a notebook cell work. Ranks find torchrun's
environment variables and initialise process groups themselves. The store by which they find each other is held here,
as torchrun's agent does: it outlives every rank, so those that are left can say who is gone. It listens on loopback
alone, and so do the ranks: nobody on the network is let in.
A launch ends as a whole: with the results of all ranks or with one error, and with no process left behind.
One rank's process is in rank_process.py, and what runs inside it in rank_main.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

import cloudpickle
import torch.distributed as dist

from zeor.comm.launch.rank_main import LEAVE, Outcome
from zeor.comm.launch.rank_process import RankProcess
from zeor.comm.launch.world import STORE_VARIABLE

_LOCAL = "127.0.0.1"
_TICK_SECONDS = 0.2  # how often exits are looked for; messages and output are seen at once
_TERM_SECONDS = 3.0  # from SIGTERM to SIGKILL
_LEAVE_SECONDS = 30.0  # for what ranks do at exit, once all results are in


class RankError(RuntimeError):
    """A launched rank failed. `rank` says which; the text has its traceback, or the signal that killed it."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank

    def __str__(self) -> str:
        return f"rank {self.rank} {self.args[1]}"


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    timeout: float | None = None,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` in `ranks` new local processes and return the list of results by rank.

    Each process has torchrun's variables (RANK, WORLD_SIZE, MASTER_PORT, ...), those of `env`, and `threads`
    OpenMP threads (by default the cores divided by the ranks, unless OMP_NUM_THREADS is set).
    If a rank fails, the others are ended and RankError shows the failure that came first. If some have not
    finished after `timeout` seconds, all are ended and TimeoutError names them.
    """
    if ranks < 1:
        raise ValueError(f"launch() needs at least one rank, but was called with ranks={ranks}")
    if "RANK" in os.environ:
        raise RuntimeError(
            f"launch() was called inside rank {os.environ['RANK']} of a launch or torchrun that is already "
            "running: call it only in the process that starts the ranks, or call the function itself here"
        )
    payload = _pickle_call(fn, args, kwargs)
    store = _local_store()
    shared_env = _shared_env(ranks, threads, env or {}, store.port)
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    print(end="", flush=True)  # what was printed before the launch is seen before what the ranks print
    team: list[RankProcess] = []
    try:
        for rank in range(ranks):
            team.append(RankProcess(rank, {**shared_env, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        for member in team:
            member.send(payload)
        _await_outcomes(team, deadline)
        if all(member.outcome is not None and member.outcome.ok for member in team):
            for member in team:
                member.send(LEAVE)  # all together; and their exit handlers get time
            _await_exits(team, _LEAVE_SECONDS)
    finally:
        _end(team)
        del store
    return _results(team, timeout)


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(fn):
        raise ValueError(f"launch() needs a function to run, but was given a {type(fn).__name__}")
    try:
        pickled: bytes = cloudpickle.dumps((fn, args, kwargs))
        return pickled
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(
            f"launch() cannot send {name} and its arguments to other processes ({error}): make what cannot "
            "be pickled (locks, open files, generators) inside the function"
        ) from error


def _local_store() -> dist.TCPStore:
    """Listens on a free port of this machine's loopback; torch's own would listen on every interface."""
    with socket.socket() as listener:
        listener.bind((_LOCAL, 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return dist.TCPStore(_LOCAL, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _shared_env(ranks: int, threads: int | None, extra: Mapping[str, str], port: int) -> dict[str, str]:
    """The variables that all ranks have in common, named as torchrun names them."""
    env = {**os.environ, **extra}
    for backend in ("GLOO", "NCCL"):
        env.setdefault(f"{backend}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    env.setdefault("OMP_NUM_THREADS", str(max(1, _core_count() // ranks)))
    return env | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _LOCAL,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # whoever initialises a group by these variables is a client of ours
        STORE_VARIABLE: f"{_LOCAL}:{port}",
    }


def _core_count() -> int:
    """The cores that this process may use: under taskset or SLURM fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _await_outcomes(team: list[RankProcess], deadline: float) -> None:
    """Relay output until every rank has an outcome, the deadline has passed, or a failure is certain.

    A failure just seen need not be the first. Another may be on its way (wait a moment); and an error that
    says a peer is gone is the echo of that peer's death, which is about to be noticed (wait longer).
    """
    failure_seen: float | None = None
    while any(member.outcome is None for member in team):
        now = time.monotonic()
        failure = _first_failure(team)
        if failure is not None:
            failure_seen = failure_seen or now
            deadline = min(deadline, failure_seen + (2.0 if failure[1].peer_lost else 0.1))
        if now >= deadline:
            return
        sources: list[Any] = [member.conn for member in team if member.outcome is None]
        sources += [relay for member in team for relay in member.relays if relay.is_open]
        wait(sources, timeout=min(_TICK_SECONDS, deadline - now))
        for member in team:
            member.pump()
            member.update()


def _first_failure(team: list[RankProcess]) -> tuple[int, Outcome] | None:
    """The rank and the failure to report: the earliest of those that are not the echo of another, if there is one."""
    outcomes = [(member.rank, member.outcome) for member in team if member.outcome is not None]
    failures = [(rank, outcome) for rank, outcome in outcomes if not outcome.ok]
    return min(failures, key=lambda failure: (failure[1].peer_lost, failure[1].when), default=None)


def _end(team: list[RankProcess]) -> None:
    """End the ranks that still run, politely and then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in team:
            member.signal(number)
        _await_exits(team, _TERM_SECONDS)
    for member in team:
        member.close()


def _await_exits(team: list[RankProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(member.is_alive() for member in team) and time.monotonic() < deadline:
        for member in team:
            member.pump()  # a rank that prints as it leaves must not wait for a full pipe
        time.sleep(0.02)


def _results(team: list[RankProcess], timeout: float | None) -> list[Any]:
    failure = _first_failure(team)
    if failure is not None:
        raise RankError(failure[0], failure[1].body.decode())
    late = [member.rank for member in team if member.outcome is None]
    if late:
        raise TimeoutError(f"ranks {late} of {len(team)} had not finished after {timeout} s; all ranks were ended")
    return [cloudpickle.loads(member.outcome.body) for member in team if member.outcome is not None]
