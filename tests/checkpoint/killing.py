"""A run of two ranks that is killed again and again around its saves, and restarted; what it finds is checked.

    python -m tests.checkpoint.killing FOLDER KILLS SEED MODE [JSON]

Each life is two processes forked from this one, over Gloo: they load the latest checkpoint, compare it bit by bit
with an uninterrupted run at that step, then train and save every step. One of them dies by SIGKILL: at a given
call to the disk of a save, before or after it (every one of them comes first, then random ones), or at a random
moment. The other must end by itself. After each death every visible checkpoint is verified in full.

MODE is where and how they save: `shared`, a folder of both; `async`, the same while training goes on; `hosts`, a folder
each, as if on two hosts; `url`, a filesystem of fsspec that knows no rename; `direct`, a shared folder and a model so
large that the blocks of its files are written past the page cache.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests.checkpoint import kept
from tests.checkpoint.disks import FaultyDisk, die
from tests.loops import FEATURES, net, own_loss
from zeor.access.sharded import state_of
from zeor.checkpoint import save as saving
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.store import complete
from zeor.checkpoint.files.urls import Place, place_of
from zeor.checkpoint.verify import Description, describe, verify
from zeor.comm import stuck

MODES = ("shared", "async", "hosts", "url", "direct")
WIDTH = 1500  # of the large model: three whole blocks per rank, and a rest
WORLD, KEEP = 2, 2
SAVES = 4  # of a life
LAST_STEP = 40  # a run that came so far begins anew, in another folder
TIMEOUT = 10.0  # of the ranks' exchanges
LIFE_SECONDS = 60.0  # no process of a life of SAVES steps may live longer: it would hang
ENDED, RAISED = 0, 3  # exit codes


class Where(NamedTuple):
    """A run's checkpoints, and what a life needs to know of them."""

    mode: str
    root: Path  # of this run alone
    known: int = 0  # the last step that is known to be saved

    def folder(self, rank: int) -> Place:
        if self.mode == "url":
            return place_of(f"kept://{self.root}/run")
        return self.root / f"host{rank}" / "run" if self.mode == "hosts" else self.root / "run"

    def folders(self) -> list[Place]:
        return [self.folder(rank) for rank in range(WORLD if self.mode == "hosts" else 1)]

    def hidden(self) -> list[str]:
        folders = [folder for folder in self.folders() if isinstance(folder, Path) and folder.exists()]
        return [name for folder in folders for name in os.listdir(folder) if name.startswith(".")]


class Kill(NamedTuple):
    rank: int
    save: int  # of its life
    call: int | None  # of that save; None: at a random moment
    after: bool
    seconds: float  # of that moment, from when both ranks are at work


class Life(NamedTuple):
    loaded: int  # the step both began from
    digest: str
    saved: int  # the last step whose save returned on a rank
    hung: bool
    exits: list[int]


# ---- a rank


def rank_main(rank: int, where: Where, store: str, kill: Kill | None, steps: int, conn: Connection) -> None:
    stuck.GRACE_SECONDS = 0.1  # how long a rank looks for what a dead one has to say
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=limit)
    model = model_of(where.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeor.shard(model, optimizer, stage=2, timeout=TIMEOUT)
    folder = _enter(where, rank)
    begin = _load(where, folder, model, optimizer)
    conn.send(("loaded", begin, digest_of(model), time.monotonic()))
    before: tuple[Any, int, str, FaultyDisk] | None = None  # a save that may be under way
    for number, step in enumerate(range(begin + 1, begin + 1 + steps)):
        own_loss(model, step, torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
        _tell(conn, before)
        fatal = kill is not None and kill.rank == rank and kill.call is not None and number == kill.save
        disk = FaultyDisk()
        if fatal and kill is not None:
            disk = FaultyDisk(kill.call, after=kill.after)
            disk.act = functools.partial(_die, conn, disk)
        saving.write = functools.partial(_plain_write, disk=disk)
        kept.disk = disk
        digest = digest_of(model) if kill is None else ""
        later: Any = where.mode == "async"
        before = (save(folder, model, optimizer, step=step, keep=KEEP, asynchronous=later), step, digest, disk)
        if not later:
            _tell(conn, before)
            before = None
    _tell(conn, before)


_plain_write = saving.write


def model_of(mode: str) -> nn.Module:
    small = net(torch.float32)
    if mode != "direct":
        return small
    large = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, FEATURES))
    return nn.Sequential(large, small)


def _die(conn: Connection, disk: FaultyDisk) -> None:
    assert disk.at is not None
    conn.send(("dies", 0, disk.calls[disk.at], 0.0))
    die()


def _tell(conn: Connection, save: tuple[Any, int, str, FaultyDisk] | None) -> None:
    """That a save has ended, and how many calls it took."""
    if save is not None:
        handle, step, digest, disk = save
        if hasattr(handle, "wait"):
            handle.wait()
        conn.send(("saved", step, digest, time.monotonic(), len(disk.calls), disk.calls.count("write_direct")))


def _enter(where: Where, rank: int) -> Place:
    """The folder, as this rank calls it: hosts that share nothing give their own the same name."""
    folder = where.folder(rank)
    if where.mode != "hosts" or not isinstance(folder, Path):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(folder.parent)
    return Path(folder.name)


def _load(where: Where, folder: Place, model: Any, optimizer: Any) -> int:
    if where.mode != "hosts" and not complete(folder):
        return 0
    try:
        return load(folder, model, optimizer).step
    except CheckpointError:
        if where.mode == "hosts" and not where.known:
            return 0  # one host may have what another could not commit any more
        raise


def digest_of(model: Any) -> str:
    """Of parameters and the optimizer's state, whole."""
    segments = state_of(model).steppers[0].segments
    hasher = hashlib.sha256()
    with zeor.full_params(model):
        for name, param in model.named_parameters():
            hasher.update(name.encode() + param.detach().contiguous().view(-1).numpy().tobytes())
    for name, param in model.named_parameters():
        for key, value in sorted(segments.whole(param).items()):
            hasher.update(f"{name}/{key}".encode() + torch.as_tensor(value).contiguous().view(-1).numpy().tobytes())
    return hasher.hexdigest()


def start(rank: int, *args: Any) -> tuple[int, Connection]:
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    code = RAISED
    try:
        ours.close()
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)  # what a rank says of its lost peer
        rank_main(rank, *args, theirs)
        code = ENDED
    except BaseException:
        theirs.send(("raised", 0, traceback.format_exc()[-2000:], 0.0))
    finally:
        os._exit(code)


# ---- the parent


def live(
    where: Where, store: str, kill: Kill | None, steps: int, seconds: float = LIFE_SECONDS
) -> tuple[Life, list[Any]]:
    """Both ranks, until both are gone."""
    ranks = [start(rank, where, store, kill, steps) for rank in range(WORLD)]
    deadline = time.monotonic() + seconds
    told: list[Any] = []
    if kill is not None and kill.call is None:
        for _, conn in ranks:
            _receive(conn, told, deadline, 1)
        time.sleep(kill.seconds)
        os.kill(ranks[kill.rank][0], signal.SIGKILL)
    for _, conn in ranks:
        _receive(conn, told, deadline, None)
    hung, exits = False, []
    for pid, conn in ranks:
        conn.close()
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                hung = True
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        exits.append(os.waitstatus_to_exitcode(status))
    begun = {(step, digest) for word, step, digest, *_ in told if word == "loaded"}
    loaded, digest = begun.pop() if len(begun) == 1 else (-1, "")
    saved = max([step for word, step, *_ in told if word == "saved"], default=-1)
    return Life(loaded, digest, saved, hung, exits), told


def _receive(conn: Connection, told: list[Any], deadline: float, count: int | None) -> None:
    """So many messages, or all until the other end is closed."""
    while count != 0 and conn.poll(max(0.0, deadline - time.monotonic())):
        try:
            told.append(conn.recv())
        except EOFError:
            return
        count = count and count - 1


def kills(random_source: random.Random, calls: list[int], life_seconds: float) -> Iterator[Kill]:
    """Every call of a save on every rank, before and after; then moments of a life and calls, in turn."""
    each = [(rank, at, after) for rank in range(WORLD) for at in range(calls[rank]) for after in (False, True)]
    random_source.shuffle(each)
    yield from (Kill(rank, 2, at, after, 0.0) for rank, at, after in each)
    while True:
        yield Kill(random_source.randrange(WORLD), 0, None, False, random_source.uniform(0, life_seconds))
        rank, at, after = random_source.choice(each)
        yield Kill(rank, random_source.randrange(SAVES), at, after, 0.0)


def import_everything(where: Where) -> None:
    """What is imported on the way of a save is there for all that is forked from here. And no thread is left."""
    model: Any = model_of(where.mode)
    model, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    own_loss(model, 0, torch.float32).backward()
    optimizer.step()
    folder = where.folder(0)
    save(folder, model, optimizer, step=1)
    load(folder, model, optimizer)


def main(root: Path, count: int, seed: int, mode: str = "shared") -> dict[str, Any]:
    torch.set_num_threads(1)
    kept.register()
    import_everything(Where(mode, root / "imported"))
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1  # a process that forks has no others
    stores = (str(root / f"store-{number}") for number in itertools.count())
    # Many times the steps of other lives, so it may take that much longer.
    _, told = live(Where(mode, root / "whole"), next(stores), None, LAST_STEP + 2 * SAVES, seconds=5 * LIFE_SECONDS)
    truth = {step: digest for word, step, digest, *_ in told if word in ("saved", "loaded")}
    assert len(truth) == LAST_STEP + 2 * SAVES + 1, told[-2:]
    times = sorted(each[3] for each in told)
    save_seconds = (times[-1] - times[0]) / (len(truth) - 1)
    counts = [each[4] for each in told if each[0] == "saved" and each[1] > KEEP + 1]  # of one rank, then of the other
    calls = sorted({counts[0], counts[-1]}, reverse=True)
    calls = calls * 2 if len(calls) == 1 else calls
    begun = time.monotonic()
    report: dict[str, Any] = {
        "mode": mode, "kills": 0, "at_a_call": 0, "at_a_moment": 0, "by_rank": [0, 0], "calls_by_rank": calls,
        "wrong_loads": 0, "unloadable": 0, "lost": 0, "hung": 0, "peer_raised": 0, "peer_told": 0, "peer_named": 0,
        "peer_ended": 0, "lives": 0, "seed": seed, "problems": [], "by_call": {},
        "direct_writes": min(each[5] for each in told if each[0] == "saved"),  # of one save of a rank
    }  # fmt: skip
    moments = kills(random.Random(seed), calls, SAVES * save_seconds)
    number, where = 0, Where(mode, root / "run-0")
    while report["kills"] < count:
        if where.known >= LAST_STEP:
            number += 1
            where = Where(mode, root / f"run-{number}")
        kill = next(moments)
        life, told = live(where, next(stores), kill, SAVES)
        judge(report, where, kill, life, told, truth)
        where = where._replace(known=max(where.known, life.saved))
    life, told = live(where, next(stores), None, 1)  # a last life, that nobody kills
    left = where.hidden()
    if life.exits != [ENDED, ENDED] or truth.get(life.loaded) != life.digest or left:
        report["problems"].append(f"the last life: {life}, left {left}")
    report["seconds"] = round(time.monotonic() - begun, 1)
    return report


def judge(
    report: dict[str, Any], where: Where, kill: Kill, life: Life, told: list[Any], truth: dict[int, str]
) -> None:
    report["lives"] += 1
    killed = life.exits[kill.rank] == -signal.SIGKILL
    report["kills"] += killed
    report["by_rank"][kill.rank] += killed
    report["at_a_moment" if kill.call is None else "at_a_call"] += killed
    for kind in (each[2] for each in told if each[0] == "dies"):
        report["by_call"][kind] = report["by_call"].get(kind, 0) + 1
    peer = life.exits[1 - kill.rank]
    report["peer_raised"] += peer == RAISED
    report["peer_ended"] += peer == ENDED
    words = [each[2] for each in told if each[0] == "raised"]
    words = [text for text in words if "CheckpointError: Saving step" in text and "did not end on every rank" in text]
    report["peer_told"] += bool(words)
    report["peer_named"] += any(f"rank {kill.rank} did not take part" in text for text in words)
    report["hung"] += life.hung
    if life.loaded < 0 or truth[life.loaded] != life.digest:
        report["wrong_loads"] += life.loaded >= 0
        report["unloadable"] += life.loaded < 0
        report["problems"].append(f"{kill} {life} {[each for each in told if each[0] == 'raised']}"[:1500])
    if 0 <= life.loaded < where.known:
        report["lost"] += 1
        report["problems"].append(f"step {where.known} was saved, step {life.loaded} was loaded")
    for host, folder in enumerate(where.folders()):
        for each in complete(folder):
            found = describe(each.path)
            verify(found)
            problems = _own(found, host) if where.mode == "hosts" else found.problems
            torn = where.mode == "url" and found.manifest is None  # killed while it wrote the manifest: passed over
            if (problems and not torn) or each.step > max(life.saved, life.loaded) + 1 + (where.mode == "async"):
                report["unloadable"] += 1
                report["problems"] += [f"{kill} {life}", *problems[:3]]


def _own(found: Description, host: int) -> list[str]:
    """What is wrong with the files that this host keeps; of the others' it has none."""
    own = f"rank-{host:05d}.safetensors"
    return [text for text in found.problems if own in text or found.manifest is None]


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    text = json.dumps(result, indent=1)
    print(text)
    if len(sys.argv) > 5:
        Path(sys.argv[5]).write_text(text + "\n")
    sys.exit(1 if result["problems"] else 0)
