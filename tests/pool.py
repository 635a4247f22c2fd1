"""Four Gloo ranks that stay up for a whole pytest run, so that a distributed test costs milliseconds.

The parent (pytest) sends a function to the first `world` workers and collects one result per rank; each finds
a default process group of exactly that world. Groups are kept while they are clean and the world is the same: a library
that makes groups of its own once finds them again. They are clean where all ranks have issued equally many collectives
and messages on each; otherwise the next task carries a higher generation and every rank of it builds a new one.
A worker that hangs or dies costs its test a failure and the next test a new set of workers, nothing more.
This file knows nothing of zeor.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

POOL_RANKS = 4
MOST_GROUPS = 8  # that a task may leave to the next
GRACE_SECONDS = 5.0  # what the other ranks get to finish once one has failed
# Longer than any test may take: a hang is to end in the pool's timeout, which shows stacks, not in Gloo's.
GROUP_TIMEOUT = timedelta(minutes=30)
LOCALS = "locals: "  # begins the line below a traceback that shows the failing frame's plain values


class RankFailure(AssertionError):
    """A rank of a pooled test failed; the text holds its traceback, or its stack where it hung or crashed."""


class Task(NamedTuple):
    world: int
    generation: int  # of the process group; a worker that holds an older one replaces it
    sys_path: list[str]  # pytest adds to it as it collects, and test modules are sent by name
    payload: bytes  # cloudpickle of (fn, args, kwargs)


class Outcome(NamedTuple):
    ok: bool
    when: float  # time.monotonic(), one clock for all processes of a machine
    # Collectives and messages so far by group; None: the default group is not the task's, or there are too many.
    clean: dict[str, int] | None
    body: bytes  # cloudpickle of the result, or the traceback as text


# ----------------------------------------------------------------------------------------------------
# The worker's side


def worker_main(rank: int, conn_fd: int, stacks_fd: int, store_port: int) -> None:
    """Run tasks one after the other, for as long as the parent lives."""
    faulthandler.enable(file=stacks_fd)
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
    torch.set_num_threads(1)
    for name in ("isend", "irecv"):  # in both places: batches of messages compare the two
        setattr(dist, name, _counted(getattr(dist, name)))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    conn = Connection(conn_fd)
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(conn, tasks), daemon=True).start()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    generation = module_count = 0
    while True:
        task = tasks.get()
        renew = task.generation != generation
        generation = task.generation
        outcome = _run_task(rank, task, store if renew else None)
        module_count = _collect_garbage(module_count)
        if not outcome.ok and dist.is_initialized():
            # Peers may be waiting for this rank in a collective: closed connections let them fail at once.
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send(outcome)


_messages: Counter[str] = Counter()  # sent to, or asked of, a single rank, by group; torch does not number them


def _counted(of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of)
    def called(*args: Any, **kwargs: Any) -> Any:
        _messages[dist.distributed_c10d._world.pg_names[kwargs.get("group") or dist.group.WORLD]] += 1
        return of(*args, **kwargs)

    return called


def _receive(conn: Connection, tasks: queue.SimpleQueue[Task]) -> None:
    """Queue what arrives. On its own thread so that the parent's death ends this process even in mid-task."""
    try:
        while True:
            tasks.put(conn.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _run_task(rank: int, task: Task, new_store: dist.Store | None) -> Outcome:
    """Run one task; its objects are dropped on return, so that the caller's gc.collect() reaches them."""
    try:
        sys.path[:] = task.sys_path
        if new_store is not None:
            _renew_group(rank, task, new_store)
        group = dist.group.WORLD
        torch.manual_seed(0)
        fn, args, kwargs = cloudpickle.loads(task.payload)
        body = cloudpickle.dumps(fn(*args, **kwargs))
        return Outcome(True, time.monotonic(), _counts(group), body)
    except BaseException as error:
        when = time.monotonic()
        text = "".join(traceback.format_exception(error)) + _simple_locals(error.__traceback__)
        # The frames hold the test's models and groups; without this they would live until the next exception.
        traceback.clear_frames(error.__traceback__)
        return Outcome(False, when, None, text.encode())


def _renew_group(rank: int, task: Task, store: dist.Store) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _messages.clear()  # names of groups come again
    prefixed = dist.PrefixStore(f"generation{task.generation}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=task.world, timeout=GROUP_TIMEOUT)


def _counts(group: dist.ProcessGroup | None) -> dict[str, int] | None:
    """What decides whether the next task may have `group` and those beside it too. Too many of them would pile up
    sockets and threads."""
    if not dist.is_initialized() or dist.group.WORLD is not group:
        return None
    names = dist.distributed_c10d._world.pg_names
    if len(names) > MOST_GROUPS:
        return None
    return {name: each._get_sequence_number_for_group() + _messages[name] for each, name in names.items()}


def _collect_garbage(module_count: int) -> int:
    """Drop what a task left behind; return how many modules are loaded now, for the next call.

    Walking torch's own objects takes 0.2 s, far more than a small test: when imports added some, freeze them.
    """
    _forget_meshes()
    gc.collect()
    if len(sys.modules) != module_count:
        gc.freeze()
    return len(sys.modules)


def _forget_meshes() -> None:
    """DTensor remembers how operations were cut together with the meshes they were cut over, and a mesh holds its
    groups: each idle Gloo group is three threads, one of which wakes up a hundred times a second."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)  # not in torch 2.9
    if clear_planners is not None:
        clear_planners()


def _simple_locals(tb: TracebackType | None) -> str:
    """The failing frame's plain values: pytest does not rewrite `assert` in modules that a worker imports.

    Tensors are left out on purpose: printing one whose storage was freed would crash the worker.
    """
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    plain = (bool, int, float, str, torch.Size, torch.dtype)
    names = tb.tb_frame.f_locals if tb is not None else {}
    shown = [f"{name}={value!r:.200}" for name, value in names.items() if type(value) in plain]
    return f"{LOCALS}{', '.join(shown)}\n" if shown else ""


# ----------------------------------------------------------------------------------------------------
# The parent's side


class Worker:
    """One worker process as the parent sees it."""

    def __init__(self, rank: int, store_port: int) -> None:
        self.conn, child_conn = Pipe()
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        fds = (child_conn.fileno(), self.stacks.fileno())
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import worker_main; "
            f"worker_main({rank}, {fds[0]}, {fds[1]}, {store_port})"
        )
        # A session of its own: Ctrl-C reaches pytest alone, and killpg reaches DataLoader workers too.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
        )
        child_conn.close()

    def send(self, task: Task) -> None:
        with contextlib.suppress(OSError):  # it died while idle: receive() says so
            self.conn.send(task)

    def receive(self) -> Outcome:
        """What the worker sent; if it died instead, how, and the stack it left where it crashed."""
        try:
            return self.conn.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            # A death is the cause of the connection errors around it, however late the parent saw it.
            return Outcome(False, 0.0, None, f"The process {how}.\n{self.read_stacks()}".encode())

    def read_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.conn.close()
        self.stacks.close()


class Pool:
    """The workers of one pytest run: started by the first task, and again after a failure that lost one."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.store: dist.TCPStore | None = None
        self.generation = 0
        self.group_world = 0  # world of the clean group that the workers hold; 0 when there is none

    def run(
        self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call fn(*args, **kwargs) on ranks 0..world-1 and return their results by rank."""
        __tracebackhide__ = True
        if not 1 <= world <= POOL_RANKS:
            raise ValueError(f"the pool has {POOL_RANKS} ranks; a test asked for a world of {world}")
        payload = cloudpickle.dumps((fn, args, kwargs))
        try:
            self._start()
            if world != self.group_world:
                self.generation += 1
            task = Task(world, self.generation, sys.path, payload)
            for worker in self.workers[:world]:
                worker.send(task)
            outcomes = self._collect(self.workers[:world], timeout)
        except BaseException:
            self.close()  # Ctrl-C or a timeout: the workers are in mid-task, and their results nobody's
            raise
        first = next(iter(outcomes.values())).clean
        same = first is not None and all(outcome.clean == first for outcome in outcomes.values())
        self.group_world = world if same else 0
        if len(outcomes) < world or any(worker.process.poll() is not None for worker in self.workers):
            self.close()
        if not all(outcome.ok for outcome in outcomes.values()):
            raise RankFailure(_describe(outcomes, world))
        return [cloudpickle.loads(outcomes[rank].body) for rank in range(world)]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self.group_world = 0

    def _start(self) -> None:
        if self.workers:
            return
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers = [Worker(rank, self.store.port) for rank in range(POOL_RANKS)]

    def _collect(self, workers: list[Worker], timeout: float) -> dict[int, Outcome]:
        """One outcome per rank; fewer if a rank failed and others did not finish within the grace."""
        __tracebackhide__ = True
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while len(outcomes) < len(workers):
            waiting = {worker.conn: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if failed:
                    break
                raise RankFailure(self._describe_timeout(list(waiting.values()), len(workers), timeout))
            for conn in ready:
                assert isinstance(conn, Connection)
                rank = waiting[conn]
                outcomes[rank] = workers[rank].receive()
                if not outcomes[rank].ok and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes

    def _describe_timeout(self, late: list[int], world: int, timeout: float) -> str:
        for rank in late:
            os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # faulthandler writes from the signal handler; there is nothing to wait on
        lines = [f"ranks {late} of {world} had not finished after {timeout} s; their stacks:"]
        lines += [f"--- rank {rank}\n{self.workers[rank].read_stacks()}" for rank in late]
        return "\n".join(lines)


def _describe(outcomes: dict[int, Outcome], world: int) -> str:
    """The first failure in full, the last line of each later one: those are mostly its echoes."""
    failures = sorted((outcome.when, rank) for rank, outcome in outcomes.items() if not outcome.ok)
    first = failures[0][1]
    lines = [f"rank {first} of {world} failed first:", outcomes[first].body.decode()]
    for _, rank in failures[1:]:
        error = outcomes[rank].body.decode().partition(f"\n{LOCALS}")[0].strip().splitlines()[-1]
        lines.append(f"rank {rank} failed after it: {error:.200}")
    stuck = [rank for rank in range(world) if rank not in outcomes]
    if stuck:
        lines.append(f"ranks {stuck} did not finish within {GRACE_SECONDS:g} s of that and were killed")
    return "\n".join(lines)
