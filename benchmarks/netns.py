"""Two hosts on one machine: a pair of network namespaces joined by a veth link, and torchrun in both.

    with two_hosts(rate="100mbit") as hosts:
        results = torchrun(hosts, ["train.py", "--steps", "4"])

        namespace NAMEa                 namespace NAMEb
        va 10.77.0.1  <--- veth --->    vb 10.77.0.2

Every name carries this process's id, so that two users of this file do not meet, and leaving the context
removes everything, whatever happened inside. Needs root and iproute2; standard library only, so that tests
can import it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_numbers = itertools.count()


class Host(NamedTuple):
    """One end of the link."""

    namespace: str
    interface: str
    address: str


class Finished(NamedTuple):
    """What a command in a namespace left behind."""

    status: int
    output: str


def missing() -> str | None:
    """Why namespaces cannot be made here, or None where they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt-get install -y iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"zeor{os.getpid()}probe"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return probe.stderr.strip() if probe.returncode != 0 else None


def _ip(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


@contextmanager
def two_hosts(rate: str | None = None) -> Iterator[tuple[Host, Host]]:
    """Make both namespaces and the link; `rate` (as tc writes it, "100mbit") limits each direction."""
    name = f"zeor{os.getpid()}n{next(_numbers)}"
    a = Host(name + "a", "va", "10.77.0.1")
    b = Host(name + "b", "vb", "10.77.0.2")
    try:
        for host in (a, b):
            _ip("ip", "netns", "add", host.namespace)
        link = ["type", "veth", "peer", "name", b.interface, "netns", b.namespace]
        _ip("ip", "link", "add", a.interface, "netns", a.namespace, *link)
        for host in (a, b):
            _bring_up(host, rate)
        yield a, b
    finally:
        for host in (a, b):
            _remove(host)


def _bring_up(host: Host, rate: str | None) -> None:
    _ip("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
    _ip("ip", "-n", host.namespace, "link", "set", host.interface, "up")
    _ip("ip", "-n", host.namespace, "link", "set", "lo", "up")
    if rate is not None:
        limit = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        _ip("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, *limit)


def _remove(host: Host) -> None:
    """End what still runs in this namespace of ours, then take it away; the link goes with it."""
    listed = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def start(host: Host, command: Sequence[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command inside a namespace, its output (both streams) on a pipe."""
    return subprocess.Popen(
        ["ip", "netns", "exec", host.namespace, *command],
        env={**os.environ, "GLOO_SOCKET_IFNAME": host.interface, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[Finished]:
    """Collect every process; those still there after `timeout_s` are killed with all they started."""
    deadline = time.monotonic() + timeout_s
    results = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nkilled after {timeout_s:.0f} s\n"
        results.append(Finished(process.returncode, output))
    return results


def torchrun(
    hosts: tuple[Host, Host],
    script: Sequence[str],
    per_host: int = 1,
    environment: dict[str, str] | None = None,
    timeout_s: float = 300.0,
) -> list[Finished]:
    """Run `torchrun ... script` on both hosts as two nodes of one job; host 0 holds the rendezvous."""
    processes = []
    for node, host in enumerate(hosts):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        launcher += [f"--nproc-per-node={per_host}", "--rdzv-backend=c10d", "--rdzv-id=zeor"]
        # torchrun finds out by the host name whether a node is the endpoint, and gives the host name as the
        # node's address; neither means anything inside a namespace, so both are said outright.
        launcher += [f"--rdzv-endpoint={hosts[0].address}:29400", f"--rdzv-conf=is_host={int(node == 0)}"]
        launcher += [f"--local-addr={host.address}"]
        processes.append(start(host, [*launcher, *script], environment))
    return finish(processes, timeout_s)


def sent_nbytes(interface: str) -> int:
    """Bytes the interface has sent; to be read inside the namespace, where /sys shows its own links."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
