"""The choice of a wire by arithmetic alone: candidates, what each puts on links and codecs, and which is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Size

from zeor.comm.links import Link, Links
from zeor.features.wire_choice import HIDDEN, WORTH, Foreseen, Load, Seen, candidates, chosen, describe, foresee
from zeor.memory.codecs import Codec
from zeor.memory.coding_speed import Speed
from zeor.memory.roles import Sizes
from zeor.plan import Plan, Wire
from zeor.spec.keys import LaneKey
from zeor.spec.lane_spec import LaneSpec, lane_spec

NUMEL = 4 * 128 * 100
FAST = Speed(1e15, 1e15)


def plan_of(stage: int, across: int | None = None) -> Plan:
    return Plan(stage=stage, across=across, wire=Wire(auto=True))


def spec_of(plan: Plan, sizes: Sizes, compute: torch.dtype = torch.float32) -> LaneSpec:
    return lane_spec(LaneKey(compute, compute, torch.float32, True), [Size([NUMEL])], plan, sizes)


def seen_of(spec: LaneSpec, seconds: float, waited: float) -> Seen:
    return Seen(seconds, waited, {key: float(count) for key, count in Load.of([spec]).nbytes.items()})


def named(wires: list[Wire]) -> list[str]:
    return [describe(wire) for wire in wires]


def test_candidates_of_one_axis_send_differences_where_ranks_hold_weights():
    for stage, last in ((1, "int4"), (2, "int4"), (3, "int8/int4")):
        assert named(candidates(plan_of(stage), Sizes(4, 1))) == ["exact", "bf16", "int8", last]
    lossy = candidates(plan_of(2), Sizes(4, 1))[-1]
    assert lossy.rotate and lossy.auto and lossy.across is None


def test_candidates_keep_what_they_round_off_where_that_was_asked_for():
    plan = replace(plan_of(2), wire=Wire(auto=True, feedback=True, reduce="int8"))
    assert [wire.feedback for wire in candidates(plan, Sizes(4, 1))] == [False, True, True, True]
    assert not any(wire.feedback for wire in candidates(plan_of(2), Sizes(4, 1)))


def test_of_two_axes_all_that_leave_the_inner_one_exact_come_first():
    found = candidates(plan_of(3, 1), Sizes(2, 2))
    assert named(found)[:4] == [
        "exact", "exact inside, bf16 across", "exact inside, int8 across", "exact inside, int4 across",
    ]  # fmt: skip
    assert named(found)[4:] == [
        "bf16", "bf16 inside, int8 across", "bf16 inside, int4 across", "int8", "int8 inside, int4 across",
        "int8/int4 inside, int4 across",
    ]  # fmt: skip
    assert "int4" not in {wire.gather for wire in candidates(plan_of(2), Sizes(2, 2))}  # weights go along both axes
    assert named(candidates(plan_of(2), Sizes(1, 2))) == ["exact", "bf16", "int8", "int4"]


def foreseen(spec: LaneSpec, plan: Plan, seen: Seen, rate: float, speed: Speed = FAST) -> list[Foreseen]:
    return foresee(candidates(plan, spec.sizes), [spec], seen, Links((Link(rate),)), lambda codec: speed)


def test_bytes_and_elements_are_counted_leg_by_leg():
    plan, sizes = plan_of(2), Sizes(4, 1)
    spec = spec_of(plan, sizes)
    exact = Load.of([spec])
    assert exact.nbytes == {(0, "reduce"): NUMEL * 3, (0, "gather"): NUMEL * 3} and not exact.encoded
    wired = replace(plan, wire=Wire("int8", "int4", auto=True))
    load, blocks = Load.of([spec_of(wired, sizes)]), NUMEL // 128
    assert load.nbytes == {(0, "reduce"): blocks * 66 * 3 // 4, (0, "gather"): blocks * 130 * 3 // 4}
    weights, grads = ((0, "gather"), Codec("int8")), ((0, "reduce"), Codec("int4"))
    assert load.encoded == {weights: NUMEL // 4, grads: NUMEL * 3 // 4}
    assert load.decoded == {weights: NUMEL, grads: NUMEL * 3 // 4}


def test_what_is_saved_on_the_link_is_taken_off_what_was_waited_for():
    """A link that carries the exact bytes in 10 s; 2 s of that were hidden."""
    plan = plan_of(2)
    spec = spec_of(plan, Sizes(4, 1))
    rate = 2 * 3 * NUMEL / 10.0
    exact, half, bytes_, nibbles = foreseen(spec, plan, seen_of(spec, 11.0, 8.0), rate)
    assert (exact.seconds, exact.waited, exact.coding) == pytest.approx((11.0, 8.0, 0.0))
    assert half.waited == pytest.approx(8.0 - 5.0) and half.seconds == pytest.approx(3.0 + 3.0)
    assert bytes_.waited == pytest.approx(10 * 130 / 512 - 2.0)
    assert nibbles.waited == 0.0 and nibbles.seconds == pytest.approx(3.0, abs=1e-6)


def test_a_link_that_is_slower_inside_a_step_than_alone_counts_by_so_much_more():
    plan = plan_of(3)
    spec = spec_of(plan, Sizes(4, 1))
    rate = 6 * NUMEL / 4.0  # alone it would take 4 s, and 8 were waited for
    found = foreseen(spec, plan, seen_of(spec, 10.0, 8.0), rate)
    assert [each.waited for each in found] == pytest.approx([8.0, 4.0, 8 * 130 / 512, 8 * 98 / 512])


def test_a_gather_that_came_twice_in_a_step_counts_twice():
    plan = plan_of(3)
    spec = spec_of(plan, Sizes(4, 1))
    once = seen_of(spec, 10.0, 9.0)
    twice = Seen(10.0, 9.0, {**once.sent, (0, "gather"): 2 * once.sent[0, "gather"]})
    rate = 9 * NUMEL / 9.0
    speed = Speed(NUMEL / 1.0, NUMEL / 2.0)
    bytes_ = foreseen(spec, plan, twice, rate, speed)[2]
    assert bytes_.waited == pytest.approx(9 * 130 / 512)
    assert bytes_.coding == pytest.approx(2 * (0.25 + 2.0) + 0.75 * (1.0 + 2.0))


def test_bf16_saves_nothing_where_all_is_16_bits_wide():
    plan = plan_of(2)
    spec = spec_of(plan, Sizes(2, 1), torch.bfloat16)
    exact, half, *_ = foreseen(spec, plan, seen_of(spec, 2.0, 1.0), 1e6)
    assert (half.seconds, half.waited) == (exact.seconds, exact.waited)


def test_across_all_ranks_of_a_host_share_its_link():
    plan, sizes = plan_of(3, 1), Sizes(2, 2)
    spec = spec_of(plan, sizes)
    sent = Load.of([spec]).nbytes
    across = sum(count for (axis, _), count in sent.items() if axis == 1)
    links = Links((Link(1e12), Link(2 * across / 5.0)), ("gpu", "node"), (2, 2))  # 5 s, as both ranks send at once
    seen = seen_of(spec, 6.0, 5.0)
    found = foresee(candidates(plan, sizes), [spec], seen, links, lambda codec: FAST)
    by_name = {describe(each.wire): each for each in found}
    assert by_name["exact inside, bf16 across"].waited == pytest.approx(2.5, abs=0.01)
    assert describe(chosen(found).wire) == "exact inside, int4 across"
    assert by_name["int8"].waited == pytest.approx(by_name["exact inside, int8 across"].waited, abs=0.01)


def case(seconds: float, waited: float) -> Foreseen:
    return Foreseen(Wire(), seconds, waited, 0.0)


@pytest.mark.parametrize(
    "steps, at",
    [
        ([(10, 0.4), (5, 0)], 0),  # it hides already
        ([(10, 5), (6, 0.2), (5, 0)], 1),  # the first that hides
        ([(10, 5), (9.8, 4.8), (6, 0.1)], 2),  # one that gains nothing is passed over
        ([(10, 5), (8, 3), (6.5, 1.5), (6.3, 1.3)], 2),  # none hides; the last is worth less than it costs
        ([(10, 5), (12, 0), (11, 0)], 0),  # encoding takes longer than the link
    ],
)
def test_which_is_taken(steps: Any, at: int):
    found = [case(*step) for step in steps]
    assert chosen(found) is found[at]


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0, 1)), min_size=1, max_size=10))
@settings(max_examples=100, deadline=None)
def test_what_is_taken_is_never_slower_and_nothing_before_it_hides(steps: Any):
    found = [case(seconds, seconds * share) for seconds, share in steps]
    best = chosen(found)
    assert best.seconds <= found[0].seconds
    if best is not found[0]:
        before = found[: next(at for at, each in enumerate(found) if each is best)]
        assert best.seconds <= (1 - WORTH) * found[0].seconds
        assert not before[0].hides and HIDDEN < 1
        taken = [each for each in before if each.seconds < best.seconds]
        assert not taken, "a less lossy one was faster"
