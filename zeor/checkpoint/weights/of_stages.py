"""A pipeline's parameters as one stream on rank 0: each stage's, which its ranks stream among themselves, one by one.

Of each stage the rank that stands in one row with rank 0 hands on what it receives; the stage's others only take part
in its stream. Round by round every stage of the row brings its next parameter, so that no stage waits for long, and
hears whether rank 0 still listens: what failed there ends the streams of all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zeor.checkpoint.files.plain import DTYPES, dtype_name
from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.comm.meshes import ranks_on
from zeor.comm.transfers import Transfer, move
from zeor.features.pipeline import Pipeline

Values = Iterator[tuple[str, Tensor, int]]  # name, elements, and the first of them


def of_all_stages(pipes: Pipeline, own: Values) -> Values:
    """The stream of all stages on the first rank of them all; elsewhere what comes out is for nobody. `own`: the stream
    of this rank's stages, which every rank of theirs follows."""
    row = ranks_on(pipes.axis)
    root = min(ranks_on(pipes.everyone))
    if root not in row:
        yield from own
        return
    yield from _rounds(pipes.axis, row.index(root), own)


def _rounds(axis: Axis, root: int, own: Values) -> Values:
    listening = True
    while True:
        item = next(own, None) if listening else None
        told = exchange(axis, [listening, _head(item)], "exchange about the parameters of a pipeline's stages")
        heads = [head for _, head in told]
        if not told[root][0] or not any(heads):
            break
        values = _handed_on(axis, root, heads, item)
        del item
        try:
            while values:
                yield values.pop(0)
        except GeneratorExit:
            listening = False
    own.close()  # type: ignore[attr-defined]


def _head(item: Any) -> Any:
    return None if item is None else [item[0], list(item[1].shape), dtype_name(item[1].dtype)]


def _handed_on(axis: Axis, root: int, heads: Sequence[Any], item: Any) -> list[tuple[str, Tensor, int]]:
    """What each stage brings in this round, on the root; nothing elsewhere."""
    sizes = {rank: _nbytes(head) for rank, head in enumerate(heads) if head is not None and rank != root}
    transfers = [Transfer(rank, root, nbytes) for rank, nbytes in sizes.items() if nbytes]
    received: dict[int, Tensor] = {}
    read = lambda each: item[1].detach().cpu().contiguous().view(-1).view(torch.uint8)
    move(axis, transfers, read, lambda each, data: received.update({each.source: data}), "parameters of a stage")
    if axis.rank != root:
        return []
    found = [] if item is None else [item]
    for rank in sizes:
        name, shape, word = heads[rank]
        data = received.get(rank, torch.empty(0, dtype=torch.uint8))
        found.append((name, data.view(DTYPES[word]).view(shape), 0))
    return found


def _nbytes(head: Any) -> int:
    _, shape, word = head
    return int(math.prod(shape) * DTYPES[word].itemsize)
