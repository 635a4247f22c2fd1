"""The lane: the parameters of one unit that share dtypes and trainability, in one flat buffer.

    full    compute dtype, whole lane, what forward reads   FULL; freed between uses where compute rests SLICE
    params  the user's parameters, laid over `full`         Whole while it is here, Away else (memory/param.py)
    mine    compute dtype, what this rank keeps of it       a part of `full`; where that is freed, memory of its own
                                                            on whatever tier it rests
    master  what the optimizer updates (fp32 or wider)      see tiers/master.py; frozen: only where compute rounds
    grads   see grads.py; only where the lane is trainable

Which stretch of the lane each of these is, by axes of ranks, its spec says. What is updated here may be less than
`mine` (parameters cut inside a node, the update across nodes too): then publishing brings `mine` up to date, and
gathering spreads it.

Packs the user's parameters at construction. Knows its axes to start gathers with; decides nothing about when.

Note [Shown and hidden]
~~~~~~~~~~~~~~~~~~~~~~~
A parameter is Whole only while its bytes are here and nobody writes them. So a lane hides its parameters when it is
freed, and when an update or a publish of its slices is left under way beside the computation; `wait()` shows them
again. Whoever reads a hidden parameter comes to `wait()`, by way of a gather where the bytes are on other ranks. Other
tensors over the lane cannot be hidden: where somebody has one (Note [Lent] in memory/buffers.py), nothing is left under
way.

Note [Written by the user]
~~~~~~~~~~~~~~~~~~~~~~~~~~
In-place operations on a parameter are torch's own and change compute, on every rank alike. Whether there were any
is told by the parameter's version counter, which only the engine moves otherwise. The master follows:
- compute is the master's own memory: nothing to do;
- compute is freed: the elements of this rank's slice that differ from what was gathered are carried over before the
  bytes go, into slice and master;
- a wide master: elements whose cast is no longer what compute holds take compute's value;
- a split master: compute is its upper half, and every remainder fits every compute (Note [the split master] in
  memory/formats.py), so the master is within half a unit of compute's last place of what was written.
Assignments of whole values (`copy_`, `fill_`, `data = ...`, a load) go to the master as they are, by `store`.

Note [Parted]
~~~~~~~~~~~~~
What travels as codes arrives rounded, and every rank computes with what arrived, the owner too. Where new values travel
once per step into what all ranks keep (stages 1 and 2; across nodes) the owner's part of that would be compute, which
is the master itself or its upper half, and the master must never be what was decoded. So such a lane is parted: what
is updated here has memory of its own, and what forward reads is an image of it. Where differences are sent a copy of
this rank's part of the image (`_told`) says what a user has written into it since. At stage 3 `mine` is memory of its
own anyway.

Note [Delayed]
~~~~~~~~~~~~~~
With delay=1 an update runs while the next step computes, so it must not write what that step reads: the master
then has a compute of its own beside the lane's. `catch_up()` copies it over, at the step after the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeor.comm import along, verbs
from zeor.comm.axes import Axes
from zeor.comm.observe import Place
from zeor.comm.wires import Coded
from zeor.layout import Segment
from zeor.memory import param as parameters
from zeor.memory.buffers import FullBuffer, Ledger, lasting
from zeor.memory.formats import cast_into
from zeor.memory.placed import is_placed, local_tensor
from zeor.spec.lane_spec import LaneSpec
from zeor.spec.wires import differs
from zeor.step.grads import GradLane
from zeor.tiers.master import Master
from zeor.tiers.rest import LaneRest, Rest
from zeor.tiers.streams import current_event


class Lane:
    coded = False  # compute is 8-bit codes: see coded.py

    def __init__(self, spec: LaneSpec, values: Sequence[Tensor], axes: Axes, ledger: Ledger, rest: LaneRest):
        self.spec, self.key, self.column, self.layout = spec, spec.key, spec.column, spec.layout
        self.axes, self.rest = axes, rest
        self.place: Place  # its unit's name, and which of its lanes it is
        self.frees, self.updates_whole, self.publishes = spec.frees, spec.updates_whole, spec.publishes
        key = spec.key
        self.full = FullBuffer(self.layout.numel, key.compute_dtype, axes.device, ledger if self.frees else None)
        self.grads = GradLane(spec, axes, ledger, rest) if key.trainable else None
        self.master: Master | None = None
        self._lags: Master | None = None  # the master, where compute is one update behind it
        self._behind = False  # an update was begun that forward does not see yet
        self._move: along.Gathering | Brought | None = None
        self._publishing: along.Gathering | None = None  # into `mine`, where that is memory of its own
        self.parted = spec.parted  # see Note [Parted]
        self.updated, self.fine = spec.span("update", axes.coords), spec.span("fine", axes.coords)
        self.kept = spec.span("compute", axes.coords) if self.frees else self.updated  # what `mine` is
        self._bytes = self.full.flat.view(torch.uint8)  # made once: see verbs.Parts
        self._ledger = ledger
        self._told: Tensor | None = None  # of `mine`, what the others have: see Note [Parted]
        self._pack(values, ledger)
        self._gather_legs = self.coded_legs("compute" if self.frees else "update")
        self._sent = along.parts_of(axes, self._gather_legs, self.full.flat)
        self._publish_legs = self.coded_legs("update", "compute") if self.frees else []
        self._shared = along.parts_of(axes, self._publish_legs, self.mine, self.kept.begin)
        self.parts = [self.full.tensor(at, shape) for at, shape in zip(self.layout.offsets, self.layout.shapes)]
        self.params: list[nn.Parameter] = []
        self._classes: list[tuple[type, type]] = []  # (Whole, Away) of each
        self._locals: list[Tensor] = []  # of parameters that are DTensors
        self._versions: list[int] = []  # as the engine left them
        self.shown = True
        self.looked_at = False  # somebody has a tensor over it, as the step under way found it

    def legs(self, role: str, to: str = "full") -> list[along.Leg]:
        """The gathers from what each rank holds of a role to what it holds of another, or to everything."""
        spec, grid = self.spec, self.spec.grid
        cut = grid.every if role == "fine" else spec.table.cut(role)
        return along.path(self.axes, grid, self.layout, cut, along.WHOLE if to == "full" else spec.table.cut(to))

    def coded_legs(self, role: str, to: str = "full") -> list[along.Leg]:
        """The same, as they travel in a step: by codes, where the lane's wires say so."""
        travels = role == "compute" or self.parted
        codecs = self.spec.wires.gather if travels else (None, None)
        inside, across = (
            None if codec is None else Coded(codec, self.layout.slice_numel, self._ledger) for codec in codecs
        )
        legs = along.coded(self.legs(role, to), (inside, across))
        for number, leg in enumerate(legs):
            if number == 0 and role == "update" and leg.coded is not None and differs(leg.coded.codec):
                legs[0] = leg._replace(coded=replace(leg.coded, differs=True))
        return legs

    def follow(self, spec: LaneSpec) -> None:
        """It travels by other wires from here on. Where ranks keep what travels, somebody publishes it anew."""
        self.settle()
        self.keep_writes()
        self.spec = spec
        self._gather_legs = self.coded_legs("compute" if self.frees else "update")
        self._publish_legs = self.coded_legs("update", "compute") if self.frees else []
        self._told = self.mine.clone() if self.parted and spec.differs else None
        if self.grads is not None:
            self.grads.follow(spec)

    # ---- parameters

    def adopt(
        self,
        params: Sequence[nn.Parameter],
        classes: Sequence[tuple[type, type]],
        blank: Callable[[int], bool] | None = None,
    ) -> None:
        """The user's parameters lie over this lane from now on, with its values. `classes` is empty for parameters
        that stay plain; `blank` tells of those that have no values yet."""
        self._blank = blank
        for param, part in zip(params, self.parts):
            parameters.lay(param, part)
        self.params, self._classes = list(params), list(classes)
        self.note_versions()
        wrappers = {index: param for index, param in enumerate(self.params) if is_placed(param)}
        self.full.watch(self._watched(), self.layout.offsets, wrappers)
        self._locals = [self.parts[index] for index in wrappers]
        self._dress(True)

    def _watched(self) -> Sequence[Tensor]:
        """The tensors over `full` by which the engine knows who else looks at it."""
        return [local_tensor(param) for param in self.params] if any(map(is_placed, self.params)) else self.params

    def readable(self, param: int) -> Tensor:
        """What a read of a parameter sees, once its bytes are here."""
        return self.params[param]

    def recode(self) -> None:
        """Compute follows the master where the master alone was changed, on every rank: see coded.py."""

    def _dress(self, here: bool) -> None:
        self.shown = here
        self.dress()

    def dress(self) -> None:
        """Each parameter in the class that says where its bytes are."""
        for param, (whole, away) in zip(self.params, self._classes):
            param.__class__ = whole if self.shown else away
        if self._blank is not None and self.shown:
            for index, (_, away) in enumerate(self._classes):
                if self._blank(index):
                    self.params[index].__class__ = away

    def show(self) -> None:
        if not self.shown:
            self._dress(True)

    def hide(self) -> None:
        """See Note [Shown and hidden]."""
        if self.shown:
            self._dress(False)

    def note_versions(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for param in self.params]

    def changed(self, params: Sequence[int] | None = None) -> None:
        """The engine gave these parameters (or all) new values: a graph from before is stale."""
        chosen = self.params if params is None else [self.params[index] for index in params]
        torch.autograd.graph.increment_version([*chosen, *self._locals])
        self.note_versions()

    def keep_writes(self) -> None:
        """What the user wrote into parameters goes to slice and master: see Note [Written by the user]."""
        if self.shown:
            written = [i for i, (param, seen) in enumerate(zip(self.params, self._versions)) if param._version != seen]
            if written:
                self._take_over(written)

    @torch.no_grad()
    def _take_over(self, written: Sequence[int]) -> None:
        self.note_versions()
        if self.frees:
            own, before = self.updated.within(self.kept), self._seen(self.mine, self._gather_legs)
            self._carry(written, before[own.begin : own.end])
            if self.updated != self.kept:  # every rank has written the same
                for segment in self.layout.segments_in(self.kept):
                    if segment.param in written:
                        at = slice(segment.offset, segment.offset + segment.numel)
                        now = self.full.flat[self.kept.begin : self.kept.end][at].to(self.mine.device)
                        self.mine[at] = torch.where(_differ(now, before[at]), now, self.mine[at])
        elif self.parted:
            self._carry(written, self._seen(self.mine, self._gather_legs) if self._told is None else self._told)
        elif self.master is not None and self.master.format == "wide":
            cast = torch.empty_like(self.master.compute.tensor, device=self.axes.device)
            cast_into(cast, self.master.values if not self.master.away else self._fetched())
            self._carry(written, cast)

    @staticmethod
    def _seen(values: Tensor, legs: Sequence[along.Leg]) -> Tensor:
        """What all ranks have of these values, when they have come along these legs."""
        for leg in legs:
            values = values if leg.coded is None else leg.coded.image(values)
        return values

    def _fetched(self) -> Tensor:
        assert self.master is not None
        values = torch.empty(self.master.numel, dtype=self.master.dtype, device=self.axes.device)
        self.master.read(0, values)
        return values

    def _carry(self, written: Sequence[int], before: Tensor) -> None:
        """Elements of these parameters that are not what they were, in what this rank updates."""
        for segment in self.segments:
            if segment.param in written:
                at = slice(segment.offset, segment.offset + segment.numel)
                flat = self.part(self.full.flat, segment.param)
                now = flat[segment.start : segment.start + segment.numel]
                old = before[at].to(now.device)
                differ = _differ(now, old)
                if bool(differ.any()):
                    exact = now.to(self.key.master_dtype or now.dtype)
                    if self.master is not None:
                        kept = torch.empty_like(exact)
                        self.master.read(segment.offset, kept)
                        exact = torch.where(differ, exact, kept)
                    self._keep(segment.offset, exact)

    # ---- packing

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
        sent = self._bytes if flat is self.full.flat else flat
        verbs.broadcast(self.axes.everyone, sent, "broadcast of rank 0's parameters")
        if flat is not self.full.flat:
            self._cast_whole(flat)
        self._settle(flat, ledger)

    def _cast_whole(self, flat: Tensor) -> None:
        """Compute of the whole lane from its exact values."""
        cast_into(self.full.flat, flat)

    def _pack_nothing(self, ledger: Ledger) -> None:
        """Zeros at rest. `full` is allocated but never written, so on a host it costs no page."""
        self._settle(None, ledger)

    def _settle(self, flat: Tensor | None, ledger: Ledger) -> None:
        """Slices and the master where they rest, of the whole lane's values (None: zeros) in the master's dtype."""
        exact = self._imagine(flat is not None) if self.parted else None
        if self.frees:
            self._mine = self.rest.make("compute", self.kept.numel, self.key.compute_dtype, "compute")
            if flat is not None:
                self._mine.tensor.copy_(self.full.flat[self.kept.begin : self.kept.end])
        elif exact is not None:
            self._mine = Rest(exact)
        else:
            self._mine = Rest(self.full.flat[self.kept.begin : self.kept.end])
        self.is_away = self._mine.away  # `mine` rests on another tier, and is fetched to be gathered
        self._here = self._mine.tensor
        self._written = self._mine  # the part of compute that an update writes
        if self.updated != self.kept:
            own = self.updated.within(self.kept)
            self._written = Rest(self._here[own.begin : own.end] if exact is None else exact)
        if self.key.master_dtype is not None:
            self._settle_master(flat, self.key.master_dtype, ledger)

    def _settle_master(self, flat: Tensor | None, dtype: torch.dtype, ledger: Ledger) -> None:
        updated = self._written
        if flat is None and dtype != self.key.compute_dtype:
            values = lasting(updated.tensor.numel(), dtype, self.axes.device)
        elif flat is None or flat is self.full.flat:  # where compute is the master, they are one memory
            values = updated.tensor.to(self.axes.device)
        elif self.updated.numel == self.layout.numel:
            values = flat
        else:
            values = flat[self.updated.begin : self.updated.end].clone()
        delayed = self.rest.delayed and self.key.trainable
        if delayed:  # see Note [Delayed]
            updated = Rest(torch.empty_like(updated.tensor, device=self.axes.device))
            if values.dtype == updated.dtype:
                values = updated.tensor.copy_(values)
        away = self.key.trainable and self.rest.tiers.master != "device"
        home = functools.partial(self.rest.make, "master") if away else None
        self.master = Master(values, updated, ledger, home, self.rest.wide and self.key.trainable)
        self._lags = self.master if delayed else None

    def _imagine(self, filled: bool) -> Tensor:
        """Of a parted lane: the exact compute that this rank updates, in memory of its own. What it leaves in `full`
        is what the others will have of it: they were all given the same exact values, so nothing travels."""
        flat = self.full.flat
        exact = lasting(self.updated.numel, self.key.compute_dtype, self.axes.device)
        if filled:
            exact.copy_(flat[self.updated.begin : self.updated.end])
            if not self.spec.differs:
                legs = [leg for leg in self.coded_legs("update", "compute") if not (leg.coded and leg.coded.differs)]
                flat.copy_(self._seen(flat, legs))
        if self.spec.differs:
            self._told = exact.clone()
        return exact

    @property
    def lags(self) -> bool:
        """Compute is one update behind the master."""
        return self._lags is not None

    @property
    def mine(self) -> Tensor:
        """This rank's slice of compute; on the host where it rests there or on disk."""
        return self._mine.tensor if self.is_away else self._here

    def read_mine(self, begin: int, end: int) -> Tensor:
        """A range of `mine` to look at, of a file past its map."""
        return self._mine.read(begin, end)

    @torch.no_grad()
    def catch_up(self) -> bool:
        """Forward reads what the last update left: see Note [Delayed]. Whether that is new to it."""
        if self._lags is None:
            return False
        self._arrive()  # a gather of the slice -> new values in it
        self._lags.hold()  # the update -> this copy
        into = self.mine if self._written is self._mine else self._written.tensor
        into.copy_(self._lags.compute.tensor)
        behind, self._behind = self._behind, False
        return behind

    def fall_behind(self) -> None:
        """An update is begun: see Note [Delayed]."""
        self._behind = self.lags

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

    def fine_of(self, values: Tensor) -> Tensor:
        """This rank's fine slice of what it updates: no other rank has the same."""
        own = self.fine.within(self.updated)
        return values[own.begin : own.end]

    @torch.no_grad()
    def store(self, param: int, value: Tensor) -> None:
        """This rank's part of one parameter's full value, into master and compute."""
        self.settle()
        self.keep_writes()
        flat = value.detach().to(self.axes.device, self.key.master_dtype or self.key.compute_dtype).reshape(-1)
        if self.full.inflated:
            cast_into(self.part(self.full.flat, param), flat)
        for segment in self.segments:
            if segment.param == param:
                self._keep(segment.offset, flat[segment.start : segment.start + segment.numel])
        if self.frees and self.updated != self.kept:
            for segment in self.layout.segments_in(self.kept):
                if segment.param == param:
                    into = self.mine[segment.offset : segment.offset + segment.numel]
                    cast_into(into, flat[segment.start : segment.start + segment.numel])
        self.catch_up()
        if self.params:
            self.changed([param])

    @torch.no_grad()
    def store_part(self, offset: int, values: Tensor) -> None:
        """Values of a part of what this rank updates (`offset` as in its segments), into master and compute. Other
        ranks see them where compute rests FULL once the lane is gathered."""
        self.settle()
        self.keep_writes()
        flat = values.detach().to(self.axes.device, self.key.master_dtype or self.key.compute_dtype).reshape(-1)
        self._keep(offset, flat)
        self.catch_up()
        if self.params:
            end = offset + flat.numel()
            self.changed([s.param for s in self.segments if offset < s.offset + s.numel and s.offset < end])

    def _keep(self, offset: int, values: Tensor) -> None:
        if self.master is not None:
            self.master.store(offset, values)
        else:
            updated = self.mine if self._written is self._mine else self._written.tensor
            updated[offset : offset + values.numel()].copy_(values)

    # ---- gather and free

    def start_gather(self, label: str) -> None:
        """SLICE -> FULL; where compute rests FULL this is the publishing of updated slices."""
        lent = self.full.lent if self.frees else self.looked_at
        self._hold_update()  # of the slice -> this gather
        self._finish_publishing()
        if self.frees:
            self._check_unwritten()
            self.full.inflate()
            self.full.ready = False
        self.hide()
        if self.is_away:
            self._move = Brought(self, label)
        else:
            self._move = along.start_gather(self.axes, self._gather_legs, self._sent, self.mine, label)
            if self._move is None:
                self._move = verbs.gather(self.axes.over(along.WHOLE), self.full.flat, self.mine, label)
        if lent:
            self._arrive()  # somebody may read it at any time: the gather -> the reader

    def start_publish(self, label: str) -> None:
        """What was updated here, to all who keep it as compute."""
        if not self.frees:
            self.start_gather(label)
            return
        self._finish_publishing()
        self._hold_update()
        self._publishing = along.start_gather(self.axes, self._publish_legs, self._shared, self._written.tensor, label)

    def publish_anew(self, label: str) -> None:
        """The same, and waits for it. What all ranks have is a function of what is updated here alone then: nothing of
        the past is left in it, so where differences travel in a step, values do so exactly."""
        if self.parted:
            self.bring_anew(label)
        else:
            self.start_publish(label)
        self.wait()

    @torch.no_grad()
    def bring_anew(self, label: str) -> None:
        """That of a parted lane, without a change of its parameters' classes."""
        self.settle()
        legs = self._publish_legs if self.frees else self._gather_legs
        sent, own = (self._shared, self._written.tensor) if self.frees else (self._sent, self.mine)
        first = legs[0]
        if first.coded is not None and first.coded.differs:
            first = first._replace(coded=None)
        found = along.start_gather(self.axes, [first, *legs[1:]], sent, own, label)
        assert found is not None
        found.wait()
        if self._told is not None:
            self._told.copy_(own)

    def _finish_publishing(self) -> None:
        if self._publishing is not None:
            self._publishing.wait()
            self._publishing = None

    def wait(self) -> None:
        """Its parameters may be read, if its bytes are here or on their way."""
        self.settle()
        if self.full.inflated:
            self.show()

    def settle(self) -> None:
        """Nothing is under way, as far as the computation sees."""
        self._hold_update()  # of compute -> whoever reads it
        self._finish_publishing()
        self._arrive()

    def _hold_update(self) -> None:
        """The computation waits for an update under way, if compute follows it at once."""
        if self.master is not None and self.master.pending is not None and self._lags is None:
            self._hold(self.master)

    def _hold(self, master: Master) -> None:
        observer = self.axes.everyone.observer
        waited = observer.waits("update", self.place.update) if observer.on else None
        master.hold()
        if waited is not None:
            observer.arrived(waited)

    def look(self) -> None:
        """A step begins: while it runs, its own tensors would be counted too."""
        if not self.frees:
            self.looked_at = self.full.lent

    @property
    def under_way(self) -> bool:
        """Compute is being written beside the computation."""
        pending = self.master is not None and self.master.pending is not None and self._lags is None
        return self._move is not None or (pending and not self.frees)

    def leave_under_way(self) -> None:
        """An update or a publish was begun: its parameters are hidden until somebody waits for it."""
        if not self.under_way:
            return
        if self.looked_at or not self._classes:
            self.wait()
        else:
            self.hide()

    def _arrive(self) -> None:
        """Nothing is being gathered."""
        if self._move is not None:
            self._move.wait()
            self._move = None
            self.full.ready = self.full.inflated
            if self._told is not None:
                self._told.copy_(self.full.flat[self.updated.begin : self.updated.end])

    def free(self) -> None:
        if self.frees:
            self._arrive()  # an update of the slice, which is other memory, may go on
            if self.full.inflated:
                self.keep_writes()
            self.hide()
            self.full.free()
        else:
            self.wait()

    @torch.no_grad()
    def blank(self) -> None:
        """Zeros in the place of bytes that are away, for a computation whose values nobody uses. Nothing is sent."""
        if self.frees and not self.full.inflated:
            self.settle()
            self.full.inflate()
            self.full.flat.zero_()
            self.full.ready = True
            self.show()

    def _check_unwritten(self) -> None:
        """What somebody wrote into memory that was lent while its parameters were away would be lost here."""
        if self.full.inflated or not self._versions:
            return
        with torch._C.DisableTorchFunctionSubclass():
            changed = any(param._version != seen for param, seen in zip(self.params, self._versions))
        if changed:
            self.note_versions()
            raise RuntimeError(
                "A tensor over sharded parameters, kept from an earlier forward, was written to while its unit was "
                "away, and the change would be lost; write inside `with zeor.full_params(model, write=True):`."
            )

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
        return self.layout.segments_in(self.updated)

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
        self.settle()
        self.keep_writes()
        if self.master is None:
            flat = self.gather_compute()
        else:
            self.master.fetch()
            flat = self.all_of(self.master.values, "update", "gather of full parameters")
            self.master.spill()
        return flat

    def gather_compute(self) -> Tensor:
        """The whole lane of what forward reads, in memory of its own; a collective where it is freed."""
        if not self.frees:
            return self.full.flat.clone()
        return self.all_of(self.mine.to(self.axes.device), "compute", "gather of full parameters")

    def all_of(self, mine: Tensor, role: str, label: str) -> Tensor:
        """The whole lane of what each rank holds as it holds this role, in memory of its own."""
        return along.all_of(self.axes, self.legs(role), self.layout, mine, label)

    # ---- gradients

    def gather_grads(self) -> list[Any]:
        """Every gradient of the lane, full and flat; a collective where they rest as slices."""
        assert self.grads is not None
        return self.grads.gather()

    # ---- bytes

    def on_device(self) -> Iterator[Tensor]:
        """Between steps, without gradients: everything whose values count and that does not rest elsewhere."""
        if not self.frees:
            yield self.full.flat
        rests = [self._mine, self._written]
        if self.master is not None:
            rests += [self.master.compute, *self.master.arrays().values()]
        yield from (rest.tensor for rest in rests if not rest.away)
        if self._told is not None:
            yield self._told
        if self.grads is not None:
            yield from self.grads.residuals()

    @property
    def is_watched(self) -> bool:
        """Somebody but the engine looks at the lane's memory: see Note [Lent] in memory/buffers.py."""
        return self.full.lent if not self.frees else not self.full.give_back()

    def nbytes(self) -> dict[str, int]:
        """Resident bytes by role, as allocated; a master that is compute counts as compute alone."""
        return {
            "compute": self._compute_nbytes(),
            "master": self.master.nbytes() if self.master else 0,
            "grad": self.grads.nbytes() if self.grads else 0,
            "residual": self.grads.residual_nbytes() if self.grads else 0,
        }

    def _compute_nbytes(self) -> int:
        found = self.mine.nbytes if self.is_away else self.mine.untyped_storage().nbytes()
        if self.parted:  # see Note [Parted]
            found += self._written.tensor.nbytes if self.frees else self.full.nbytes
        return found + (0 if self._told is None else self._told.nbytes)


def _differ(now: Tensor, before: Tensor) -> Tensor:
    return now.ne(before) & ~(now.isnan() & before.isnan())


class Brought:
    """A slice that rests elsewhere, on its way into the full buffer, and gathered there. As a verbs.Move."""

    def __init__(self, lane: Lane, label: str):
        self._lane, self._label = lane, label
        self._stream = lane.rest.store.fetches
        self._read, self._source = None, lane.mine
        file = lane._mine.file
        if file is not None:
            self._source = torch.empty_like(lane.mine, pin_memory=lane.axes.device.type != "cpu")
            self._read = file.read_async(0, self._source.numel(), self._source)
        current_event(lane.axes.device).hold(self._stream)  # earlier use of the buffer's memory -> this copy
        if self._read is None or lane.axes.everyone.size > 1:  # gathers must start in the order they are asked for
            self._finish_read()
            self._copy()

    def _finish_read(self) -> None:
        if self._read is not None:
            self._read.result()
            self._read = None

    def _copy(self) -> None:
        lane = self._lane
        with self._stream():
            own = lane.full.flat[lane.kept.begin : lane.kept.end]
            own.copy_(self._source, non_blocking=True)
            self._gather = along.start_gather(lane.axes, lane._gather_legs, lane._sent, own, self._label)
            self._copied = self._stream.record_event()

    def wait(self) -> None:
        if self._read is not None:
            self._finish_read()
            self._copy()
        self._copied.hold()  # copy -> whoever reads the parameters
        if self._gather is not None:
            self._gather.wait()
