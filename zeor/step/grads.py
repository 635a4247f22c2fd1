"""The gradient of one lane, from autograd's hands to the sum that the optimizer uses.

    autograd -> buffer (PARTIAL, full size) --reduce--> new part (SLICE) --add--> sum (SLICE, or FULL)

Every backward outside no_sync reduces only its new gradient and adds it to the running sum; inside
no_sync the new gradient stays PARTIAL, summed in fp32. That one rule is what makes the stages equal
in bits. A factor by which the user multiplied (a clip factor, a loss scale) is remembered in `scales`
and applied in fp32 when the gradient is used. This module knows one lane; the engine orders lanes.
Where a gradient waits: in the buffer, or put aside while the buffer is sent; then in the sum (running_sum.py), which
may rest on another tier (resting.py); what needs no reduce waits in direct.py.

Note [Adopted gradients]
~~~~~~~~~~~~~~~~~~~~~~~~
In a world of one there is nothing to send, so nothing needs to lie side by side: where no full-size buffer
is kept, the tensors autograd made are adopted as they are, and `parts` holds them in place of `sum`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.mesh import Mesh
from zeor.layout import Segment
from zeor.memory.buffers import Ledger, lasting
from zeor.memory.roles import MOVES, Residency
from zeor.spec.lane_spec import LaneSpec
from zeor.step.direct import Direct
from zeor.step.resting import WHOLE, RestingGrads
from zeor.step.running_sum import RunningSum, wide
from zeor.tiers.master import Pending
from zeor.tiers.rest import LaneRest, Rest


class GradLane(RunningSum):
    def __init__(self, spec: LaneSpec, mesh: Mesh, ledger: Ledger, rest: LaneRest):
        self.layout, self.column, self.mesh = spec.layout, spec.column, mesh
        self.reduce_dtype, self._ledger = spec.key.reduce_dtype, ledger
        layout, column = spec.layout, spec.column
        count = len(layout.shapes)
        self.buffer: Tensor | None = None  # where new gradients arrive; PARTIAL
        self.partial: Tensor | None = None  # what no_sync has summed so far; PARTIAL, fp32
        self.adopts = spec.adopts  # see Note [Adopted gradients]
        away = rest.tiers.grads != "device" and not column.grad_buffer
        super().__init__(mesh, count, RestingGrads(rest) if away else None)
        self._aside: dict[int, Tensor] = {}  # new parts by parameter that came while the buffer was being sent
        self.direct = Direct()  # what needs no reduce
        self.arrived = [False] * count  # came from autograd in this backward
        self.pending = [False] * count  # came, and is not reduced yet
        self.expects = [True] * count  # it trains on this rank: see freezing.py
        self.trains = [True] * count  # it trains, as all ranks agree
        self.reader: Pending | None = None  # an update under way that reads the sum
        self._stale: set[int] = set()  # parameters to be zero in the sum once nobody reads it
        self.released = False  # used up inside backward: see release.py
        self._move: verbs.Move | None = None
        self._received: Tensor
        self._spread: verbs.Move | None = None  # the gather of a sum that rests FULL
        self._kept: Tensor | None = None  # the sum of earlier backwards, while the buffer it lay in is refilled
        whole = column.grad is Residency.FULL
        self._where = {s.param: s for s in (layout.whole() if whole else layout.segments(mesh.rank))}
        self._own = {s.param: s for s in layout.segments(mesh.rank)}
        if column.grad_buffer:
            self._open_buffer()

    # ---- at rest

    def put_away(self) -> None:
        """The sum is complete as far as this backward goes: to the tier it rests on, if that is another."""
        if self.resting is None or self.resting or self.released or self.unreduced or self._move is not None:
            return
        held = dict(self._parts) if self.adopts else {} if self._sum is None else {WHOLE: self._sum}
        if held:
            own = {param: self.own(param) for param in (self._parts if self.adopts else self._own)}
            self.resting.put(held, own, self.layout)
            self._sum, self._parts = None, {}

    # ---- arrival

    def begin(self, kept: list[bool]) -> None:
        """A backward starts. `kept[i]`: the user still has parameter i's gradient, so add to it."""
        self.arrived = [False] * len(self.arrived)
        self.settle_reader(wait=self.column.grad_buffer or any(kept))  # what is kept will be added to
        for param, keep in enumerate(kept):
            if self.has[param] and (self.released or not keep):
                self.drop(param)
        self.released = False
        self.apply_scales()

    def settle_reader(self, wait: bool = True) -> None:
        """Before the sum is written: whoever reads it -> the writer."""
        if self.reader is not None and (wait or self._stale):
            self.reader.hold()
        self.reader = None
        stale, self._stale = self._stale, set()
        for param in stale:
            if self.adopts:
                self.parts.pop(param, None)
            elif param in self._where and self.sum is not None:
                self.local(param).zero_()

    def collect(self, param: int, grad: Tensor, sync: bool) -> None:
        """Take one parameter's new gradient from autograd."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if not sync and self.partial is None:
            self.partial = self._allocate(wide(self.reduce_dtype), "partial").zero_()
        if self.adopts and self.partial is None:
            self._adopt(param, grad)
            return
        if self.partial is None and self._in_use:
            self._put_aside(param, grad.to(self.reduce_dtype).reshape(-1))
            return
        into = self._open_buffer() if self.partial is None else self.partial
        target = self._range(into, param).view(grad.shape)
        if self.pending[param] or self.partial is not None:
            target.add_(grad)
        else:
            target.copy_(grad)
        self.arrived[param] = self.pending[param] = True

    @property
    def _in_use(self) -> bool:
        """The buffer is being sent. Waiting for that here could be waiting for a rank that waits for this one."""
        return self._move is not None or self._spread is not None or bool(self._aside)

    def _put_aside(self, param: int, grad: Tensor) -> None:
        """It came again while its first part is under way: it is reduced when backward ends."""
        held = self._aside.get(param)
        self._aside[param] = grad if held is None else held + grad
        self.arrived[param] = self.pending[param] = True

    def _adopt(self, param: int, grad: Tensor) -> None:
        new, kept = grad.to(self.reduce_dtype).contiguous().view(-1), self.parts.get(param)
        self.parts[param] = new if kept is None else kept.to(wide(kept.dtype)).add_(new)
        self.arrived[param] = self.pending[param] = True

    def _open_buffer(self) -> Tensor:
        """The buffer, ready to be filled; a sum that rests in it is taken out first."""
        self.settle()
        if self.column.grad_buffer and self.sum is not None:
            self._kept, self.sum = self._own_part(self.sum).clone(), None
        if self.buffer is None:
            self.buffer = self._allocate(self.reduce_dtype, "grad")
            for begin, end in self.layout.gaps():
                self.buffer[begin:end].zero_()
        return self.buffer

    @property
    def complete(self) -> bool:
        return all(came or not expected for came, expected in zip(self.arrived, self.expects))

    # ---- reduction

    def start_reduce(self, factor: float, label: str) -> None:
        """PARTIAL -> SLICE of everything that arrived; zeros stand for what did not."""
        self.finish_reduce(label)
        if self.adopts:
            self._adopt_partial()
            return
        buffer = self._open_buffer()
        if self.partial is not None:
            buffer.copy_(self.partial)
            self._release_partial()
        else:
            for param, pending in enumerate(self.pending):
                if not pending:
                    self._range(buffer, param).zero_()
            for param, grad in self._aside.items():
                self._range(buffer, param).copy_(grad)
            self._aside = {}
        self.arrived = [False] * len(self.arrived)
        self.pending = [False] * len(self.pending)
        received = verbs.reduce_receives(self.mesh, buffer.numel())
        self._received = self._ledger.take("receive", received, self.reduce_dtype, self.mesh.device)
        self._move = verbs.reduce(self.mesh, buffer, self._received, factor, label, in_place=self.column.grad_buffer)

    def _adopt_partial(self) -> None:
        """What no_sync summed becomes part of the sum, through the reduce dtype as in any other world."""
        for param, pending in enumerate(self.pending):
            if pending and self.partial is not None:
                self._adopt(param, self._range(self.partial, param).to(self.reduce_dtype, copy=True))
        if self.partial is not None:
            self._release_partial()
        self.arrived = [False] * len(self.arrived)
        self.pending = [False] * len(self.pending)

    def reduced_within(self, seconds: float) -> bool:
        """Whether nothing is under way, or it arrives in time."""
        return self._move is None or self._move.arrives_within(seconds)

    def finish_reduce(self, label: str) -> None:
        """Wait for the new part and add it to the running sum; where the sum rests FULL, gather it."""
        if self._move is None:
            return
        new = self._move.wait()
        self._move = None
        if new.data_ptr() == self._received.data_ptr() and new.device.type == "cpu" and new.numel():
            new = new.clone()  # its block goes back to the ledger
        self._ledger.give("receive", self._received)
        kept, self._kept = (self._kept, None) if self.column.grad_buffer else (self.sum, None)
        if kept is not None:
            new = kept.to(wide(kept.dtype)).add_(new)
        if not self.column.grad_buffer:
            self.sum = new
            self._release_buffer()
            return
        self.sum = self._rest_in_buffer(new)
        if "gather" in MOVES[Residency.PARTIAL, self.column.grad]:
            # Not waited for here: another rank may come to it only once this one's backward is over.
            own = self._own_part(self.sum)
            self._spread = verbs.gather(self.mesh, self.sum, own, f"gather of the gradient, {label}")

    def settle(self) -> None:
        """The sum is everywhere it rests."""
        if self._spread is not None:
            self._spread.wait()
            self._spread = None

    def _rest_in_buffer(self, new: Tensor) -> Tensor:
        """The sum lies in the kept buffer, or in one of its own where accumulation made it wider."""
        assert self.buffer is not None
        if self.mesh.world == 1:
            return new
        home = self.buffer
        if new.dtype != home.dtype:
            size = home.numel() if self.column.grad is Residency.FULL else new.numel()
            home = torch.empty(size, dtype=new.dtype, device=new.device)
        if home.numel() == new.numel():
            return home.copy_(new)
        own = home[self.mesh.rank * new.numel() : (self.mesh.rank + 1) * new.numel()]
        if own.data_ptr() != new.data_ptr():  # else the reduce left it there
            own.copy_(new)
        return home if self.column.grad is Residency.FULL else own

    # ---- gradients that need no reduce: see Note [Direct gradients] in direct.py

    def fold_direct(self, counts: Sequence[float] | None) -> None:
        """Into the sum. `counts`: by parameter, where the sum is one over items."""
        if not self.direct:
            return
        if self.sum is None and not self.adopts:
            numel = self.layout.numel if self.column.grad is Residency.FULL else self.layout.slice_numel
            self.sum = torch.zeros(numel, dtype=wide(self.reduce_dtype), device=self.mesh.device)
        self.widen()
        for param, grad in self.direct.take(keep=counts is not None):
            if self.adopts and param not in self.parts:
                self.parts[param] = torch.zeros_like(grad)
            if counts is None:
                self.local(param).add_(grad)
            else:
                self.local(param).add_(grad, alpha=counts[param])

    def unfold_direct(self, param: int, count: float) -> None:
        """The factor 1 / `count` of this gradient was taken off."""
        grad = self.direct.take_back(param)
        if grad is not None:
            self.local(param).sub_(grad, alpha=count)
            self.direct.collect(param, grad)

    # ---- use

    def cut(self, param: int, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor of a parameter's size."""
        segment = self._where.get(param)
        return flat[:0] if segment is None else flat[segment.start : segment.start + segment.numel]

    @property
    def unreduced(self) -> bool:
        return self.partial is not None or bool(self.direct)

    @property
    def reduced(self) -> bool:
        """There is a sum to be used."""
        return not self.unreduced and (bool(self.resting) or self._sum is not None or bool(self._parts))

    def local(self, param: int) -> Tensor:
        """This rank's part of one parameter's gradient, flat; empty where it holds none."""
        if self.adopts:
            return self.parts[param]
        assert self.sum is not None
        segment = self._where.get(param)
        return self.sum[:0] if segment is None else self.sum[segment.offset : segment.offset + segment.numel]

    def own(self, param: int) -> Tensor:
        """Its part inside this rank's slice: what norms are computed from, the same at every stage."""
        if self.adopts:
            return self.parts[param]
        segment = self._own.get(param)
        if segment is None:  # nothing is brought back for that
            return torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        assert self.sum is not None
        return self._own_part(self.sum)[segment.offset : segment.offset + segment.numel]

    def at_rest(self, segment: Segment) -> tuple[Rest, int]:
        """The memory an update reads a segment's gradient from, and which element of the lane it begins with."""
        if self.resting:
            return self.resting.rest(segment, self.adopts)
        if self.adopts:
            return Rest(self.parts[segment.param]), segment.offset
        assert self.sum is not None
        return Rest(self.sum), 0

    def own_parts(self) -> list[Tensor]:
        """All of this rank's slice, in as few tensors as it lies in."""
        if self.adopts:
            return list(self.parts.values())
        return [] if self.sum is None else [self._own_part(self.sum)]

    # ---- the end of a gradient's life

    def abandon(self) -> None:
        """A backward raised half-way: what it brought cannot be told from what was there, so all of it goes."""
        self.settle()
        if self._move is not None:
            self._move.wait()
            self._move = None
            self._ledger.give("receive", self._received)
        if self.partial is not None:
            self._release_partial()
        if self.buffer is not None and not self.column.grad_buffer:
            self._release_buffer()
        self._kept = None
        self._forget()
        self._aside.clear()
        self.direct = Direct()
        self.arrived, self.pending, self.has = ([False] * len(self.has) for _ in range(3))
        self.scales = [None] * len(self.has)

    def release(self) -> None:
        """It was used, and nobody needs it any more; to the user it is there until it is set to None."""
        self.settle()
        self._forget()
        self.scales = [None] * len(self.has)
        self.released = True

    def drop(self, param: int) -> None:
        """The user set this gradient to None."""
        self.has[param] = self.pending[param] = False
        self.scales[param] = None
        if not any(self.has):
            self._forget()
        elif self.resting:
            self._stale.add(param)  # it is not brought back for that
        for held in (self._parts, self._aside):
            held.pop(param, None)
        self.direct.drop(param)
        if self.partial is not None:
            self._range(self.partial, param).zero_()
            if not any(self.pending):
                self._release_partial()
        if not any(self.has):
            self.sum = None
            self.released = False
            self._stale.clear()
        elif self.reader is not None or self.resting:
            self._stale.add(param)
        elif self.sum is not None and param in self._where:
            self.local(param).zero_()

    def zero(self, param: int) -> None:
        """The user set a gradient to zero that was computed inside no_sync: nothing is left of it to reduce."""
        assert self.partial is not None
        self.scales[param] = None
        self.pending[param] = False
        self.direct.drop(param)
        self._range(self.partial, param).zero_()
        if self.adopts:
            self.parts[param] = torch.zeros(self.layout.numels[param], dtype=self.reduce_dtype, device=self.mesh.device)
        elif self.sum is not None:
            self.local(param).zero_()
        if not any(self.pending):
            self._release_partial()
            if not self.adopts and self.sum is None:
                whole = self.column.grad is Residency.FULL
                numel = self.layout.numel if whole else self.layout.slice_numel
                self.sum = torch.zeros(numel, dtype=self.reduce_dtype, device=self.mesh.device)

    def nbytes(self) -> int:
        """Resident bytes: the kept buffer and the sum, counted once where they share memory."""
        found = {}
        for tensor in (self.buffer, self._sum, *self._parts.values(), *self.direct.tensors()):
            if tensor is not None:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(found.values())

    # ---- helpers

    def _own_part(self, total: Tensor) -> Tensor:
        if self.column.grad is Residency.FULL and self.mesh.world > 1:
            begin = self.mesh.rank * self.layout.slice_numel
            return total[begin : begin + self.layout.slice_numel]
        return total

    def _range(self, flat: Tensor, param: int) -> Tensor:
        begin = self.layout.offsets[param]
        return flat[begin : begin + self.layout.numels[param]]

    def _allocate(self, dtype: torch.dtype, kind: str) -> Tensor:
        if kind == "partial" or self._buffer_is_transient:
            return self._ledger.take(kind, self.layout.numel, dtype, self.mesh.device)
        return lasting(self.layout.numel, dtype, self.mesh.device)

    @property
    def _buffer_is_transient(self) -> bool:
        """Not where it is kept, nor in a world of one, where it becomes the sum itself."""
        return not self.column.grad_buffer and self.mesh.world > 1

    def _release_partial(self) -> None:
        assert self.partial is not None
        self._ledger.give("partial", self.partial)
        self.partial = None

    def _release_buffer(self) -> None:
        assert self.buffer is not None
        if self._buffer_is_transient:
            self._ledger.give("grad", self.buffer)
        self.buffer = None
