"""A lane cut into batches for its update on the host (host_update.py): segments side by side in each.

Knows what an optimizer's step needs of a segment; nothing of threads, links or when it happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zeor.optim.streaming.chunks import Begun, Chunk, ChunkSteps, Run
from zeor.optim.streaming.host import CUT_NUMEL, Batch, HostPart
from zeor.optim.streaming.moments import Moments
from zeor.runtime.lane import Lane


class _Cut(NamedTuple):
    begun: Begun
    begin: int
    end: int


def batches_of(
    lane: Lane,
    runs: Sequence[Run],
    moments: Moments,
    steps: ChunkSteps,
    groups: list[dict[str, Any]],
    scale: Tensor | float | None,
    most: int,
) -> list[Batch]:
    """Of at most so many elements; `groups`: the settings each step is called with."""
    master, grads = lane.master, lane.grads
    assert master is not None and master.own is not None and grads is not None
    own, compute = master.own.tensor, master.compute.tensor

    def batch_of(cuts: list[_Cut]) -> Batch:
        parts, chunks = [], []
        for begun, begin, end in cuts:
            rest, first = grads.at_rest(begun.run.where)
            parts.append(HostPart(begin, end, rest, begin - first))
            at = {name: moments.need(lane, name).codes.tensor[begin:end] for name in begun.names}
            chunks.append(Chunk(begun, begin, end, {"master": own[begin:end], **at}))

        def step(given: list[Tensor]) -> None:
            for chunk, grad in zip(chunks, given):
                chunk.at["grad"] = grad
            steps.step_stock(lane, chunks, groups, None)

        published = [(own[begin:end], compute[begin:end]) for begin, end in _joined(cuts)]
        return Batch(parts, published, scale, step)

    return [batch_of(cuts) for cuts in _cut([steps.begun(run, host=True) for run in runs], most)]


def _cut(begun: Sequence[Begun], most: int) -> Iterator[list[_Cut]]:
    batch: list[_Cut] = []
    room = most
    for each in begun:
        at = each.run.begin
        while at < each.run.end:
            end = min(each.run.end, at + room // CUT_NUMEL * CUT_NUMEL)
            batch.append(_Cut(each, at, end))
            room -= -(-(end - at) // CUT_NUMEL) * CUT_NUMEL
            at = end
            if room < CUT_NUMEL:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def _joined(cuts: Sequence[_Cut]) -> list[tuple[int, int]]:
    """The same elements in as few ranges as they lie in."""
    ranges: list[tuple[int, int]] = []
    for _, begin, end in cuts:
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return ranges
