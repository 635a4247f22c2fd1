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


def check_options(options: Mapping[str, Any]) -> None:
    """ValueError where torch.compile does not take them, before anything has changed."""
    import torch._dynamo.exc

    try:
        torch.compile(lambda x: x, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError, torch._dynamo.exc.TorchDynamoException) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"torch.compile does not take compile={dict(options)!r}: {why}") from error


class Compiling(Extension):
    """The compiled blocks of one model."""

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module], options: Mapping[str, Any]):
        done = {inner for module in root.modules() if _is_compiled(module) for inner in module.modules()}
        self.modules = [module for module in blocks if module not in done]
        for module in self.modules:
            module.compile(**options)
        self._compiled = [module._compiled_call_impl for module in self.modules]
        if not self.modules and not done:
            log.warning("compile=: the model has no blocks that could be compiled one by one; use model.compile().")
        self._steps = 0
        self._graphs = 0  # before this pass
        self._late = self._told = self._trained = False

    def pause(self) -> None:
        """The modules as they were."""
        for module in self.modules:
            module._compiled_call_impl = None

    def resume(self) -> None:
        for module, compiled in zip(self.modules, self._compiled):
            module._compiled_call_impl = compiled

    # An evaluation has graphs of its own, and so may the user's other models: only a training pass is looked at.

    def begin_forward(self, train: bool, alone: bool) -> None:
        if train:
            self._graphs = _graphs()

    def grads_there(self) -> None:
        self._trained = True
        self._late |= self._steps >= _WARM_STEPS and _graphs() > self._graphs

    def end_step(self) -> None:
        if not self._trained:  # the step of another optimizer of the same model
            return
        self._trained = False
        self._steps += 1
        if self._steps == _WARM_STEPS:
            self._tell_breaks(_counters()["graph_break"])
        if self._late and not self._told:
            self._told = True
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


def _graphs() -> int:
    return int(_counters()["stats"]["unique_graphs"])


def _counters() -> Any:
    from torch._dynamo.utils import counters  # the compiler is imported only where somebody compiles

    return counters
