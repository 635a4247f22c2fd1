"""Streaming: the update of lanes of which something rests elsewhere or in a small format, chunk by chunk.

    fetch -> decode -> step -> encode -> spill

Nothing of a lane's state is ever on the device as a whole: a chunk at a time goes through a window (windows.py). The
step is the one-pass kernel where it runs, else the optimizer's own step over a stand-in for the chunk; both do to each
element what they do without offload, so the bits are the same. On an accelerator everything queues up beside the
computation and the host goes on; a lane whose state is on disk is driven by a thread. Whoever reads the lane next
waits for it: see Update.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from zeor.comm.observe import Observer, Record
from zeor.layout import Segment
from zeor.memory.buffers import Ledger
from zeor.memory.device import thread_beside
from zeor.optim.kernels.protocol import Kernel
from zeor.optim.kernels.registry import kernel_for
from zeor.optim.kernels.run import LaneRun, OnePass, as_kernels_read, lane_scale, runs_of
from zeor.optim.parts.segments import Segments
from zeor.optim.streaming.ahead import Ahead, Stretch
from zeor.optim.streaming.chunks import Chunk, StockSteps, on_host
from zeor.optim.streaming.host import HostUpdate, batch_numel, batches_of
from zeor.optim.streaming.moments import Moments
from zeor.optim.streaming.spare_room import SpareRoom
from zeor.optim.streaming.windows import ChunkPart, Done, WindowRing, Work
from zeor.plan import Plan
from zeor.step.backward import Backward
from zeor.step.extension import Extension
from zeor.step.lane import Lane
from zeor.step.unit import Unit
from zeor.tiers.streams import SideStream, StreamEvent, current_event, current_stream_id

LARGE_NUMEL = 8 * 10**9  # elements on one rank
ChunkStep = Callable[[dict[str, Tensor]], None]
RangeStep = Callable[[int, int, dict[str, Tensor]], None]  # of elements [begin, end) of a lane
IN_FLIGHT = 2  # lanes whose gradients are released but not yet used up: bounds what a slow link can pile up


class Update:
    """A lane's update under way, beside the computation: who waits for it, and what it keeps meanwhile.
    `hold`: the computation waits for it. `wait`: the host does. What has failed fails for everybody who asks.

    Note [Gradients until they are used]
    An update reads gradients beside the computation, which is done with them. Their memory must not be given to others
    before it is done, and the allocator can be told so (record_stream); but then it is free only when the host
    happens to see that, and a host that runs ahead takes new memory instead. So the update itself keeps them until the
    computation waits for it, which it does before it reads the new weights: what is allocated from then on may lie
    there.
    """

    def __init__(self, queued: Future[Done], device: torch.device, compute_away: bool, keeps: Sequence[Tensor]):
        self._queued, self._device, self._compute_away, self._keeps = queued, device, compute_away, keeps
        self._home = current_stream_id(device)  # what it keeps goes back to who computes here
        self._held_by: set[int] = set()  # streams
        self._then: Callable[[], None] | None = None

    @property
    def spilled(self) -> StreamEvent:
        return self._queued.result().spilled

    def hold(self) -> None:
        stream = current_stream_id(self._device)
        if stream in self._held_by:
            return
        done = self._queued.result()
        if self._compute_away:
            self.written()
            done.spilled.hold()
        else:
            done.updated.hold()
        self._held_by.add(stream)
        if stream == self._home:
            self._keeps = ()
            if self._then is not None:
                self._then()

    def written(self) -> None:
        """The host waits until files have everything."""
        for write in self._queued.result().writes:
            write.result()

    def wait(self) -> None:
        self.spilled.wait()
        self.written()
        self.hold()

    @property
    def is_queued(self) -> bool:
        """All of it is with the device, or done."""
        return self._queued.done()

    def when_queued(self, then: Callable[[], None]) -> None:
        """In whatever thread that is."""
        self._queued.add_done_callback(lambda _: then())

    def when_held(self, then: Callable[[], None]) -> None:
        """By the stream it was begun on; at once where it is."""
        if self._home in self._held_by:
            then()
        else:
            self._then = then


class Streaming(Extension):
    """`one_pass`: updates the lanes that are not updated here. `observer` hears of each action: see schedule.py."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        units: list[Unit],
        segments: Segments,
        one_pass: OnePass,
        observer: Observer,
    ):
        self._plan, self._device, self._units, self._one_pass, self._observer = plan, device, units, one_pass, observer
        self._optimizer, self._segments = segments.optimizer, segments
        self.moments = Moments(segments.optimizer, plan.moments)
        self._always = plan.moments != "exact" or plan.delay > 0
        self.chunk_numel = chunk_numel(plan, units)
        self._windows = WindowRing(device)
        self.ahead: Ahead | None = None
        self._host: HostUpdate | None = None
        if plan.offload is not None and plan.offload.update == "host":
            wide = [lane for unit in units for lane in unit.lanes if lane.rest.wide]
            sizes = [(lane.master.numel, len(lane.segments)) for lane in wide if lane.master is not None]
            self._host = HostUpdate(device, batch_numel(self.chunk_numel, sizes), plan.offload.threads)
        self._pump: ThreadPoolExecutor | None = None
        self._works: deque[Work] = deque()  # for it
        self._in_flight: deque[Update] = deque()
        self._last: Update | None = None  # of this step
        self._steps = StockSteps(segments.optimizer, self.moments, self._windows.updates)

    def look_ahead(self, backward: Backward, ledger: Ledger) -> Ahead:
        """State is fetched before step() from here on, as the plan's `ahead` says."""
        offload = self._plan.offload
        assert offload is not None
        most = offload.ahead if isinstance(offload.ahead, int) else None
        budget = offload.device_budget if isinstance(offload.device_budget, int) else None
        room = SpareRoom(self._device, most, budget)
        self.ahead = Ahead(self._windows, backward, self._observer, ledger, room, self._state_parts)
        return self.ahead

    def takes(self, lane: Lane) -> bool:
        """Whether this lane is updated here."""
        assert lane.master is not None
        rests = self.moments.rests(lane)  # once here it stays here, wherever it is placed
        return self._always or lane.rest.tiers.away or lane.master.away or rests

    def adopt(self, lane: Lane) -> None:
        """A lane that was updated without streaming is from now on: its moments come to rest here."""
        for slot in (slot for unit in self._units for slot in unit.slots if slot.lane is lane):
            segment = self._segments.of(slot.param)
            if segment is not None:
                self.moments.take(lane, self._segments.at(slot.param), segment)
        self._one_pass.forget_lane(lane)

    # ---- one lane

    def update(self, work: list[list[Tensor]], lanes: list[Lane], bounded: bool = False) -> None:
        """`work`: the user's parameters by group. `bounded`: inside backward, where gradients must not pile up."""
        # Settings as they are now: a scheduler may go on at once, and writes into a learning rate that is a tensor.
        now = [group.items() for group in self._optimizer.param_groups]
        groups = [{key: value.clone() if isinstance(value, Tensor) else value for key, value in each} for each in now]
        for value in (value for group in groups for value in group.values() if isinstance(value, Tensor)):
            self._windows.updates.uses(value)
        for lane in lanes:
            assert lane.master is not None
            earlier = lane.master.pending
            if isinstance(earlier, Update):
                earlier.hold()
                earlier.spilled.hold(self._windows.fetches)  # copies back, a step ago -> copies of the same memory
            if self._host is not None and lane.rest.wide:
                records = self._begin_host_records(lane, self._host) if self._observer.on else []
                lane.master.pending = self._start_on_host(lane, work, groups, earlier)
                if records:
                    self._end_records(records, lane.master.pending)
            else:
                chunks, steps = self._prepare(lane, work, groups)
                records = self._begin_records(lane, chunks) if self._observer.on else []
                lane.master.pending = self._start(lane, chunks, steps, earlier) or earlier
                if records:
                    self._end_records(records, lane.master.pending)
            self._last = lane.master.pending if isinstance(lane.master.pending, Update) else self._last
            lane.fall_behind()
            if lane.grads is not None:
                lane.grads.read_by(lane.master.pending)
            if bounded and isinstance(lane.master.pending, Update):
                self._in_flight.append(lane.master.pending)
                while len(self._in_flight) > IN_FLIGHT:
                    self._in_flight.popleft().hold()  # what backward allocates now may lie where its gradients did

    def _kept(self, lane: Lane, stream: SideStream) -> list[Tensor]:
        """Gradients on the device that are read in this stream: see Note [Gradients until they are used]."""
        assert lane.grads is not None
        if lane.grads.resting:
            return []
        held = lane.grads.own_parts()
        if lane.lags:  # nobody waits for it before the next one
            for tensor in held:
                stream.uses(tensor)
            return []
        return held

    def _start(self, lane: Lane, chunks: list[list[ChunkPart]], steps: list[ChunkStep], earlier: Any) -> Update | None:
        """Queue a lane's chunks: here, or in the thread that waits for files."""
        away = [part for chunk in chunks for part in chunk if part.rest.away]
        if not away:
            for chunk, step in zip(chunks, steps):
                step({part.name: part.home for part in chunk})
            return None
        windows, ready = self._windows, current_event(self._device)
        compute_away = lane.master is not None and lane.master.compute.away
        keeps = self._kept(lane, windows.updates)

        def before() -> None:
            if isinstance(earlier, Update):
                earlier.written()  # a step ago -> reads of the same files
            ready.hold(windows.updates)  # gradients, and the last readers of compute -> the update

        work = Work(chunks, steps, before)
        if any(part.rest.file is not None for part in away) or self._pump is not None:
            self._works.append(work)
            self._submit(functools.partial(windows.run, self._works))
            return Update(work.done, self._device, compute_away, keeps)
        windows.run(deque([work]))
        if work.done.exception() is not None:  # what is queued goes on, and whoever reads the lane must wait for it
            queued = Done(windows.updates.record_event(), windows.spills.record_event()).future()
            assert lane.master is not None
            lane.master.pending = Update(queued, self._device, compute_away, keeps)
            work.done.result()
        return Update(work.done, self._device, compute_away, keeps)

    def _submit(self, job: Callable[[], None]) -> None:
        """To be done by the one thread beside the loop, in order."""
        if self._pump is None:
            self._pump = ThreadPoolExecutor(1, "zeor-offload")

        def run() -> None:
            try:
                with thread_beside(self._device):
                    job()
            except BaseException as error:  # a device that is gone, say: nobody may wait for ever
                while self._works:
                    self._works.popleft().fail(error)

        self._pump.submit(run)

    def _start_on_host(
        self, lane: Lane, work: list[list[Tensor]], groups: list[dict[str, Any]], earlier: Any
    ) -> Update:
        """The stock step over the host's memory: see host.py."""
        host, grads = self._host, lane.grads
        assert host is not None and grads is not None and lane.master is not None
        host.reserve(lane.master.dtype)
        scale, runs = lane_scale(lane), self._runs(lane, work, None)
        fused = {"fused": True, "foreach": False}  # torch's fused kernel, if the optimizer has one
        groups = [{**on_host(group), **(fused if "fused" in group else {})} for group in groups]
        batches = batches_of(lane, runs, self._steps, groups, scale, host.batch_numel)
        ready, resting = current_event(self._device), grads.resting
        rested = resting.spilled if resting else StreamEvent()

        def wait() -> None:
            if isinstance(earlier, Update):
                earlier.wait()  # weights on their way up -> new values for them
            for stream in (host.widens, host.ups):
                ready.hold(stream)  # gradients, and the last readers of compute -> the update
            rested.hold(host.widens)  # gradients' copies out, in backward -> their way here

        keeps = self._kept(lane, host.widens)
        return Update(host.start(batches, wait), self._device, compute_away=False, keeps=keeps)

    # ---- what the observer is told

    def _begin_records(self, lane: Lane, chunks: list[list[ChunkPart]]) -> list[Record]:
        """Of an update on the device: what is fetched for it and what goes back."""
        windows, parts = self._windows, [part for chunk in chunks for part in chunk]
        there = {id(part) for chunk in chunks if windows.is_ahead(chunk) for part in chunk if part.may_be_ahead}
        reads = [part for part in parts if part.rest.away and part.reads and id(part) not in there]
        writes = [part for part in parts if part.rest.away and part.writes]
        found = []
        for verb, some, stream in (("fetch", reads, windows.fetches), ("update", parts, windows.updates),
                                   ("spill", writes, windows.spills)):  # fmt: skip
            if some or verb == "update":
                tiers = ", ".join(sorted({part.rest.tier for part in some}))
                nbytes = sum(part.nbytes for part in some)
                beside = stream if reads or writes else None
                found.append(self._observer.begin(verb, lane.place, nbytes, tiers, beside))
        return found

    def _begin_host_records(self, lane: Lane, host: HostUpdate) -> list[Record]:
        """Of an update on the host: gradients go down, weights come up."""
        assert lane.master is not None and lane.grads is not None
        numel, itemsize = lane.master.numel, lane.master.dtype.itemsize
        resting, tier = lane.grads.resting, lane.rest.tiers.grads
        begin, where = self._observer.begin, lane.rest.tiers.master
        found = [begin("fetch", lane.place, numel * lane.grads.dtype.itemsize, tier, host.widens)] if resting else []
        found.append(begin("spill", lane.place, numel * itemsize, where, host.widens))
        found.append(begin("update", lane.place, numel * itemsize, where))
        found.append(begin("fetch", lane.place, numel * itemsize, where, host.ups))
        return found

    def _end_records(self, records: list[Record], update: Any) -> None:
        """What another thread goes on with is over when that says so."""
        goes_on = isinstance(update, Update) and not update.is_queued
        for record in reversed(records):
            self._observer.goes_on(record) if goes_on else self._observer.end(record)
        if goes_on:
            update.when_queued(functools.partial(self._observer.over, records))

    # ---- chunks

    def _runs(self, lane: Lane, work: list[list[Tensor]], kernel: Kernel | None) -> list[LaneRun]:
        def age(where: Segment, segment: nn.Parameter) -> int:
            self.moments.take(lane, where, segment)
            return kernel.age(self._optimizer.state[segment], self.moments.names(segment)) if kernel else 0

        return runs_of(lane, work, self._segments, age, kernel is not None and self.moments.format != "int8")

    def _prepare(
        self, lane: Lane, work: list[list[Tensor]], groups: list[dict[str, Any]]
    ) -> tuple[list[list[ChunkPart]], list[ChunkStep]]:
        """The chunks of a lane, and what to do with each once it is there."""
        kernel = None  # that runs here, does this optimizer's arithmetic, and knows the format
        if lane.master is not None and lane.master.dtype == torch.float32:
            kernel = kernel_for(self._optimizer, self._device, self._plan.kernel, self.moments.format)
        scale, runs = lane_scale(lane), self._runs(lane, work, kernel)
        if kernel is None:
            made = [self._stock_step(lane, run, groups, scale) for run in runs]
        else:
            read = as_kernels_read(scale, self._device)
            made = [self._kernel_step(kernel, run, groups, read) for run in runs]
        chunks: list[list[ChunkPart]] = []
        steps: list[ChunkStep] = []
        for run, step in zip(runs, made):
            for begin in range(run.begin, run.end, self.chunk_numel):
                end = min(begin + self.chunk_numel, run.end)
                stretch = Stretch(lane, run.where, run.segments[0], begin, end)
                chunks.append([*self._state_parts(stretch), self._grad_part(stretch)])
                if self.ahead is not None:
                    self.ahead.learn(stretch)
                steps.append(functools.partial(step, begin, end))
        return chunks, steps

    def _stock_step(
        self, lane: Lane, run: LaneRun, groups: list[dict[str, Any]], scale: Tensor | float | None
    ) -> RangeStep:
        begun = self._steps.begun(run)
        return lambda begin, end, at: self._steps.step(lane, [Chunk(begun, begin, end, at)], groups, scale)

    def _kernel_step(
        self, kernel: Kernel, run: LaneRun, groups: list[dict[str, Any]], scale: Tensor | None
    ) -> RangeStep:
        kernel.count([self._optimizer.state[segment] for segment in run.segments])
        for segment in run.segments:
            self.moments.names(segment)[:] = kernel.moments(groups)
        launch = kernel.launcher(self._optimizer, groups[run.group], run.age)

        def step(begin: int, end: int, at: dict[str, Tensor]) -> None:
            launch(at, scale)
            if scale is not None:
                self._windows.updates.uses(scale)

        return step

    def _state_parts(self, stretch: Stretch) -> list[ChunkPart]:
        """What an update reads and writes of a chunk, without its gradient."""
        lane, where, segment, begin, end = stretch
        master = lane.master
        assert master is not None
        # Where the master is kept beside it, compute is written only.
        parts = [
            ChunkPart(name, rest, begin, end, reads=not (name == "compute" and master.format == "wide"))
            for name, rest in master.arrays().items()
        ]
        for name in self.moments.names(segment):
            moment = self.moments.need(lane, name)
            parts.append(ChunkPart(name, moment.codes, begin, end))
            if moment.scales is not None:
                scales = self.moments.scale_range(lane, where, begin, end)
                parts.append(ChunkPart(f"{name} scales", moment.scales, scales.start, scales.stop))
        return parts

    def _grad_part(self, stretch: Stretch) -> ChunkPart:
        grads = stretch.lane.grads
        assert grads is not None
        if grads.resting is not None:
            grads.resting.spilled.hold(self._windows.fetches)  # its copy out, in backward -> its copy in
        rest, first = grads.at_rest(stretch.where)
        return ChunkPart("grad", rest, stretch.begin - first, stretch.end - first, writes=False)

    def step_queued(self) -> None:
        """Everything of a step is queued. Its updates are done where forward waits for the last: what it computes from
        there on, the loss above all, needs the windows' memory more than they do."""
        last, self._last = self._last, None
        if self.ahead is not None:
            self.ahead.step_queued()
        if last is not None and not self._plan.delay:
            last.when_held(self._leave)

    def grads_begun(self) -> None:
        """The same where forward did not come to the last of them."""
        if not self._plan.delay:
            self._leave()

    def _leave(self) -> None:
        if self.ahead is not None:
            self.ahead.leave()
        elif self._pump is None:
            self._windows.leave()
        if self._host is not None:
            self._host.leave()

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.give_back()
        if self._host is not None:
            self._host.close()
        if self._pump is not None:
            self._pump.shutdown(wait=True)
            self._pump = None


def chunk_numel(plan: Plan, units: list[Unit]) -> int:
    """Elements streamed at a time: what the plan says, else what keeps the host's work for each of them small."""
    if plan.offload is not None and plan.offload.chunk is not None:
        return plan.offload.chunk
    masters = (lane.master for unit in units for lane in unit.lanes)
    return 1 << 25 if sum(m.numel for m in masters if m is not None) > LARGE_NUMEL else 1 << 24
