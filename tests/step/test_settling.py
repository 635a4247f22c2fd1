"""Settled paths: nobody waits for the exchange that ends a pass, bits stay the same, and a rank that diverges is told.

Ranks over Gloo also meet before each event; most tests here leave that out, as over NCCL.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops
from zeor.access.sharded import state_of
from zeor.comm import small
from zeor.step.settling import DivergedError, Settling, Told

STEPS = 12
TIMEOUT_SECONDS = 4.0


class Choosy(loops.Net):
    """Runs its blocks as `path` says: usually each once."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.path = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.path:
            x = self.blocks[block](x)
        return self.head(x * self.scale)


def sharded(stage: int, paths: str, **options: Any) -> tuple[Choosy, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Choosy().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=stage, paths=paths, keep_whole=0, **options)
    state_of(model).engine.axes.everyone.meets = False
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loops.own_loss(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def settling_of(model: nn.Module) -> Settling:
    return state_of(model).engine.passes.settling


def values(model: nn.Module) -> list[Tensor]:
    with zeor.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


# ---- nobody waits


class Waits:
    """Counts exchanges that the main thread waits for, and those that it only starts."""

    def __enter__(self) -> Waits:
        self.waited = self.started = 0
        self._largest, self._rows, self._start = small.largest, small.rows, small.Channel.start
        small.largest, small.rows, small.Channel.start = self._see(self._largest), self._see(self._rows), self._begin()
        return self

    def _see(self, of: Any) -> Any:
        def seen(*args: Any, **kwargs: Any) -> Any:
            self.waited += threading.current_thread() is threading.main_thread()
            return of(*args, **kwargs)

        return seen

    def _begin(self) -> Any:
        def seen(*args: Any) -> Any:
            self.started += 1
            return self._start(*args)

        return seen

    def __exit__(self, *exception: Any) -> None:
        small.largest, small.rows, small.Channel.start = self._largest, self._rows, self._start


def count_waits(stage: int, paths: str, freeze: bool) -> tuple[list[bool], list[tuple[int, int]]]:
    model, optimizer = sharded(stage, paths)
    if freeze:
        model.blocks[1].requires_grad_(False)
    settled, counts = [], []
    for step in range(8):
        with Waits() as waits:
            train(model, optimizer, step)
        settled.append(settling_of(model).settled)
        counts.append((waits.waited, waits.started))
    return settled, counts


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_five_equal_steps_nobody_waits(ranks, stage, freeze):
    for settled, counts in ranks(count_waits, 2, stage, "auto", freeze):
        assert settled == [False] * 4 + [True] * 4
        assert all(waited for waited, _ in counts[:5])
        assert counts[5:] == [(0, 1)] * 3


@pytest.mark.parametrize("stage", [1, 3])
def test_static_settles_at_once_and_dynamic_never(ranks, stage):
    for settled, counts in ranks(count_waits, 2, stage, "static", False):
        assert settled == [True] * 8 and counts[1:] == [(0, 1)] * 7
    for settled, counts in ranks(count_waits, 2, stage, "dynamic", False):
        assert settled == [False] * 8 and all(waited and not started for waited, started in counts)


def train_all(stage: int, paths: str, how: str) -> tuple[list[float], list[Tensor], bool]:
    """Some way of leaving the common path, or a feature, in the middle of a settled run."""
    model, optimizer = sharded(stage, paths)
    rank, losses = dist.get_rank(), []
    for step in range(STEPS):
        late = step >= 8
        if how == "a rank skips a block":
            model.path = [0, 2] if late and rank == step % 2 else [0, 1, 2]
        elif how == "all skip a block":
            model.path = [0, 2] if late else [0, 1, 2]
        elif how == "all repeat a block":
            model.path = [0, 1, 2, 0] if late else [0, 1, 2]
        elif how == "all evaluate":
            with torch.no_grad():
                model(loops.batch(step)[0])
        elif how == "all accumulate" and late:
            with zeor.no_sync(model):
                loops.own_loss(model, step + 100).backward()
        elif how == "all freeze and unfreeze":
            model.blocks[1].requires_grad_(step not in (7, 8))
        elif how == "settings change alike":
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        losses.append(train(model, optimizer, step))
    return losses, values(model), settling_of(model).settled


WAYS = ["nothing", "a rank skips a block", "all skip a block", "all repeat a block", "all evaluate", "all accumulate",
        "all freeze and unfreeze", "settings change alike"]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stage", [1, 3])
def test_settled_paths_change_no_bit(ranks, stage, how):
    found, wanted = (ranks(train_all, 2, stage, paths, how) for paths in ("auto", "dynamic"))
    for (losses, weights, _), (their_losses, their_weights, _) in zip(found, wanted, strict=True):
        assert losses == their_losses
        assert all(map(torch.equal, weights, their_weights))
    assert len({settled for _, _, settled in found}) == 1


class Routed(Choosy):
    """Which of two blocks runs is each rank's own matter."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[dist.get_rank() % 2](x)
        return self.head(self.blocks[2](x) * self.scale)


def train_routed(stage: int) -> bool:
    torch.manual_seed(3)
    model = Routed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=stage)
    for step in range(STEPS):
        train(model, optimizer, step)
    return settling_of(model).settled


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_take_their_own_paths_do_not_settle(ranks, stage):
    assert ranks(train_routed, 2, stage) == [False, False]


def warn_of_nan(stage: int) -> tuple[bool, list[str]]:
    """Only one rank holds the part of the gradient that is not finite; all hear of it, one step late."""
    model, optimizer = sharded(stage, "auto")
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeor").addHandler(handler)
    try:
        for step in range(STEPS):
            if step == 8:
                model.head.bias.register_hook(lambda grad: grad * float("inf"))
            train(model, optimizer, step)
    finally:
        logging.getLogger("zeor").removeHandler(handler)
    return settling_of(model).settled, texts


@pytest.mark.parametrize("stage", [2, 3])
def test_news_is_heard_late_and_all_wait_again(ranks, stage):
    """The weights are nan from then on, so there is news in every step."""
    (settled, texts), (other, _) = ranks(warn_of_nan, 2, stage)
    assert not settled and not other
    assert len(texts) == 1 and texts[0].startswith("Step 9: the gradient of parameter 'head.bias' is not finite")


# ---- beside a settled run


def join_late(paths: str, batches: list[int]) -> tuple[list[Tensor], bool]:
    """Settled ranks enter a block in which they have unequal numbers of batches, and train on after it."""
    model, optimizer = sharded(3, paths, timeout=TIMEOUT_SECONDS)
    for step in range(7):
        train(model, optimizer, step)
    with zeor.join(model):
        for step in range(batches[dist.get_rank()]):
            train(model, optimizer, step)
    for step in range(7):
        train(model, optimizer, step)
    return values(model), settling_of(model).settled


@pytest.mark.parametrize("batches", [[4, 0], [2, 6], [3, 3]])
@pytest.mark.parametrize("paths", ["auto", "static"])
def test_a_join_unsettles_every_rank(ranks, paths, batches):
    found, wanted = (ranks(join_late, 2, how, batches) for how in (paths, "dynamic"))
    for (weights, settled), (theirs, _) in zip(found, wanted, strict=True):
        assert settled and all(map(torch.equal, weights, theirs))


def keep_on_one_rank(paths: str) -> tuple[list[Tensor], bool]:
    """Rank 0 keeps a tensor over a parameter, as a logger might; it shows each step's values, from the second on."""
    model, optimizer = sharded(3, paths)
    kept: list[Tensor] = []
    for step in range(STEPS):
        if step == 8 and dist.get_rank() == 0:
            handle = model.head.register_forward_pre_hook(lambda module, _: kept.append(module.weight.detach()))
        train(model, optimizer, step)
        if step == 8 and dist.get_rank() == 0:
            handle.remove()
    found = values(model)
    if kept:
        assert torch.equal(kept[0], found[-2])
    return found, settling_of(model).settled


def test_a_tensor_that_one_rank_keeps_ends_no_run(ranks):
    found, wanted = (ranks(keep_on_one_rank, 2, paths) for paths in ("auto", "dynamic"))
    for (weights, settled), (theirs, _) in zip(found, wanted, strict=True):
        assert not settled and all(map(torch.equal, weights, theirs))


class Normed(Choosy):
    """Statistics that change in every step; a rank may skip them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(loops.FEATURES, affine=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.path:
            x = self.norms[block](self.blocks[block](x))
        return self.head(x * self.scale)


def skip_statistics(paths: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = Normed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=2, paths=paths)
    state_of(model).engine.axes.everyone.meets = False
    for step in range(STEPS):
        model.path = [0, 2] if step == 8 and dist.get_rank() == 1 else [0, 1, 2]
        train(model, optimizer, step)
    return [*values(model), *model.buffers()]


def test_a_rank_that_skips_a_module_with_buffers_ends_no_run(ranks):
    found, wanted = (ranks(skip_statistics, 2, paths) for paths in ("auto", "dynamic"))
    for state, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, state, theirs))


# ---- a rank that diverges


def diverge(stage: int, how: str) -> tuple[int, str, str]:
    """The step in which this rank raised, and what."""
    model, optimizer = sharded(stage, "auto", timeout=TIMEOUT_SECONDS)
    rank = dist.get_rank()
    for step in range(STEPS):
        odd = rank == 1 and step == 8
        try:
            if odd and how == "settings":
                optimizer.param_groups[0]["lr"] = 0.5
            if odd and how == "freezes":
                model.head.weight.requires_grad_(False)
            if odd and how == "repeats a block":
                model.path = [0, 1, 2, 0]
            loss = loops.own_loss(model, step)
            loss.backward(retain_graph=odd and how == "backward twice")
            if odd and how == "backward twice":
                loss.backward()
            if not (odd and how == "skips step"):
                optimizer.step()
            optimizer.zero_grad()
        except (RuntimeError, ValueError) as error:
            return step, type(error).__name__, str(error)
    return STEPS, "", ""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_that_differ_are_told_before_a_second_step(ranks, stage):
    for step, kind, text in ranks(diverge, 2, stage, "settings"):
        assert (step, kind) == (9, "ValueError")
        assert text.startswith("The ranks' optimizer settings differ: rank 0 has lr=0.01 in group 0")


def test_a_rank_that_skips_a_step_is_named(ranks):
    """At stage 3, where a step has no collective that would notice: told with the next backward, heard with the one
    after it."""
    for step, kind, text in ranks(diverge, 2, 3, "skips step"):
        assert (step, kind) == (10, "RuntimeError")
        assert text.startswith("Rank 0 has called step() 10 times and rank 1 9 times")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_that_one_rank_runs_twice_ends_in_an_error(ranks, stage):
    other, odd = ranks(diverge, 2, stage, "backward twice")
    assert odd[0] == 8 and odd[1] in ("DivergedError", "RuntimeError")
    assert other[0] <= 9 and other[1] in ("DivergedError", "RuntimeError")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_freezes_alone_is_named_on_every_rank(ranks, stage):
    for step, kind, text in ranks(diverge, 2, stage, "freezes"):
        assert (step, kind) == (9, "RuntimeError")
        assert text.startswith("Parameter 'head.weight' trains on rank 0 and is frozen on rank 1")


def test_a_rank_that_needs_a_unit_out_of_turn_raises_and_nobody_hangs(ranks):
    """At stage 3 the other rank waits for it in a gather, until the time is over."""
    other, odd = ranks(diverge, 2, 3, "repeats a block")
    assert odd[:2] == (8, "DivergedError")
    assert "it needs a unit out of turn" in odd[2] and "paths='dynamic'" in odd[2]
    assert other[0] == 8 and other[1] == "RuntimeError" and "did not" in other[2]


def fresh(axes: Any, how: str = "auto") -> Settling:
    return Settling(axes, how, 2)


class Ranks:
    """Enough of axes for a Settling of imagined ranks."""

    class everyone:
        rank, size, fake, control, timeout = 1, 2, False, None, 600.0

    def when_replaced(self, method: Any) -> None: ...


def test_a_regular_rank_is_told_late_and_an_irregular_one_at_once():
    settling, told = fresh(Ranks()), Told([3, 0, 0], [7, -7], [0])
    for _ in range(5):
        assert settling.heard(told, settling.tells(told), lambda now: True) == (told, False)
    assert settling.settled
    more = Told([3, 1, 0], [7, -7], [0])
    assert not settling.foretell(more)
    numbers = [max(pair) for pair in zip(settling.tells(more), settling.tells(told, regular=True))]
    with pytest.raises(DivergedError, match="rank 1 of 2 did not wait"):
        settling.heard(more, numbers, lambda now: True)
    # Where every rank tells more, all have waited: they go on, and settle anew.
    assert settling.heard(more, settling.tells(more), lambda now: True) == (more, False)
    assert not settling.settled
    # One that tells less is right all the same, and hears of differences when the others do.
    for _ in range(5):
        settling.heard(told, settling.tells(told), lambda now: True)
    less = Told([2, 0, 0], [7, -7], [0])
    numbers = [max(pair) for pair in zip(settling.tells(less), settling.tells(told, regular=True))]
    answer, later = settling.heard(less, numbers, lambda now: True)
    assert answer.now == told.now and later and settling.settled
    assert settling.look_back() == told and settling.look_back() is None


@pytest.mark.parametrize(("how", "all_had", "wanted"), [("auto", False, False), ("static", False, True)])
def test_auto_wants_a_gradient_for_everything_that_trains(how, all_had, wanted):
    settling, told = fresh(Ranks(), how), Told([3, 0, 0], [], [])
    for _ in range(10):
        settling.heard(told, settling.tells(told), lambda now: all_had)
    assert settling.settled is wanted
