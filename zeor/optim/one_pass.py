"""The one-pass update: Adam, AdamW and SGD on an accelerator at the floor of bytes.

Chosen for an optimizer when the kernels can run on the device and do its arithmetic; the stock step is
its reference. State lives in flat tensors of a whole lane, of which the optimizer's own state entries
are views, so that stock code can read and continue it. A launch covers a run: neighbouring segments of
one group and one age.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.layout import Segment
from zeor.optim.kernels import adam as kernels
from zeor.optim.parts.segments import Segments
from zeor.runtime.engine import Engine
from zeor.runtime.lane import Lane


@dataclass
class Run:
    """Neighbouring segments updated by one launch: elements [begin, end) of a lane's update part."""

    group: int
    age: int  # steps taken so far
    begin: int
    end: int
    segments: list[torch.nn.Parameter]
    params: list[int]  # their indices in the lane


class OnePass:
    def __init__(self, optimizer: Optimizer, segments: Segments):
        self._optimizer, self._segments = optimizer, segments
        self._flat: dict[tuple[int, str], Tensor] = {}  # (id of lane, name) -> moments of the whole lane
        self._ages: dict[torch.nn.Parameter, int] = {}
        self._adam = not isinstance(optimizer, torch.optim.SGD)

    @staticmethod
    def for_optimizer(engine: Engine, optimizer: Optimizer, segments: Segments) -> OnePass | None:
        """None where the stock step is to run; `why_not` says why."""
        return None if why_not(engine, optimizer) else OnePass(optimizer, segments)

    def takes(self, lanes: list[Lane]) -> bool:
        """Whether this step can be done in one pass: not while GradScaler hands its scale to the stock step."""
        if getattr(self._optimizer, "found_inf", None) is not None:
            self.forget_state()
            return False
        if any(kernels.supports(self._optimizer, group, True) for group in self._optimizer.param_groups):
            self.forget_state()
            return False
        return all(lane.master is not None and lane.master.dtype == torch.float32 for lane in lanes)

    def forget_state(self) -> None:
        """The optimizer's state was changed by others; it is taken over anew at the next pass."""
        self._flat.clear()
        self._ages.clear()

    def forget_lane(self, lane: Lane) -> None:
        """Somebody else updates it from now on, with state of its own."""
        for name in self._names():
            self._flat.pop((id(lane), name), None)

    # ---- the update

    def update(self, work: list[list[Tensor]], lanes: list[Lane]) -> None:
        for lane in lanes:
            grads = lane.grads
            assert grads is not None
            common, factor = grads.common_scale()
            if not common:
                grads.apply_scales()
                factor = None
            scale = self._as_scale(factor, lane)
            for run in self._runs(lane, work):
                grad = grads.local(run.params[0]) if grads.adopts else grads.sum[run.begin : run.end]  # type: ignore[index]
                self._launch(lane, run, grad, scale)
                for segment in run.segments:
                    self._ages[segment] = run.age + 1
                steps = [self._optimizer.state[s]["step"] for s in run.segments if self._adam]
                if steps:
                    torch._foreach_add_(steps, 1.0)

    @staticmethod
    def _as_scale(factor: Tensor | float | None, lane: Lane) -> Tensor | None:
        if factor is None:
            return None
        return torch.as_tensor(factor, dtype=torch.float32).to(lane.mesh.device, non_blocking=True)

    def _runs(self, lane: Lane, work: list[list[Tensor]]) -> list[Run]:
        """This lane's segments in the order of memory, merged where neighbours agree."""
        found: list[tuple[Segment, int, torch.nn.Parameter]] = []
        for group, params in enumerate(work):
            for param in params:
                segment = self._segments.of(param)
                if segment is not None and self._segments.slots[id(param)].lane is lane:
                    self._take_over(lane, param, segment)
                    found.append((self._segments._at[id(param)], group, segment))
        runs: list[Run] = []
        for where, group, segment in sorted(found, key=lambda item: item[0].offset):
            age = self._ages[segment]
            last = runs[-1] if runs else None
            together = lane.grads is not None and not lane.grads.adopts  # adopted gradients lie each for itself
            if together and last and last.end == where.offset and (last.group, last.age) == (group, age):
                last.end += where.numel
                last.segments.append(segment)
                last.params.append(where.param)
            else:
                runs.append(Run(group, age, where.offset, where.offset + where.numel, [segment], [where.param]))
        return runs

    def _take_over(self, lane: Lane, param: Tensor, segment: torch.nn.Parameter) -> None:
        """Make the optimizer's state of a segment views of the lane's flat moments, keeping its values."""
        if segment in self._ages:
            return
        state = self._optimizer.state[segment]
        where = self._segments._at[id(param)]
        started = state.get("momentum_buffer") is not None
        for name in self._names():
            if (id(lane), name) not in self._flat:
                assert lane.master is not None
                last = lane.segments[-1]  # what lies behind it is padding and needs no moments
                self._flat[id(lane), name] = torch.zeros(last.offset + last.numel, device=lane.mesh.device)
            flat = self._flat[id(lane), name]
            part = flat[where.offset : where.offset + where.numel].view(segment.shape)
            if state.get(name) is not None:
                part.copy_(state[name])
            state[name] = part
        if self._adam:
            state.setdefault("step", torch.zeros(()))
            self._ages[segment] = int(state["step"])
        else:
            self._ages[segment] = int(started)

    def _names(self) -> tuple[str, ...]:
        if self._adam:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if any(group["momentum"] for group in self._optimizer.param_groups) else ()

    def _launch(self, lane: Lane, run: Run, grad: Tensor, scale: Tensor | None) -> None:
        group, master = self._optimizer.param_groups[run.group], lane.master
        part = slice(run.begin, run.end)
        assert master is not None
        values = None if master.format == "split" else master.values[part]
        compute = None if master.format == "compute" else master.compute.tensor[part]
        remainder = None if master.remainder is None else master.remainder.tensor[part]
        moments = [self._flat[id(lane), name][part] for name in self._names()]
        if self._adam:
            adam = kernels.AdamRun(values, grad, moments[0], moments[1], compute, remainder)
            kernels.adam_pass(adam, kernels.AdamSettings.from_group(self._optimizer, group), run.age + 1, scale)
        else:
            sgd = kernels.SGDRun(values, grad, moments[0] if moments else None, compute, remainder)
            kernels.sgd_pass(sgd, kernels.SGDSettings.from_group(group), run.age == 0, scale)


def why_not(engine: Engine, optimizer: Optimizer) -> str | None:
    """Why the one pass does not run for this optimizer, or None where it does."""
    if engine.plan.kernel == "stock":
        return "kernel='stock' was asked for"
    reason = kernels.unavailable_reason(engine.mesh.device)
    for group in optimizer.param_groups:
        reason = reason or kernels.supports(optimizer, group)
    return reason
