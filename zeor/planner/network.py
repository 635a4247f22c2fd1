"""What collectives cost on a network of axes: pure formulas of sizes, bytes, bandwidth and latency.

An axis is (name, members, link), the innermost first: with two, ranks inside a host and hosts. Large collectives are
rings, as NCCL makes them: each member passes on what it has got, so a gather of n bytes over W members sends
n (W - 1) / W and takes W - 1 hops. Small agreements go in ceil(log2 N) rounds (comm/small.py).

Note [Two axes]
~~~~~~~~~~~~~~~
    flat      ranks stand on one axis over several hosts: one ring over all of them. Every host must hear all that it
              has not, over its one link; inside, every rank passes all of it on. The slower of the two decides, and
              hops add up along the ring.
    by axis   ranks stand on two: each leg is a ring of its own (comm/along.py). Across, all ranks of a host send at
              once and share its link, so a leg there is counted for the whole host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zeor.planner.machine import Along
from zeor.spec.lane_spec import LaneSpec
from zeor.spec.travel import Leg, legs_of


class Cost(NamedTuple):
    """Of one collective along one axis: bytes that a member (a rank; across, all ranks of a host) sends, seconds."""

    axis: str
    nbytes: float
    seconds: float


def ring(nbytes: float, along: Along) -> Cost:
    """A gather of so many bytes in all, or a reduce of as many on each member: n (W - 1) / W sent, W - 1 hops."""
    name, size, link = along
    if size <= 1 or nbytes <= 0:
        return Cost(name, 0.0, 0.0)
    sent = nbytes * (size - 1) / size
    return Cost(name, sent, sent / link.bandwidth + (size - 1) * link.latency)


def flat(nbytes: float, axes: Sequence[Along]) -> list[Cost]:
    """One collective over all ranks: see Note [Two axes]. The seconds stand with the axis that decides."""
    if len(axes) == 1:
        return [ring(nbytes, axes[0])]
    (inner, ranks, near), (outer, hosts, far) = axes
    world = ranks * hosts
    if world <= 1 or nbytes <= 0:
        return [Cost(inner, 0.0, 0.0), Cost(outer, 0.0, 0.0)]
    hops = (world - hosts) * near.latency + (hosts - 1) * far.latency
    inside, across = nbytes * (world - 1) / world, nbytes * (hosts - 1) / hosts
    times = inside / near.bandwidth, across / far.bandwidth
    slow = times[1] >= times[0]
    return [
        Cost(inner, inside, 0.0 if slow else times[0] + hops),
        Cost(outer, across, times[1] + hops if slow else 0.0),
    ]


def agreement(axes: Sequence[Along]) -> float:
    """Seconds until every rank knows the largest of small numbers: ceil(log2 N) messages in a row on the slowest."""
    world = math.prod(size for _, size, _ in axes)
    return math.ceil(math.log2(world)) * max(link.small for _, _, link in axes) if world > 1 else 0.0


def small_gather(axes: Sequence[Along], native: bool) -> float:
    """Seconds of a gather of a few numbers: a ring of small messages where the backend does it, else log N rounds."""
    if not native:
        return agreement(axes)
    outer = axes[-1][1] if len(axes) > 1 else 1
    world = math.prod(size for _, size, _ in axes)
    return (world - outer) * axes[0][2].small + ((outer - 1) * axes[-1][2].small if len(axes) > 1 else 0.0)


class Moves(NamedTuple):
    """What a lane moves in a step, by verb, leg by leg."""

    gather: list[Cost]  # before each use
    reduce: list[Cost]  # of its gradients
    spread: list[Cost]  # of the sum, to ranks that keep more of it than a reduce leaves
    publish: list[Cost]  # of what the update left


def moves_of(spec: LaneSpec, axes: Sequence[Along]) -> Moves:
    """`axes`: as many as its ranks stand on; or two for ranks on one axis over several hosts. See Note [Two axes]."""

    if spec.key.experts:
        axes = [(name, size, link) for (name, _, link), size in zip(axes, spec.sizes)]

    def costs(legs: Sequence[Leg]) -> list[Cost]:
        found = []
        for leg in legs:
            if spec.sizes.across == 1:
                found += flat(leg.nbytes, axes)
            else:
                found.append(ring(leg.nbytes * (spec.sizes.inside if leg.axis else 1), axes[leg.axis]))
        return found

    return Moves(*map(costs, legs_of(spec)))
