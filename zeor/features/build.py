"""Building an engine: slots with their handles first, then the features that hang on it.

`zeor.shard` and the drop-in optimizers compose the same parts; what differs is whether there is a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zeor.features.counts import Counts
from zeor.features.first_batch import FirstBatch
from zeor.features.freezing import Freezing
from zeor.features.module_buffers import ModuleBuffers
from zeor.features.nonfinite import NonFinite
from zeor.features.plain_grads import PlainGrads
from zeor.features.recompute import Recompute
from zeor.features.release import Release
from zeor.features.settings import Settings
from zeor.step.engine import Engine
from zeor.step.extension import Extension
from zeor.step.handle import Handle, Services, services_of
from zeor.step.unit import Owner, Slot


class Builder:
    """Of one engine. 1. `slots`, 2. `engine.add_unit` with them, 3. `finish`; a drop-in that is given more parameters
    later goes through all three again."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._services: Services = services_of(engine)
        self._first_batch = FirstBatch(engine.mesh, engine.remove_extension)
        self._counts = Counts(engine.mesh, engine.slots, engine.announcer)
        self._plain: PlainGrads | None = None

    def slots(self, params: Sequence[tuple[str, nn.Parameter, Sequence[Owner]]]) -> list[Slot]:
        """One for each parameter, with its handle."""
        made = [Slot(*each) for each in params]
        for slot in made:
            slot.held = Handle(slot, self._services)
        return made

    def finish(self, model: nn.Module | None = None) -> None:
        """All units are there."""
        self.engine.ready()
        self.engine.extend(self._features(model))
        self._services.complete(self.engine)

    def _features(self, model: nn.Module | None) -> list[Extension]:
        """In the order in which they act: a mean is known before a release uses it. What has nothing to do in this
        model is left out."""
        engine, mesh, counts = self.engine, self.engine.mesh, self._counts
        nonfinite = NonFinite(mesh, engine.norms, engine.slots, engine.plan.nonfinite)
        features: list[Extension] = [
            Freezing(mesh, engine.slots, engine.announcer, engine.thaw),
            counts,
            Settings(mesh, engine.optimizers),
            nonfinite,
        ]
        if engine.plan.release:
            features.append(Release(engine.units, engine.reducer, engine.backward, counts))
        if not self._first_batch.done:
            features.append(self._first_batch)
        if model is not None:
            features.append(Recompute(engine.units, engine.plan.recompute, mesh.device))
            buffers = ModuleBuffers(mesh, model, engine.plan.buffers)
            if buffers.told_count:
                features.append(buffers)
        if engine.plain:
            given = None if self._plain is None else self._plain.given
            self._plain = PlainGrads(engine, self._first_batch, nonfinite, given)
            features.append(self._plain)
        return features
