"""Steps played on clocks, worked out by hand: what hides and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeor.plan import Plan
from zeor.planner.network import Cost
from zeor.planner.timeline import Durations, Played, play
from zeor.step.schedule import LaneTraits, Schedule, Traits

UNITS = 3  # and the root, which holds nothing here
FREES, STAYS = LaneTraits(True, True, False), LaneTraits(False, True, True)


def schedule(lane: LaneTraits, **options: int) -> Schedule:
    units = (Traits("root", ()), *(Traits(str(n), (lane,)) for n in range(UNITS)))
    order = tuple(range(UNITS + 1))
    return Schedule(units, order, (*order[:0:-1], 0), Plan(**options))


def durations(forward: float, backward: float, update: float = 0.0, **moves: float | list[Cost]) -> Durations:
    found = {}
    for verb, cost in moves.items():
        for unit in range(1, UNITS + 1):
            found[verb, unit, 0] = cost if isinstance(cost, list) else [Cost("net", 0.0, cost)]
    places = [(unit, 0) for unit in range(1, UNITS + 1)]
    per_unit = [0.0] + [1.0] * UNITS
    return Durations(
        [forward * each for each in per_unit], [backward * each for each in per_unit], found,
        dict.fromkeys(places, update),
    )  # fmt: skip


def exposed(played: Played) -> dict[str, float]:
    return {verb: seconds for (verb, _), seconds in played.exposed.items() if seconds}


def test_without_messages_a_step_is_what_it_computes() -> None:
    played = play(schedule(FREES), durations(1.0, 2.0, 0.5))
    assert (played.seconds, played.forward, played.backward, played.update) == (10.5, 3.0, 6.0, 1.5)
    assert exposed(played) == {}


def test_gathers_one_unit_ahead_hide_behind_the_unit_before() -> None:
    """The first of forward hides behind nothing. The last unit stays for backward, whose first gather hides."""
    played = play(schedule(FREES), durations(1.0, 2.0, gather=0.75))
    assert exposed(played) == {"gather": 0.75}
    assert played.seconds == 9.75
    assert played.busy["gather", "net"] == 5 * 0.75  # three in forward, two in backward


def test_gathers_that_take_longer_than_a_unit_are_exposed_by_the_rest() -> None:
    """Forward: 1.5, then 0.5 for each of two. Backward (2 a unit) hides all."""
    played = play(schedule(FREES), durations(1.0, 2.0, gather=1.5))
    assert exposed(played) == {"gather": 2.5}
    assert played.seconds == 9 + 2.5


def test_a_link_carries_one_collective_at_a_time() -> None:
    """Backward: the second unit's gather comes before the first one's reduce, and the third's after it: 3 seconds of
    messages for each unit of 2. The last reduce hides behind nothing."""
    played = play(schedule(FREES), durations(0.0, 2.0, gather=1.5, reduce=1.5))
    assert played.seconds == pytest.approx(sum(exposed(played).values()) + 6.0)
    assert played.busy["gather", "net"] + played.busy["reduce", "net"] == pytest.approx(8 * 1.5)
    assert played.seconds >= 8 * 1.5 - 2.0  # the link never rests but before the first reduce


def test_publishes_hide_behind_the_next_forward() -> None:
    """A unit waits for its own alone: the first for one of 0.5, the others' come while it computes."""
    played = play(schedule(STAYS), durations(1.0, 2.0, publish=0.5))
    assert exposed(played) == {"publish": 0.5}
    assert played.seconds == 9.5


def test_without_overlap_nothing_hides() -> None:
    played = play(schedule(FREES, overlap=False), durations(1.0, 2.0, gather=0.5, reduce=0.25))
    assert exposed(played) == {"gather": 5 * 0.5, "reduce": 3 * 0.25}


def test_only_the_last_micro_batch_reduces_unless_each_does() -> None:
    once = replace(durations(1.0, 2.0, reduce=0.5), micro_batches=4)
    each = replace(once, sums_each=True)
    assert play(schedule(STAYS), once).busy["reduce", "net"] == 3 * 0.5
    assert play(schedule(STAYS), each).busy["reduce", "net"] == 4 * 3 * 0.5
    assert play(schedule(STAYS), once).seconds == 4 * 9.0 + 0.5  # the last reduce is exposed


def test_the_hop_across_has_a_unit_more_to_hide_behind() -> None:
    """1 second inside and 3 across, beside units of 2: in one ring 4 seconds would have 2 to hide behind. As two hops
    the link across is busy for 9 seconds, from 3 seconds after backward began (the first unit, and its hop inside)."""
    hops = [Cost("gpu", 0.0, 1.0), Cost("node", 0.0, 3.0)]
    played = play(schedule(STAYS), durations(0.0, 2.0, reduce=hops))
    assert played.seconds == 3.0 + 9.0
    assert played.busy["reduce", "gpu"] == 3.0 and played.busy["reduce", "node"] == 9.0


def test_where_the_cores_that_compute_carry_messages_nothing_hides() -> None:
    played = play(schedule(FREES), replace(durations(1.0, 2.0, gather=0.5), hides=False))
    assert exposed(played) == {"gather": 2.5} and played.seconds == 11.5


def test_agreements_cost_time_only_where_somebody_waits_for_them() -> None:
    quick = replace(durations(1.0, 2.0), agreement=0.25)
    assert play(schedule(FREES), quick).seconds == 9.0
    assert play(schedule(FREES), replace(quick, agreement_waits=True)).seconds == 9.5


def test_the_norm_and_its_exchange_come_before_updates() -> None:
    played = play(schedule(FREES), replace(durations(1.0, 2.0), norm=0.5, exchange=0.25))
    assert played.seconds == 9.75 and exposed(played) == {"norm": 0.25}


def test_what_is_encoded_and_decoded_is_computed() -> None:
    """Each reduce is encoded before it travels and decoded when it is waited for, where nothing can hide it."""
    moves = durations(1.0, 2.0, reduce=0.5)
    coding = {("reduce", unit, 0): (0.25, 0.125) for unit in range(1, UNITS + 1)}
    plain, coded = play(schedule(FREES), moves), play(schedule(FREES), replace(moves, coding=coding))
    assert coded.coding == 3 * 0.375 and plain.coding == 0.0
    assert coded.seconds == plain.seconds + coded.coding
