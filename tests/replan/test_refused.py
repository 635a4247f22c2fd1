"""What cannot be done is one sentence on every rank, and the run goes on as if nobody had asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeor
from tests import offloads
from tests.comm.test_frozen import LIMIT_SECONDS, ROOT, free_port
from zeor.access.sharded import state_of
from zeor.optim.state import KeptState

Run = tuple[nn.Module, list[torch.optim.Optimizer]]


def told(run: Run, options: dict[str, Any], words: str, inside: Callable[[Run, Callable], None] | None = None) -> None:
    """Asked for at the right moment or, with `inside`, there: all ranks are told in these words."""
    model, optimizers = run
    errors: list[str] = []

    def ask(given: Any = optimizers) -> None:
        try:
            zeor.replan(model, given, **options)
        except (RuntimeError, ValueError, TypeError) as error:
            errors.append(str(error))

    if inside is None:
        ask()
    else:
        inside(run, ask)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    assert all(len(each) == 1 and words in each[0] for each in everyone), everyone
    assert all(each[0].count(". ") <= 1 and each[0].endswith(".") for each in everyone), everyone


def with_gradients(run: Run, ask: Callable) -> None:
    offloads.loss_of(run[0], 50).backward()
    ask()
    run[0].zero_grad()


def in_no_sync(run: Run, ask: Callable) -> None:
    with zeor.no_sync(run[0]):
        ask()


def in_full_params(run: Run, ask: Callable) -> None:
    with zeor.full_params(run[0]):
        ask()


def in_a_step(run: Run, ask: Callable) -> None:
    handle = run[1][0].register_step_pre_hook(lambda *_: ask())
    try:
        run[1][0].step()
    finally:
        handle.remove()


def in_forward(run: Run, ask: Callable) -> None:
    handle = run[0].head.register_forward_pre_hook(lambda *_: ask())
    with torch.no_grad():
        offloads.loss_of(run[0], 50)
    handle.remove()


def without_one(run: Run, ask: Callable) -> None:
    ask(None)


def with_another(run: Run, ask: Callable) -> None:
    ask([*run[1], torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)])


REFUSED: list[tuple[dict[str, Any], str, Callable[[Run, Callable], None] | None]] = [
    ({"stage": 4}, "not a ZeRO stage", None),
    ({"stag": 2}, "no option 'stag' (did you mean 'stage'?)", None),
    ({"device": "cpu"}, "another device", None),
    ({"stage": {"gpu": 3, "node": 1}}, "names axes, but the ranks have none", None),
    ({"hierarchy": 3}, "do not divide", None),
    ({"hierarchy": 2, "stage": {"gpus": 3, "node": 1}}, "there is no axis 'gpus' (did you mean 'gpu'?)", None),
    ({"stage": 1, "offload": {"grads": "host"}}, "at stage 1 gradients are whole", None),
    ({"methods": "encode"}, "no method 'encode'", None),
    ({"units": [nn.Conv2d]}, "the class Conv2d", None),
    ({"recompute": [nn.Conv2d]}, "the class Conv2d", None),
    ({"stage": 2}, "has a gradient", with_gradients),
    ({"stage": 2}, "inside zeor.no_sync", in_no_sync),
    ({"stage": 2}, "inside zeor.full_params", in_full_params),
    ({"stage": 2}, "inside a forward, a backward or a step", in_a_step),
    ({"stage": 2}, "inside a forward, a backward or a step", in_forward),
    ({"stage": 2}, "was not given its AdamW", without_one),
    ({"stage": 2}, "This SGD was not sharded with the model", with_another),
]


def refuse_all() -> None:
    run, untouched = offloads.made(stage=3), offloads.made(stage=3)
    for each in (run, untouched):
        offloads.one_step(*each, 0, "plain")
    plan, engine = state_of(run[0]).asked, state_of(run[0]).engine
    for options, words, inside in REFUSED:
        told(run, options, words, inside)
        assert state_of(run[0]).asked is plan and state_of(run[0]).engine is engine
        in_a_step(untouched, lambda: None) if inside is in_a_step else None
        offloads.same(offloads.left(run[0]), offloads.left(untouched[0]), words)
    goes_on(run, untouched)


def goes_on(run: Run, untouched: Run) -> None:
    for step in (1, 2):
        assert offloads.one_step(*run, step, "clip") == offloads.one_step(*untouched, step, "clip")
    offloads.same(offloads.left(run[0]), offloads.left(untouched[0]))
    mine, other = zeor.report(run[0]), zeor.report(untouched[0])
    assert {**mine, "transient_peak": 0} == {**other, "transient_peak": 0}
    for each in (run, untouched):
        zeor.replan(*each, stage=1, precision="bf16")
        offloads.one_step(*each, 3, "clip")
    offloads.same(offloads.left(run[0]), offloads.left(untouched[0]))


def test_what_cannot_be_done_is_refused_on_every_rank(ranks: Callable) -> None:
    ranks(refuse_all, 2)


def disagree() -> None:
    run, untouched = offloads.made(stage=3), offloads.made(stage=3)
    rank = dist.get_rank()
    told(run, {"stage": 1 if rank == 0 else 2}, "plans differ: rank 0 has stage=1, rank 1 has stage=2")
    told(run, {} if rank == 0 else {"prefetch": -1}, "prefetch=-1")
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    told(run, {"mesh": half["gpu"]}, "zeor.replan keeps the ranks")
    told(run, {"mesh": half if rank else None}, "differ: rank 0 has")
    goes_on(run, untouched)


def test_ranks_that_ask_for_different_things_are_told(ranks: Callable) -> None:
    ranks(disagree, 4)


# ---- failures on the way


def fails_on_one(folder: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """At each place in turn something goes wrong on rank 1 alone."""
    run, untouched = (offloads.made(**old) for _ in range(2))
    for each in (run, untouched):
        offloads.one_step(*each, 0, "plain")
    nowhere = {"moments": "disk", "master": "disk", "folder": f"{folder}/{dist.get_rank()}/there"}
    Path(folder, "0").mkdir(exist_ok=True)
    told(run, {"stage": 3, "offload": nowhere}, "does not exist")
    for name in ("put", "take_all"):
        plain = getattr(KeptState, name)

        def fail(self: KeptState, *args: Any, **kwargs: Any) -> None:
            raise MemoryError(f"no room in {name}")  # noqa: B023 (used in this turn)

        if dist.get_rank() == 1:
            setattr(KeptState, name, fail)
        try:
            zeor.replan(*run, **new)
            raise AssertionError("it must fail")
        except (MemoryError, RuntimeError) as error:
            assert f"no room in {name}" in str(error) and (dist.get_rank() == 1 or "rank 1" in str(error)), error
        finally:
            setattr(KeptState, name, plain)
        offloads.same(offloads.left(run[0]), offloads.left(untouched[0]), name)
    goes_on(run, untouched)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"stage": 3, "precision": "bf16"}, {"stage": 0, "precision": "fp32"}),
        ({"stage": 1}, {"stage": 3, "offload": "host", "moments": "bf16"}),
        ({"stage": 3, "offload": "host"}, {"stage": 2, "offload": None}),
    ],
)
def test_a_failure_on_the_way_leaves_the_run_as_it_was(ranks: Callable, tmp_path: Path, old: Any, new: Any) -> None:
    ranks(fails_on_one, 2, str(tmp_path), old, new)


@pytest.mark.long
def test_a_rank_that_dies_on_the_way_leaves_the_others_their_model(tmp_path: Path) -> None:
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = [sys.executable, "-m", "tests.replan.dying_rank", str(tmp_path)]
    team = [
        subprocess.Popen(
            program, env={**shared, "RANK": rank}, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        said, wrong = team[0].communicate(timeout=LIMIT_SECONDS)
    finally:
        for member in team:
            member.kill()
            member.wait()
    assert (tmp_path / "there").exists(), wrong
    assert "rank 1" in said and "another plan" in said and said.endswith("as it was\n"), said + wrong
