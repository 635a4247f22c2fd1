"""recompute="auto" before the run: how much a pass's last calls can keep of their activations, from traced bytes.

Three traces say all: in one nothing is computed again, so what each unit's forward leaves alive is what keeping all
costs; in one everything is but products, which says what keeping these costs; in the third everything is, so its peaks
are what remains. As in the run (features/keeping.py) the last calls keep theirs: their memory is the first to be free
again. A call that keeps something and is in its backward is counted in both, so the peak is over by at most one unit,
never under. Compiled units keep all or nothing, and less than is traced here: a compiler computes what is cheap again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeor.features.levels import Kept, Level, Need
from zeor.model.discover import UnitSpec
from zeor.planner.peaks import Model
from zeor.planner.trace import Trace

Calls = list[tuple[int, Need]]  # (unit, bytes), in the order of forward


def needs(model: Model) -> Calls:
    """What keeping costs, of the calls that would be computed again."""
    plain, again, middle = model.plain, model.trace, model.middle
    if plain is None or len(plain.kept) != len(again.kept):  # a model whose forward depends on it
        return []
    products = plain.kept if middle is None or len(middle.kept) != len(plain.kept) else middle.kept
    found = [
        (unit, Need(whole - inputs, max(0, part - inputs)))
        for (unit, whole), (_, part), (_, inputs) in zip(plain.kept, products, again.kept)
    ]
    return [(unit, need) for unit, need in found if need.whole > 0]


def units_at(calls: Calls, kept: Kept, level: Level) -> list[int]:
    """By call that keeps so much, its unit."""
    sizes = [need for _, need in calls]
    return [unit for call, (unit, _) in enumerate(calls) if kept.level(sizes, call) is level]


def keeping(units: Sequence[UnitSpec], again: Trace, calls: Calls, chosen: Kept) -> Trace:
    """The trace in which all is computed again but what calls keep."""
    by_call = chosen.by_call([need for _, need in calls])
    kept = [(calls[call][0], nbytes) for call, nbytes in by_call.items()]
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
