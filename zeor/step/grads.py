"""The gradient of one lane, from autograd's hands to the sum that the optimizer uses.

    autograd -> buffer (PARTIAL, full size) --reduce--> new part (SLICE) --add--> sum (SLICE, or FULL)
                Arrival                     Reduction                             Sum

Every backward outside no_sync reduces only its new gradient and adds it to the running sum; inside no_sync the new
gradient stays PARTIAL, summed in fp32. That one rule is what makes the stages equal in bits. `GradLane` is what others
talk to; where a new gradient waits is decided in its `collect`. Each field is written by its own class and by nobody
else: tests/step/test_grads.py checks it.

Note [Adopted gradients]
~~~~~~~~~~~~~~~~~~~~~~~~
In a world of one there is nothing to send, so nothing needs to lie side by side: where no full-size buffer is kept, the
tensors autograd made are adopted as they are, and the sum is held by parameter in place of one tensor.

Note [Direct gradients]
~~~~~~~~~~~~~~~~~~~~~~~
What is computed on a slice (a penalty's gradient) is final where it is made: it is neither reduced nor divided by the
world. It waits beside the sum until the backward that reduces is over, and is added then, in one order whatever was
reduced when. Where the sum is one over items that carries 1 / count as a remembered factor (mean_loss.py) it is added
`count` times, and taken off before the factor changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from zeor.comm import along, verbs
from zeor.comm.axes import Axes
from zeor.comm.observe import Place
from zeor.layout import Segment
from zeor.memory.buffers import Ledger, lasting
from zeor.spec.lane_spec import RESIDUAL, LaneSpec
from zeor.step.grad_wires import GradWires
from zeor.step.resting import WHOLE, RestingGrads
from zeor.tiers.master import Pending
from zeor.tiers.rest import LaneRest, Rest


class State(Enum):
    """How far a lane's gradients are. A sum that is there stays SUMMED while the next backward's part is on its way,
    but where it lies in the kept buffer, which that part fills."""

    EMPTY = "empty"
    ARRIVING = "arriving"  # some came from autograd; there is no sum yet
    IN_FLIGHT = "in flight"  # they are being reduced; there is no sum yet
    UNREDUCED = "unreduced"  # part is not in the sum and waits: of a backward inside no_sync, or direct gradients
    SUMMED = "summed"  # the sum is on the device
    RESTING = "resting"  # the sum is on another tier
    RELEASED = "released"  # used up inside backward; to the user it is there until it is set to None


USABLE = (State.SUMMED, State.RESTING)


class Arrival:
    """What came from autograd and is not reduced yet. PARTIAL, full size."""

    def __init__(self, spec: LaneSpec, axes: Axes, ledger: Ledger):
        count = len(spec.layout.shapes)
        self._layout, self._dtype, self._device, self._ledger = spec.layout, spec.key.reduce_dtype, axes.device, ledger
        self._gaps = list(spec.layout.gaps())
        self._stays = spec.column.grad_buffer
        self._lends = not self._stays and axes.everyone.size > 1  # else it stays, or becomes the sum itself
        self.buffer: Tensor | None = None  # where new gradients arrive
        self.partial: Tensor | None = None  # what no_sync has summed so far; fp32 or wider
        self.aside: dict[int, Tensor] = {}  # by parameter, what came while the buffer was being sent
        self.arrived = [False] * count  # came from autograd in this backward
        self.pending = [False] * count  # came, and is not reduced yet
        self.expects = [True] * count  # it trains on this rank: see freezing.py
        self.trains = [True] * count  # it trains, as all ranks agree
        self.missing = count  # how many are expected in this backward and did not come yet
        if self._stays:
            self.open_buffer()

    def begin(self) -> None:
        self.arrived[:] = [False] * len(self.arrived)
        self.missing = sum(self.expects)

    def expect(self, param: int, flag: bool) -> None:
        self.expects[param] = flag
        self.missing = sum(expected and not came for expected, came in zip(self.expects, self.arrived))

    def agree(self, param: int, trains: bool) -> None:
        self.trains[param] = trains

    def open_buffer(self) -> None:
        if self.buffer is None:
            size = self._layout.numel, self._dtype, self._device
            self.buffer = self._ledger.take("grad", *size) if self._lends else lasting(*size)

    def open_partial(self) -> None:
        if self.partial is None:
            self.partial = self._ledger.take("partial", self._layout.numel, wide(self._dtype), self._device).zero_()

    def take(self, param: int, grad: Tensor) -> None:
        """Into what no_sync sums, where there is that; else into the buffer."""
        into = self.buffer if self.partial is None else self.partial
        assert into is not None
        begin = self._layout.offsets[param]
        target = into[begin : begin + grad.numel()].view(grad.shape)
        if self.pending[param] or self.partial is not None:
            target.add_(grad)
        else:
            target.copy_(grad)

    def put_aside(self, param: int, grad: Tensor) -> None:
        """It came again while its first part is under way: it is reduced when backward ends."""
        new, held = grad.to(self._dtype).reshape(-1), self.aside.get(param)
        self.aside[param] = new if held is None else held + new

    def came(self, param: int) -> bool:
        """Whether that was the last one expected."""
        if not self.arrived[param]:
            self.arrived[param] = True
            self.missing -= self.expects[param]
        self.pending[param] = True
        return self.missing == 0

    def fill(self) -> Tensor:
        """The buffer to be sent: all that came, and zeros for what did not."""
        buffer = self.buffer
        assert buffer is not None
        if self.partial is not None:
            buffer.copy_(self.partial)
            self._give_partial()
        else:
            for param, pending in enumerate(self.pending):
                if not pending:
                    self._range(buffer, param).zero_()
            for param, grad in self.aside.items():
                self._range(buffer, param).copy_(grad)
            self.aside.clear()
        for begin, end in self._gaps:  # what a sum by codes left there would be in the next one's blocks
            buffer[begin:end].zero_()
        self._sent()
        return buffer

    def take_partial(self) -> list[tuple[int, Tensor]]:
        """What no_sync summed, by parameter, through the reduce dtype as if it were sent."""
        found = []
        if self.partial is not None:
            pending = [param for param, pending in enumerate(self.pending) if pending]
            found = [(param, self._range(self.partial, param).to(self._dtype, copy=True)) for param in pending]
            self._give_partial()
        self._sent()
        return found

    def _sent(self) -> None:
        self.pending[:] = [False] * len(self.pending)
        self.begin()

    def give_buffer(self) -> None:
        """It was sent."""
        if self.buffer is not None and self._lends:
            self._ledger.give("grad", self.buffer)
        self.buffer = None

    def _give_partial(self) -> None:
        assert self.partial is not None
        self._ledger.give("partial", self.partial)
        self.partial = None

    def rescale(self, factor: float) -> None:
        if self.partial is not None:
            self.partial.mul_(factor)

    def drop(self, param: int) -> None:
        self.pending[param] = False
        self.aside.pop(param, None)
        if self.partial is not None:
            self._range(self.partial, param).zero_()
            if not any(self.pending):
                self._give_partial()

    def abandon(self) -> None:
        if self.partial is not None:
            self._give_partial()
        if not self._stays:
            self.give_buffer()
        self.aside.clear()
        self._sent()

    def _range(self, flat: Tensor, param: int) -> Tensor:
        begin = self._layout.offsets[param]
        return flat[begin : begin + self._layout.numels[param]]


class Reduction:
    """What is in flight: the reduce of new gradients, then the gather of a sum of which a rank keeps more."""

    def __init__(self, spec: LaneSpec, axes: Axes, ledger: Ledger):
        self._axes, self._ledger, self.dtype = axes, ledger, spec.key.reduce_dtype
        self._in_place, self._grid = spec.column.grad_buffer, spec.grid
        self._fine = spec.span("fine", axes.coords)
        self.wires = GradWires(spec, axes, ledger)
        self.move: along.Reduces | None = None
        self.spread: along.Gathering | None = None
        self.kept: Tensor | None = None  # the sum of earlier backwards, while the buffer it lay in is refilled
        self.flushed: Tensor | None = None  # to be added to the next sum, before its factor: Note [Residuals]
        self._factor = 1.0
        self._adopted = False  # it was added to the gradient of some parameter

    def keep(self, part: Tensor) -> None:
        self.kept = part

    def start(self, buffer: Tensor, factor: float, place: Place) -> None:
        self.move, self._factor = along.Reduces(self._axes, self._grid, self._ledger, self._room(buffer)), factor
        self.move.start(buffer, factor, place.reduce, self.wires.of_reduce(place))

    def _room(self, buffer: Tensor) -> Callable[[], Tensor]:
        """What gives the memory for the sum. Where that is not the buffer nothing here holds a tensor over it, so that
        its memory is free once it is given back."""
        if self._in_place:
            own = buffer[self._fine.begin : self._fine.end]
            return lambda: own
        return functools.partial(self._ledger.reuse, self._fine.numel, buffer.dtype, buffer.device)

    def arrives_within(self, seconds: float) -> bool:
        return self.move is None or self.move.arrives_within(seconds)

    @property
    def has_read(self) -> bool:
        """The buffer is read no longer."""
        return self.move is not None and self.move.has_read

    def advances_within(self, seconds: float) -> bool:
        """Whether the buffer is read no longer: only sums of it travel, if anything does."""
        return self.move is None or self.move.advance(seconds)

    def arrive(self, earlier: Tensor | None) -> Tensor:
        """The new part, added to the sum that was kept here, or to `earlier`."""
        assert self.move is not None
        new = self.move.wait()
        self.move = None
        if self.flushed is not None:
            new.add_(self.flushed, alpha=self._factor)
            self.flushed = None
        before, self.kept = earlier if self.kept is None else self.kept, None
        if before is None:
            return new
        if self._in_place and new.dtype == wide(before.dtype):
            return new.add_(before)  # in the kept buffer, where the user may look at it
        return before.to(wide(before.dtype)).add_(new)

    # ---- what was left out: see Note [Residuals] in grad_wires.py

    def flush(self, label: str) -> None:
        """To what is added to the next sum. A collective."""
        left = self.wires.flush(label)
        if left is not None:
            self.flushed = left if self.flushed is None else self.flushed.add_(left)

    def put_flushed(self, begin: int, values: Tensor) -> None:
        """Of this rank's fine slice."""
        if self.flushed is None:
            self.flushed = torch.zeros(self._fine.numel, dtype=RESIDUAL, device=self._axes.device)
        self.flushed[begin : begin + values.numel()].copy_(values)

    def take_flushed(self, begin: int, like: Tensor) -> Tensor:
        """Added to a new gradient of a parameter, where nothing is reduced and the fine slice is the lane."""
        if self.flushed is None:
            return like
        self._adopted = True
        part = self.flushed[begin : begin + like.numel()]
        found = like + part.view(like.shape).to(like.dtype)
        part.zero_()
        return found

    def end_flushed(self) -> None:
        """Another backward begins: what was taken from is used up."""
        if self._adopted:
            self.flushed, self._adopted = None, False

    def forget(self, param: int, segments: Sequence[Segment]) -> None:
        """It trains no more."""
        self.wires.forget(param)
        if self.flushed is None:
            return
        for segment in segments:
            if segment.param == param:
                self.flushed[segment.offset : segment.offset + segment.numel].zero_()

    def begin_anew(self) -> None:
        """Nothing of the past is left."""
        self.wires.clear()
        self.flushed, self._adopted = None, False

    def spread_out(self, legs: Sequence[along.Leg], total: Tensor, own: Tensor, label: str, begin: int) -> None:
        """Not waited for here: another rank may come to it only once this one's backward is over. `begin`: which
        element of the lane `total` begins with."""
        legs = self.wires.of_spread(legs)
        self.spread = along.start_gather(self._axes, legs, along.parts_of(self._axes, legs, total, begin), own, label)

    def settle(self) -> None:
        """The sum is everywhere it rests."""
        if self.spread is not None:
            self.spread.wait()
            self.spread = None

    def abandon(self) -> None:
        self.settle()
        if self.move is not None:
            self.move.wait()
            self.move = None
        self.kept = None


class Sum:
    """The running sum: where it is, who has one, and the factors that it is only remembered to be multiplied by.

    It lies on the device or rests on another tier (resting.py), from where `_recall` brings it back. A factor by which
    the user multiplied (a clip factor, a loss scale) is remembered and applied in fp32 when the gradient is used.
    """

    def __init__(self, spec: LaneSpec, axes: Axes, resting: RestingGrads | None):
        layout, count = spec.layout, len(spec.layout.shapes)
        self._layout, self._dtype, self._axes, self._adopts = layout, spec.key.reduce_dtype, axes, spec.adopts
        self.span, fine = spec.span("grad", axes.coords), spec.span("fine", axes.coords)
        self._numel = self.span.numel
        self._own = {s.param: s for s in layout.segments_in(fine)}  # in this rank's fine slice
        self._where = {s.param: s for s in layout.segments_in(self.span)}  # in the sum
        self._first = fine.begin - self.span.begin  # of this rank's fine slice, in the sum
        self.held: dict[int, Tensor] = {}  # WHOLE: one tensor. By parameter, flat: see Note [Adopted gradients]
        self.resting = resting  # None: never on another tier
        self.has = [False] * count  # the user has a gradient for this parameter
        self.scales: list[Tensor | float | None] = [None] * count  # remembered factors
        self.folds = 0  # how often they were multiplied in; norms from before that are stale
        self._product: tuple[Tensor | float, Tensor | float, Tensor | float] | None = None
        self.direct: dict[int, Tensor] = {}  # not in the sum yet, by parameter: see Note [Direct gradients]
        self.folded: dict[int, Tensor] = {}  # in the sum, and to be taken off again
        self.reader: Pending | None = None  # an update under way that reads the sum
        self.stale: set[int] = set()  # parameters to be zero in the sum once nobody reads it
        self.released = False  # used up inside backward: see release.py

    # ---- where it is

    def put(self, new: Tensor, home: Tensor | None) -> None:
        """The new sum of this rank's fine slice. It lies in the kept buffer `home`, or in memory of its own where there
        is none, or accumulation made it wider."""
        if self._axes.everyone.size == 1 or (home is None and self._numel == new.numel()):
            self.held[WHOLE] = new
            return
        if home is not None and new.dtype == home.dtype:
            total = home[self.span.begin : self.span.end]
        else:
            total = self.held.get(WHOLE, new)
            if total.numel() != self._numel or total.dtype != new.dtype:
                total = torch.empty(self._numel, dtype=new.dtype, device=new.device)
        own = total[self._first : self._first + new.numel()]
        if own.data_ptr() != new.data_ptr():  # else the reduce left it there
            own.copy_(new)
        self.held[WHOLE] = total

    def take_out(self) -> Tensor:
        """This rank's slice of it, in memory of its own; nothing stays here."""
        own = self.held.pop(WHOLE)[self._first : self._first + self._layout.slice_numel]
        return own.clone()

    def adopt(self, param: int, grad: Tensor) -> None:
        self._recall()
        new, kept = grad.to(self._dtype).contiguous().view(-1), self.held.get(param)
        self.held[param] = new if kept is None else kept.to(wide(kept.dtype)).add_(new)

    def put_away(self) -> None:
        """From the device to the tier it rests on."""
        assert self.resting is not None
        own = {param: self.own(param) for param in (self.held if self._adopts else self._own)}
        self.resting.put(self.held, own, self._layout)
        self.held = {}

    def _recall(self) -> None:
        if self.resting:
            self.held = self.resting.take_back(self._axes.device)

    # ---- reading it

    @property
    def dtype(self) -> torch.dtype:
        """Wider than the reduce dtype once gradients were accumulated."""
        return self.resting.dtype if self.resting else next(iter(self.held.values())).dtype

    def here(self) -> Tensor | None:
        """On the device, as one tensor; None where it is held by parameter, or there is none."""
        self._recall()
        return self.held.get(WHOLE)

    def local(self, param: int) -> Tensor:
        """This rank's part of one parameter's gradient, flat; empty where it holds none."""
        if self.resting:
            self._recall()
        if self._adopts:
            return self.held[param]
        total, segment = self.held[WHOLE], self._where.get(param)
        return total[:0] if segment is None else total[segment.offset : segment.offset + segment.numel]

    def own(self, param: int) -> Tensor:
        """Its part inside this rank's slice: what norms are computed from, the same at every stage."""
        if self._adopts:
            return self.local(param)
        segment = self._own.get(param)
        if segment is None:  # nothing is brought back for that
            return torch.empty(0, dtype=self.dtype, device=self._axes.device)
        if self.resting:
            self._recall()
        begin = self._first + segment.offset
        return self.held[WHOLE][begin : begin + segment.numel]

    def own_parts(self) -> list[Tensor]:
        """All of this rank's slice, in as few tensors as it lies in."""
        total = self.here()
        if total is None:
            return list(self.held.values())
        return [total[self._first : self._first + self._layout.slice_numel]]

    def at_rest(self, segment: Segment) -> tuple[Rest, int]:
        """The memory an update reads a segment's gradient from, and which element of the lane it begins with."""
        if self.resting:
            return self.resting.rest(segment, self._adopts)
        return (Rest(self.held[segment.param]), segment.offset) if self._adopts else (Rest(self.held[WHOLE]), 0)

    def cut(self, param: int, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor of a parameter's size."""
        segment = self._where.get(param)
        return flat[:0] if segment is None else flat[segment.start : segment.start + segment.numel]

    def mark_held(self, param: int) -> None:
        """This rank or another had a gradient for it: the user has it from here on."""
        self.has[param] = True

    def read_by(self, update: Pending | None) -> None:
        self.reader = update

    def settle_reader(self, wait: bool = True) -> None:
        """Before the sum is written: whoever reads it -> the writer."""
        if self.reader is not None and (wait or self.stale):
            self.reader.hold()
        self.reader = None
        if self.stale:
            self._recall()
            for param in self.stale:
                self._wipe(param)
            self.stale.clear()

    def _wipe(self, param: int) -> None:
        """Nothing of this parameter is left in it."""
        if self.held.pop(param, None) is None and WHOLE in self.held:
            self.local(param).zero_()

    # ---- factors

    def scale(self, param: int, factor: Tensor | float) -> None:
        """Remember a factor; only one can be remembered, so a second is multiplied into the first."""
        before = self.scales[param]
        if before is None:
            self.scales[param] = factor
            return
        # The same two factors for every parameter (unscale, then clip) stay one factor for the lane.
        if self._product is None or self._product[0] is not before or self._product[1] is not factor:
            self._product = (before, factor, before * factor)
        self.scales[param] = self._product[2]

    def unscale(self, param: int, factor: Tensor | float) -> bool:
        """Forget a factor, where it is the very one that is remembered. Whether it was."""
        if self.scales[param] is not factor:
            return False
        self.scales[param] = None
        return True

    def apply_scales(self) -> None:
        scales = [(param, scale) for param, scale in enumerate(self.scales) if scale is not None]
        if not scales or not (self.held or self.resting):
            return
        self._widen()
        for param, scale in scales:
            if self.has[param] and param in self._where:
                self.local(param).mul_(scale)
            self.scales[param] = None
        self.folds += 1

    def common_scale(self) -> tuple[bool, Tensor | float | None]:
        """(True, factor) when one remembered factor, or none, holds for every gradient of this lane."""
        seen = {id(s): s for s, has in zip(self.scales, self.has) if has}
        return (True, next(iter(seen.values()))) if len(seen) == 1 else (not seen, None)

    def _widen(self) -> None:
        """Make it fp32 or wider: it is about to be changed by more than a sum of gradients."""
        self._recall()
        self.held = {param: part.to(wide(part.dtype)) for param, part in self.held.items()}

    # ---- gradients that need no reduce: see Note [Direct gradients]

    def add_direct(self, param: int, grad: Tensor) -> None:
        """Of the size of this rank's part of the parameter, or empty as that is."""
        held = self.direct.get(param)
        self.direct[param] = grad if held is None else held.add_(grad)

    def fold_direct(self, counts: Sequence[float] | None) -> None:
        """Into the sum. `counts`: by parameter, where the sum is one over items."""
        if not self.direct:
            return
        if self.here() is None and not self._adopts:
            self.held[WHOLE] = torch.zeros(self._numel, dtype=wide(self._dtype), device=self._axes.device)
        self._widen()
        direct, self.direct = self.direct, {}
        if counts is not None:
            self.folded.update(direct)
        for param, grad in direct.items():
            if self._adopts and param not in self.held:
                self.held[param] = torch.zeros_like(grad)
            if counts is None:
                self.local(param).add_(grad)
            else:
                self.local(param).add_(grad, alpha=counts[param])

    def unfold_direct(self, param: int, count: float) -> None:
        """The factor 1 / `count` of this gradient was taken off."""
        grad = self.folded.pop(param, None)
        if grad is not None:
            self.local(param).sub_(grad, alpha=count)
            self.add_direct(param, grad)

    def _drop_direct(self, param: int) -> None:
        self.direct.pop(param, None)
        self.folded.pop(param, None)

    # ---- its end

    def replace(self, grads: Sequence[Tensor | None]) -> None:
        self._forget()
        self.has[:] = [grad is not None for grad in grads]
        for param, grad in enumerate(grads):
            if grad is None:
                continue
            flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
            if self._adopts:
                self.held[param] = flat.to(self._dtype)
                continue
            if WHOLE not in self.held:
                self.held[WHOLE] = torch.zeros(self._numel, dtype=self._dtype, device=flat.device)
            segment = self._own.get(param)
            if segment is not None:
                self.own(param).copy_(flat[segment.start : segment.start + segment.numel])

    def zero(self, param: int, alone: bool) -> None:
        """`alone`: nothing else of the lane waits to be reduced, so there must be a sum from here on."""
        self.scales[param] = None
        self._drop_direct(param)
        if self.here() is not None:
            self.local(param).zero_()
        elif self._adopts or alone:
            numel = self._layout.numels[param] if self._adopts else self._numel
            zeros = torch.zeros(numel, dtype=self._dtype, device=self._axes.device)
            self.held[param if self._adopts else WHOLE] = zeros

    def drop(self, param: int) -> None:
        self.has[param] = False
        self.scales[param] = None
        self._drop_direct(param)
        self.held.pop(param, None)
        if not any(self.has):
            self.end()
        elif self.reader is not None or self.resting:  # it is not waited for, nor brought back, for that
            self.stale.add(param)
        else:
            self._wipe(param)

    def begin(self) -> None:
        self.released = False

    def end(self) -> None:
        """Nobody has a gradient of the lane."""
        self._forget()
        self.released = False
        self.stale.clear()

    def release(self) -> None:
        self._forget()
        self.released = True

    def abandon(self) -> None:
        self._forget()
        self.has[:] = [False] * len(self.has)
        self.direct.clear()
        self.folded.clear()

    def _forget(self) -> None:
        self.held, self.scales[:] = {}, [None] * len(self.scales)
        if self.resting is not None:
            self.resting.forget()


class GradLane:
    """The gradients of one lane. Others read its fields, and change them by calling its methods."""

    def __init__(self, spec: LaneSpec, axes: Axes, ledger: Ledger, rest: LaneRest):
        away = rest.tiers.grads != "device" and not spec.column.grad_buffer
        self.adopts = spec.adopts  # see Note [Adopted gradients]
        self._stays = spec.column.grad_buffer
        self._axes, self._layout = axes, spec.layout
        self._sums = [axes.tensor.dims[dim] for dim in spec.key.sums] if axes.tensor is not None else []
        cut = spec.table.cut("grad")
        self._spreads = along.path(axes, spec.grid, spec.layout, spec.grid.every, cut)
        self._gathers = along.path(axes, spec.grid, spec.layout, cut)
        self._arrival, self._reduction = Arrival(spec, axes, ledger), Reduction(spec, axes, ledger)
        self._sum = Sum(spec, axes, RestingGrads(rest) if away else None)
        arrival, total = self._arrival, self._sum
        # The very lists, which are never replaced: reading one costs no call.
        self.trains: Sequence[bool] = arrival.trains
        self.pending: Sequence[bool] = arrival.pending
        self.has: Sequence[bool] = total.has
        self.scales: Sequence[Tensor | float | None] = total.scales
        self.resting = total.resting
        # What concerns one part alone is asked of it.
        self.local, self.own, self.own_parts, self.cut = total.local, total.own, total.own_parts, total.cut
        self.here, self.at_rest = total.here, total.at_rest
        self.mark_held, self.read_by = total.mark_held, total.read_by
        self.scale, self.unscale, self.common_scale = total.scale, total.unscale, total.common_scale
        self.add_direct, self.fold_direct, self.unfold_direct = total.add_direct, total.fold_direct, total.unfold_direct
        self.expect, self.rescale_unreduced = arrival.expect, arrival.rescale
        self.settle, self.reduced_within = self._reduction.settle, self._reduction.arrives_within
        self.flush, self.put_flushed = self._reduction.flush, self._reduction.put_flushed
        self.begin_anew = self._reduction.begin_anew
        self._fine = spec.layout.segments_in(spec.span("fine", axes.coords))
        self.several_hops = len(list(spec.grid.hops())) > 1

    @property
    def state(self) -> State:
        total = self._sum
        if total.released:
            return State.RELEASED
        if self._arrival.partial is not None or total.direct:
            return State.UNREDUCED
        if total.resting:
            return State.RESTING
        if total.held:
            return State.SUMMED
        if self._reduction.move is not None:
            return State.IN_FLIGHT
        return State.ARRIVING if any(self.pending) else State.EMPTY

    @property
    def complete(self) -> bool:
        """All gradients that this backward should bring are there."""
        return self._arrival.missing == 0

    @property
    def dtype(self) -> torch.dtype:
        return self._sum.dtype

    @property
    def full_nbytes(self) -> int:
        """Of all gradients of the lane, as they are sent."""
        return self._layout.numel * self._reduction.dtype.itemsize

    @property
    def folds(self) -> int:
        return self._sum.folds

    def follow(self, spec: LaneSpec) -> None:
        """Gradients travel by other wires from the next reduce on."""
        self._reduction.wires.follow(spec)

    @property
    def has_legs(self) -> bool:
        """Reduces go on after backward: see comm/lowrank.py."""
        return self._reduction.wires.has_legs

    @property
    def keeps(self) -> bool:
        """Something of earlier gradients is left, or may be: see Note [Residuals] in grad_wires.py."""
        return self._reduction.wires.keeps or self._reduction.flushed is not None

    def flushed(self, segment: Segment) -> Tensor:
        """What a flush has left for the next sum, of a segment of this rank's fine slice."""
        left = self._reduction.flushed
        if left is None:
            return torch.zeros(segment.numel, dtype=RESIDUAL, device=self._axes.device)
        return left[segment.offset : segment.offset + segment.numel]

    def agree(self, param: int, trains: bool) -> None:
        """Whether it trains, as all ranks agree."""
        if self.trains[param] and not trains:
            self._reduction.forget(param, self._fine)
        self._arrival.agree(param, trains)

    # ---- arrival

    def begin(self, plain: list[bool] | None) -> None:
        """A backward starts, and what the user still has is added to. `plain[i]`: whether that is so of parameter i,
        where parameters are plain and do not tell."""
        self._arrival.begin()
        self._reduction.end_flushed()
        kept = self.has if plain is None else plain
        self._sum.settle_reader(wait=self._stays or any(kept))  # what is kept will be added to
        for param, keep in enumerate(list(kept)):
            if self.has[param] and (self._sum.released or not keep):
                self.drop(param)
        self._sum.begin()
        self.apply_scales()

    def collect(self, param: int, grad: Tensor, sync: bool) -> bool:
        """Take one parameter's new gradient from autograd. Whether the lane is complete."""
        arrival, reduction = self._arrival, self._reduction
        if grad.is_sparse:
            grad = grad.to_dense()
        if not sync:
            arrival.open_partial()
        if arrival.partial is not None:
            arrival.take(param, grad)
        elif self.adopts:
            self._sum.adopt(param, reduction.take_flushed(self._layout.offsets[param], grad))
        elif reduction.move is not None or reduction.spread is not None or arrival.aside:
            # The buffer is being sent. Waiting for that here could be waiting for a rank that waits for this one.
            arrival.put_aside(param, grad)
        else:
            if arrival.buffer is None or self._sum.held:
                self._make_room()
            arrival.take(param, grad)
        return arrival.came(param)

    def _make_room(self) -> None:
        """The buffer may be filled: a sum that rests in it is taken out first."""
        self._reduction.settle()
        if self._stays and self._sum.held:
            self._reduction.keep(self._sum.take_out())
        self._arrival.open_buffer()

    def unreduced(self, param: int) -> Tensor:
        """What backwards inside no_sync have summed of one parameter, flat; zeros where they brought nothing."""
        partial = self._arrival.partial
        begin, numel = self._layout.offsets[param], self._layout.numels[param]
        if partial is None:
            return torch.zeros(numel, dtype=wide(self._reduction.dtype), device=self._axes.device)
        return partial[begin : begin + numel]

    # ---- reduction

    def start_reduce(self, factor: float, place: Place) -> None:
        """PARTIAL -> SLICE of everything that arrived; zeros stand for what did not."""
        self.finish_reduce(place.spread)
        if self.adopts:
            for param, grad in self._arrival.take_partial():
                grad = self._reduction.take_flushed(self._layout.offsets[param], grad)
                self._sum.adopt(param, grad if factor == 1.0 else grad.mul_(factor))
        else:
            self._make_room()
            buffer = self._arrival.fill()
            for dim in self._sums:  # see Note [Partial gradients] in memory/placed.py
                verbs.sum_everywhere(dim, buffer, place.reduce)
            self._reduction.start(buffer, factor, place)
            if not self._stays and self._reduction.has_read:
                self._arrival.give_buffer()

    def next_leg(self, last_hop: bool = False) -> None:
        """Of what goes on after backward; with `last_hop` it is only brought as far as that."""
        if self._reduction.move is not None:
            self._reduction.move.to_last_hop() if last_hop else self._reduction.move.next_leg()

    def finish_reduce(self, label: str) -> None:
        """Wait for the new part and add it to the running sum; where the sum rests FULL, gather it, by this label."""
        if self._reduction.move is None:
            return
        earlier = None
        if not self._stays and self._sum.here() is not None:
            [earlier] = self._sum.own_parts()
        new = self._reduction.arrive(earlier)
        if not self._stays:
            self._arrival.give_buffer()
        self._sum.put(new, self._arrival.buffer)
        if self._spreads:
            [own], total = self._sum.own_parts(), self._sum.held[WHOLE]
            self._reduction.spread_out(self._spreads, total, own, label, self._sum.span.begin)

    def advance_reduce(self, seconds: float) -> bool:
        """Where a reduce goes along several axes: begin the last hop, if those before it end in time. Whether it has
        begun, or there is none."""
        if self._reduction.move is None or not self._reduction.advances_within(seconds):
            return self._reduction.move is None
        if not self._stays and self.several_hops:
            self._arrival.give_buffer()
        return True

    def put_away(self) -> None:
        """The sum is complete as far as this backward goes: to the tier it rests on, if that is another. Where it is
        still being spread that is when backward ends."""
        under_way = self._reduction.move is not None or self._reduction.spread is not None
        if self.resting is not None and self.state is State.SUMMED and not under_way:
            self._sum.put_away()

    # ---- use

    def use(self) -> State:
        """Somebody is about to use the sum; nobody else reads it from here on. The state says whether there is one."""
        state = self.state
        if state in USABLE:
            self._sum.settle_reader()
        return state

    def apply_scales(self) -> None:
        """Multiply what was only remembered into the sum, in fp32 at least."""
        if self._arrival.partial is None:
            self._sum.apply_scales()

    def gather(self) -> list[Tensor | None]:
        """Every gradient of the lane, full and flat; a collective where they rest as slices."""
        assert self.state in USABLE
        self.apply_scales()
        total, layout = self._sum.here(), self._layout
        if self.adopts:
            return [self._sum.held.get(param) for param in range(len(layout.shapes))]
        assert total is not None
        if self._gathers:
            total = along.all_of(self._axes, self._gathers, layout, total, "gather of gradients")
        return [total[begin : begin + numel] for begin, numel in zip(layout.offsets, layout.numels)]

    @torch.no_grad()
    def replace(self, grads: Sequence[Tensor | None]) -> None:
        """Somebody else has reduced them: this rank's part of each takes the place of what was here."""
        self._arrival.give_buffer()  # one that stays would never be filled
        self._sum.replace(grads)

    # ---- the end of a gradient's life

    def zero_unreduced(self, param: int) -> bool:
        """The user set a gradient to zero. If it was computed inside no_sync nothing is left of it to reduce, and the
        answer is True."""
        if self._arrival.partial is None:
            return False
        self._arrival.drop(param)
        self._sum.zero(param, alone=self._arrival.partial is None)
        return True

    def drop(self, param: int) -> None:
        """The user set this gradient to None."""
        self._arrival.drop(param)
        self._sum.drop(param)

    def drop_unused(self) -> None:
        """A backward is over: where no rank had a gradient of the lane, what was summed is zeros."""
        if not any(self._sum.has) and self.state in USABLE:
            self._sum.end()

    def release(self) -> None:
        """It was used, and nobody needs it any more; to the user it is there until it is set to None."""
        self._reduction.settle()
        self._sum.release()

    def abandon(self) -> None:
        """A backward raised half-way: what it brought cannot be told from what was there, so all of it goes."""
        self._reduction.abandon()
        self._arrival.abandon()
        self._sum.abandon()

    def residual_nbytes(self) -> int:
        """Of what was left out of sums, waiting for the next."""
        flushed = self._reduction.flushed
        return self._reduction.wires.nbytes() + (0 if flushed is None else flushed.nbytes)

    def residuals(self) -> Iterator[Tensor]:
        """The memory of it."""
        yield from self._reduction.wires.tensors()
        if self._reduction.flushed is not None:
            yield self._reduction.flushed

    @property
    def kept_buffer(self) -> Tensor | None:
        """Where gradients will arrive, if that stays allocated; without gradients its values mean nothing."""
        return self._arrival.buffer

    def nbytes(self) -> int:
        """Resident bytes: the kept buffer and the sum, counted once where they share memory."""
        total, found = self._sum, {}
        held = [*total.held.values(), *total.direct.values(), *total.folded.values()]
        for tensor in (self._arrival.buffer, *held):
            if tensor is not None:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(found.values())


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
