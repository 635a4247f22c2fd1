"""The optimizer's own step over a chunk, by a stand-in: where no kernel knows the optimizer.

A chunk is a part of a run (kernels/run.py) of one segment. As a kernel, the step reads and writes tensors that it is
given by name (compute, remainder or master, grad, moments and their scales) and knows nothing of where those rest.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.memory import small
from zeor.memory.formats import cast_into, join_into, split_into
from zeor.optim.kernels.run import LaneRun
from zeor.optim.parts.methods import REPLACED
from zeor.optim.parts.probe import raw_step
from zeor.optim.streaming.moments import UNSIGNED, Moments, is_moment
from zeor.step.lane import Lane
from zeor.tiers.streams import SideStream


class Begun(NamedTuple):
    """A segment before a stock step: its counters, the names of its moments, and the optimizer's own attributes, of
    which a GradScaler takes some back when step() returns."""

    run: LaneRun
    counters: dict[str, Any]
    names: list[str]
    attributes: dict[str, Any]


class Chunk(NamedTuple):
    """Elements [begin, end) of a lane, of one segment, and its tensors by name."""

    begun: Begun
    begin: int
    end: int
    at: dict[str, Tensor]


class StockSteps:
    def __init__(self, optimizer: Optimizer, moments: Moments, stream: SideStream):
        self._optimizer, self.moments, self._stream = optimizer, moments, stream
        self._raw_step = raw_step(optimizer)

    def begun(self, run: LaneRun, host: bool = False) -> Begun:
        """What a stock step of one segment begins with, whichever part of it comes first. `host`: it runs there."""
        (segment,) = run.segments
        own = vars(self._optimizer).items()
        attributes = {k: v for k, v in own if k not in _OWN and not isinstance(v, types.MethodType)}
        attributes = on_host(attributes) if host else attributes
        return Begun(run, dict(self._optimizer.state.get(segment, {})), list(self.moments.names(segment)), attributes)

    def step(
        self, lane: Lane, chunks: Sequence[Chunk], groups: list[dict[str, Any]], scale: Tensor | float | None
    ) -> None:
        """Chunks of different segments by one step. A stand-in of the optimizer steps, so that the user's own is not
        touched meanwhile; counters are the same before each chunk of a segment, and those of the last are kept."""
        stand_in = object.__new__(type(self._optimizer))
        vars(stand_in).update(chunks[0].begun.attributes)
        stand_in.state = defaultdict(dict)
        given: dict[int, list[nn.Parameter]] = defaultdict(list)
        params: list[nn.Parameter] = []
        if isinstance(scale, Tensor):
            self._stream.uses(scale)
        for chunk in chunks:
            param = self._stand_in(lane, chunk, scale)
            counters = {k: v.clone() if isinstance(v, Tensor) else v for k, v in chunk.begun.counters.items()}
            moments = {name: self._decoded(chunk.at, name) for name in chunk.begun.names}
            stand_in.state[param] = {**counters, **moments}
            given[chunk.begun.run.group].append(param)
            params.append(param)
        stand_in.param_groups = [{**groups[number], "params": some} for number, some in given.items()]
        self._raw_step(stand_in)
        for chunk, param in zip(chunks, params):
            self._finish(lane, chunk, param, stand_in.state[param])

    @staticmethod
    def _stand_in(lane: Lane, chunk: Chunk, scale: Tensor | float | None) -> nn.Parameter:
        """A chunk as a parameter with its gradient."""
        assert lane.master is not None
        values = chunk.at.get("master")
        if values is None:
            numel, device = chunk.end - chunk.begin, chunk.at["compute"].device
            values = torch.empty(numel, dtype=lane.master.dtype, device=device)
            join_into(values, chunk.at["compute"], chunk.at["remainder"])
        param = nn.Parameter(values)
        grad = chunk.at["grad"]  # in the master's dtype; memory of its own where it is changed
        param.grad = grad.to(values.dtype) if scale is None else grad.to(values.dtype, copy=True).mul_(scale)
        return param

    def _finish(self, lane: Lane, chunk: Chunk, param: nn.Parameter, state: dict[str, Any]) -> None:
        """After the step: moments, weights and counters to where they belong."""
        run, at, values = chunk.begun.run, chunk.at, param.detach()
        self._keep(lane, run, chunk.begin, chunk.end, at, state)
        if "remainder" in at:
            split_into(at["compute"], at["remainder"], values)
        elif "compute" in at:
            cast_into(at["compute"], values)
        if chunk.end == run.end:
            (segment,) = run.segments
            self._optimizer.state[segment] = {
                key: value for key, value in state.items() if not is_moment(key, value, param)
            }

    @staticmethod
    def _decoded(at: dict[str, Tensor], name: str) -> Tensor:
        codes = at[name]
        if codes.dtype in (torch.float32, torch.float64):
            return codes
        values = torch.empty(codes.shape, device=codes.device)
        small.decode_into(values, codes, at.get(f"{name} scales"))
        return values

    def _keep(
        self, lane: Lane, run: LaneRun, begin: int, end: int, at: dict[str, Tensor], state: dict[str, Any]
    ) -> None:
        """The moments of a chunk after its step, back into their format. Those that are new begin to rest."""
        (segment,) = run.segments
        for name, value in state.items():
            if not (type(value) is Tensor and value.is_floating_point() and value.dim() > 0):
                continue
            if name not in at:
                self._begin(lane, run, begin, end, name, value)
            elif at[name].data_ptr() != value.data_ptr():
                _encode(at[name], at.get(f"{name} scales"), value, name)
            if name not in self.moments.names(segment):
                self.moments.names(segment).append(name)

    def _begin(self, lane: Lane, run: LaneRun, begin: int, end: int, name: str, value: Tensor) -> None:
        """A first step made this state: write it to where it rests from now on."""
        moment = self.moments.need(lane, name, value.dtype)
        codes, scales = moment.codes.tensor[begin:end], None
        if moment.scales is not None:
            scales = moment.scales.tensor[self.moments.scale_range(lane, run.where, begin, end)]
        made = torch.empty_like(codes, device=value.device)
        made_scales = None if scales is None else torch.empty_like(scales, device=value.device)
        _encode(made, made_scales, value, name)
        codes.copy_(made)
        if scales is not None and made_scales is not None:
            scales.copy_(made_scales)


def on_host(values: dict[str, Any]) -> dict[str, Any]:
    """With tensors of a device (a learning rate, a gradient scaler's) there: read now, and not when a step looks."""
    return {k: v.cpu() if isinstance(v, Tensor) and v.device.type != "cpu" else v for k, v in values.items()}


_OWN = (*REPLACED, "state", "param_groups")


def _encode(codes: Tensor, scales: Tensor | None, value: Tensor, name: str) -> None:
    if codes.dtype == value.dtype:
        codes.copy_(value)
    else:
        small.encode_into(codes, scales, value.float(), name not in UNSIGNED)
