"""launch(): results by rank, one clear error when a rank fails, and never a process left behind.

Functions are defined inside the tests so that they travel by value and ranks load no more than they use.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zeor.comm.launch.launch import RankError, launch

REPOSITORY = Path(__file__).resolve().parents[2]


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie that waits for init."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def noted_pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def start_script(folder: Path, body: str) -> subprocess.Popen[str]:
    """Run a script, without a `__main__` guard, that has imported launch."""
    script = folder / "script.py"
    script.write_text("import os, sys, time\nfrom zeor.comm.launch.launch import launch\n" + body)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Results and surroundings


def test_results_come_by_rank_with_torchruns_variables():
    def describe(prefix, suffix=""):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
        return prefix + ",".join(os.environ[name] for name in names) + suffix, os.environ["MASTER_PORT"]

    results = launch(describe, "<", ranks=3, suffix=">")
    assert [text for text, _ in results] == [f"<{rank},{rank},3,3,0,127.0.0.1>" for rank in range(3)]
    assert len({port for _, port in results}) == 1


def test_threads_are_shared_out_unless_asked_for(monkeypatch):
    def omp_threads():
        return os.environ["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert launch(omp_threads, ranks=2) == [str(max(1, cores // 2))] * 2
    assert launch(omp_threads, ranks=1, threads=7) == ["7"]
    assert launch(omp_threads, ranks=1, env={"OMP_NUM_THREADS": "5"}) == ["5"]


def test_what_ranks_print_reaches_a_stdout_that_is_no_file(capsys):
    def speak():
        print("hello from", os.environ["RANK"])
        print("a warning", file=sys.stderr)
        print("no newline", end="")

    launch(speak, ranks=2)
    captured = capsys.readouterr()
    assert "hello from 0\n" in captured.out and "hello from 1\n" in captured.out
    assert captured.out.count("no newline") == 2
    assert captured.err == "a warning\n" * 2


def test_a_script_without_a_guard_sends_closures_and_exits_quietly(tmp_path):
    script = """
import torch
import torch.distributed as dist

class Answer:  # a class of __main__, sent there and back
    def __init__(self, value): self.value = value

scale = torch.tensor(10.0)

def total(offset):
    dist.init_process_group("gloo")  # left open: launch closes it
    value = scale * dist.get_rank()
    dist.all_reduce(value)
    if dist.get_rank() == 1:
        time.sleep(0.5)  # rank 0, which holds the store, is long done when this rank asks it for a group
    dist.new_group([1])
    print("rank", dist.get_rank(), "was here")
    return Answer(value.item() + offset)

print("before")
answers = launch(lambda: total(1), ranks=2)
print([isinstance(answer, Answer) and answer.value for answer in answers])
"""
    process = start_script(tmp_path, script)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    lines = out.splitlines()
    assert (lines[0], lines[-1]) == ("before", "[11.0, 11.0]")
    assert sorted(lines[1:-1]) == ["rank 0 was here", "rank 1 was here"]


def test_sys_exit_0_is_a_result():
    assert launch(lambda: sys.exit(), ranks=1) == [None]


# Failures


@pytest.mark.parametrize(
    ("how", "text"), [("raise", "ValueError: no such luck"), ("kill", "rank 1 was killed by SIGKILL")]
)
def test_a_failing_rank_ends_those_that_wait_for_it_in_a_collective(tmp_path, how, text):
    def fail_on_rank_1():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        (tmp_path / str(os.getpid())).touch()
        dist.barrier()
        (tmp_path / str(os.getpid())).write_text(str(time.monotonic()))
        if dist.get_rank() == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            raise ValueError("no such luck")
        dist.barrier()

    with pytest.raises(RankError, match=text) as caught:
        launch(fail_on_rank_1, ranks=3)
    ended = time.monotonic()
    assert caught.value.rank == 1
    if how == "raise":
        assert "in fail_on_rank_1" in str(caught.value) and "rank_main.py" not in str(caught.value)
    failed_at = max(float(path.read_text()) for path in tmp_path.iterdir())
    assert ended - failed_at < 15
    assert len(noted_pids(tmp_path)) == 3 and not any(map(is_running, noted_pids(tmp_path)))


def test_the_cause_is_shown_even_if_its_echo_comes_first():
    def fail():
        if os.environ["RANK"] == "0":
            try:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
            except RuntimeError as error:
                raise RuntimeError("this step failed") from error
        time.sleep(0.5)
        raise ValueError("the cause")

    with pytest.raises(RankError, match="ValueError: the cause") as caught:
        launch(fail, ranks=2)
    assert caught.value.rank == 1


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    def fail_or_ignore():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / str(os.getpid())).touch()
        if os.environ["RANK"] == "1":
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            os._exit(3)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 exited with code 3 before its function returned"):
        launch(fail_or_ignore, ranks=2)
    assert time.monotonic() - started < 15
    assert not any(map(is_running, noted_pids(tmp_path)))


def test_a_timeout_names_the_ranks_that_had_not_finished():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 2\] of 3 had not finished after 2 s"):
        launch(lambda: time.sleep(0 if os.environ["RANK"] == "1" else 60), ranks=3, timeout=2)


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank():
    with pytest.raises(RankError, match="returned a lock that cannot be sent to the parent"):
        launch(threading.Lock, ranks=1)


def test_the_error_itself_can_be_pickled():
    error = pickle.loads(pickle.dumps(RankError(1, "was killed by SIGKILL")))
    assert (error.rank, str(error)) == (1, "rank 1 was killed by SIGKILL")


# No orphans

SLEEPERS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests with & ignores it

def sleep():
    os.write(1, b"%d\\n" % os.getpid())  # one call: two ranks' lines do not mix
    child = os.fork()  # as a DataLoader does
    if child:
        os.write(1, b"%d\\n" % child)
    time.sleep(60)

launch(sleep, ranks=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_do_not_outlive_the_parent(tmp_path, number):
    process = start_script(tmp_path, SLEEPERS)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(4)]
    assert all(map(is_running, pids))
    process.send_signal(number)
    assert wait_until(lambda: not any(map(is_running, pids)), seconds=5)
    _, err = process.communicate(timeout=10)
    tracebacks = 1 if number == signal.SIGINT else 0  # the parent's own KeyboardInterrupt, and no rank's
    assert err.count("Traceback") == tracebacks


# Refusals


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match=r"at least one rank, but was called with ranks=0"):
        launch(print, ranks=0)


def test_a_function_that_cannot_be_sent_is_refused():
    lock = threading.Lock()

    def hold_lock():
        return lock

    with pytest.raises(ValueError, match=r"cannot send .*hold_lock and its arguments to other processes"):
        launch(hold_lock)


def test_launch_inside_a_rank_is_refused():
    def nested():
        from zeor.comm.launch.launch import launch

        launch(print)

    with pytest.raises(RankError, match=r"RuntimeError: launch\(\) was called inside rank 0"):
        launch(nested, ranks=1)


def listening(pid: int) -> list[str]:
    """ADDRESS:PORT on which a process listens, as the kernel writes them: hexadecimal, IPv6 ones with 32 digits."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if _is_open(pid, fd)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1])
    return found


def _is_open(pid: int, fd: str) -> bool:
    return os.path.lexists(f"/proc/{pid}/fd/{fd}")


def train_and_listen(by_hand: bool) -> tuple[list[str], list[str]]:
    """Where this rank listens, and where the store does."""
    import torch
    import torch.distributed as dist

    import zeor

    if by_hand:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    port = f":{int(os.environ['MASTER_PORT']):04X}"  # the launcher, here pytest, listens elsewhere too
    return listening(os.getpid()), [address for address in listening(os.getppid()) if address.endswith(port)]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("by_hand", [False, True], ids=["by zeor", "by hand"])
def test_nobody_on_the_network_is_let_in(by_hand):
    """Neither to the store, which would take any message, nor to the ranks."""
    for mine, store in launch(train_and_listen, by_hand, ranks=2):
        assert mine and len(store) == 1
        assert {address.partition(":")[0] for address in mine + store} == {"0100007F"}  # 127.0.0.1
