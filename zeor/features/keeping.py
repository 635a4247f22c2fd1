"""Which recomputed units keep their activations after all: `zeor.shard(..., recompute="auto")`.

Memory that is free is speed: a unit that keeps what its backward needs is computed once, and one that keeps the results
of its products is computed again quickly. How much that is, and how much is free when, is measured in one step in which
every chosen unit is computed again; then calls keep what fits. levels.py decides, in integers alone. How a unit is
computed again: recompute.py.

Note [What is kept]
~~~~~~~~~~~~~~~~~~~
1. The first step makes state and gradients. The second is measured: what each recomputation leaves alive is what its
   call would keep, the results of the products that it has run are what keeping those alone would take, and the peaks
   between the beginnings of recomputations say how much is in use when which calls are still to come. (The peak that
   torch counts starts anew at each of them, in that step alone; on a host there are no peaks, and the limit is a share
   of what is free.) The third step agrees, and from the fourth on calls keep theirs.
2. The last calls of a pass keep most, see Note [Three levels] in levels.py. Their memory is the first to be free again,
   and gradients, which come meanwhile, take its place.
3. Ranks agree on the least of both numbers, by the exchange that ends a backward, and each keeps at most what fits on
   itself. Bits are the same either way: a recomputation repeats its random numbers.
4. A call whose inputs are larger in some dimension than any that were measured is computed again, and measured. After a
   step in which memory ran out at most half as many bytes are kept. What ranks have agreed on never grows.
5. A call that torch.compile has made a graph of, or that a re-entrant checkpoint runs, keeps all or nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from zeor.features.levels import NOTHING, Interval, Kept, Level, Need, choose, expected_nbytes
from zeor.features.products import Counted, Listener, Products
from zeor.memory.device import DeviceMemory, local_world
from zeor.step.passes import inside_backward
from zeor.tiers.host import free_host_nbytes

HOST_SHARE = 0.8  # of what is free on a host: the rest is for what the next steps and others need
HOLES = 0.02  # of an accelerator's memory, left for what lies between the allocator's blocks
_ALL = 1 << 20  # more calls than any pass has
_GIB = 1 << 30

log = logging.getLogger("zeor")


Shapes = tuple[torch.Size, ...]


class Call(NamedTuple):
    number: int  # in this pass
    shapes: Shapes  # of its inputs


class Keeping:
    """Of one model. `told` and `heard` are the numbers by which ranks agree. `budget`: of the device's memory, in
    bytes, where the user has named one."""

    _all: ClassVar[weakref.WeakSet[Keeping]] = weakref.WeakSet()  # of this process: they share its memory

    def __init__(self, device: torch.device, budget: int | None = None):
        self._memory, self._device, self._budget = DeviceMemory(device), device, budget
        self._failures = self._memory.failures()
        self._measures = False
        self._agreed: Kept | None = None  # None: nobody has said
        self._most = NOTHING  # what may be kept on this rank
        self._cap: int | None = None  # bytes; memory ran out with more
        self._asks = [0, 0]
        self._measured_shapes: list[set[Shapes]] = []  # by call
        self._tried: set[Call] = set()
        self._needs: list[Need] = []  # by call: the most that was measured
        self._counts: list[int] = []  # by call: products that its recomputation has run
        self._intervals: list[Interval] = []
        self._begin_pass()
        Keeping._all.add(self)

    def _begin_pass(self) -> None:
        self._entered = 0  # calls
        self._begun: set[int] = set()  # calls that were computed again
        self._forwards = self._backwards = 0

    # ---- a forward

    def begin_forward(self) -> None:
        self._forwards += 1

    def enter(self, arguments: Any) -> Call:
        """A call that may keep its activations begins."""
        if self._measures and not self._entered:
            self._memory.reset_peak()
        self._entered += 1
        return Call(self._entered - 1, tuple(each.shape for each in _strided(arguments)))

    def level(self, call: Call) -> Level:
        if self._measures or not self._needs:
            return Level.AGAIN
        known = self._measured_shapes[call.number] if call.number < len(self._needs) else set()
        if not any(_is_within(call.shapes, each) for each in known):
            if call not in self._tried:
                self._measure()  # from this very call on
            if self._measures:
                self._tried.add(call)  # once: a call that no backward comes to is never measured
            return Level.AGAIN
        return self._most.least(self._agreed or NOTHING).level(self._needs, call.number)

    def products(self, call: Call) -> Products | None:
        """For a call that keeps its products; None where its recomputation needs none."""
        count = self._counts[call.number]
        return Products(self._device, count) if count else None

    @property
    def measures(self) -> bool:
        """Whether this step is measured."""
        return self._measures

    def _measure(self) -> None:
        """Where two models share a device each has a step of its own: they would reset each other's peaks."""
        if not any(other._measures for other in self._others()):
            self._measures = True
            self._memory.reset_peak()

    def _others(self) -> list[Keeping]:
        return [other for other in Keeping._all if other is not self and other._device == self._device]

    # ---- a backward

    def metered(self, call: Call, forward: Callable[..., Any], middle: bool = True) -> Callable[..., Any]:
        """The forward of a call, whose recomputation is measured if this step is. `middle`: it can keep its products
        alone."""
        if not self._measures:
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not inside_backward():
                return forward(*args, **kwargs)
            with self._measured(call, middle):
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def _measured(self, call: Call, middle: bool) -> Iterator[None]:
        self.begin_again(call)
        before, alive, counted = self._memory.used_nbytes(), Alive(), Counted()
        try:
            with alive if self._device.type == "cpu" else nullcontext(), counted:
                yield
        finally:  # torch ends a recomputation by an exception, as soon as it has all it needs
            need = alive.nbytes() if self._device.type == "cpu" else self._memory.used_nbytes() - before
            self.needs(call, need, counted if middle else None)

    def begin_again(self, call: Call) -> None:
        """It is about to be computed again, in the step that is measured."""
        self._end_interval()
        self._begun.add(call.number)

    def needs(self, call: Call, nbytes: int, products: Counted | None = None) -> None:
        """What it would keep. `products`: those that were run; None: it keeps all or nothing."""
        number = call.number
        while len(self._needs) <= number:
            self._needs.append(Need(0, 0))
            self._counts.append(0)
            self._measured_shapes.append(set())
        before, of_products = self._needs[number], nbytes if products is None else products.nbytes
        self._needs[number] = Need(max(before.whole, nbytes), max(before.products, of_products))
        self._counts[number] = max(self._counts[number], 0 if products is None else products.count)
        self._measured_shapes[number].add(call.shapes)

    def _end_interval(self) -> None:
        # Of a graph that is gone through a second time nobody knows what is still to come.
        calls = frozenset(range(self._entered or len(self._needs)))
        self._intervals.append(Interval(self._memory.reset_peak(), calls - self._begun))

    def end_backward(self) -> bool:
        """Whether a pass is over: all forwards have had their backwards."""
        if self._measures and self._begun:
            self._end_interval()
        self._backwards += 1
        over = self._backwards >= self._forwards
        if over:
            self._begin_pass()
        return over

    # ---- a step

    def end_step(self) -> None:
        self._begin_pass()
        failures, self._failures = self._failures, self._memory.failures()
        if self._failures > failures and self._needs:
            self._cap = self.kept_nbytes // 2
        if self._needs and (self._measures or (self._cap is not None and self._cap < self.kept_nbytes)):
            self._decide()
        elif self._measures:
            self._measures = False  # nothing was computed again
        elif not self._needs:
            self._measure()

    def _decide(self) -> None:
        limit = self._limit_nbytes()
        self._measures, self._most = False, choose(self._needs, self._intervals, limit, self._cap)
        if self._agreed is None or self._most.least(self._agreed) != self._agreed:
            self._asks = [_ALL - count for count in self._most]
        expected = expected_nbytes(self._needs, self._intervals, self._most)
        whole, products = self._kept_by_level()
        log.info(
            "recompute=auto: of %d calls %d may keep all activations (%.2f GiB) and %d their products (%.2f GiB); "
            "expected at most %.2f of %.2f GiB",
            len(self._needs), len(whole), sum(whole) / _GIB, len(products), sum(products) / _GIB,
            expected / _GIB, limit / _GIB,
        )  # fmt: skip

    def _kept_by_level(self) -> tuple[list[int], list[int]]:
        """Bytes of the calls that keep all, and of those that keep their products."""
        found: dict[Level, list[int]] = {level: [] for level in Level}
        for call, nbytes in self._most.by_call(self._needs).items():
            found[self._most.level(self._needs, call)].append(nbytes)
        return found[Level.ALL], found[Level.PRODUCTS]

    @property
    def kept_nbytes(self) -> int:
        return self._most.nbytes(self._needs)

    # ---- what ranks agree on

    def told(self) -> list[int]:
        """Zeros, or the more the fewer calls may keep their products, and all, here."""
        asks, self._asks = self._asks, [0, 0]
        return asks

    def heard(self, most_asked: Sequence[int]) -> None:
        """The most that any rank has told."""
        if any(most_asked):
            least = Kept(*(_ALL - asked for asked in most_asked))
            self._agreed = least if self._agreed is None else self._agreed.least(least)

    def _limit_nbytes(self) -> int:
        total = self._memory.total_nbytes()
        if total is not None:
            limit = int((1 - HOLES) * (total if self._budget is None else min(total, self._budget)))
        else:
            free = free_host_nbytes()
            limit = 1 << 62 if free is None else int(HOST_SHARE * free / local_world())
        return limit - sum(other.kept_nbytes for other in self._others())


def _is_within(shapes: Shapes, measured: Shapes) -> bool:
    """Whether inputs of these shapes are in no dimension larger than those that were measured."""
    return len(shapes) == len(measured) and all(
        len(one) == len(other) and all(a <= b for a, b in zip(one, other)) for one, other in zip(shapes, measured)
    )


class Alive(Listener):
    """What operations inside make, and of it what is alive. For a host, whose allocator does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in _strided((args, kwargs))}
        for each in _strided(result):
            storage = each.untyped_storage()
            if storage._cdata not in given:  # else a view, or written in place
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def nbytes(self) -> int:
        return sum(nbytes for ref, nbytes in self._made.values() if not ref.expired())


def _strided(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.layout is torch.strided]
