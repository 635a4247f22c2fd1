"""Units compiled by torch.compile: `zeor.shard(..., compile=True)`.

Each block is compiled in place, as by `block.compile()`, so that blocks of a kind share one graph and zeor's hooks stay
outside it. What the user has compiled already stays as it is. Graph breaks, and graphs that are compiled again after
the second step, cost speed in silence: each is told once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from zeor.step.extension import Extension

_WARM_STEPS = 2  # in which graphs are made

log = logging.getLogger("zeor")


class Compiling(Extension):
    """The compiled blocks of one model."""

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module], options: Mapping[str, Any]):
        done = {inner for module in root.modules() if _is_compiled(module) for inner in module.modules()}
        self.modules = [module for module in blocks if module not in done]
        for module in self.modules:
            module.compile(**options)
        self._steps = 0
        self._graphs: int | None = None  # when all should have been made; None: not yet, or already told

    def end_step(self) -> None:
        self._steps += 1
        if self._steps > _WARM_STEPS and self._graphs is None:
            return
        graphs = _counters()["stats"]["unique_graphs"]
        if self._steps == _WARM_STEPS:
            self._graphs = graphs
            self._tell_breaks(_counters()["graph_break"])
        elif self._graphs is not None and graphs > self._graphs:
            self._graphs = None
            log.warning(
                "compile=: torch.compile made another graph at step %d, which takes seconds. Inputs of another shape "
                "are the usual cause (TORCH_LOGS=recompiles names it): pad them, or give compile={'dynamic': True}.",
                self._steps,
            )

    def _tell_breaks(self, breaks: Mapping[str, int]) -> None:
        if breaks:
            reason, times = Counter(breaks).most_common(1)[0]
            log.warning(
                "compile=: torch.compile broke graphs at %d place(s), most often (%d times) for this reason: %s. What "
                "lies between breaks is compiled in parts; TORCH_LOGS=graph_breaks names the places.",
                len(breaks), times, reason.strip().splitlines()[0],
            )  # fmt: skip


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def _counters() -> Any:
    from torch._dynamo.utils import counters  # the compiler is imported only where somebody compiles

    return counters
