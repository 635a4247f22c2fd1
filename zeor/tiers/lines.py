"""Lines: where copies and updates queue up beside the computation.

On an accelerator a line is a stream and a mark in it an event; on a host everything happens at once, a line is
nothing and a mark always reached. Each wait names writer -> reader where it is called. Knows no tensors' meaning.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Mark:
    """A place in a line: everything queued before it."""

    def __init__(self, event: torch.Event | None = None):
        self._event = event

    def hold(self, line: Line | None = None) -> None:
        """Nothing queued in `line` (None: the current computation) from here on starts before the mark is reached."""
        if self._event is not None:
            if line is not None and line.stream is not None:
                line.stream.wait_event(self._event)
            else:
                torch.accelerator.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """The host waits until it is reached."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def reached(self) -> bool:
        return self._event is None or bool(self._event.query())


class Line:
    def __init__(self, device: torch.device):
        self.stream = None if device.type == "cpu" else torch.Stream(device)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """What is done inside queues up here."""
        if self.stream is None:
            yield
            return
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self.stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def mark(self) -> Mark:
        if self.stream is None:
            return Mark()
        event = torch.Event(device=self.stream.device.type)
        event.record(self.stream)
        return Mark(event)

    def uses(self, tensor: Tensor) -> None:
        """This memory must not be given to anybody else before what is queued here so far is done."""
        if self.stream is not None and tensor.device.type != "cpu":
            tensor.record_stream(self.stream)


class Leaving:
    """Memory that the computation is done with and a line still reads: kept until the computation waits for that, so
    that what is allocated afterwards may lie there. See Note [Gradients until they are used] in pending_update.py."""

    def __init__(self) -> None:
        self._held: deque[tuple[Mark, Sequence[Tensor]]] = deque()

    def add(self, tensors: Sequence[Tensor], read: Mark) -> None:
        self._held.append((read, tensors))

    def let_go(self, but: int = 0) -> None:
        """All but so many of the last."""
        while len(self._held) > but:
            self._held.popleft()[0].hold()


def current_stream_id(device: torch.device) -> int:
    """Which stream this thread's computation goes to."""
    return 0 if device.type == "cpu" else int(torch.accelerator.current_stream(device).stream_id)


def current_mark(device: torch.device) -> Mark:
    """Everything the computation has queued so far."""
    if device.type == "cpu":
        return Mark()
    event = torch.Event(device=device.type)
    event.record(torch.accelerator.current_stream())
    return Mark(event)
