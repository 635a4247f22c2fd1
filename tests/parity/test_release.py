"""release=True: gradients are used up inside backward, unit by unit, and no bit of the result changes.

Every comparison is with the same run without it. What cannot go with it is refused, in a sentence each.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import offloads
from tests.offloads import CHUNK, Net, adamw, left, loss_of, made, one_step, run, same
from zeor import Offload
from zeor.access.sharded import state_of


def check_equal(path: str, stages: tuple[int, ...]) -> int:
    """Loops take turns over the places, shifted by one at each stage."""
    count = 0
    places = [
        ("none", None),
        ("host", Offload(chunk=CHUNK)),
        ("disk", Offload("disk", "disk", folder=path, chunk=CHUNK)),
        ("grads", Offload("disk", "host", "host", folder=path, chunk=CHUNK)),
    ]
    loops = ("plain", "accumulate", "no_sync")
    for stage in stages:
        options = {"stage": stage, "precision": "bf16" if stage % 2 else None, "steps": 2}
        wanted = {loop: run(loop=loop, **options) for loop in loops}
        for number, (name, offload) in enumerate(places[: 4 if stage >= 2 else 3]):
            loop = loops[(number + stage) % len(loops)]
            same(run(release=True, offload=offload, loop=loop, **options), wanted[loop], (name, loop, options))
            count += 1
    return count


@pytest.mark.long
@pytest.mark.parametrize(("world", "stages"), [(1, (0, 2, 3)), (2, (0, 1, 2, 3)), (3, (0, 3))])
def test_it_changes_no_bit_at_any_stage_and_place(ranks, tmp_path, world, stages):
    assert ranks(check_equal, world, str(tmp_path), stages) == [sum(4 if s >= 2 else 3 for s in stages)] * world


def check_on_host() -> None:
    fused = functools.partial(adamw, fused=True)
    for stage in (1, 3):
        wanted = run(fused, stage=stage, precision="bf16", loop="accumulate")
        offload = Offload(update="host", chunk=CHUNK)
        same(run(fused, stage=stage, precision="bf16", loop="accumulate", offload=offload, release=True), wanted)


def test_it_goes_with_an_update_on_the_host(ranks):
    ranks(check_on_host, 2)


def check_formats() -> None:
    for moments in ("bf16", "int8"):
        same(run(stage=3, moments=moments, release=True), run(stage=3, moments=moments), moments)


def test_it_goes_with_small_formats(ranks):
    ranks(check_formats, 2)


# ---- who has a gradient


class Branches(nn.Module):
    """Each batch goes through some of the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(offloads.WIDTH, offloads.WIDTH)
        self.branches = nn.ModuleList(offloads.Block() for _ in range(4))
        self.head = nn.Linear(offloads.WIDTH, offloads.OUT)
        self.extra = nn.Parameter(torch.ones(offloads.OUT))  # of the root's unit
        self.way: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in self.way:
            x = self.branches[number](x)
        x = self.head(x)
        return x * self.extra if len(self.way) > 1 else x


def branches_run(ways: list[list[tuple[int, ...]]], **options: Any) -> dict[str, Any]:
    """`ways[step][rank]`."""
    torch.manual_seed(3)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, **options)
    for step, each in enumerate(ways):
        model.way = each[dist.get_rank()]
        one_step(model, [optimizer], step, "plain")
    return left(model)


ONE_RANK = [[(0, 1, 2, 3), (0, 1, 2, 3)], [(0, 2), (0, 1, 2, 3)], [(0, 1, 3), (3,)], [(0, 1, 2, 3)] * 2]
ALL_RANKS = [[(0, 1, 2, 3)] * 2, [(1, 2)] * 2, [(0,)] * 2, [(0, 1, 2, 3)] * 2]


def check_branches(ways: list[list[tuple[int, ...]]]) -> None:
    for stage in (0, 1, 2, 3):
        wanted = branches_run(ways, stage=stage)
        for offload in (None, Offload(chunk=CHUNK)):
            same(branches_run(ways, stage=stage, release=True, offload=offload), wanted, (stage, offload))


@pytest.mark.parametrize("ways", [ONE_RANK, ALL_RANKS], ids=["on one rank", "on all ranks"])
def test_parameters_without_a_gradient(ranks, ways):
    ranks(check_branches, 2, ways)


def frozen_run(**options: Any) -> dict[str, Any]:
    model = offloads.net(3)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    optimizer = adamw(model)
    zeor.shard(model, optimizer, **options)
    for step in range(4):
        if step == 2:
            model.blocks[1].requires_grad_(True)
            model.blocks[0].down.requires_grad_(False)
        one_step(model, [optimizer], step, "accumulate" if step == 1 else "plain")
    return left(model)


def check_frozen() -> None:
    for stage in (0, 2, 3):
        wanted = frozen_run(stage=stage)
        same(frozen_run(stage=stage, release=True), wanted, stage)
        same(frozen_run(stage=stage, release=True, offload=Offload(chunk=CHUNK)), wanted, stage)


def test_frozen_and_thawed_parameters(ranks):
    ranks(check_frozen, 2)


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Both have a part of every unit."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def muon_too(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for name, param in model.named_parameters() if param.dim() == 2 and "blocks" in name]
    taken = {id(param) for param in matrices}
    return [
        torch.optim.AdamW([param for param in model.parameters() if id(param) not in taken], lr=0.01),
        torch.optim.Muon(matrices, lr=0.01),
    ]


def check_two(make: Any) -> None:
    for stage in (0, 1, 3):
        wanted = run(make, stage=stage)
        for offload in (None, Offload(chunk=CHUNK)):
            same(run(make, stage=stage, release=True, offload=offload), wanted, (stage, offload))


def test_two_optimizers_of_one_model(ranks):
    ranks(check_two, 2, two)


def test_muon_beside_adamw(ranks):
    ranks(check_two, 2, muon_too)


def mean_run(**options: Any) -> dict[str, Any]:
    """Counts that differ by rank and batch."""
    model, (optimizer,) = made(**options)
    for step in range(3):
        for part in range(2):
            with zeor.accumulate(model) if part == 0 else nullcontext():
                rows = 1 + (step + part + dist.get_rank()) % 3
                x = torch.randn(rows, offloads.WIDTH, generator=torch.Generator().manual_seed(step * 7 + part))
                zeor.mean_loss(model, model(x).square().sum(), rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return left(model)


def check_mean_loss() -> None:
    for stage in (0, 2, 3):
        wanted = mean_run(stage=stage)
        same(mean_run(stage=stage, release=True), wanted, stage)
        same(mean_run(stage=stage, release=True, offload=Offload(chunk=CHUNK)), wanted, stage)


def test_mean_loss_divides_by_all_items(ranks):
    ranks(check_mean_loss, 2)


# ---- memory


def held_in_backward(stage: int, release: bool) -> dict[int, int]:
    """Bytes of gradients by block once the backward of all blocks but the first is over."""
    torch.manual_seed(3)
    model = Net(6)
    optimizer = adamw(model)
    zeor.shard(model, optimizer, stage=stage, release=release)
    units = {unit.module: unit for unit in state_of(model).engine.units}
    found: dict[int, int] = {}

    def look(grad: Tensor) -> None:
        for number, block in enumerate(model.blocks):
            found[number] = sum(lane.grads.nbytes() for lane in units[block].lanes)

    for step in range(3):
        x = torch.randn(4, offloads.WIDTH, generator=torch.Generator().manual_seed(step))
        handle = model.blocks[0].register_forward_hook(lambda _, __, out: out.register_hook(look) and None)
        model(x).square().mean().backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_earlier_units_are_gone_while_backward_runs(ranks, world, stage):
    runs = [ranks(held_in_backward, world, stage, release) for release in (False, True)]
    for kept, released in zip(*runs):
        assert all(kept[number] > 0 for number in range(2, 6)), "without release they pile up"
        assert [released[number] for number in range(2, 6)] == [0, 0, 0, 0]
        assert sum(released.values()) <= kept[0] + kept[1]


def check_after() -> tuple[bool, bool, float]:
    """What the user sees afterwards."""
    model, (optimizer,) = made(stage=2, release=True)
    loss_of(model, 0).backward()
    had = all(param.grad is not None for param in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    return had, all(param.grad is None for param in model.parameters()), zeor.report(model)["grad"]


def test_afterwards_gradients_are_there_until_they_are_dropped_and_take_no_memory(ranks):
    assert ranks(check_after, 2) == [(True, True, 0)] * 2


# ---- refusals


def message(call: Any, kind: type[Exception] = RuntimeError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def check_refusals(stage: int) -> dict[str, str]:
    model, (optimizer,) = made(stage=stage, release=True)
    loss_of(model, 0).backward()
    found = {
        "clip": message(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        "zeor clip": message(lambda: zeor.clip_grad_norm_(model, 1.0)),
        "read": message(lambda: dict(model.named_parameters())["head.weight"].grad.norm()),
        "second": message(lambda: loss_of(model, 1).backward()),
    }
    optimizer.step()
    optimizer.zero_grad()
    one_step(model, [optimizer], 2, "plain")  # nothing of it is left
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_clipping_reading_and_a_second_backward_are_refused(ranks, stage):
    for found in ranks(check_refusals, 2, stage):
        assert found["second"] == (
            "A second backward began before step(), and with release=True the first has updated the weights; run all "
            "but the last inside `with zeor.accumulate(model):`, or leave release= out."
        )
        for what in ("clip", "zeor clip", "read"):
            assert "release" in found[what], found


def check_scaler() -> str:
    model, (optimizer,) = made(lambda m: adamw(m, fused=True), stage=2, precision="fp16", release=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(loss_of(model, 0)).backward()
    return message(lambda: scaler.step(optimizer))


def check_unfused_scaler() -> str:
    model, (optimizer,) = made(stage=2, precision="fp16", release=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(loss_of(model, 0)).backward()
    return message(lambda: scaler.step(optimizer))


def test_gradscaler_is_refused(ranks):
    for found in ranks(check_scaler, 2) + ranks(check_unfused_scaler, 2):
        assert "release" in found and ("GradScaler" in found or "scaled" in found), found


def check_penalty() -> str:
    model, _ = made(stage=3, release=True)
    loss = loss_of(model, 0) + zeor.penalty(model, lambda p: p.square().sum())
    return message(loss.backward)


def test_penalty_is_refused(ranks):
    for found in ranks(check_penalty, 2):
        assert "zeor.penalty" in found and "release=True" in found
