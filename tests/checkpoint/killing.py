"""A run of two ranks that is killed again and again around its saves, and restarted; what it finds is checked.

    python -m tests.checkpoint.killing FOLDER KILLS SEED [JSON]

Each life is two processes forked from this one, over Gloo: they load the latest checkpoint, compare it bit by bit
with an uninterrupted run at that step, then train and save every step. One of them dies by SIGKILL: at a given
system call of a save, before or after it (every one of them comes first, then random ones), or at a random moment.
The other must end by itself. After each death every visible checkpoint is verified in full.
"""

from __future__ import annotations

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

import zeor
from tests.checkpoint.disks import FaultyDisk, die
from tests.loops import net, own_loss
from zeor.checkpoint.commit import complete
from zeor.checkpoint.disk import DISK
from zeor.checkpoint.health import describe, verify
from zeor.checkpoint.save import collect, write
from zeor.checkpoint.training import load, run_of
from zeor.comm import stuck
from zeor.runtime.sharded import state_of

WORLD, KEEP = 2, 2
SAVES = 4  # of a life
LAST_STEP = 40  # a run that came so far begins anew, in another folder
TIMEOUT = 10.0  # of the ranks' exchanges
LIFE_SECONDS = 60.0  # no process may live longer: it would hang
ENDED, RAISED = 0, 3  # exit codes


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


def rank_main(rank: int, folder: Path, store: str, kill: Kill | None, steps: int, conn: Connection) -> None:
    stuck.GRACE_SECONDS = 0.1  # how long a rank looks for what a dead one has to say
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=limit)
    model = net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeor.shard(model, optimizer, stage=2, timeout=TIMEOUT)
    begin = load(folder, model, optimizer).step if complete(folder) else 0
    conn.send(("loaded", begin, digest_of(model), time.monotonic()))
    for number, step in enumerate(range(begin + 1, begin + 1 + steps)):
        own_loss(model, step, torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
        fatal = kill is not None and kill.rank == rank and kill.call is not None and number == kill.save
        disk = FaultyDisk(kill.call, die, after=kill.after) if fatal and kill is not None else DISK
        run = run_of(model, optimizer)
        write(run, collect(run, None, None), folder, step, KEEP, disk)
        conn.send(("saved", step, digest_of(model) if kill is None else "", time.monotonic()))


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


def live(folder: Path, store: str, kill: Kill | None, steps: int) -> tuple[Life, list[Any]]:
    """Both ranks, until both are gone."""
    ranks = [start(rank, folder, store, kill, steps) for rank in range(WORLD)]
    deadline = time.monotonic() + LIFE_SECONDS
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
    begun = {(step, digest) for word, step, digest, _ in told if word == "loaded"}
    loaded, digest = begun.pop() if len(begun) == 1 else (-1, "")
    saved = max([step for word, step, _, _ in told if word == "saved"], default=-1)
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


def calls_of_a_save(folder: Path) -> list[int]:
    """System calls of a save that finds two checkpoints, by rank: counted, not assumed. And whatever is imported on
    the way is there for all that is forked from here."""
    model = net(torch.float32)
    model, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    own_loss(model, 0, torch.float32).backward()
    optimizer.step()
    run, disk = run_of(model, optimizer), FaultyDisk()
    for step in (1, 2):
        write(run, collect(run, None, None), folder, step, KEEP)
    write(run, collect(run, None, None), folder, 3, KEEP, disk)
    other = disk.calls.index("close") - disk.calls.index("create") + 1
    return [len(disk.calls) + 1, other]  # of two ranks there is one file more to delete


def main(root: Path, count: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    calls = calls_of_a_save(root / "counted")
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1  # a process that forks has no others
    stores = (str(root / f"store-{number}") for number in itertools.count())
    _, told = live(root / "whole", next(stores), None, LAST_STEP + 2 * SAVES)
    truth = {step: digest for word, step, digest, _ in told if word in ("saved", "loaded")}
    assert len(truth) == LAST_STEP + 2 * SAVES + 1, told[-2:]
    times = sorted(when for *_, when in told)
    save_seconds = (times[-1] - times[0]) / (len(truth) - 1)
    begun = time.monotonic()
    report: dict[str, Any] = {
        "kills": 0, "at_a_call": 0, "at_a_moment": 0, "by_rank": [0, 0], "calls_by_rank": calls, "wrong_loads": 0,
        "unloadable": 0, "lost": 0, "hung": 0, "peer_raised": 0, "peer_ended": 0, "lives": 0, "seed": seed,
        "problems": [],
    }  # fmt: skip
    moments = kills(random.Random(seed), calls, SAVES * save_seconds)
    number, known, folder = 0, 0, root / "run-0"
    while report["kills"] < count:
        if known >= LAST_STEP:
            number, known = number + 1, 0
            folder = root / f"run-{number}"
        kill = next(moments)
        life, told = live(folder, next(stores), kill, SAVES)
        judge(report, folder, kill, life, told, truth, known)
        known = max(known, life.saved)
    life, told = live(folder, next(stores), None, 1)  # a last life, that nobody kills
    left = [name for name in os.listdir(folder) if name.startswith(".")]
    if life.exits != [ENDED, ENDED] or truth.get(life.loaded) != life.digest or left:
        report["problems"].append(f"the last life: {life}, left {left}")
    report["seconds"] = round(time.monotonic() - begun, 1)
    return report


def judge(
    report: dict[str, Any], folder: Path, kill: Kill, life: Life, told: list[Any], truth: dict[int, str], known: int
) -> None:
    report["lives"] += 1
    killed = life.exits[kill.rank] == -signal.SIGKILL
    report["kills"] += killed
    report["by_rank"][kill.rank] += killed
    report["at_a_moment" if kill.call is None else "at_a_call"] += killed
    peer = life.exits[1 - kill.rank]
    report["peer_raised"] += peer == RAISED
    report["peer_ended"] += peer == ENDED
    report["hung"] += life.hung
    if life.loaded < 0 or truth[life.loaded] != life.digest:
        report["wrong_loads"] += life.loaded >= 0
        report["unloadable"] += life.loaded < 0
        report["problems"].append(f"{kill} {life} {[each for each in told if each[0] == 'raised']}"[:1500])
    if 0 <= life.loaded < known:
        report["lost"] += 1
        report["problems"].append(f"step {known} was saved, step {life.loaded} was loaded")
    for each in complete(folder):
        found = describe(each.path)
        verify(found)
        if found.problems or each.step > max(life.saved, life.loaded) + 1:
            report["unloadable"] += 1
            report["problems"] += [f"{kill} {life}", *found.problems[:3]]


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    text = json.dumps(result, indent=1)
    print(text)
    if len(sys.argv) > 4:
        Path(sys.argv[4]).write_text(text + "\n")
    sys.exit(1 if result["problems"] else 0)
