"""Bytes and collectives per step equal the theory, as the comm layer counts them.

A rank of W sends (W-1)/W of a lane for each gather and each reduce of it, so a step costs 2 models at stages 0
to 2, and 3 at stage 3 less what stays between forward and backward: the root's second gather and the last unit's.
What ranks agree on besides is one small exchange per pass that gathers or reduces. Counted as the difference
between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from zeor import api
from zeor.layout import lay_out

WORLDS, STAGES = (2, 3, 4), (0, 1, 2, 3)


class Block(nn.Module):
    """One trainable and one frozen lane: a frozen one is gathered at stage 3 and never reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * self.frozen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


BLOCK, FROZEN = [(16, 16), (16,)], [(16,)]
ROOT = [(), (16, 8), (16,)]
COUNT = 3  # blocks


class Cost(NamedTuple):
    """What one rank sends, by verb."""

    gathers: int
    gather_nbytes: int
    reduces: int
    reduce_nbytes: int
    agrees: int


def sent(lanes: Iterable[list], world: int) -> int:
    """Bytes one rank sends for one gather, or one reduce, of each of these lanes in fp32."""
    return sum(4 * lay_out(shapes, world).numel * (world - 1) // world for shapes in lanes)


def theory(world: int, stage: int, forwards: int = 1, backwards: int = 1, reducing: int = 1) -> Cost:
    """One step of `forwards` forward and `backwards` backward passes, of which `reducing` are outside no_sync. As
    something is frozen, each forward that has a backward begins with an agreement on what trains."""
    trained = [ROOT, *[BLOCK] * COUNT]
    everything, again = [*trained, *[FROZEN] * COUNT], [*[BLOCK, FROZEN] * (COUNT - 1)]
    if stage == 3:
        gathers = len(everything) * forwards + len(again) * backwards
        gather_nbytes = sent(everything, world) * forwards + sent(again, world) * backwards
        agrees = forwards + backwards + backwards  # a pass of gathers ends when nobody needs another
    else:
        times = reducing if stage == 0 else 1  # stage 0 gathers each sum, 1 and 2 publish each update
        gathers, gather_nbytes = len(trained) * times, sent(trained, world) * times
        agrees = reducing + backwards
    return Cost(gathers, gather_nbytes, len(trained) * reducing, sent(trained, world) * reducing, agrees)


class Trained:
    def __init__(self, stage: int, build: Callable[[], nn.Module] = Model, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        zeor.shard(self.model, self.optimizer, stage=stage, **options)
        self.number = 0

    def loss(self) -> Tensor:
        self.number += 1
        seed = 10 * self.number + dist.get_rank()
        return self.model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean()

    def step(self, micro: int = 1, quiet: bool = False, clip: bool = False) -> None:
        for number in range(micro):
            with zeor.no_sync(self.model) if quiet and number < micro - 1 else nullcontext():
                self.loss().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()

    def cost(self, act: Callable[[], None]) -> Cost:
        """What `act` costs once everything is learned."""
        act()
        act()
        before = zeor.traffic(self.model)
        act()
        api._state(self.model).engine.drain()
        after = zeor.traffic(self.model)

        def more(what: str, verb: str) -> int:
            return after[what].get(verb, 0) - before[what].get(verb, 0)

        found = Cost(
            more("calls", "gather"), more("bytes_by_verb", "gather"),
            more("calls", "reduce"), more("bytes_by_verb", "reduce"), more("calls", "agree"),
        )  # fmt: skip
        assert after["collectives"] - before["collectives"] == found.gathers + found.reduces + found.agrees
        small = more("bytes_by_verb", "agree")
        assert after["bytes_sent"] - before["bytes_sent"] == found.gather_nbytes + found.reduce_nbytes + small
        assert small < 1000
        return found


def step_and_evaluate(trained: Trained) -> None:
    trained.step()
    trained.evaluate()


def costs_of_a_stage(stage: int) -> dict[str, Cost]:
    trained = Trained(stage, units=[Block], paths="dynamic")
    found = {
        "plain": trained.cost(trained.step),
        "accumulated": trained.cost(lambda: trained.step(micro=3)),
        "no_sync": trained.cost(lambda: trained.step(micro=3, quiet=True)),
        "clipped": trained.cost(lambda: trained.step(clip=True)),
        "evaluated": trained.cost(trained.evaluate),
        "both": trained.cost(lambda: step_and_evaluate(trained)),
    }
    for name, options in {"serial": {"overlap": False}, "late": {"prefetch": 0}, "early": {"prefetch": 3}}.items():
        other = Trained(stage, units=[Block], **options)
        found[name] = other.cost(other.step)
    settled = Trained(stage, units=[Block], paths="static")
    found["settled"] = settled.cost(settled.step)
    found["settled, no_sync"] = settled.cost(lambda: settled.step(micro=3, quiet=True))
    return found


def costs_of_all() -> dict[int, dict[str, Cost]]:
    return {stage: costs_of_a_stage(stage) for stage in STAGES}


@pytest.fixture(scope="module")
def costs(ranks: Callable[..., list[Any]]) -> dict[tuple[int, int], list[dict[str, Cost]]]:
    """(world, stage) -> by rank, by kind of step."""
    found = {}
    for world in WORLDS:
        by_rank = ranks(costs_of_all, world)
        for stage in STAGES:
            found[world, stage] = [rank[stage] for rank in by_rank]
    return found


CASES = [(world, stage) for world in WORLDS for stage in STAGES]


@pytest.mark.parametrize("world, stage", CASES)
def test_a_step_sends_what_the_theory_says(costs: Any, world: int, stage: int) -> None:
    for rank in costs[world, stage]:
        assert rank["plain"] == theory(world, stage)


@pytest.mark.parametrize("world", WORLDS)
def test_the_theory_is_two_models_or_three_less_what_stays(world: int) -> None:
    """The whole of the theory in one number, for lanes without padding and nothing frozen: 2x, and 3x less two."""
    trained = sent([ROOT, *[BLOCK] * COUNT], world)
    for stage in (0, 1, 2):
        cost = theory(world, stage)
        assert cost.gather_nbytes + cost.reduce_nbytes == 2 * trained
    cost = theory(world, 3)
    frozen = sent([FROZEN] * (2 * COUNT - 1), world)
    assert cost.gather_nbytes + cost.reduce_nbytes - frozen == 3 * trained - sent([ROOT, BLOCK], world)


@pytest.mark.parametrize("kind", ["serial", "late", "early"])
@pytest.mark.parametrize("world, stage", CASES)
def test_neither_overlap_nor_prefetch_changes_what_is_sent(costs: Any, world: int, stage: int, kind: str) -> None:
    for rank in costs[world, stage]:
        assert rank[kind] == rank["plain"]


@pytest.mark.parametrize("world, stage", CASES)
def test_accumulation_reduces_each_backward(costs: Any, world: int, stage: int) -> None:
    for rank in costs[world, stage]:
        assert rank["accumulated"] == theory(world, stage, forwards=3, backwards=3, reducing=3)


@pytest.mark.parametrize("world, stage", CASES)
def test_no_sync_reduces_once(costs: Any, world: int, stage: int) -> None:
    for rank in costs[world, stage]:
        assert rank["no_sync"] == theory(world, stage, forwards=3, backwards=3, reducing=1)


@pytest.mark.parametrize("world, stage", CASES)
def test_settled_ranks_agree_once_per_backward_that_reduces(costs: Any, world: int, stage: int) -> None:
    for rank in costs[world, stage]:
        assert rank["settled"] == theory(world, stage)._replace(agrees=1)
        assert rank["settled, no_sync"] == theory(world, stage, forwards=3, backwards=3)._replace(agrees=1)


@pytest.mark.parametrize("world, stage", CASES)
def test_clipping_costs_one_exchange(costs: Any, world: int, stage: int) -> None:
    for rank in costs[world, stage]:
        expected = theory(world, stage)
        assert rank["clipped"] == expected._replace(agrees=expected.agrees + 1)


@pytest.mark.parametrize("world, stage", CASES)
def test_evaluation_gathers_once_where_parameters_are_sliced(costs: Any, world: int, stage: int) -> None:
    nothing = Cost(0, 0, 0, 0, 0)
    expected = theory(world, stage, backwards=0, reducing=0) if stage == 3 else nothing
    step = theory(world, stage)
    for rank in costs[world, stage]:
        assert rank["evaluated"] == expected
        assert rank["both"] == Cost(*(a + b for a, b in zip(step, expected)))


def sequential() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_a_root_without_parameters_whose_output_is_its_last_unit_s(ranks: Callable, prefetch: int) -> None:
    def count() -> Cost:
        trained = Trained(3, sequential, prefetch=prefetch)
        return trained.cost(trained.step)

    lane = [[(8, 8), (8,)]]
    for cost in ranks(count, 2):
        assert cost == Cost(4 + 3, 7 * sent(lane, 2), 4, 4 * sent(lane, 2), 2)


def test_a_world_of_one_sends_nothing(ranks: Callable) -> None:
    def count() -> list[Cost]:
        return [trained.cost(trained.step) for trained in (Trained(stage, units=[Block]) for stage in STAGES)]

    assert ranks(count, 1) == [[Cost(0, 0, 0, 0, 0)] * 4]
