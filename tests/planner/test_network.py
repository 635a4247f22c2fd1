"""What collectives cost, worked out by hand: bytes by axis, bandwidth and hops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zeor.comm.links import Link
from zeor.memory.roles import Sizes
from zeor.plan import Plan
from zeor.planner import network
from zeor.planner.machine import MACHINES, Machine
from zeor.planner.network import Cost, flat, moves_of, ring
from zeor.spec.keys import LaneKey
from zeor.spec.lane_spec import LaneSpec, lane_spec

NEAR, FAR = Link(100.0, 0.5, 0.25), Link(10.0, 2.0, 1.0)
GPUS, NODES = ("gpu", 4, NEAR), ("node", 2, FAR)
BF16 = LaneKey(torch.bfloat16, torch.bfloat16, torch.float32, trainable=True, stays_whole=False)
N = 2 * 800  # bytes of a lane of 800 elements
BOTH = Sizes(4, 2)


def lane(inside: int, across: int | None = None, sizes: Sizes = BOTH, key: LaneKey = BF16) -> LaneSpec:
    plan = Plan(stage=inside, across=across)
    return lane_spec(key, [torch.Size([800])], plan, sizes)


def test_a_ring_sends_all_but_its_own_part_in_one_hop_less_than_it_has_members() -> None:
    assert ring(1600.0, GPUS) == Cost("gpu", 1200.0, 1200 / 100 + 3 * 0.5)
    assert ring(1600.0, ("gpu", 1, NEAR)) == Cost("gpu", 0.0, 0.0)
    assert ring(0.0, GPUS) == Cost("gpu", 0.0, 0.0)


def test_one_ring_over_hosts_goes_as_fast_as_the_slower_of_its_links() -> None:
    """Eight ranks: 6 hops inside hosts and 1 across; a host hears half over a link of 10 bytes a second."""
    assert flat(1600.0, [GPUS, NODES]) == [Cost("gpu", 1400.0, 0.0), Cost("node", 800.0, 80.0 + 6 * 0.5 + 1 * 2.0)]
    fast = ("node", 2, Link(1000.0, 2.0))
    assert flat(1600.0, [GPUS, fast]) == [Cost("gpu", 1400.0, 14.0 + 5.0), Cost("node", 800.0, 0.0)]
    assert flat(1600.0, [GPUS]) == [ring(1600.0, GPUS)]


def test_an_agreement_takes_log_n_messages_of_the_slowest_link() -> None:
    assert network.agreement([GPUS, NODES]) == 3 * 1.0
    assert network.agreement([("gpu", 5, NEAR)]) == 3 * 0.25
    assert network.agreement([("gpu", 1, NEAR)]) == 0.0
    assert network.small_gather([GPUS, NODES], native=True) == 6 * 0.25 + 1 * 1.0
    assert network.small_gather([GPUS, NODES], native=False) == 3.0


INSIDE, ACROSS = ring(N, GPUS), ring(N, NODES)  # across: what all four ranks of a host send together


@pytest.mark.parametrize(
    "stages, gather, reduce, spread, publish",
    [
        ((0, 0), [], [INSIDE, ACROSS], [ACROSS, INSIDE], []),
        ((1, 0), [], [INSIDE, ACROSS], [ACROSS], [INSIDE]),
        ((1, 1), [], [INSIDE, ACROSS], [], [ACROSS, INSIDE]),
        ((2, 1), [], [INSIDE, ACROSS], [], [ACROSS, INSIDE]),
        ((3, 0), [INSIDE], [INSIDE, ACROSS], [ACROSS], []),
        ((3, 1), [INSIDE], [INSIDE, ACROSS], [], [ACROSS]),
        ((3, 3), [ACROSS, INSIDE], [INSIDE, ACROSS], [], []),
    ],
)
def test_legs_by_axis_are_what_the_stages_ask_for(
    stages: tuple[int, int], gather: list[Cost], reduce: list[Cost], spread: list[Cost], publish: list[Cost]
) -> None:
    assert moves_of(lane(*stages), [GPUS, NODES]) == (gather, reduce, spread, publish)


def test_updates_cut_across_alone_are_laid_out_so_and_send_as_much() -> None:
    """Inside 0, across 1: a node's ranks update the same, so what is published inside is nothing."""
    found = moves_of(lane(0, 1), [GPUS, NODES])
    assert found.publish == [ring(4.0 * N, NODES)]  # each of the four ranks fetches the other half for itself
    assert sum(cost.nbytes for cost in found.reduce) == INSIDE.nbytes + ACROSS.nbytes


def test_ranks_on_one_axis_over_two_hosts_make_one_ring() -> None:
    both = flat(N, [GPUS, NODES])
    assert moves_of(lane(3, sizes=Sizes(8)), [GPUS, NODES]) == (both, both, [], [])
    assert moves_of(lane(2, sizes=Sizes(8)), [GPUS, NODES]) == ([], both, [], both)
    assert moves_of(lane(0, sizes=Sizes(8)), [GPUS, NODES]) == ([], both, both, [])


def test_what_is_frozen_or_stays_whole_moves_less() -> None:
    frozen = LaneKey(torch.bfloat16, torch.bfloat16, None, trainable=False, stays_whole=False)
    assert moves_of(lane(3, 1, key=frozen), [GPUS, NODES]) == ([INSIDE], [], [], [])
    small = replace(BF16, stays_whole=True)
    assert moves_of(lane(3, 1, key=small), [GPUS, NODES]) == ([], [INSIDE, ACROSS], [], [ACROSS, INSIDE])


def test_a_stage_inside_a_node_sends_two_thirds_across_of_what_plain_stage_3_does() -> None:
    """Plain: two gathers and a reduce cross. {3, 1}: gradients once, and new values once."""

    def across(spec: LaneSpec) -> float:
        gather, reduce, spread, publish = moves_of(spec, [GPUS, NODES])
        return sum(cost.nbytes for cost in (*gather, *gather, *reduce, *spread, *publish) if cost.axis == "node")

    assert across(lane(3, sizes=Sizes(8))) == across(lane(3, 3)) == 3 * N / 2
    assert across(lane(3, 1)) == across(lane(3, 0)) == 2 * N / 2


def test_links_of_a_machine_by_how_its_ranks_stand() -> None:
    h100 = MACHINES["H100"]
    assert h100.links(Sizes(8)) == (("ranks", 8, h100.inside),)
    assert h100.links(Sizes(32)) == (("gpu", 8, h100.inside), ("node", 4, h100.across))
    assert h100.links(Sizes(8, 4), ("host", "card")) == (("card", 8, h100.inside), ("host", 4, h100.across))
    slow = Link.parse("10Gbit/s")
    assert h100.links(Sizes(32), link="10Gbit/s")[1] == ("node", 4, slow)
    assert h100.links(Sizes(8), link="10Gbit/s") == (("ranks", 8, slow),)
    both = h100.links(Sizes(8, 4), ("node", "gpu"), {"gpu": "10Gbit/s", "node": 7.0})
    assert both == (("gpu", 8, slow), ("node", 4, Link(7.0)))
    inside = h100.links(Sizes(2, 2), ("node", "gpu"))[1][2]  # two axes of one host
    assert (inside.bandwidth, inside.latency) == (2 * h100.inside.bandwidth, h100.inside.latency)


def test_machines_have_names_sizes_and_refuse_others() -> None:
    assert Machine.parse("h200") is MACHINES["H200"]
    assert Machine.parse("80GiB").memory == 80 << 30 and Machine.parse("80GiB").name in ("H100", "A100")
    with pytest.raises(ValueError, match=r"gpu='H300' is not known \(did you mean 'H200'\?\); use one of"):
        Machine.parse("H300")
