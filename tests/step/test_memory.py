"""Bytes per rank: resident ones equal the table of roles exactly, transient ones stay within their formula.

The table is multiplied out here from shapes and slice sizes alone, the engine is asked what it really holds, and
the planner what it would have said before anything was allocated. All three must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from zeor import api
from zeor.layout import lay_out
from zeor.planner import Prediction

WORLDS, STAGES, PRECISIONS = (1, 2, 4), (0, 1, 2, 3), ("fp32", "bf16")
WIDTH, BLOCKS = 20, 12
ROLES = ("compute", "grad", "master", "moments")


class Block(nn.Module):
    """One trainable and one frozen lane."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.relu(self.linear(x))) * self.frozen


class Model(nn.Module):
    """The root holds a scalar, a prime-sized weight, and a norm with running statistics (fp32 whatever is asked)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.stats = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.stats(x) * self.scale


# Shapes by lane: (shapes, trainable, keeps fp32), written down once more so as not to ask the engine.
BLOCK_LANES = [([(WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)], True, False), ([(WIDTH,)], False, False)]
ROOT_LANES = [([(), (WIDTH, 7), (WIDTH,)], True, False), ([(WIDTH,), (WIDTH,)], True, True)]
LANES = ROOT_LANES + BLOCK_LANES * BLOCKS


def run_one(stage: int, precision: str, prefetch: int = 1, build: Callable[[], nn.Module] = Model) -> dict[str, Any]:
    """Three steps; what is held with gradients present, and after they are dropped."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeor.shard(model, optimizer, stage=stage, precision=precision, prefetch=prefetch, units=[Block])
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).float().square().mean().backward()
        optimizer.step()
    found = zeor.report(model)
    optimizer.zero_grad()
    engine = api._state(model).engine
    return {"held": found, "after": zeor.report(model), "alive": engine.ledger.live_nbytes}


def run_all() -> dict[tuple[int, str], dict[str, Any]]:
    return {(stage, precision): run_one(stage, precision) for stage in STAGES for precision in PRECISIONS}


@pytest.fixture(scope="module")
def measured(ranks: Callable[..., list[Any]]) -> dict[tuple[int, int, str], list[dict[str, Any]]]:
    """(world, stage, precision) -> what each rank held."""
    found = {}
    for world in WORLDS:
        by_rank = ranks(run_all, world)
        for key in by_rank[0]:
            found[(world, *key)] = [rank[key] for rank in by_rank]
    return found


def table(world: int, stage: int, precision: str, rank: int) -> dict[str, int]:
    """The column of a stage, multiplied out for one rank."""
    total = dict.fromkeys(ROLES, 0)
    for shapes, trainable, keeps_fp32 in LANES:
        layout = lay_out(shapes, world)
        full, part = layout.numel, layout.slice_numel
        mine = sum(segment.numel for segment in layout.segments(rank))
        everything = sum(math.prod(shape) for shape in shapes)
        narrow = precision == "bf16" and not keeps_fp32
        itemsize = 2 if narrow else 4
        total["compute"] += itemsize * (part if stage == 3 else full)
        # A master beside bf16 is the other half of its bits, frozen ones' too; beside fp32 it is compute itself.
        total["master"] += 2 * (full if stage == 0 else part) if narrow else 0
        if trainable:
            total["grad"] += itemsize * (full if stage < 2 else part)
            total["moments"] += 2 * 4 * (everything if stage == 0 else mine)
    return total


def prediction(world: int, stage: int, precision: str, prefetch: int = 1) -> Prediction:
    with torch.device("meta"):
        model = Model()
    return zeor.predict(
        model, world=world, stage=stage, precision=precision, optimizer="AdamW", units=[Block], prefetch=prefetch
    )


CASES = [(world, stage, precision) for world in WORLDS for stage in STAGES for precision in PRECISIONS]


@pytest.mark.parametrize("world, stage, precision", CASES)
def test_resident_bytes_are_those_of_the_table(measured: Any, world: int, stage: int, precision: str) -> None:
    for rank, found in enumerate(measured[world, stage, precision]):
        assert {role: found["held"][role] for role in ROLES} == table(world, stage, precision, rank)


@pytest.mark.parametrize("world, stage, precision", CASES)
def test_gradients_leave_nothing_but_the_buffer_that_stays(
    measured: Any, world: int, stage: int, precision: str
) -> None:
    expected = table(world, stage, precision, 0)["grad"] if stage < 2 else 0
    for found in measured[world, stage, precision]:
        assert found["after"]["grad"] == expected
        assert found["alive"] == 0


@pytest.mark.parametrize("world, stage, precision", CASES)
def test_the_planner_says_what_the_engine_holds(measured: Any, world: int, stage: int, precision: str) -> None:
    predicted, held = prediction(world, stage, precision), [r["held"] for r in measured[world, stage, precision]]
    for role in ("compute", "grad", "master", "padding"):
        assert [rank[role] for rank in held] == [getattr(predicted, role)] * world
    assert max(rank["moments"] for rank in held) == predicted.moments
    assert predicted.resident == max(sum(rank[role] for role in ROLES) for rank in held)


@pytest.mark.parametrize("world, stage, precision", CASES)
def test_transient_bytes_stay_within_the_formula(measured: Any, world: int, stage: int, precision: str) -> None:
    bound = prediction(world, stage, precision).transient
    for found in measured[world, stage, precision]:
        peak = found["held"]["transient_peak"]
        assert peak <= bound
        least = bound / 2 if stage == 3 else min(1, bound)
        assert peak >= least


def test_a_world_of_one_needs_only_what_an_update_needs(measured: Any) -> None:
    for stage in STAGES:
        assert measured[1, stage, "fp32"][0]["held"]["transient_peak"] == 0
        largest = lay_out(BLOCK_LANES[0][0], 1).numel  # its master, and its gradient as wide as that
        assert measured[1, stage, "bf16"][0]["held"]["transient_peak"] == 2 * 4 * largest


def run_summed(stage: int, quiet: bool, grads: str) -> dict[str, int]:
    """Before the step after three micro-batches: gradients held, on the device and in all on the host; and the most
    that no_sync has summed."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = zeor.Offload("device", "device", grads) if grads == "host" else None
    zeor.shard(model, optimizer, stage=stage, precision="bf16", units=[Block], offload=offload)
    for part in range(3):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(part))
        with zeor.no_sync(model) if quiet and part < 2 else nullcontext():
            model(x).float().square().mean().backward()
    engine = api._state(model).engine
    partial = engine.ledger.peaks.get("partial", 0)
    return {"grad": zeor.report(model)["grad"], "partial": partial, "host": engine.places.store.nbytes["host"]}


@pytest.mark.parametrize("world", [1, 2])
def test_sums_over_micro_batches_are_those_that_the_planner_counts(ranks: Callable[..., list[Any]], world: int) -> None:
    """4 bytes for each parameter inside no_sync, of slices outside; on the host where gradients rest there."""
    with torch.device("meta"):
        model = Model()
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    rounding = 512 * len(LANES)  # of torch's allocator, which the planner counts on the device
    for stage, quiet, grads in ((3, False, "device"), (3, True, "device"), (1, False, "device"), (3, False, "host")):
        offload = zeor.Offload("device", "device", grads) if grads == "host" else None
        known = zeor.predict(
            model, world=world, stage=stage, precision="bf16", units=[Block], offload=offload, accumulation=3,
            sums_each=not quiet,
        )  # fmt: skip
        for found in ranks(run_summed, world, stage, quiet, grads):
            if grads == "host":
                assert (found["grad"], found["host"]) == (0, known.host)
                assert known.host >= 0.99 * (2 + 4) * trained / world and known.accumulated < 4 * trained
                continue
            sums = found["partial"] if quiet else found["grad"] - (known.grad if stage == 1 else 0)
            assert 0 <= known.accumulated - sums <= rounding
            assert sums >= 0.99 * 4 * trained / (1 if quiet else world)


def formula(world: int, prefetch: int) -> int:
    """Invariant 4 at stage 3 in fp32: (1 + prefetch) compute, 2 gradients, a receive buffer, what the root keeps."""

    def nbytes(lanes: list, only_trainable: bool) -> int:
        return sum(4 * lay_out(shapes, world).numel for shapes, trains, _ in lanes if trains or not only_trainable)

    compute, grad = nbytes(BLOCK_LANES, False), nbytes(BLOCK_LANES, True)
    root = nbytes(ROOT_LANES, False) + nbytes(ROOT_LANES, True)
    return (1 + prefetch) * compute + 2 * grad + max(grad, nbytes(ROOT_LANES, True)) + root


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_each_unit_of_prefetch_costs_one_unit(ranks: Callable[..., list[Any]], prefetch: int) -> None:
    assert prediction(2, 3, "fp32", prefetch).transient == formula(2, prefetch)
    for found in ranks(run_one, 2, 3, "fp32", prefetch):
        peak = found["held"]["transient_peak"]
        assert formula(2, prefetch) / 2 <= peak <= formula(2, prefetch)


class WithMemory(Block):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x) + memory


class Decoder(Model):
    """Every block reads one tensor that needs a gradient, as a decoder reads its encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WithMemory() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        memory = self.embed(x)
        y = torch.relu(memory)
        for block in self.blocks:
            y = block(y, memory=memory)
        return self.stats(y) * self.scale


def test_an_input_shared_by_all_units_does_not_keep_them_all(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(run_one, 2, 3, "fp32", 1, build=Decoder):
        assert found["held"]["transient_peak"] <= formula(2, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_each_stage_needs_no_more_than_the_one_before(measured: Any, world: int, precision: str) -> None:
    for rank in range(world):
        held = [measured[world, stage, precision][rank]["held"] for stage in STAGES]
        peaks = [sum(found[role] for role in ROLES) + found["transient_peak"] for found in held]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[3] < peaks[0] or world == 1
    predicted = [prediction(world, stage, precision) for stage in STAGES]
    totals = [p.resident + p.transient for p in predicted]
    assert totals == sorted(totals, reverse=True)
