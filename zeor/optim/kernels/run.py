"""Runs: neighbouring segments that one launch updates; and the update of lanes whose state is all on the device.

`runs_of` makes the runs of every update, resident or streamed (zeor.optim.streaming), by a kernel or by the stock step.
OnePass is the resident update by a kernel. State lives in flat tensors of a whole lane, of which the optimizer's own
state entries are views, so that stock code can read and continue it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeor.layout import Segment
from zeor.optim.kernels.protocol import Kernel
from zeor.optim.kernels.registry import kernel_for, kernel_of, why_not
from zeor.optim.parts.segments import Segments
from zeor.step.lane import Lane


class LaneRun:
    """Elements [begin, end) of a lane's update part that are updated alike: one segment, or neighbours of one group and
    one age. `age`: steps taken so far. `where`: the first segment."""

    def __init__(self, group: int, where: Segment, segment: nn.Parameter, age: int):
        self.group, self.where, self.age = group, where, age
        self.begin, self.end = where.offset, where.offset + where.numel
        self.segments = [segment]

    def takes(self, other: LaneRun) -> bool:
        if self.end == other.begin and (self.group, self.age) == (other.group, other.age):
            self.end = other.end
            self.segments += other.segments
            return True
        return False


def runs_of(
    lane: Lane,
    work: list[list[Tensor]],
    segments: Segments,
    age: Callable[[Segment, nn.Parameter], int],
    merges: bool = True,
) -> list[LaneRun]:
    """A lane's segments of these parameters (by group), in the order of memory, merged where neighbours agree. `age`:
    of each, once its state is where the update finds it. `merges`: one launch may do for several."""
    found: list[LaneRun] = []
    for group, params in enumerate(work):
        for param in params:
            segment = segments.of(param)
            if segment is not None and segments.slots[id(param)].lane is lane:
                where = segments.at(param)
                found.append(LaneRun(group, where, segment, age(where, segment)))
    assert lane.grads is not None
    merges = merges and not lane.grads.adopts  # adopted gradients lie each for itself
    runs: list[LaneRun] = []
    for run in sorted(found, key=lambda each: each.begin):
        if not (merges and runs and runs[-1].takes(run)):
            runs.append(run)
    return runs


class OnePass:
    """The update of lanes whose state is all on the device. `asked`: the plan's kernel=."""

    def __init__(self, segments: Segments, device: torch.device, asked: str):
        self._optimizer, self._segments, self._device, self._asked = segments.optimizer, segments, device, asked
        self._flat: dict[tuple[int, str], Tensor] = {}  # (id of lane, name) -> moments of the whole lane
        self._ages: dict[nn.Parameter, int] = {}
        self.kernel: Kernel | None = kernel_of(segments.optimizer)  # None: the stock step runs
        self.check()

    def check(self) -> None:
        """The groups are new: can the kernel update them all?"""
        self.forget_state()
        if self.kernel is not None and why_not(self._optimizer, self._device, self._asked):
            self.kernel = None

    def takes(self, lanes: list[Lane]) -> bool:
        """Whether this step of these lanes can be done by the kernel."""
        if kernel_for(self._optimizer, self._device, self._asked) is None:
            self.forget_state()
            return False
        return all(lane.master is not None and lane.master.dtype == torch.float32 for lane in lanes)

    def forget_state(self) -> None:
        """The optimizer's state was changed by others; it is taken over anew at the next pass."""
        self._flat.clear()
        self._ages.clear()

    def forget_lane(self, lane: Lane) -> None:
        """Somebody else updates it from now on, with state of its own."""
        for place in [place for place in self._flat if place[0] == id(lane)]:
            del self._flat[place]

    def update(self, work: list[list[Tensor]], lanes: list[Lane]) -> None:
        kernel, groups, states = self.kernel, self._optimizer.param_groups, self._optimizer.state
        assert kernel is not None
        names = kernel.moments(groups)
        for lane in lanes:
            grads, master = lane.grads, lane.master
            assert grads is not None and master is not None
            scale = as_kernels_read(lane_scale(lane), self._device)

            def age(where: Segment, segment: nn.Parameter, lane: Lane = lane) -> int:
                return self._take_over(kernel, names, lane, where, segment)

            for run in runs_of(lane, work, self._segments, age):
                part = slice(run.begin, run.end)
                at = {name: rest.tensor[part] for name, rest in master.arrays().items()}
                at["grad"] = grads.local(run.where.param) if grads.adopts else grads.here()[part]  # type: ignore[index]
                at.update({name: self._flat[id(lane), name][part] for name in names})
                kernel.launcher(self._optimizer, groups[run.group], run.age)(at, scale)
                self._ages.update(dict.fromkeys(run.segments, run.age + 1))
                kernel.count([states[segment] for segment in run.segments])

    def _take_over(
        self, kernel: Kernel, names: tuple[str, ...], lane: Lane, where: Segment, segment: nn.Parameter
    ) -> int:
        """Make the optimizer's state of a segment views of the lane's flat moments, keeping its values; its age."""
        if segment in self._ages:
            return self._ages[segment]
        state = self._optimizer.state[segment]
        begun = [name for name in names if state.get(name) is not None]
        for name in names:
            if (id(lane), name) not in self._flat:
                last = lane.segments[-1]  # what lies behind it is padding and needs no moments
                self._flat[id(lane), name] = torch.zeros(last.offset + last.numel, device=self._device)
            part = self._flat[id(lane), name][where.offset : where.offset + where.numel].view(segment.shape)
            if name in begun:
                part.copy_(state[name])
            state[name] = part
        self._ages[segment] = kernel.age(state, begun)
        return self._ages[segment]


def lane_scale(lane: Lane) -> Tensor | float | None:
    """The factor to multiply a lane's gradients by; several different ones are multiplied in here."""
    grads = lane.grads
    assert grads is not None
    common, factor = grads.common_scale()
    if not common:
        grads.apply_scales()
    return factor if common else None


def as_kernels_read(scale: Tensor | float | None, device: torch.device) -> Tensor | None:
    """On the device, which is not waited for."""
    return None if scale is None else torch.as_tensor(scale, dtype=torch.float32).to(device, non_blocking=True)
