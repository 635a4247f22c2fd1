"""How much each call keeps: the decision of recompute="auto", in integers alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zeor.features.levels import Interval, Kept, Level, Need, choose, expected_nbytes


def whole(*nbytes):
    """Calls that keep all or nothing."""
    return [Need(each, each) for each in nbytes]


def chain(needs, rest):
    """What one backward over calls in a row measures where `rest` bytes are in use beside."""
    total = len(needs)
    peaks = [Interval(rest, frozenset(range(total)))]
    for call in reversed(range(total)):
        peaks.append(Interval(rest + needs[call].whole, frozenset(range(call))))
    return peaks


def test_what_is_kept_is_what_is_left_of_the_memory():
    needs = whole(10, 10, 10, 10)
    # The last to be computed again is measured with its own bytes: those of a kept one are the same.
    found = [choose(needs, chain(needs, 5), limit).products for limit in (0, 14, 15, 25, 34, 35, 44, 45, 100)]
    assert found == [0, 0, 1, 2, 2, 3, 3, 4, 4]


def test_gradients_take_the_place_of_the_last_calls_activations():
    """At the end of backward the peak is high, and by then what the last calls kept is free again."""
    needs = whole(10, 10, 10)
    peaks = [Interval(0, frozenset({0, 1, 2})), Interval(50, frozenset({0})), Interval(60, frozenset())]
    assert [choose(needs, peaks, limit).products for limit in (59, 60, 69)] == [0, 3, 3]
    assert choose(needs, [*peaks, Interval(60, frozenset({0}))], 69).products == 2


def test_products_of_all_calls_come_before_the_rest_of_any():
    needs = [Need(10, 4)] * 3
    peaks = [Interval(0, frozenset(range(3)))]
    found = [choose(needs, peaks, limit) for limit in (3, 4, 10, 12, 17, 18, 24, 30)]
    assert found == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert [found[5].level(needs, call) for call in range(3)] == [Level.PRODUCTS, Level.PRODUCTS, Level.ALL]
    assert [Kept(2, 0).level(needs, call) for call in range(3)] == [Level.AGAIN, Level.PRODUCTS, Level.PRODUCTS]


def test_a_call_whose_products_take_as_much_as_everything_keeps_everything():
    needs = [Need(10, 4), Need(5, 7), Need(6, 6)]
    kept = choose(needs, [Interval(0, frozenset(range(3)))], 15)
    assert kept == (3, 2)  # the first its products, and the others all that they have, which costs no more
    assert kept.by_call(needs) == {0: 4, 1: 5, 2: 6}
    assert Kept(2, 0).by_call(needs) == {1: 5, 2: 6}


NEEDS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: Need(*pair)), max_size=6)
PEAKS = st.lists(
    st.tuples(st.integers(0, 50), st.sets(st.integers(0, 7))).map(lambda pair: Interval(pair[0], frozenset(pair[1]))),
    max_size=8,
)


@given(NEEDS, PEAKS, st.integers(0, 80), st.none() | st.integers(0, 40))
def test_the_most_that_stays_within_the_limit(needs, peaks, limit, cap):
    def fits(kept):
        return expected_nbytes(needs, peaks, kept) <= limit and (cap is None or kept.nbytes(needs) <= cap)

    found, total = choose(needs, peaks, limit, cap), len(needs)
    assert 0 <= found.whole <= found.products <= total
    if found.products:
        assert fits(found)
    assert not any(fits(Kept(more, 0)) for more in range(found.products + 1, total + 1))
    assert not any(fits(Kept(found.products, more)) for more in range(found.whole + 1, found.products + 1))


@given(NEEDS, PEAKS, st.integers(0, 80), st.integers(0, 20))
def test_more_room_never_takes_the_products_of_a_call_nor_then_the_rest(needs, peaks, limit, more):
    assert choose(needs, peaks, limit) <= choose(needs, peaks, limit + more)  # products first, then the rest


@given(NEEDS, st.tuples(*[st.integers(0, 6)] * 4))
def test_the_least_of_what_two_ranks_keep_takes_no_more_than_either(needs, counts):
    counts = [min(count, len(needs)) for count in counts]
    one, other = (Kept(max(pair), min(pair)) for pair in (counts[:2], counts[2:]))
    both, mine = one.least(other).by_call(needs), one.by_call(needs)
    assert all(nbytes <= mine[call] for call, nbytes in both.items())
