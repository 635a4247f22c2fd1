"""A rank that freezes or dies anywhere in a step, the one that holds the job's store too: the other says so within the
time limit and its process can leave."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import netns

ROOT = Path(__file__).resolve().parents[2]
PLACES = ["between steps", "after forward", "in backward", "after backward", "after step", "in a background save"]
CODED = ["in a gather by codes", "in a reduce by codes"]
# Rank 0 holds the store. Every place and every way in `make test-all`; here each of them once.
SOME = [
    (0, "in a background save", "SIGSTOP"),
    (0, "after forward", "SIGKILL"),
    (1, "in backward", "SIGSTOP"),
    (0, "after step", "SIGSTOP"),
    (1, "in a reduce by codes", "SIGKILL"),
]
ALL = [(who, place, how) for who in (0, 1) for place in [*PLACES, *CODED] for how in ("SIGSTOP", "SIGKILL")]
LIMIT_SECONDS = 120  # so long may the other live on a busy machine; an endless wait is what is looked for


def start(rank: int, port: int, arguments: list[str], hosts: Sequence[netns.Host] = ()) -> subprocess.Popen:
    env = {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": hosts[rank].interface if hosts else "lo",
    }  # fmt: skip
    inside = ["ip", "netns", "exec", hosts[rank].namespace] if hosts else []
    program = [*inside, sys.executable, "-m", "tests.comm.frozen_rank", *arguments]
    return subprocess.Popen(program, env=env, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "place", "how"),
    [pytest.param(*case, marks=[] if case in SOME else [pytest.mark.whole]) for case in ALL],
)
def test_a_rank_that_freezes_or_dies_does_not_hold_the_other(tmp_path, who, place, how):
    port, arguments = free_port(), [str(who), place, how, str(tmp_path)]
    team = [start(rank, port, arguments) for rank in (0, 1)]
    try:
        _, said = team[1 - who].communicate(timeout=LIMIT_SECONDS)
    finally:
        for member in team:
            member.send_signal(signal.SIGKILL)
            member.wait()
    assert (tmp_path / "there").exists(), said
    assert team[1 - who].returncode == 1, said
    last = next(line for line in reversed(said.splitlines()) if "Error: " in line)
    assert f"rank {1 - who} of 2" in last or "did not answer" in last or f"ranks [{who}] did not" in last, said
    if who == 0:
        assert "rank 0" in last, said  # as the one that is gone, or that holds the store which does not answer
    else:
        assert "rank 1 did not take part" in last or "ranks [1] did not" in last, said


@pytest.mark.netns
@pytest.mark.whole
@pytest.mark.parametrize("place", [*PLACES, *CODED])
def test_a_link_that_is_cut_holds_neither_host(tmp_path, place):
    """Nobody closes a connection: each side hears nothing more, and the store is on the other for one of them."""
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.two_hosts() as hosts:
        team = [start(rank, 29400, ["0", place, "cut", str(tmp_path)], hosts) for rank in (0, 1)]
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not all((tmp_path / f"there{rank}").exists() for rank in (0, 1)):
                assert time.monotonic() < deadline and all(member.poll() is None for member in team)
                time.sleep(0.05)
            command = ["ip", "netns", "exec", hosts[0].namespace, "ip", "link", "set", hosts[0].interface, "down"]
            subprocess.run(command, check=True)
            (tmp_path / "cut").touch()
            said = [member.communicate(timeout=LIMIT_SECONDS)[1] for member in team]
        finally:
            for member in team:
                member.send_signal(signal.SIGKILL)
                member.wait()
    assert [member.returncode for member in team] == [1, 1], said
    assert "rank 1 did not take part" in said[0] or "ranks [1] did not" in said[0], said[0]
    assert "rank 0" in said[1] and ("frozen or cut off" in said[1] or "is gone" in said[1]), said[1]
