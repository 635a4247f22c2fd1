"""The lane: the parameters of one unit that share dtypes and trainability, in one flat buffer.

    full    compute dtype, whole lane, what forward reads   FULL; freed between uses where compute rests SLICE
    mine    compute dtype, this rank's slice                a part of `full`; where that is freed, memory of its own
                                                            on whatever tier it rests
    master  what the optimizer updates (fp32 or wider)      see memory/master.py; frozen: only where compute rounds
    grads   see grads.py; only where the lane is trainable

Packs the user's parameters at construction and unpacks them at the end. Knows the mesh to start
gathers with; decides nothing about when.

Note [Delayed]
~~~~~~~~~~~~~~
With delay=1 an update runs while the next step computes, so it must not write what that step reads: the master
then has a compute of its own beside the lane's. `catch_up()` copies it over, at the step after the next.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeor.comm import verbs
from zeor.comm.mesh import Mesh
from zeor.layout import LaneLayout, Segment, lay_out
from zeor.memory.buffers import FullBuffer, Ledger, lasting
from zeor.memory.formats import cast_into
from zeor.memory.lines import current_mark
from zeor.memory.master import Master
from zeor.memory.rest import LaneRest, Rest, Store, Tiers
from zeor.memory.roles import Column, Residency
from zeor.runtime.grads import GradLane


@dataclass(frozen=True)
class LaneKey:
    """What parameters must share to lie in one lane. master_dtype None: compute is the exact value and nothing
    updates it. A frozen lane has a master where compute alone would be a rounded value."""

    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype | None
    trainable: bool


class Lane:
    def __init__(
        self,
        key: LaneKey,
        params: Sequence[Tensor],
        column: Column,
        mesh: Mesh,
        ledger: Ledger,
        rest: LaneRest | None = None,
    ):
        self.key, self.column, self.mesh = key, column, mesh
        self.rest = rest or LaneRest(Tiers(), Store(None, mesh.device), "")
        self.layout: LaneLayout = lay_out([p.shape for p in params], mesh.world)
        away = self.rest.tiers.compute != "device"
        self.frees = column.compute is Residency.SLICE and (mesh.world > 1 or away)
        self.updates_whole = column.update is Residency.FULL
        self.full = FullBuffer(self.layout.numel, key.compute_dtype, mesh.device, ledger if self.frees else None)
        self.grads = (
            GradLane(self.layout, key.reduce_dtype, column, mesh, ledger, self.rest) if key.trainable else None
        )
        self.master: Master | None = None
        self._lags: Master | None = None  # the master, where compute is one update behind it
        self.behind = False  # an update was begun that forward does not see yet
        self._pack(params, ledger)
        self.full_params = [
            nn.Parameter(self.full.tensor(offset, shape), requires_grad=key.trainable)
            for offset, shape in zip(self.layout.offsets, self.layout.shapes)
        ]
        self._move: verbs.Move | Brought | None = None

    # ---- pack and unpack

    @torch.no_grad()
    def _pack(self, params: Sequence[Tensor], ledger: Ledger) -> None:
        """Rank 0's values into the buffers of every rank, by way of the master where there is one. What is on the
        meta device has no values yet: zeros stand for them, and a lane of such parameters alone moves nothing."""
        if params and all(param.is_meta for param in params):
            return self._pack_nothing(ledger)
        flat = self.full.flat
        if self.key.master_dtype not in (None, self.key.compute_dtype):
            flat = torch.empty_like(flat, dtype=self.key.master_dtype)
        self.fill(flat, params)
        verbs.broadcast(self.mesh, flat, "broadcast of rank 0's parameters")
        if flat is not self.full.flat:
            cast_into(self.full.flat, flat)
        self._settle(flat, ledger)

    def _pack_nothing(self, ledger: Ledger) -> None:
        """Zeros at rest. `full` is allocated but never written, so on a host it costs no page."""
        self._settle(None, ledger)

    def _settle(self, flat: Tensor | None, ledger: Ledger) -> None:
        """Slices and the master where they rest, of the whole lane's values (None: zeros) in the master's dtype."""
        if self.frees:
            self._mine = self.rest.make("compute", self.layout.slice_numel, self.key.compute_dtype, "compute")
            if flat is not None:
                self._mine.tensor.copy_(self.slice_of(self.full.flat))
        else:
            self._mine = Rest(self.slice_of(self.full.flat))
        if self.key.master_dtype is None:
            return
        updated = Rest(self.full.flat) if self.updates_whole else self._mine
        if flat is None and self.key.master_dtype != self.key.compute_dtype:
            values = lasting(updated.tensor.numel(), self.key.master_dtype, self.mesh.device)
        elif flat is None or flat is self.full.flat:
            values = updated.tensor.to(self.mesh.device)
        elif self.updates_whole or self.mesh.world == 1:
            values = flat
        else:
            values = self.slice_of(flat).clone()
        delayed = self.rest.delayed and self.key.trainable
        if delayed:  # see Note [Delayed]
            updated = Rest(torch.empty_like(updated.tensor, device=self.mesh.device))
            if values.dtype == updated.dtype:
                values = updated.tensor.copy_(values)
        away = self.key.trainable and self.rest.tiers.master != "device"
        home = functools.partial(self.rest.make, "master") if away else None
        self.master = Master(values, updated, ledger, home, self.rest.wide and self.key.trainable)
        self._lags = self.master if delayed else None

    @property
    def lags(self) -> bool:
        """Compute is one update behind the master."""
        return self._lags is not None

    @property
    def mine(self) -> Tensor:
        """This rank's slice of compute; on the host where it rests there or on disk."""
        return self._mine.tensor

    @torch.no_grad()
    def catch_up(self) -> bool:
        """Forward reads what the last update left: see Note [Delayed]. Whether that is new to it."""
        if self._lags is None:
            return False
        self._arrive()  # a gather of the slice -> new values in it
        self._lags.hold()  # the update -> this copy
        into = self.full.flat if self.updates_whole else self.mine
        into.copy_(self._lags.compute.tensor)
        behind, self.behind = self.behind, False
        return behind

    def fill(self, flat: Tensor, params: Sequence[Tensor]) -> None:
        """Parameters side by side; gaps, and parameters without values, are zero."""
        for begin, end in self.layout.gaps():
            flat[begin:end].zero_()
        for param, value in enumerate(params):
            if value.is_meta:
                self.part(flat, param).zero_()
            else:
                self.part(flat, param).view(value.shape).copy_(value)

    def part(self, flat: Tensor, param: int) -> Tensor:
        begin = self.layout.offsets[param]
        return flat[begin : begin + self.layout.numels[param]]

    def slice_of(self, flat: Tensor) -> Tensor:
        begin = self.mesh.rank * self.layout.slice_numel
        return flat[begin : begin + self.layout.slice_numel]

    @torch.no_grad()
    def store(self, param: int, value: Tensor) -> None:
        """This rank's part of one parameter's full value, into master and compute."""
        self.wait()
        flat = value.detach().to(self.mesh.device, self.key.master_dtype or self.key.compute_dtype).reshape(-1)
        if not self.frees:
            cast_into(self.part(self.full.flat, param), flat)
        for segment in self.segments:
            if segment.param == param:
                self._keep(segment.offset, flat[segment.start : segment.start + segment.numel])
        self.catch_up()

    @torch.no_grad()
    def store_part(self, offset: int, values: Tensor) -> None:
        """Values of a part of what this rank updates (`offset` as in its segments), into master and compute. Other
        ranks see them where compute rests FULL once the lane is gathered."""
        self.wait()
        flat = values.detach().to(self.mesh.device, self.key.master_dtype or self.key.compute_dtype).reshape(-1)
        self._keep(offset, flat)
        self.catch_up()

    def _keep(self, offset: int, values: Tensor) -> None:
        if self.master is not None:
            self.master.store(offset, values)
        else:
            updated = self.full.flat if self.updates_whole else self.mine
            updated[offset : offset + values.numel()].copy_(values)

    # ---- gather and free

    def start_gather(self, label: str) -> None:
        """SLICE -> FULL; where compute rests FULL this is the publishing of updated slices."""
        if self.master is not None and self._lags is None:
            self.master.hold()  # update of the slice -> this gather
        if self.frees:
            self.full.inflate()
        if self._mine.away:
            self._move = Brought(self, label)
        else:
            self._move = verbs.gather(self.mesh, self.full.flat, self.mine, label)

    def wait(self) -> None:
        if self.master is not None and self._lags is None:
            self.master.hold()  # update of compute -> whoever reads it
        self._arrive()

    def _arrive(self) -> None:
        """Nothing is being gathered."""
        if self._move is not None:
            self._move.wait()
            self._move = None

    def free(self) -> None:
        if self.frees:
            self._arrive()  # an update of the slice, which is other memory, may go on
            self.full.free()
        else:
            self.wait()

    def retire(self) -> None:
        """Its parameters live in other lanes from now on. `full` is gathered and left to whoever still reads it: the
        graph of an earlier forward, or nobody."""
        if self.frees:
            self.start_gather("gather of parameters that move to another lane")
            self.wait()
            self.full.let_go()

    # ---- update

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What this rank's optimizer works on."""
        return self.layout.whole() if self.updates_whole else self.layout.segments(self.mesh.rank)

    def master_part(self, segment: Segment) -> Tensor:
        """One segment of the master; with the parameter's own shape where it is the whole parameter."""
        assert self.master is not None
        whole = segment.numel == self.layout.numels[segment.param]
        return self.master.part(segment.offset, self.layout.shapes[segment.param] if whole else (segment.numel,))

    @torch.no_grad()
    def read_master(self, segment: Segment, into: Tensor) -> None:
        """One segment of the master, flat, into memory of the caller's; nothing else is fetched."""
        assert self.master is not None
        self.master.read(segment.offset, into)

    @torch.no_grad()
    def gather_master(self) -> Tensor:
        """The exact values of the whole lane, in memory of their own; a collective where they rest as slices."""
        self.wait()
        if self.master is None:
            own, whole = self.mine.to(self.mesh.device), None if self.frees else self.full.flat
        else:
            self.master.fetch()
            own = self.master.values
            whole = own if self.updates_whole or self.mesh.world == 1 else None
        if whole is None:
            flat = torch.empty(self.layout.numel, dtype=own.dtype, device=own.device)
            verbs.gather(self.mesh, flat, own, "gather of full parameters").wait()
        else:
            flat = whole.clone()
        if self.master is not None:
            self.master.spill()
        return flat

    # ---- gradients

    def gather_grads(self) -> list[Any]:
        """Every gradient of the lane, full and flat; a collective where they rest as slices."""
        grads = self.grads
        assert grads is not None and grads.reduced
        grads.apply_scales()
        if grads.adopts:
            return [grads.parts.get(param) for param in range(len(self.layout.shapes))]
        total = grads.sum
        assert total is not None
        if self.column.grad is not Residency.FULL and self.mesh.world > 1:
            full = torch.empty(self.layout.numel, dtype=total.dtype, device=total.device)
            total = verbs.gather(self.mesh, full, total.contiguous(), "gather of gradients").wait()
        return [self.part(total, param) for param in range(len(self.layout.shapes))]

    # ---- bytes

    def nbytes(self) -> dict[str, int]:
        """Resident bytes by role, as allocated; a master that is compute counts as compute alone."""
        return {
            "compute": self.mine.nbytes if self._mine.away else self.mine.untyped_storage().nbytes(),
            "master": self.master.nbytes() if self.master else 0,
            "grad": self.grads.nbytes() if self.grads else 0,
        }


class Brought:
    """A slice that rests elsewhere, on its way into the full buffer, and gathered there. As a verbs.Move."""

    def __init__(self, lane: Lane, label: str):
        self._lane, self._label = lane, label
        self._line = lane.rest.store.fetches
        self._read, self._source = None, lane.mine
        file = lane._mine.file
        if file is not None:
            self._source = torch.empty_like(lane.mine, pin_memory=lane.mesh.device.type != "cpu")
            self._read = file.read_async(0, self._source.numel(), self._source)
        current_mark(lane.mesh.device).hold(self._line)  # earlier use of the buffer's memory -> this copy
        if self._read is None or lane.mesh.world > 1:  # gathers must start in the order they are asked for
            self._finish_read()
            self._copy()

    def _finish_read(self) -> None:
        if self._read is not None:
            self._read.result()
            self._read = None

    def _copy(self) -> None:
        lane = self._lane
        with self._line():
            own = lane.slice_of(lane.full.flat)
            own.copy_(self._source, non_blocking=True)
            self._gather = verbs.gather(lane.mesh, lane.full.flat, own, self._label)
            self._mark = self._line.mark()

    def wait(self) -> Tensor:
        if self._read is not None:
            self._finish_read()
            self._copy()
        self._mark.hold()  # copy -> whoever reads the parameters
        return self._gather.wait()
