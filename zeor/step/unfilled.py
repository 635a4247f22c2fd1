"""What of a sharded model has no values yet: parameters and buffers that were on the meta device (meta.py).

Nothing may compute with them; whatever fills one says so here.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from zeor.step.extension import Extension
from zeor.step.unit import Slot

HOW = "fill the model with zeor.load_pretrained(model, folder) or zeor.init_parameters(model) first"


class BufferPlace(NamedTuple):
    module: nn.Module
    attr: str
    name: str

    @property
    def value(self) -> Tensor | None:
        return self.module._buffers.get(self.attr)


class Unfilled(Extension):
    """What of one model has no values yet. Empty for a model that was sharded with values: then it costs nothing."""

    def __init__(self) -> None:
        self.slots: dict[Slot, None] = {}  # in the order of the model
        self.buffers: list[BufferPlace] = []

    def begin_forward(self, train: bool, alone: bool) -> None:
        self.check()

    def check(self) -> None:
        """Before anything computes with the model or reads it whole."""
        if self.slots:
            raise RuntimeError(sentence(next(iter(self.slots)).name))
        if self.buffers:
            self.buffers = self.meta_buffers()
            if self.buffers:
                raise RuntimeError(
                    f"Buffer {self.buffers[0].name!r} is still on the meta device; build the model inside "
                    "`with zeor.on_meta():`, which keeps buffers real, or assign it a value."
                )

    def fill(self, slot: Slot) -> None:
        """It has values from now on."""
        if slot in self.slots:
            del self.slots[slot]
            slot.lane.dress()  # it may be read now

    def check_slot(self, slot: Slot) -> None:
        if slot in self.slots:
            raise RuntimeError(sentence(slot.name))

    def meta_buffers(self) -> list[BufferPlace]:
        """Those that nobody, the user included, has given a value."""
        return [buffer for buffer in self.buffers if buffer.value is not None and buffer.value.is_meta]


def sentence(name: str) -> str:
    return f"Parameter {name!r} was on the meta device when zeor.shard ran and has no values yet; {HOW}."
