"""Streams beside the computation, where copies and updates queue up, and events in them.

On a host everything happens at once: there a stream is nothing and an event always reached. Each wait names writer ->
reader where it is called. Knows no tensors' meaning.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class StreamEvent:
    """A place in a stream: everything queued before it."""

    def __init__(self, event: torch.Event | None = None):
        self._event = event

    def hold(self, beside: SideStream | None = None) -> None:
        """Nothing queued in `beside` (None: the computation) from here on starts before the event is reached."""
        if self._event is not None:
            if beside is not None and beside.stream is not None:
                beside.stream.wait_event(self._event)
            else:
                torch.accelerator.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """The host waits until it is reached."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def reached(self) -> bool:
        return self._event is None or bool(self._event.query())


class SideStream:
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

    def record_event(self) -> StreamEvent:
        if self.stream is None:
            return StreamEvent()
        event = torch.Event(device=self.stream.device.type)
        event.record(self.stream)
        return StreamEvent(event)

    def uses(self, tensor: Tensor) -> None:
        """This memory must not be given to anybody else before what is queued here so far is done."""
        if self.stream is not None and tensor.device.type != "cpu":
            tensor.record_stream(self.stream)


class DeviceClock:
    """The times of places in streams, on the host's clock. They are known when everything queued is done: nothing waits
    for the device but the first mark and `finish`. On a host it does not tick, as everything happens at once."""

    def __init__(self, device: torch.device):
        self.ticks, self._kind = device.type != "cpu", device.type
        if self.ticks:
            torch.accelerator.synchronize()
            self._first = self.mark()
            self._first.synchronize()
            self._first_ns = time.perf_counter_ns()

    def mark(self, beside: SideStream | None = None) -> torch.Event:
        """Everything queued so far, in `beside` or (None) by the computation."""
        event = torch.Event(device=self._kind, enable_timing=True)
        stream = None if beside is None else beside.stream
        event.record(torch.accelerator.current_stream() if stream is None else stream)
        return event

    def finish(self) -> None:
        """The host waits until all marks are reached."""
        if self.ticks:
            torch.accelerator.synchronize()

    def at_ns(self, mark: torch.Event) -> int:
        return self._first_ns + int(1e6 * self._first.elapsed_time(mark))


class Leaving:
    """Memory that the computation is done with and a stream still reads: kept until the computation waits for that, so
    that what is allocated afterwards may lie there. See Note [Gradients until they are used] in streaming.py."""

    def __init__(self) -> None:
        self.held: deque[tuple[StreamEvent, Sequence[Tensor]]] = deque()

    def add(self, tensors: Sequence[Tensor], read: StreamEvent) -> None:
        self.held.append((read, tensors))

    def let_go(self, but: int = 0) -> None:
        """All but so many of the last."""
        while len(self.held) > but:
            self.held.popleft()[0].hold()


def current_stream_id(device: torch.device) -> int:
    """Which stream this thread's computation goes to."""
    return 0 if device.type == "cpu" else int(torch.accelerator.current_stream(device).stream_id)


def current_event(device: torch.device) -> StreamEvent:
    """Everything the computation has queued so far."""
    if device.type == "cpu":
        return StreamEvent()
    event = torch.Event(device=device.type)
    event.record(torch.accelerator.current_stream())
    return StreamEvent(event)
