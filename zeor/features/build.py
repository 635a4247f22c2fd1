"""Building an engine: slots with their handles first, then the features that hang on it.

`zeor.shard` and the drop-in optimizers compose the same parts; what differs is whether there is a model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn

from zeor.access.wiring import set_wire
from zeor.features.auto_wire import AutoWire
from zeor.features.compiling import Compiling
from zeor.features.first_batch import FirstBatch
from zeor.features.freezing import Freezing
from zeor.features.mean_loss import Counts
from zeor.features.module_buffers import ModuleBuffers
from zeor.features.nonfinite import NonFinite
from zeor.features.plain_grads import PlainGrads
from zeor.features.recompute import AutoRecompute, KeepsProducts, Recompute, asks_products, blocks_of
from zeor.features.release import Release
from zeor.features.settings import Settings
from zeor.step.engine import Engine
from zeor.step.extension import Extension
from zeor.step.handle import slots_of
from zeor.step.unit import Owner, Slot


class Builder:
    """Of one engine. 1. `slots`, 2. `engine.add_unit` with them, 3. `finish`; a drop-in that is given more parameters
    later goes through all three again."""

    def __init__(self, engine: Engine, goes_on: bool = False):
        """`goes_on`: the model has trained before, under another plan."""
        axes = engine.axes
        self.engine = engine
        self._first_batch = FirstBatch(axes, engine.remove_extension)
        self._first_batch.done |= goes_on
        self._counts = Counts(axes, engine.slots, engine.announcer)
        self._plain: PlainGrads | None = None

    def slots(self, params: Sequence[tuple[str, nn.Parameter, Sequence[Owner]]]) -> list[Slot]:
        """One for each parameter, with its handle."""
        return slots_of(params, self.engine.services)

    def finish(self, model: nn.Module | None = None) -> None:
        """All units are there."""
        self.engine.ready()
        self.engine.extend(self._features(model))

    def _features(self, model: nn.Module | None) -> list[Extension]:
        """In the order in which they act: a mean is known before a release uses it. What has nothing to do in this
        model is left out."""
        engine, counts, first_batch = self.engine, self._counts, self._first_batch
        axes, plan, units, slots, norms = engine.axes, engine.plan, engine.units, engine.slots, engine.norms
        nonfinite = NonFinite(axes, norms, slots, plan.nonfinite)
        freezing = Freezing(axes, slots, engine.announcer, engine.passes.settling, engine.thaw)
        features: list[Extension] = [freezing, counts, Settings(axes, engine.optimizers), nonfinite]
        if plan.release:
            features.append(Release(units, engine.reducer, engine.backward, counts))
        if not first_batch.done:
            features.append(first_batch)
        if model is not None:
            if plan.recompute == "auto":
                budget = None if plan.offload is None else plan.offload.device_budget
                features.append(AutoRecompute(units, axes.device, budget))
            else:
                kind = KeepsProducts if asks_products(plan.recompute) else Recompute
                features.append(kind(units, plan.recompute, axes.device))
            if plan.compile is not False:
                features.append(Compiling(model, blocks_of(units), plan.compile))
            buffers = ModuleBuffers(axes, model, plan.buffers)
            if buffers.told_count:
                features.append(buffers)
        if plan.wire is not None and plan.wire.auto:
            switch = functools.partial(set_wire, engine)
            features.append(AutoWire(plan, axes, units, engine.announcer, switch=switch, drain=engine.drain))
        if engine.plain:
            before = self._plain
            self._plain = PlainGrads(axes, units, norms, engine.drop_grads, first_batch, nonfinite)
            if before is not None:
                self._plain.given = before.given
            features.append(self._plain)
        return features
