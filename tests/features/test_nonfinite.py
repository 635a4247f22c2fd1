"""Gradients with inf or nan: what a step does about them, on every rank alike, and who is named."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]
CULPRIT = "blocks.1.down.weight"


@contextmanager
def logged() -> Iterator[list[str]]:
    """Warnings of zeor's logger on this rank."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and "not finite" in record.getMessage():
                found.append(record.getMessage())

    handler = Keep()
    logging.getLogger("zeor").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("zeor").removeHandler(handler)


class Poisoned(loops.Net):
    """On the ranks that are told to, one weight's gradient gets one bad element."""

    poison: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[1]
        for each in self.blocks[:1]:
            x = each(x)
        inner = torch.tanh(block.up(block.norm(x)))
        down = block.down(inner)
        if self.poison is not None and down.requires_grad:
            # Into the gradient of down's output's last feature: its weight's last row, and its bias.
            bad = self.poison
            down.register_hook(lambda grad: grad.index_fill(1, torch.tensor([loops.FEATURES - 1]), bad))
            down = down + 0 * down.detach()
        return self.head((x.detach() + down) * self.scale)


def build(stage: int, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Poisoned().to(dtype)
    for param in (*model.blocks[0].parameters(), *model.blocks[1].up.parameters(), *model.blocks[1].norm.parameters()):
        param.requires_grad_(False)  # so that the bad element stays in one weight and its bias
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return zeor.shard(model, made, stage=stage, **options)


def one_step(model: Any, optimizer: Any, step: int, poison: float | None, clip: str = "none") -> None:
    model.poison = poison
    dtype = model.head.weight.dtype
    loops.own_loss(model, step, dtype).backward()
    if clip == "stock":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif clip == "zeor":
        zeor.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, list[float]]:
    with zeor.full_params(model):
        return {name: param.detach().flatten().tolist() for name, param in model.named_parameters()}


# ---- skip


def skip_one(stage: int, clip: str, poison: float, bad_rank: int) -> tuple[dict[str, list[float]], list[str]]:
    model, optimizer = build(stage, nonfinite="skip")
    with logged() as found:
        one_step(model, optimizer, 0, None, clip)
        before, state = values(model), optimizer.state_dict()["state"]
        kept = {k: {n: v.clone() for n, v in entries.items()} for k, entries in state.items()}
        one_step(model, optimizer, 1, poison if dist.get_rank() == bad_rank else None, clip)
        assert values(model) == before, "weights are untouched"
        after = optimizer.state_dict()["state"]
        for key, entries in kept.items():
            for name, value in entries.items():
                assert torch.equal(after[key][name], value), "and so is the optimizer's state, its counters included"
        one_step(model, optimizer, 2, None, clip)
    return values(model), found


def without_it(clip: str) -> dict[str, list[float]]:
    model, optimizer = build(2)
    one_step(model, optimizer, 0, None, clip)
    one_step(model, optimizer, 2, None, clip)
    return values(model)


@pytest.mark.parametrize("clip", ["none", "stock", "zeor"])
@pytest.mark.parametrize("stage", STAGES)
def test_skip_leaves_everything_untouched_on_every_rank(ranks, stage, clip):
    wanted = ranks(without_it, 2, clip)[0]
    (first, said), (second, nothing) = ranks(skip_one, 2, stage, clip, float("nan"), 1)
    assert first == second == wanted, "as if that step had never been"
    assert len(said) == 1 and nothing == [], "rank 0 alone says so"
    assert "Step 2 was skipped on every rank" in said[0] and repr(CULPRIT) in said[0]


def test_skip_on_three_ranks_by_an_infinity(ranks):
    results = ranks(skip_one, 3, 3, "none", float("-inf"), 2)
    assert results[0][0] == results[1][0] == results[2][0] and repr(CULPRIT) in results[0][1][0]


# ---- raise


def raise_once(stage: int, clip: str) -> tuple[str, bool]:
    model, optimizer = build(stage, nonfinite="raise")
    one_step(model, optimizer, 0, None, clip)
    before = values(model)
    with pytest.raises(RuntimeError) as caught:
        one_step(model, optimizer, 1, float("inf") if dist.get_rank() == 0 else None, clip)
    optimizer.zero_grad()
    unchanged = values(model) == before
    one_step(model, optimizer, 2, None, clip)  # a user may catch it and go on
    return str(caught.value), unchanged


@pytest.mark.parametrize("clip", ["none", "stock"])
@pytest.mark.parametrize("stage", [1, 3])
def test_raise_names_the_parameter_on_every_rank_before_anything_is_updated(ranks, stage, clip):
    for text, unchanged in ranks(raise_once, 2, stage, clip):
        assert f"Step 2: the gradient of parameter {CULPRIT!r} is not finite" in text
        assert "nonfinite='skip'" in text and unchanged


# ---- factors that a rank only remembers


def with_factors(how: str, clip: str, factors: list[float | None]) -> tuple[list[str], list[str], bool, bool]:
    """This rank's gradients are multiplied by its own factor in the second step: (what was raised, what was said,
    whether that step changed weights, whether they end finite)."""
    model, optimizer = build(3, nonfinite=how)
    raised = []
    with logged() as found:
        for step in range(3):
            before = values(model)
            loops.own_loss(model, step).backward()
            if clip == "stock":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == 1 and (factor := factors[dist.get_rank()]) is not None:
                for param in model.parameters():
                    if param.requires_grad:
                        param.grad.mul_(factor)
            try:
                optimizer.step()
            except RuntimeError as error:
                raised.append(str(error))
            optimizer.zero_grad()
            if step == 1:
                changed = values(model) != before
    finite = all(math.isfinite(x) for each in values(model).values() for x in each)
    return raised, found, changed, finite


@pytest.mark.parametrize("factors", [[1.0, math.inf], [None, math.nan]])
@pytest.mark.parametrize("clip", ["none", "stock"])
def test_a_factor_that_is_not_finite_on_one_rank_skips_or_raises_on_all(ranks, clip, factors):
    (raised, said, changed, finite), other = ranks(with_factors, 2, "skip", clip, factors)
    assert (raised, changed, finite) == ([], False, True) == (other[0], other[2], other[3])
    assert len(said) == 1 and "Step 2 was skipped on every rank" in said[0]
    told = [result[0] for result in ranks(with_factors, 2, "raise", clip, factors)]
    assert told[0] == told[1] and len(told[0]) == 1 and "Step 2: the gradient of parameter" in told[0][0]


@pytest.mark.parametrize("clip", ["none", "stock"])
def test_warn_sees_factors_too(ranks, clip):
    (_, said, _, finite), (_, nothing, _, _) = ranks(with_factors, 2, "warn", clip, [1.0, math.inf])
    assert not finite and nothing == []
    assert "Step 2: the gradient of parameter" in said[0] and "went into the weights" in said[0]


def scaled_on_one_rank() -> float:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=2, nonfinite="ignore")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        scaler.scale(loops.own_loss(model, step, torch.float32)).backward()
        for param in model.parameters():
            param.grad.mul_(math.inf if step == 1 and dist.get_rank() == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


def test_gradscaler_skips_on_all_ranks_for_a_factor_of_one(ranks):
    assert ranks(scaled_on_one_rank, 2) == [2.0, 2.0]


# ---- warn


def warn_at(stage: int, clip: str, bad_rank: int, steps: int) -> list[tuple[int, str]]:
    """(after which step, what) on this rank."""
    model, optimizer = build(stage)
    said = []
    with logged() as found:
        for step in range(steps):
            one_step(model, optimizer, step, float("nan") if step == 1 and dist.get_rank() == bad_rank else None, clip)
            said.extend((step + 1, text) for text in found)
            found.clear()
    return said


@pytest.mark.parametrize("clip", ["none", "stock"])
@pytest.mark.parametrize("stage", STAGES)
def test_warn_is_the_default_and_comes_with_the_next_step_at_the_latest(ranks, stage, clip):
    said, nothing = ranks(warn_at, 2, stage, clip, 1, 3)
    assert nothing == [] and len(said) >= 1
    when, text = said[0]
    assert when == (3 if clip == "none" else 2), "norms that are known tell at once"
    assert f"Step 2: the gradient of parameter {CULPRIT!r} is not finite and went into the weights" in text
    assert "nonfinite='skip'" in text


def test_a_run_that_stays_bad_is_said_ever_more_rarely(ranks):
    said = ranks(warn_at, 2, 3, "stock", 0, 13)[0]
    assert [when for when, _ in said] == [2, 11], "the first and the tenth of twelve bad steps"
    assert "10 such step(s) so far" in said[1][1]


def quiet(how: str) -> list[str]:
    model, optimizer = build(3, nonfinite=how)
    with logged() as found:
        for step in range(3):
            one_step(model, optimizer, step, float("nan") if how == "ignore" else None)
    return found


@pytest.mark.parametrize("how", ["ignore", "warn", "skip", "raise"])
def test_nothing_is_said_of_finite_gradients_or_where_it_is_ignored(ranks, how):
    assert ranks(quiet, 2, how) == [[], []]


# ---- what is not an overflow of the check itself


def large_but_finite(how: str, size: float) -> tuple[list[str], bool]:
    """Finite elements whose sum, or whose squares' sum, is infinite in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False)).to(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
    zeor.shard(model, optimizer, stage=2, nonfinite=how)
    with logged() as found:
        for _ in range(2):
            (model(torch.ones(1, 6)) * size).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with zeor.full_params(model):
        return found, bool(torch.isfinite(model[0].weight).all())


@pytest.mark.parametrize("how", ["warn", "raise", "skip"])
@pytest.mark.parametrize("size", [1e30, 1.5e38])
def test_finite_gradients_whose_sums_overflow_are_finite(ranks, how, size):
    assert ranks(large_but_finite, 2, how, size) == [([], True)] * 2


# ---- what it costs


def collectives(how: str, clip: str) -> int:
    model, optimizer = build(2, nonfinite=how)
    for step in range(2):
        one_step(model, optimizer, step, None, clip)
    before = zeor.traffic(model)["collectives"]
    one_step(model, optimizer, 2, None, clip)
    return zeor.traffic(model)["collectives"] - before


def test_warn_sends_nothing_and_the_others_one_agreement(ranks):
    def count(how: str, clip: str) -> int:
        return ranks(collectives, 2, how, clip)[0]

    none, clipped = count("ignore", "none"), count("ignore", "stock")
    assert count("warn", "none") == none
    assert count("skip", "none") == count("raise", "none") == none + 1
    assert count("skip", "stock") == count("raise", "stock") == clipped + 1
    assert count("warn", "stock") == clipped


# ---- elsewhere


def with_drop_in(how: str | None) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    options = {} if how is None else {"nonfinite": how}
    optimizer = zeor.optim.AdamW(model.named_parameters(), lr=0.1, **options)
    with logged() as found:
        for step in range(3):
            loss = loops.own_loss(model, step, torch.float32)
            (loss * (float("nan") if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return found, model.weight.detach().flatten().tolist()


def test_a_drop_in_optimizer_warns_and_may_skip(ranks):
    (said, weights), (nothing, _) = ranks(with_drop_in, 2, None)
    assert "Step 2: the gradient of parameter 'weight' is not finite" in said[0] and nothing == []
    assert all(math.isnan(w) for w in weights)
    (said, weights), (_, other) = ranks(with_drop_in, 2, "skip")
    assert "Step 2 was skipped on every rank" in said[0] and weights == other
    assert not any(math.isnan(w) for w in weights)


def world_of_one(how: str) -> list[str]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3, nonfinite=how)
    with logged() as found:
        (model(torch.ones(1, 3)) * float("inf")).sum().backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("how", ["warn", "skip"])
def test_a_world_of_one_says_it_at_once(ranks, how):
    (found,) = ranks(world_of_one, 1, how)
    assert len(found) == 1 and "'weight'" in found[0]


def with_scaler(fused: bool) -> tuple[list[str], float]:
    """GradScaler looks for itself: a step it skips is no news."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    zeor.shard(model, optimizer, stage=2, nonfinite="raise")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with logged() as found:
        for step in range(3):
            loss = loops.own_loss(model, step, torch.float32)
            scaler.scale(loss * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return found, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_gradscaler_skips_is_left_to_it(ranks, fused):
    assert ranks(with_scaler, 2, fused) == [([], 2.0)] * 2


def test_wrong_words_get_the_nearest():
    with pytest.raises(ValueError, match=r"nonfinite='skipp' is not known \(did you mean 'skip'"):
        zeor.shard(nn.Linear(2, 2), nonfinite="skipp")
