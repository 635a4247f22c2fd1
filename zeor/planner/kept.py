"""recompute="auto" before the run: how many of a pass's last calls can keep their activations, from traced bytes.

Two traces say all: in one nothing is computed again, so what each unit's forward leaves alive is what keeping costs; in
the other everything is, so its peaks are what remains. As in the run (features/keeping.py) the last calls keep theirs:
their memory is the first to be free again. A call that is kept and is in its backward is counted in both, so the peak
is over by at most one unit, never under. Compiled units keep less than is traced here: a compiler computes what is
cheap again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zeor.model.discover import UnitSpec
from zeor.planner.trace import Trace


def needs(plain: Trace, again: Trace) -> list[tuple[int, int]]:
    """(unit, bytes) by call, in the order of forward: what keeping costs, of the calls that would be computed again."""
    if len(plain.kept) != len(again.kept):  # a model whose forward depends on it
        return []
    more = [(unit, whole - part) for (unit, whole), (_, part) in zip(plain.kept, again.kept)]
    return [(unit, nbytes) for unit, nbytes in more if nbytes > 0]


def keeping(units: Sequence[UnitSpec], plain: Trace, again: Trace, count: int) -> Trace:
    """The trace in which all is computed again but the last `count` calls."""
    kept = needs(plain, again)[-count:] if count else []
    missing = {unit: len([1 for _, p, _ in units[unit].params if p.requires_grad]) for unit, _ in kept}
    owner = {id(param): number for number, unit in enumerate(units) for _, param, _ in unit.params}
    alive = sum(nbytes for _, nbytes in kept)
    peaks = [again.peaks[0] + alive]
    for param, peak in zip(again.arrived, again.peaks[1:]):
        unit = owner.get(id(param), 0)
        if unit in missing:
            missing[unit] -= 1
            if not missing[unit]:
                alive -= sum(nbytes for each, nbytes in kept if each == unit)
        peaks.append(peak + alive)
    held, entered = 0, []
    for unit, peak in again.entered:
        held += sum(nbytes for each, nbytes in kept if each == unit)
        entered.append((unit, peak + held))
    return replace(again, peaks=peaks, entered=entered)


def most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number of calls up to `count` that fits, where fewer fit too; 0 where none does."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
