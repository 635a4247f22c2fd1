"""Few rows that together hold every triple of values: what `make test` runs in place of a whole product.

An error mostly needs two or three factors to meet, so a row for every triple finds nearly what every combination finds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest

Row = dict[str, Any]  # one value for each factor


def product(factors: Mapping[str, Iterable[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Every combination that is allowed."""
    rows = [dict(zip(factors, values)) for values in itertools.product(*factors.values())]
    return [row for row in rows if allowed(row)]


def held(row: Row, strength: int) -> set[tuple[tuple[str, Any], ...]]:
    """Every `strength` (factor, value) pairs of a row; all of them at once where the row has fewer."""
    return set(itertools.combinations(row.items(), min(strength, len(row))))


def covering(
    factors: Mapping[str, Iterable[Any]], strength: int = 3, allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows of the product that together hold whatever `strength` values some allowed row holds.

    Greedy: the next row is always the one that adds the most; among equals the first in the product. What a row adds
    only shrinks as others are taken. So a row whose old number is still the best when counted anew is the best one.
    """
    rows = product(factors, allowed)
    parts = [held(row, strength) for row in rows]
    missing = set().union(*parts)
    queue = [(-len(part), index) for index, part in enumerate(parts)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        _, index = heapq.heappop(queue)
        entry = (-len(parts[index] & missing), index)
        if queue and entry > queue[0]:
            heapq.heappush(queue, entry)
        else:
            chosen.append(rows[index])
            missing -= parts[index]
    return chosen


# For @pytest.mark.parametrize("select", BOTH): the triples in `make test`, the whole product in `make test-all`.
BOTH = [pytest.param(covering, id="triples"), pytest.param(product, id="whole", marks=pytest.mark.whole)]
# Both in `make test-all`, for rows so long that `make test` takes fewer.
LATER = [pytest.param(*each.values, id=each.id, marks=pytest.mark.whole) for each in BOTH]
PAIRS = [pytest.param(partial(covering, strength=2), id="pairs"), *LATER]
