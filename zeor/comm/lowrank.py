"""Reduces of matrices as two factors (PowerSGD): what a hop of a lane's reduces sends, leg by leg.

    start       x = residual + gradient; of each matrix P = x Q; what lies beside matrices travels with the P
    leg 1       the sum of P over ranks: an exchange, and a sum in rank order of the part that this rank has
    leg 2       a gather of the sums; every rank makes P orthonormal, by the same operations
    leg 3, 4    the same of Q = x^T P. Then residual = x - P Q^T, with this rank's own Q
    wait        this rank's part of P (sum of Q)^T: its own rows alone, so the sum is as sharded as any other

The parts of legs 1 and 3 are cut at equal lengths and not between matrices: few large matrices would make messages of
many ranks uneven, and making P orthonormal costs less than a hundredth of x Q. All legs go over the group of reduces,
so ranks must begin them in one order: step/reduces.py begins legs 2 to 4 once backward is over and every rank has
begun its first legs. Sums are in fp32. This module knows flat tensors and an axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.axes import Axis
from zeor.comm.feedback import Residual, forget_nonfinite
from zeor.layout.matrices import Matrix, Pieces
from zeor.memory.buffers import Ledger
from zeor.memory.lowrank import begun, make_orthonormal
from zeor.memory.noise import Noise

LEGS = 3  # that begin after the first


@dataclass(frozen=True)
class Factored:
    """How a hop's input travels. q: where the last Q of all matrices lie. noise: for columns that begin anew."""

    rank: int
    pieces: Pieces
    residual: Residual
    q: Tensor
    ledger: Ledger
    noise: Noise


class Reduce:
    """PARTIAL -> SLICE, times `factor`, as wires.Reduce. `full`, of so many blocks, is not read after `start`."""

    def __init__(self, axis: Axis, full: Tensor, how: Factored, factor: float, into: Callable[[], Tensor], blocks: int):
        self._axis, self._how, self._factor, self._into = axis, how, factor, into
        self._full: Tensor | None = full
        self._numel, self._blocks = full.numel(), blocks
        p_numel, q_numel = how.pieces.factor_numels(how.rank)
        self._p, self._q = self._take(p_numel), self._take(q_numel)
        self._received = self._take(0)
        others = axis.size - 1
        sent = (self._p.nbytes + self._q.nbytes) // axis.size * 2
        self._nbytes = sent * others, full.nbytes // axis.size * others  # (sent, what would be sent exactly)
        self._legs: list[Callable[[], None]] = [self._gather_p, self._send_q, self._gather_q]
        self._sum: Tensor | None = None

    def _take(self, numel: int) -> Tensor:
        """For so many elements, in as many equal parts as there are ranks."""
        size = self._axis.size
        return self._how.ledger.take("factors", -(-numel // size) * size, torch.float32, self._axis.device)

    @torch.no_grad()
    def start(self, label: str) -> Reduce:
        axis, how = self._axis, self._how
        self._label = label
        with axis.observer.coding("encode", label, axis.device, self._nbytes):
            assert self._full is not None
            how.residual.flat.add_(self._full)
            self._p[how.pieces.factor_numels(how.rank)[0] :].zero_()
            for (matrix, x, p), (_, _, last) in zip(self._factors(self._p, "rows"), self._factors(how.q, "columns")):
                torch.mm(x, _by_column(begun(last, how.noise.beyond(matrix.begin))), out=p)
            for span, part in self._beside():
                part.copy_(how.residual.flat[span])
                how.residual.flat[span].zero_()
        self._full = None  # an empty part of it would keep its memory
        self._exchange(self._p)
        axis.observer.traffic.shortened(axis.name, "reduce", self._nbytes[1] - self._nbytes[0])
        return self

    # ---- where the factors lie

    def _factors(self, flat: Tensor, side: str) -> list[tuple[Matrix, Tensor, Tensor]]:
        """(where, the matrix, its factor in `flat`) of all."""
        found, at = [], 0
        for matrix in self._how.pieces.matrices:
            count = getattr(matrix, side)
            x = self._how.residual.flat[matrix.begin : matrix.end].view(matrix.rows, matrix.columns)
            found.append((matrix, x, flat[at : at + count * self._how.rank].view(count, self._how.rank)))
            at += count * self._how.rank
        return found

    def _beside(self) -> list[tuple[slice, Tensor]]:
        """What lies beside matrices: (where in the input, where behind the P)."""
        spans = self._how.pieces.beside
        found, at = [], self._how.pieces.factor_numels(self._how.rank)[0] - sum(span.numel for span in spans)
        for span in spans:
            found.append((slice(span.begin, span.end), self._p[at : at + span.numel]))
            at += span.numel
        return found

    # ---- leg by leg

    def go_on(self) -> None:
        """Wait for the leg under way and begin the next one, if there is one."""
        if self._legs:
            self._legs.pop(0)()

    def _exchange(self, flat: Tensor) -> None:
        self._how.ledger.give("factors", self._received)
        self._received = self._how.ledger.take(
            "factors", verbs.exchange_receives(self._axis, flat.numel()), torch.float32, flat.device
        )
        self._move = verbs.exchange(self._axis, flat, self._received, self._label)

    @torch.no_grad()
    def _sum_up(self, flat: Tensor) -> None:
        """This rank's part of what was exchanged, in rank order."""
        self._move.wait()
        own = flat.view(self._axis.size, -1)[self._axis.rank]
        parts = [own if part is None else part for part in verbs.exchanged(self._axis, self._received)]
        verbs.sum_in_rank_order(parts, 1.0, own)
        self._move = verbs.gather_sums(self._axis, flat, self._label)

    def _gather_p(self) -> None:
        self._sum_up(self._p)

    @torch.no_grad()
    def _send_q(self) -> None:
        self._move.wait()
        how = self._how
        with self._axis.observer.coding("encode", self._label, self._axis.device, self._nbytes):
            # A host can look; a device is not waited for.
            finite = self._p.device.type == "cpu" and bool(self._p.isfinite().all())
            self._q[how.pieces.factor_numels(how.rank)[1] :].zero_()
            factors = self._factors(self._q, "columns")
            for (_, x, q), (_, _, p) in zip(factors, self._factors(self._p, "rows")):
                make_orthonormal(p)
                q.copy_((p.T @ x).T)  # of rank 4 x.T @ p takes a host four to seven times as long
                x.addmm_(p, q.T, alpha=-1.0)
            if not finite:
                forget_nonfinite(how.residual.flat)
        self._exchange(self._q)

    def _gather_q(self) -> None:
        self._sum_up(self._q)

    def arrives_within(self, seconds: float) -> bool:
        return self._sum is not None or self._move.arrives_within(seconds)

    @torch.no_grad()
    def wait(self) -> Tensor:
        if self._sum is None:
            while self._legs:
                self.go_on()
            self._move.wait()
            into = self._into()
            with self._axis.observer.coding("decode", self._label, self._axis.device, self._nbytes):
                self._how.q.copy_(self._q[: self._how.q.numel()])
                self._scale()
                self._rebuild(into)
            for flat in (self._p, self._q, self._received):
                self._how.ledger.give("factors", flat)
            self._sum = into
        return self._sum

    def _scale(self) -> None:
        """In fp32, before the cast to the sum's dtype: a sum of all ranks may be more than fp16 holds."""
        if self._factor != 1.0:
            self._q.mul_(self._factor)
            for _, part in self._beside():
                part.mul_(self._factor)

    def _rebuild(self, into: Tensor) -> None:
        """This rank's part of the sum of each block."""
        into.zero_()
        size, rank = self._axis.size, self._axis.rank
        part = self._numel // self._blocks // size
        qs = [q for _, _, q in self._factors(self._q, "columns")]
        ps = [p for _, _, p in self._factors(self._p, "rows")]
        for number, out in enumerate(into.view(self._blocks, part)):
            begin = (number * size + rank) * part
            for matrix, p, q in zip(self._how.pieces.matrices, ps, qs):
                _rows_into(out, begin, matrix, p, q)
            for span, found in self._beside():
                low, high = max(span.start, begin), min(span.stop, begin + part)
                if low < high:
                    out[low - begin : high - begin].copy_(found[low - span.start : high - span.start])


def _by_column(factor: Tensor) -> Tensor:
    """The same, with a column's numbers side by side: a host multiplies by a narrow matrix four times as fast then."""
    return factor.T.contiguous().T


def _rows_into(out: Tensor, begin: int, matrix: Matrix, p: Tensor, q: Tensor) -> None:
    """What of P Q^T lies in `out`, which begins with element `begin` of the input."""
    low, high = max(matrix.begin, begin), min(matrix.end, begin + out.numel())
    if low >= high:
        return
    first, last = (low - matrix.begin) // matrix.columns, -(-(high - matrix.begin) // matrix.columns)
    found = (p[first:last] @ q.T).view(-1)
    at = matrix.begin + first * matrix.columns
    out[low - begin : high - begin].copy_(found[low - at : high - at])
