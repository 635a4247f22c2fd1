"""Ways to exchange parts of a buffer over Gloo, on links of a given speed: what verbs.py chose from.

Two hosts made of network namespaces (netns.py) with `--per-host` ranks each, or (`--rates loopback`) ranks of one
host. All ways take turns in every repeat. Before each exchange every rank sleeps for a random moment of its own, since
who comes last decides which way Gloo's messages queue up. Seconds count from the moment the last rank came to the
moment the last one was done; processor time is that of all ranks, threads of the backend included.

    python -m benchmarks.links --rates 100mbit,1gbit,loopback --out benchmarks/results/links.json
    python -m benchmarks.links --rates 100mbit --ways "zeor gather,zeor reduce" --repeats 3

The floor of a way is its bytes over the link's rate; needs root and iproute2, except for loopback.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

# So that `python benchmarks/links.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import netns
from benchmarks.measure import MIB, command_line, describe_machine, free_port, write_json

ROOT = Path(__file__).resolve().parents[1]
CHUNKS_KIB = (64, 256, 1024, 4096)
WAYS = [
    "zeor gather", "zeor reduce",
    "broadcasts", *(f"broadcasts {kib}" for kib in CHUNKS_KIB),
    "shifts", *(f"shifts {kib}" for kib in CHUNKS_KIB),
    "messages", *(f"messages {kib}" for kib in CHUNKS_KIB),
    "marked messages", "messages by direction", "two groups",
]  # fmt: skip


# One rank


class Ways:
    """Each way moves `full.nbytes / ranks` bytes from every rank to every other; it returns what to wait for."""

    def __init__(self, nbytes: int) -> None:
        import torch
        import torch.distributed as dist

        from zeor.comm import axes, verbs

        self.torch, self.dist, self.verbs = torch, dist, verbs
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.axis = axes.make_axis(None, torch.device("cpu"), deterministic=False, timeout=300.0)
        everyone = list(range(self.size))
        self.group, self.back = dist.new_group(everyone), dist.new_group(everyone)
        self.part = nbytes // 4 // self.size
        self.full = torch.ones(self.part * self.size)
        self.into = torch.zeros(self.part * self.size)
        self.received = torch.zeros(verbs.reduce_receives(self.axis, self.full.numel()))
        self.parts = verbs.Parts.of(self.axis, self.into)
        self.sent_nbytes = self.part * 4 * (self.size - 1)

    def start(self, way: str) -> list[Any]:
        kind, _, kib = way.rpartition(" ") if way[-1].isdigit() else (way, "", "")
        numel = int(kib) * 256 if kib else self.part
        mine = self.into.view(self.size, -1)[self.rank]
        if kind == "zeor gather":
            return [self.verbs.gather(self.axis, self.into, mine, "gather", self.parts)]
        if kind == "zeor reduce":
            return [self.verbs.reduce(self.axis, self.full, self.received, 1.0, "reduce", lambda: mine)]
        pieces = [(begin, min(self.part, begin + numel)) for begin in range(0, self.part, numel)]
        rows, outs = self.into.view(self.size, -1), self.full.view(self.size, -1)
        return list(itertools.chain.from_iterable(getattr(self, f"_{kind.replace(' ', '_')}")(rows, outs, pieces)))

    def _broadcasts(self, rows: Any, outs: Any, pieces: Any) -> Any:
        """Each rank's part from it, in pieces that take turns."""
        for begin, end in pieces:
            yield [
                self.dist.broadcast(rows[rank][begin:end], rank, group=self.group, async_op=True)
                for rank in range(self.size)
            ]

    def _shift(self, group: Any, rows: Any, outs: Any, piece: Any, distance: int, two_way: bool = True) -> Any:
        """An all-to-all of which each rank sends to one other alone, and hears of one."""
        (begin, end), to, of = piece, (self.rank + distance) % self.size, (self.rank - distance) % self.size
        splits = [[end - begin if each == peer else 0 for each in range(self.size)] for peer in (of, to)]
        sent, into = outs[to][begin:end], rows[of][begin:end]
        return self.dist.all_to_all_single(into, sent, *splits, group=group, async_op=True)

    def _shifts(self, rows: Any, outs: Any, pieces: Any) -> Any:
        for piece in pieces:
            yield [self._shift(self.group, rows, outs, piece, distance) for distance in range(1, self.size)]

    def _messages(self, rows: Any, outs: Any, pieces: Any) -> Any:
        """From one rank to one other; each rank says what it receives before it sends anything."""
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        for begin, end in pieces:
            yield [self.dist.irecv(rows[other][begin:end], other, group=self.group) for other in others]
        for begin, end in pieces:
            yield [self.dist.isend(outs[other][begin:end], other, group=self.group) for other in others]

    def _messages_by_direction(self, rows: Any, outs: Any, pieces: Any) -> Any:
        """The same, to higher ranks by one group's connections and to lower ones by another's."""
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        up, down = self.group, self.back
        for begin, end in pieces:
            yield [self.dist.irecv(rows[o][begin:end], o, group=up if o < self.rank else down) for o in others]
        for begin, end in pieces:
            yield [self.dist.isend(outs[o][begin:end], o, group=up if o > self.rank else down) for o in others]

    def _marked_messages(self, rows: Any, outs: Any, pieces: Any) -> Any:
        """After them a byte to every rank in a collective, which can be asked whether it is done; messages cannot."""
        yield from self._messages(rows, outs, pieces)
        mark = self.torch.zeros(self.size, dtype=self.torch.uint8)
        yield [self.dist.all_to_all_single(self.torch.empty_like(mark), mark, group=self.group, async_op=True)]

    def _two_groups(self, rows: Any, outs: Any, pieces: Any) -> Any:
        """To higher ranks by one group, to lower ones by the other: broadcasts of whole parts, of two ranks only."""
        assert self.size == 2
        groups = (self.group, self.back)
        yield [self.dist.broadcast(rows[rank], rank, group=groups[rank], async_op=True) for rank in range(2)]


def work(options: argparse.Namespace) -> None:
    """Play every way in turn and write the readings of each repeat."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways, rank, readings = Ways(options.nbytes), dist.get_rank(), []
    noise = random.Random(rank)
    names = [way for way in options.ways if way != "two groups" or ways.size == 2]
    for repeat in range(-1, options.repeats):  # the first one warms up
        for way in names[repeat % len(names) :] + names[: repeat % len(names)]:
            dist.barrier()
            time.sleep(noise.random() * options.skew_ms / 1e3)
            cpu, started = time.process_time(), time.monotonic()
            for _ in range(options.moves):
                for move in ways.start(way):
                    move.wait()
            done = time.monotonic()
            dist.barrier()
            if repeat >= 0:
                used = time.process_time() - cpu
                readings.append({"way": way, "repeat": repeat, "started": started, "done": done, "cpu": used})
    answer = {"sent_nbytes": ways.sent_nbytes * options.moves, "readings": readings}
    Path(options.worker, f"rank{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


# The parent


def run_rate(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, "-m", "benchmarks.links", "--worker", folder, "--ways", ",".join(options.ways)]
        for name in ("nbytes", "repeats", "moves", "skew_ms"):
            script += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        if rate == "loopback":
            _run_here(script, options)
        else:
            with netns.two_hosts(rate) as hosts:
                _run_hosts(script, hosts, options)
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2 * options.per_host)]
    return {"rate": rate, "sent_nbytes": ranks[0]["sent_nbytes"], "ways": _summary(ranks)}


def _environment(rank: int, address: str, port: int, options: argparse.Namespace) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    world = {"RANK": str(rank), "WORLD_SIZE": str(2 * options.per_host), "MASTER_ADDR": address}
    return {**world, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def _run_hosts(script: list[str], hosts: tuple[netns.Host, netns.Host], options: argparse.Namespace) -> None:
    started = [
        netns.start(hosts[rank // options.per_host], script, _environment(rank, hosts[0].address, 29400, options))
        for rank in range(2 * options.per_host)
    ]
    for rank, (status, output) in enumerate(netns.finish(started, options.timeout)):
        if status != 0:
            raise RuntimeError(f"rank {rank} ended with status {status}:\n{output[-3000:]}")


def _run_here(script: list[str], options: argparse.Namespace) -> None:
    port, own = free_port(), {"GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(script, env={**os.environ, **own, **_environment(rank, "127.0.0.1", port, options)})
        for rank in range(2 * options.per_host)
    ]
    statuses = [process.wait(options.timeout) for process in started]
    if any(statuses):
        raise RuntimeError("a rank failed: its error is above")


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """By way: MB/s that a rank sent (and received) in each repeat, and the ranks' processor milliseconds."""
    ways: dict[str, Any] = {}
    for readings in zip(*(rank["readings"] for rank in ranks)):
        seconds = max(each["done"] for each in readings) - max(each["started"] for each in readings)
        found = ways.setdefault(readings[0]["way"], {"mb_per_s": [], "cpu_ms": []})
        found["mb_per_s"].append(round(ranks[0]["sent_nbytes"] / seconds / 1e6, 2))
        found["cpu_ms"].append(round(1e3 * sum(each["cpu"] for each in readings), 1))
    return ways


def show(run: dict[str, Any]) -> None:
    print(f"{run['rate']}: {run['sent_nbytes'] / 1e6:.1f} MB from each rank; MB/s least, median, most; cpu ms, median")
    for way, found in run["ways"].items():
        rates = found["mb_per_s"]
        print(f"  {way:26} {min(rates):8.1f} {median(rates):8.1f} {max(rates):8.1f}   {median(found['cpu_ms']):8.1f}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="100mbit,1gbit,loopback", help="as tc writes them, or loopback")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated; a number is a piece's size in KiB")
    parser.add_argument("--nbytes", type=int, default=12 * MIB, help="of the whole buffer of one move")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each of the two hosts")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--moves", type=int, default=1, help="one after the other, in one reading")
    parser.add_argument("--skew-ms", type=float, default=10.0, help="the longest sleep of a rank before a reading")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds one rate may take")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.ways = options.ways.split(",")
    return options


def main() -> None:
    options = parse()
    if options.worker is not None:
        work(options)
        return
    workload = {name: getattr(options, name) for name in ("nbytes", "per_host", "repeats", "moves", "skew_ms")}
    document: dict[str, Any] = {"kind": "links", "machine": describe_machine(options.date), "command": command_line()}
    document |= {"workload": workload, "runs": []}
    for rate in options.rates.split(","):
        if rate != "loopback" and (reason := netns.missing()):
            raise SystemExit(f"cannot make network namespaces: {reason}")
        document["runs"].append(run_rate(rate, options))
        show(document["runs"][-1])
        if options.out is not None:
            write_json(options.out, document)


if __name__ == "__main__":
    main()
