"""Ranks that leave the common path: every rank says who is where, before a collective of unequal lengths begins.

Gloo ends the process where such collectives meet, so without the meeting these tests end with a rank that died.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests import loops
from zeor.access.sharded import state_of
from zeor.comm.axes import make_axis
from zeor.comm.meeting import ApartError, meet

TIMEOUT_SECONDS = 20.0


def sharded(stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zeor.shard(model, optimizer, stage=stage, timeout=TIMEOUT_SECONDS, **options)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, odd: str, clips: bool) -> None:
    """`odd`: what this rank does otherwise than it should."""
    loss = loops.own_loss(model, step)
    if odd != "skips backward":
        loss.backward(retain_graph=odd == "runs backward twice")
    if odd == "runs backward twice":
        loss.backward()
    if odd == "reads a norm":
        next(model.parameters()).grad.norm()
    if clips:
        zeor.clip_grad_norm_(model, 1.0)
    if odd == "evaluates":
        with torch.no_grad():
            model(loops.batch(0)[0])
    if odd == "unshards":
        zeor.unshard(model)
    if odd == "totals":
        zeor.total(1)
    if odd != "skips step":
        optimizer.step()
    if odd == "steps twice":
        optimizer.step()
    optimizer.zero_grad()


def leave_the_path(stage: int, odd: str, clips: bool) -> str:
    model, optimizer = sharded(stage)
    for step in range(2):
        one_step(model, optimizer, step, "", clips)
    try:
        for step in range(2, 6):
            one_step(model, optimizer, step, odd if dist.get_rank() == 1 and step == 2 else "", clips)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


STEP, FORWARD, BACKWARD = "a step of an optimizer", "a forward with gradients", "a backward"
NORM = "the norms of the gradients"
CASES = [
    # what rank 1 does, whether the loop clips, where rank 0 is, where rank 1 is, at stages
    ("skips backward", False, BACKWARD, STEP, (0, 1, 2, 3)),
    ("runs backward twice", False, STEP, BACKWARD, (0, 1, 2, 3)),
    ("skips step", False, STEP, FORWARD, (3,)),
    ("skips step", False, STEP, BACKWARD, (0, 1, 2)),
    ("steps twice", False, BACKWARD, STEP, (0, 1, 2)),
    ("steps twice", False, FORWARD, STEP, (3,)),
    ("reads a norm", False, STEP, NORM, (1, 3)),
    ("skips backward", True, BACKWARD, STEP, (3,)),
    ("evaluates", False, STEP, "a forward without gradients", (3,)),
    ("unshards", False, STEP, "zeor.unshard", (2, 3)),
    ("totals", False, STEP, "zeor.total", (1, 3)),
]


@pytest.mark.parametrize(
    ("odd", "clips", "first", "second", "stage"), [(*case[:4], stage) for case in CASES for stage in case[4]]
)
def test_a_rank_that_leaves_the_path_is_named_on_every_rank(ranks, odd, clips, first, second, stage):
    texts = ranks(leave_the_path, 2, stage, odd, clips)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"ApartError: The ranks have come apart: rank 0 is at {first}; rank 1 is at {second}. ")


def evaluate_alone() -> float:
    """Where nothing is gathered an evaluation is each rank's own business."""
    model, optimizer = sharded(2)
    for step in range(3):
        one_step(model, optimizer, step, "", False)
        if dist.get_rank() == 1:
            with torch.no_grad():
                model(loops.batch(0)[0])
            loops.own_loss(model, 0)  # with gradients, and nothing follows
    return zeor.total(float(loops.own_loss(model, 0).detach()))


def test_a_forward_that_gathers_nothing_needs_no_other_rank(ranks):
    first, second = ranks(evaluate_alone, 2)
    assert first == second > 0


def step_different_models() -> str:
    models = [sharded(1) for _ in range(2)]
    for model, optimizer in models:
        one_step(model, optimizer, 0, "", False)
    for model, _ in models:
        loops.own_loss(model, 1).backward()
    try:
        models[dist.get_rank()][1].step()
    except ApartError as error:
        return str(error)
    return "nothing was raised"


def test_the_same_event_of_different_models_is_told_apart(ranks):
    for text in ranks(step_different_models, 2):
        assert f"all at {STEP}, but of different models" in text


def meet_where(texts: list[str]) -> str:
    axis = make_axis(None, torch.device("cpu"), False, TIMEOUT_SECONDS)
    for _ in range(3):
        meet(axis, "the same place")
    found = _raised(lambda: meet(axis, texts[dist.get_rank()]))
    meet(axis, "the same place")  # nothing is under way: ranks may go on
    return found


def _raised(do: Callable[[], None]) -> str:
    try:
        do()
    except ApartError as error:
        return str(error)
    return ""


def test_ranks_are_listed_by_where_they_are_and_may_go_on(ranks):
    for text in ranks(meet_where, 4, ["here", "there ä" * 40, "here", "here"]):
        assert text.startswith("The ranks have come apart: ranks 0, 2, 3 are at here; rank 1 is at there ä")


def no_meeting_alone() -> bool:
    model, _ = sharded(3)
    return state_of(model).engine.axes.everyone.meets is False


def test_a_rank_alone_meets_nobody(ranks):
    assert ranks(no_meeting_alone, 1) == [True]


# ---- where ranks do not meet before each event: NCCL


def step_differently(odd: str, then: str, folder: str) -> str:
    """As over NCCL: no meetings. At stage 3 the step itself has no collective that could fail."""
    model, optimizer = sharded(3)
    state_of(model).engine.axes.everyone.meets = False
    try:
        for step in range(3):
            one_step(model, optimizer, step, odd if dist.get_rank() == 1 and step == 2 else "", False)
        if then == "training":
            one_step(model, optimizer, 3, "", False)
        elif then == "saving":
            zeor.save(folder, model, optimizer, step=3)
        else:
            with zeor.full_params(model):
                pass
    except (RuntimeError, zeor.CheckpointError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(("odd", "count"), [("skips step", 2), ("steps twice", 4)])
@pytest.mark.parametrize("then", ["training", "saving", "reading"])
def test_a_rank_that_skips_or_repeats_a_step_is_found_without_meetings(ranks, tmp_path, odd, count, then):
    for text in ranks(step_differently, 2, odd, then, str(tmp_path)):
        if then == "training":
            assert text.startswith(f"Rank 0 has called step() 3 times and rank 1 {count} times")
        else:
            verb = "zeor.save" if then == "saving" else "zeor.full_params"
            assert f"rank 0 is at {verb} after 3 calls of step() and rank 1 at {verb} after {count}." in text
    assert not list(tmp_path.iterdir())
