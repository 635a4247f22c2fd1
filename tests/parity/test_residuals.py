"""Wires that keep what they do not send: bits between stages, checkpoints, other plans and wires, and failures.

Along one axis reduces are the same at all stages, so all give the same bits. A run that resumes has the bits of the one
that went on, because a save flushes what is left into the next gradient, in both.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests import offloads
from tests.offloads import CHUNK
from tests.parity.models import Setting, placed
from tests.parity.test_wires import made, same_bits
from zeor import Offload, PowerSGD, RandomK, Sign, TopK, Wire
from zeor.access.sharded import state_of
from zeor.step import reduces

TOPK, RANDOMK, SIGN, LOW = TopK(0.05), RandomK(0.2), Sign(0), PowerSGD(2, 0)
INT4 = Wire(reduce="int4", feedback=True, rounding="stochastic", rotate=True)
METHODS = [TOPK, RANDOMK, SIGN, LOW, INT4]
LATE = PowerSGD(2, warmup=2)
STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("world", [2, 3])
def test_stages_give_the_same_bits(ranks, world):
    for wire in METHODS if world == 2 else [TOPK, LOW]:
        ranks(same_bits, world, STAGES, wire=wire)


def test_stages_give_the_same_bits_with_weights_that_travel_as_codes(ranks):
    for wire in (Wire("int8", LOW), Wire("int8", TOPK)):
        ranks(same_bits, 2, (1, 2, 3), wire=wire, precision="bf16")


FEATURES: dict[str, dict[str, Any]] = {
    "accumulation": {"loop": "accumulate"},
    "no_sync": {"loop": "no_sync", "precision": "bf16"},
    "several backwards": {"loop": "backwards"},
    "no overlap": {"overlap": False, "prefetch": 0},
    "recompute": {"recompute": True, "precision": "bf16"},
    "host": {"offload": Offload(chunk=CHUNK), "precision": "bf16"},
    "release": {"release": True, "loop": "plain"},
    "warm-up": {"steps": 4},
    "skip": {"nonfinite": "skip"},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_do_not_change_a_bit_between_stages(ranks, name):
    ranks(same_bits, 2, (1, 2, 3), wire=LATE if name == "warm-up" else LOW, **FEATURES[name])
    if name in ("accumulation", "several backwards", "release"):
        ranks(same_bits, 2, (1, 2, 3), wire=TOPK, **FEATURES[name])


PAIRS = ((1, 1), (2, 1), (3, 1), (3, 3))


@pytest.mark.parametrize("wire", [Wire(across=TOPK), Wire(across=LOW), Wire(reduce=LOW, across="int8")], ids=str)
def test_two_axes(ranks, wire):
    ranks(same_bits, 4, PAIRS, wire=wire)


def test_updates_cut_across_alone(ranks):
    """The first hop has several blocks then."""
    ranks(same_bits, 4, ((0, 1), (0, 2)), wire=LOW)
    ranks(same_bits, 4, ((0, 1), (0, 2)), wire=TOPK)


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor, without: int | None) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            found = block(x)
            x = x + (found.detach() if number == without else found)
        return x


def lacks_a_gradient(wire: Any) -> dict[str, float]:
    """Rank 0 has none for one block, so it comes to the blocks behind it when its backward is over."""
    with mock.patch.object(reduces, "PATIENCE_SECONDS", 0.2):
        torch.manual_seed(0)
        model = Residuals()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zeor.shard(model, optimizer, wire=wire, keep_whole=40, **placed(Setting((1, 1), shape=(2, 2))))
        for step in range(3):
            without = 1 if dist.get_rank() == 0 and step else None
            model(torch.randn(8, 32), without).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: float(param.detach().double().sum()) for name, param in model.named_parameters()}


def test_legs_inside_wait_for_ranks_that_take_other_paths(ranks):
    """Where a hop across follows, that waits for the end of backward too."""
    first, *others = ranks(lacks_a_gradient, 4, Wire(reduce=LOW, across="exact"), timeout=60)
    assert all(each == first for each in others)


def in_halves(wire: Any) -> Any:
    """Two optimizers step after each backward."""
    model = offloads.net()
    halves = list(model.blocks.parameters()), [*model.head.parameters(), model.scale]
    optimizers = [torch.optim.AdamW(params, lr=1e-2) for params in halves]
    zeor.shard(model, optimizers, stage=2, wire=wire, keep_whole=30)
    return model, optimizers


def keeps_after(model: Any, optimizers: Any, steps: range) -> list[bool]:
    """By step, whether something was left of its gradients."""
    found = []
    for step in steps:
        offloads.one_step(model, optimizers, step, "plain")
        lanes = [lane.grads for unit in state_of(model).engine.units for lane in unit.lanes if lane.grads is not None]
        found.append(any(bool(each.any()) for grads in lanes for each in grads._reduction.wires.tensors()))
    return found


def warmed_up(folder: str, wire: Any) -> tuple[list[bool], ...]:
    """Saved under the number of an epoch, loaded whole, and its weights alone into a run that begins."""
    model, optimizers = in_halves(wire)
    first = keeps_after(model, optimizers, range(4))
    zeor.save(folder, model, optimizers, step=0)
    on = keeps_after(model, optimizers, range(4, 6))
    zeor.load(folder, *in_halves(wire))
    other, its = in_halves(wire)
    zeor.load(folder, other, its)
    loaded = keeps_after(other, its, range(4, 6))
    new, its = in_halves(wire)
    zeor.load(folder, new, only="weights")
    return first, on, loaded, keeps_after(new, its, range(3))


def test_a_warm_up_counts_steps_of_the_run(ranks, tmp_path):
    """Those of two optimizers are one, and the number that a checkpoint is given is none of them."""
    for found in ranks(warmed_up, 2, str(tmp_path), TopK(0.05, warmup=2)):
        assert found == ([False, False, True, True], [True, True], [True, True], [False, False, True])


# ---- they train


def trains(wire: Any) -> float:
    """The last losses, of a problem with an answer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    zeor.shard(model, optimizer, stage=2, wire=wire, keep_whole=30)
    truth = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(300):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - torch.tanh(x @ truth / 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30 / losses[0]


def test_each_method_trains(ranks):
    exact = ranks(trains, 2, None)[0]
    assert exact < 0.05
    for wire in (TopK(0.05), RandomK(0.2), Sign(20), PowerSGD(2, 20)):
        assert ranks(trains, 2, wire)[0] < 3 * exact, wire


# ---- what is left is the gradient


class Weighted(nn.Module):
    """Its gradients are what it is given, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(57))

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (self.matrix * given[0]).sum() + (self.vector * given[1]).sum()


def sums_kept(stage: int, wire: Any) -> None:
    """What the steps have used and what is left are the gradients of all steps: nothing is lost for good."""
    model, world = Weighted(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zeor.shard(model, optimizer, stage=stage, wire=wire, keep_whole=10)
    total = [torch.zeros(40, 30), torch.zeros(57)]
    for step in range(5):
        for rank in range(world):
            generator = torch.Generator().manual_seed(10 * step + rank)
            given = torch.randn(40, 30, generator=generator), torch.randn(57, generator=generator)
            total = [before + new / world for before, new in zip(total, given, strict=True)]
            if rank == dist.get_rank():
                mine = given
        model(mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = state_of(model).engine
    engine.flush_residuals("in a test")
    left = {slot.name: flushed(slot) / world for slot in engine.slots}
    with zeor.full_params(model):
        used = {name: -param.detach() for name, param in model.named_parameters()}
    assert float(left["matrix"].norm()) > 0.1 * float(total[0].norm())
    for name, wanted in zip(("matrix", "vector"), total, strict=True):
        assert torch.allclose(used[name] + left[name], wanted, rtol=1e-4, atol=1e-5), name


def flushed(slot: Any) -> torch.Tensor:
    """Of a whole parameter, on every rank."""
    found = torch.zeros(math.prod(slot.shape))
    for segment in slot.lane.layout.segments_in(slot.lane.fine):
        if segment.param == slot.index:
            found[segment.start : segment.start + segment.numel] = slot.lane.grads.flushed(segment)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found)
    return found.view(slot.shape)


@pytest.mark.parametrize("wire", [TOPK, LOW], ids=str)
def test_nothing_is_lost_for_good(ranks, wire):
    ranks(sums_kept, 2, 2, wire)


# ---- checkpoints


def resumed(folder: str, stage: Any, wire: Any, precision: Any, asynchronous: bool) -> None:
    """What a run that saved half-way leaves, and one that went on from what it saved."""
    options = {"stage": stage, "wire": wire, "precision": precision}
    model, optimizers = made(**options)
    for step in range(6):
        if step == 3:
            saving = zeor.save(folder, model, optimizers, step=step, asynchronous=asynchronous)
        offloads.one_step(model, optimizers, step, "backwards")
    if asynchronous:
        saving.wait()
    wanted = offloads.whole(model)
    model, optimizers = made(**options)
    for step in range(7, 9):
        offloads.one_step(model, optimizers, step, "clip")  # another past
    step = zeor.load(folder, model, optimizers).step
    for number in range(step, 6):
        offloads.one_step(model, optimizers, number, "backwards")
    offloads.same(offloads.whole(model), wanted, (stage, wire, precision))


@pytest.mark.parametrize(
    "stage, wire, precision",
    [
        (0, TOPK, None), (1, LOW, "bf16"), (2, LOW, None), (3, TOPK, "bf16"), (2, RANDOMK, None), (3, SIGN, None),
        (2, INT4, None), (3, LATE, None),
    ],
)  # fmt: skip
def test_a_run_that_resumes_has_the_bits_of_the_one_that_went_on(ranks, tmp_path, stage, wire, precision):
    ranks(resumed, 2, str(tmp_path), stage, wire, precision, asynchronous=stage == 2)


def saved(folder: str, wire: Any) -> None:
    model, optimizers = made(stage=2, wire=wire)
    for step in range(3):
        offloads.one_step(model, optimizers, step, "clip")
    zeor.save(folder, model, optimizers, step=3)


def left_after(folder: str, stage: int, wire: Any) -> dict[str, torch.Tensor]:
    """What is added to the next gradients of a run that loaded, over how many ranks these are averaged."""
    model, optimizers = made(stage=stage, wire=wire)
    zeor.load(folder, model, optimizers)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    found = {slot.name: flushed(slot) / ranks for slot in state_of(model).engine.slots}
    before = offloads.whole(model)
    offloads.one_step(model, optimizers, 3, "plain")
    after = offloads.whole(model)
    assert offloads.differences(after, before)
    return {**found, **{f"{name} after": value for name, value in after.items()}}


def test_a_checkpoint_holds_one_models_worth_for_any_ranks_stage_and_wire(ranks, tmp_path):
    ranks(saved, 2, str(tmp_path), TOPK)
    first = ranks(left_after, 2, str(tmp_path), 2, TOPK)[0]
    assert any(bool(value.any()) for name, value in first.items() if "after" not in name)
    exact = ranks(left_after, 2, str(tmp_path), 1, None)[0]
    for world, stage, wire in ((1, 3, None), (3, 3, LOW), (4, 1, SIGN), (1, 0, None)):
        found = ranks(left_after, world, str(tmp_path), stage, wire)[0]
        for name, value in found.items():
            if "after" not in name:
                assert torch.allclose(value, first[name], rtol=1e-6), (name, world)
            elif wire is None:  # the same joint batch, and the same of before
                assert torch.allclose(value, exact[name], rtol=1e-3, atol=1e-5), (name, world)


def loaded_twice(folder: str) -> None:
    """In a world of one what a checkpoint holds goes into the gradients themselves: each time it is loaded."""
    model, optimizers = made(stage=2)
    found = []
    for _ in range(2):
        zeor.load(folder, model, optimizers)
        offloads.one_step(model, optimizers, 3, "plain")
        found.append(offloads.whole(model))
    offloads.same(found[1], found[0])


def test_a_checkpoint_that_is_loaded_again_is_used_again(ranks, tmp_path):
    ranks(saved, 2, str(tmp_path), TOPK)
    ranks(loaded_twice, 1, str(tmp_path))


class Pair(nn.Module):
    """Of one lane the first of four ranks holds a part of the first weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(40, 40)), nn.Parameter(torch.randn(42, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first @ self.second.T


def of_pair(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=2, **options)
    return model, optimizer


def kept_in_part() -> Any:
    """The smaller weight travels exactly, so nothing is left of it."""
    model, optimizer = of_pair(wire=TOPK, keep_whole=1600)
    model(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved_again(folder: str, then: str) -> tuple[bool, dict[str, torch.Tensor]]:
    """By a run that has both in one lane, before it makes a gradient."""
    model, optimizer = kept_in_part()
    if then == "plan":
        zeor.replan(model, optimizer, wire="exact", keep_whole=10)
    else:
        zeor.save(folder, model, optimizer, step=1)
        model, optimizer = of_pair(keep_whole=10)
        zeor.load(folder, model, optimizer)
    one_lane = len(state_of(model).engine.slots[0].lane.layout.shapes) == 2
    zeor.save(folder, model, optimizer, step=2)
    model, optimizer = of_pair(keep_whole=10)
    zeor.load(folder, model, optimizer)
    return one_lane, {slot.name: flushed(slot) for slot in state_of(model).engine.slots}


@pytest.mark.parametrize("then", ["save", "plan"])
def test_a_rank_without_any_of_it_saves_what_is_left_too(ranks, tmp_path, then):
    for one_lane, left in ranks(saved_again, 4, str(tmp_path), then):
        assert one_lane and not bool(left["first"].any()) and bool(left["second"].any())


def counted(folder: str, load: bool) -> dict[str, torch.Tensor]:
    """Gradients of zeor.mean_loss are divided by items, and by no number of ranks."""
    model, optimizers = made(stage=2, wire=TOPK)
    if load:
        zeor.load(folder, model, optimizers)
    else:
        loss = offloads.loss_of(model, 0)
        zeor.mean_loss(model, loss, 6).backward()
        optimizers[0].step()
        model.zero_grad()
        zeor.save(folder, model, optimizers, step=1)
    return {slot.name: flushed(slot) for slot in state_of(model).engine.slots}


def test_what_is_left_of_sums_over_items_is_the_same_for_any_ranks(ranks, tmp_path):
    wanted = ranks(counted, 2, str(tmp_path), False)[0]
    assert any(bool(value.any()) for value in wanted.values())
    for world in (2, 3):
        found = ranks(counted, world, str(tmp_path), True)[0]
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), world


# ---- another wire, another plan


def changed(verb: str, folder: str, wire: Any, then: Any) -> None:
    """A run that changes goes on as one that is loaded from a checkpoint of this moment."""
    model, optimizers = made(stage=2, wire=wire)
    for step in range(3):
        offloads.one_step(model, optimizers, step, "clip")
    zeor.save(folder, model, optimizers, step=3)
    options = {"stage": 2, "wire": then}
    if verb == "wire":
        zeor.set_wire(model, then or "exact")
    else:
        options["stage"] = 3
        zeor.replan(model, optimizers, **options)
    for step in range(3, 5):
        offloads.one_step(model, optimizers, step, "clip")
    found = offloads.whole(model)
    other, its = made(**options)
    zeor.load(folder, other, its)
    for step in range(3, 5):
        offloads.one_step(other, its, step, "clip")
    offloads.same(offloads.whole(other), found, (verb, wire, then))


@pytest.mark.parametrize("verb", ["wire", "plan"])
@pytest.mark.parametrize("wire, then", [(TOPK, None), (TOPK, LOW), (LOW, TOPK)], ids=str)
def test_what_is_left_goes_on_by_another_wire_or_plan(ranks, tmp_path, verb, wire, then):
    ranks(changed, 2, verb, str(tmp_path), wire, then)


def flushes(stage: int, wire: Any, then: Any) -> None:
    """Without a save before: set_wire itself flushes."""
    model, optimizers = made(stage=stage, wire=wire)
    for step in range(3):
        offloads.one_step(model, optimizers, step, "clip")
    assert zeor.report(model)["residual"] == state_residual(model) > 0
    zeor.set_wire(model, then)
    grads = [lane.grads for unit in state_of(model).engine.units for lane in unit.lanes if lane.grads is not None]
    assert any(bool(each._reduction.flushed.any()) for each in grads if each._reduction.flushed is not None)
    offloads.one_step(model, optimizers, 3, "clip")
    assert all(each._reduction.flushed is None for each in grads)
    assert zeor.report(model).get("residual", 0) == state_residual(model)


def state_residual(model: nn.Module) -> int:
    return sum(lane.spec.residual_nbytes for unit in state_of(model).engine.units for lane in unit.lanes)


def test_set_wire_flushes(ranks):
    ranks(flushes, 2, 1, LOW, "exact")
    ranks(flushes, 2, 3, TOPK, SIGN)


# ---- what goes wrong, and who leaves


def recovers(wire: Any, how: str) -> None:
    """A gradient that is not finite is seen by the step it belongs to and by no other."""
    model, optimizers = made(stage=2, wire=wire, nonfinite=how)
    offloads.one_step(model, optimizers, 0, "clip")
    before = offloads.whole(model)
    loss = offloads.loss_of(model, 1) * (float("inf") if dist.get_rank() == 1 else 1.0)
    loss.backward()
    optimizers[0].step()
    model.zero_grad()
    offloads.same(offloads.whole(model), before, "the step was skipped")
    for step in range(2, 4):
        offloads.one_step(model, optimizers, step, "clip")
    after = offloads.whole(model)
    assert all(bool(value.isfinite().all()) for value in after.values()) and offloads.differences(after, before)


@pytest.mark.parametrize("wire", METHODS, ids=str)
def test_a_gradient_that_is_not_finite_does_not_stay(ranks, wire):
    ranks(recovers, 2, wire, "skip")


def joined(wire: Any) -> None:
    model, optimizers = made(stage=2, wire=wire)
    with zeor.join(model):
        for step in range(3 + 2 * dist.get_rank()):
            offloads.one_step(model, optimizers, step, "plain")
    found = offloads.whole(model)
    assert all(bool(value.isfinite().all()) for value in found.values())
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, {name: value.sum().item() for name, value in found.items()})
    assert all(row == rows[0] for row in rows)


@pytest.mark.parametrize("wire", [TOPK, LOW], ids=str)
def test_ranks_that_are_out_of_data(ranks, wire):
    ranks(joined, 2, wire)


def froze(wire: Any) -> None:
    """What is left of a parameter that is frozen is forgotten, and its neighbours go on."""
    model, optimizers = made(stage=2, wire=wire)
    for step in range(2):
        offloads.one_step(model, optimizers, step, "plain")
    block = model.blocks[0]
    block.up.weight.requires_grad_(False)
    before = offloads.whole(model)["blocks.0.up.weight"]
    for step in range(2, 4):
        offloads.one_step(model, optimizers, step, "plain")
    engine = state_of(model).engine
    engine.flush_residuals("in a test")
    left = {slot.name: flushed(slot) for slot in engine.slots}
    assert torch.equal(offloads.whole(model)["blocks.0.up.weight"], before)
    assert not bool(left["blocks.0.up.weight"].any()) and bool(left["blocks.0.down.weight"].any())
    block.up.weight.requires_grad_(True)
    offloads.one_step(model, optimizers, 4, "plain")
    assert not torch.equal(offloads.whole(model)["blocks.0.up.weight"], before)


@pytest.mark.parametrize("wire", [TOPK, LOW], ids=str)
def test_frozen_parameters(ranks, wire):
    ranks(froze, 2, wire)


def refuses() -> list[str]:
    found = []
    for wire in ((TopK(0.1), TopK(0.2))[dist.get_rank()], Wire(across=TOPK)):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            zeor.shard(offloads.net(), wire=wire)
        found.append(str(caught.value))
    return found


def test_ranks_that_disagree(ranks):
    for differ, across in ranks(refuses, 2):
        assert "rank 1" in differ and "fraction=0.2" in differ
        assert "there is one axis" in across


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: TopK(0), "TopK.fraction=0; give a number above 0 and up to 0.5"),
        (lambda: TopK(0.01, warmup=-1), "TopK.warmup=-1; give a whole number of at least 0"),
        (lambda: RandomK(0.7), "RandomK.fraction=0.7"),
        (lambda: Sign(1.5), "Sign.warmup=1.5"),
        (lambda: PowerSGD(0), "PowerSGD.rank=0; give a whole number of at least 1"),
        (lambda: Wire(gather=TopK()), "is a method for sums of gradients"),
        (lambda: Wire(gather="powersgd"), "is a method for sums of gradients"),
        (lambda: Wire(reduce="topkk"), "Wire.reduce='topkk' is not known (did you mean 'topk'?)"),
        (lambda: Wire(feedback=True), "they travel exactly; give reduce= a format"),
        (lambda: Wire(reduce="int8", feedback=1), "Wire.feedback=1; give True or False"),
    ],
)
def test_what_says_nothing_sensible(make, told):
    with pytest.raises(ValueError) as caught:
        make()
    assert told in str(caught.value)


def test_names_and_methods_alone():
    assert Wire(reduce="powersgd").reduce == PowerSGD()
    assert Wire.parse("topk") == Wire.parse(TopK()) == Wire(reduce=TopK())
    assert Wire(across=TopK(0.1)).axes[1] == Wire(reduce=TopK(0.1))
    assert Wire(across="int8", feedback=True).axes[1].keeps and not Wire(across=Wire(reduce="int8")).axes[1].keeps
