"""Meeting: over Gloo, ranks see that they have come to the same event before any collective of it begins.

Note [Meeting]
~~~~~~~~~~~~~~
Gloo pairs the n-th collective of one rank with the n-th of every other. Where these have different lengths (one rank
skipped a backward and is in its next forward already) it ends the process, without a sentence. So each event that has
collectives begins with one exchange of eight bytes, on a group that carries nothing else: there all messages have one
length, and nothing can go wrong. Where ranks are at different events, all of them raise and say who is where; a rank
that does not come is named when the time is over (stuck.py). An accelerator's own backend does not end the process;
there this exchange would make the host wait, and is left out.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from zeor.comm.mesh import Mesh
from zeor.comm.stuck import explain

_TEXT_NBYTES = 200


class Apart(RuntimeError):
    """The ranks have come to different events."""


def meet(mesh: Mesh, what: str, number: int = 0) -> None:
    """Return when every rank is at `what`, of the object of this number; raise Apart on all of them where one is
    elsewhere."""
    if mesh.meeting is None:
        return
    print_ = zlib.crc32(f"{number} {what}".encode()) & 0x7FFFFFFF
    told = torch.tensor([print_, -print_], dtype=torch.int32)
    try:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=mesh.meeting)
        if int(told[0]) != -int(told[1]):
            _refuse(_everyone(mesh, what))
    except Apart:
        raise
    except RuntimeError as error:
        raise explain(mesh, f"meeting before {what}", error) from error


def _everyone(mesh: Mesh, what: str) -> list[str]:
    """Where each rank is. All ranks come here, as all have seen the same numbers."""
    data = what.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    rows = [torch.empty(_TEXT_NBYTES, dtype=torch.uint8) for _ in range(mesh.world)]
    dist.all_gather(rows, torch.frombuffer(bytearray(data), dtype=torch.uint8), group=mesh.meeting)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _refuse(texts: list[str]) -> None:
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    told = "; ".join(f"{_ranks(ranks)} at {text}" for text, ranks in by_text.items())
    if len(by_text) == 1:
        told = f"all at {texts[0]}, but of different models or optimizers"
    raise Apart(
        f"The ranks have come apart: {told}. Every rank must take the same path: call forward, backward, step and "
        "clipping alike on all of them (nonfinite='skip' skips a step on every rank; for unequal numbers of batches "
        "loop inside `with zeor.join(model):`)."
    )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' and more' if len(ranks) > 8 else ''} are"
