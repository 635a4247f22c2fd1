"""Meeting: over Gloo, ranks see that they have come to the same event before any collective of it begins.

Note [Meeting]
~~~~~~~~~~~~~~
Gloo pairs the n-th collective of one rank with the n-th of every other. Where these have different lengths (one rank
skipped a backward and is in its next forward already) it ends the process, without a sentence. So each event that has
collectives begins with one exchange of eight bytes, in messages that are of no other kind: all have one length, and
nothing can go wrong. Where ranks are at different events, all of them raise and say who is where; a rank that does not
come is named when the time is over (stuck.py). A backward computes before its first collective, so it begins to meet
and goes on, and that collective waits. An accelerator's own backend does not end the process; there this exchange
would make the host wait, and is left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from zeor.comm import small
from zeor.comm.axes import Axis
from zeor.comm.stuck import explain

_TEXT_NBYTES = 200


class ApartError(RuntimeError):
    """The ranks have come to different events."""


def meet(axis: Axis, what: str, number: int = 0) -> None:
    """Return when every rank is at `what`, of the object of this number; raise ApartError on all of them where one is
    elsewhere."""
    if axis.meets:
        finish_meeting(axis)
        # In turn with what others of these ranks' models have begun.
        ask = small.channel_of(axis).ask
        _compare(axis, what, lambda: ask(axis, _print(what, number), kind=small.MEET))


def begin_meeting(axis: Axis, what: str, number: int = 0) -> None:
    """The same, not waited for: the first collective of the event does that (`finish_meeting`). For an event that
    computes before it."""
    if axis.meets:
        finish_meeting(axis)
        answer = small.channel_of(axis).start(axis, _print(what, number), small.MEET)
        axis.standing.meeting = lambda: _compare(axis, what, answer.result)


def finish_meeting(axis: Axis) -> None:
    """Before anything is exchanged: the meeting that has begun, if there is one."""
    standing = axis.standing
    if standing.meeting is not None:
        wait, standing.meeting = standing.meeting, None
        wait()


def _print(what: str, number: int) -> Tensor:
    """Equal on all ranks where the largest of it is its own opposite."""
    print_ = zlib.crc32(f"{number} {what}".encode()) & 0x7FFFFFFF
    return torch.tensor([print_, -print_], dtype=torch.int32)


def _compare(axis: Axis, what: str, wait: Callable[[], Tensor]) -> None:
    try:
        most, least = wait().tolist()
        if most != -least:
            _refuse(_everyone(axis, what))
    except ApartError:
        raise
    except RuntimeError as error:
        raise explain(axis, f"meeting before {what}", error) from error


def _everyone(axis: Axis, what: str) -> list[str]:
    """Where each rank is. All ranks come here, as all have seen the same numbers."""
    data = what.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    rows = small.rows(axis, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def _refuse(texts: list[str]) -> None:
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    told = "; ".join(f"{_ranks(ranks)} at {text}" for text, ranks in by_text.items())
    if len(by_text) == 1:
        told = f"all at {texts[0]}, but of different models or optimizers"
    raise ApartError(
        f"The ranks have come apart: {told}. Every rank must take the same path: call forward, backward, step and "
        "clipping alike on all of them (nonfinite='skip' skips a step on every rank; for unequal numbers of batches "
        "loop inside `with zeor.join(model):`)."
    )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' and more' if len(ranks) > 8 else ''} are"
