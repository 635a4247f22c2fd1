"""Gradients of plain parameters: a drop-in optimizer knows no model, and leaves them where everybody looks for them.

Note [Given gradients]
~~~~~~~~~~~~~~~~~~~~~~
A drop-in optimizer sees parameters, not the model, and DDP leaves no trace on parameters. So when its first gradient
arrives, a drop-in looks once through the process's objects for a DDP around its own parameters. (A hook on all
modules would see the wrapper called, but would be noticed by torch.compile.) Where there is one the engine is `given`
its gradients, full, averaged and the same on every rank: it leaves them alone as they arrive, and step() cuts this
rank's part out of them. Nothing is reduced a second time; clipping, GradScaler and ddp.no_sync() act on plain tensors
before that. The first step checks that ranks do have the same gradients: they do not where the module inside the DDP
was called.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeor.comm.agree import exchange
from zeor.comm.axes import Axes
from zeor.data import fingerprint
from zeor.features.first_batch import FirstBatch
from zeor.features.nonfinite import NonFinite
from zeor.memory.param import when_accumulated
from zeor.step.engine import Engine
from zeor.step.extension import Extension
from zeor.step.norms import Norms
from zeor.step.unit import Slot, Unit


class PlainGrads(Extension):
    """`drop`: takes every gradient away."""

    def __init__(
        self, axes: Axes, units: list[Unit], norms: Norms, drop: Callable[[], None],
        first_batch: FirstBatch, nonfinite: NonFinite,
    ):  # fmt: skip
        self._axes, self._units, self._slots = axes, units, [slot for unit in units for slot in unit.slots]
        self._norms, self._drop, self._first_batch, self._nonfinite = norms, drop, first_batch, nonfinite
        self.given = None if axes.everyone.size > 1 else False  # None: not looked for yet

    @property
    def is_given(self) -> bool:
        """Asked when gradients arrive: by then the model is wrapped, if ever."""
        if self.given is None:
            self.given = around(slot.param for slot in self._slots)
        return self.given

    def grads_begun(self) -> None:
        for slot in self._slots:
            if slot.lane.grads is not None:
                slot.param.grad = None

    def grads_there(self) -> None:
        self._first_batch.compare()
        for slot in self._slots:
            if slot.lane.grads is not None and slot.lane.grads.has[slot.index]:
                slot.param.grad = slot.held.get_grad()

    def heed(self) -> None:
        """Plain parameters do not tell when the user drops or replaces their gradient: look before it is used."""
        if self.given:
            self._take()
            return
        for slot in self._slots:
            if slot.param.grad is not slot.held.get_grad():
                slot.held.set_grad(slot.param.grad)

    def end_step(self) -> None:
        if self.given:
            self._drop()  # the parts; the user's own stay

    def _take(self) -> None:
        """This rank's part of what lies on the user's parameters."""
        if not self._first_batch.done:
            self._first_batch.done = True
            self._compare()
        self._norms.forget_all()
        self._nonfinite.travels = False  # no backward of this engine's own ends with an exchange
        for unit in self._units:
            for lane in unit.lanes:
                if lane.grads is not None:
                    lane.grads.replace([slot.param.grad for slot in unit.members(lane)])

    def _compare(self) -> None:
        prints = [0 if slot.param.grad is None else fingerprint(slot.param.grad) for slot in self._slots]
        seen = exchange(self._axes.everyone, prints, "comparison of the ranks' gradients")
        for number, slot in enumerate(self._slots):
            if any(rank[number] != seen[0][number] for rank in seen):
                raise RuntimeError(
                    f"The model is wrapped in DistributedDataParallel, but the gradient of {slot.name!r} differs "
                    "between ranks at the first step; call the DistributedDataParallel itself, not the module inside "
                    "it, and run the last backward before a step outside its no_sync()."
                )


def watch(slot: Slot, engine: Engine) -> None:
    """The user's plain parameter lies over the lane: its gradients are the engine's, unless a DDP reduces them."""
    # Weak: autograd's hooks are not seen by Python's collector, and a slot reaches its own parameter.
    ref, engine_ref = weakref.ref(slot), weakref.ref(engine)

    def taking() -> tuple[Slot, Engine] | None:
        owner, its_engine = ref(), engine_ref()
        if owner is None or its_engine is None or its_engine.feature(PlainGrads).is_given:
            return None
        return owner, its_engine

    def before(grad: Tensor) -> None:
        """Its sharded gradient must be out of the way before autograd accumulates."""
        if found := taking():
            found[1].backward.begin()

    def after(param: Tensor) -> None:
        if found := taking():
            found[1].backward.collect(found[0])

    when_accumulated(slot.param, after)
    slot.param.register_hook(before)


def around(params: Iterable[nn.Parameter]) -> bool:
    """Whether a DistributedDataParallel holds any of these."""
    # By type(): asking some objects for their class runs code of theirs. By the few types that there are: to ask each
    # of some 200,000 objects takes a quarter of the time in which a small model is sharded.
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if DistributedDataParallel in kind.__mro__}
    if not kinds:
        return False
    ours = {id(param) for param in params}
    wrappers = [thing for thing in things if type(thing) in kinds]
    return any(id(param) in ours for wrapper in wrappers for param in wrapper.parameters())
