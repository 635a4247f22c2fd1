"""Units whose parameters are read outside their own module while a pass is under way.

A decoder that ends with `F.linear(x, self.embed.weight)`, attention that reads `self.out_proj.weight`, a loss
inside forward that looks at `self.head.weight`: the module that holds the parameter is not running, so its unit
is not gathered. Where compute rests SLICE this module brings it. It knows no hooks and no gradients.

Note [Read outside]
~~~~~~~~~~~~~~~~~~~
1. A read inside a pass gathers the unit through the pass's walk, like an entry, so that ranks may differ. What is
   handed out is the full Parameter: its gradient arrives by its own hook.
2. Autograd may have saved the parameter for a node that belongs to no call of the unit, and reading freed storage
   crashes. So the unit stays from then until the end of backward.
3. At the end of a forward the ranks agree on what any of them read so (`known`). From then on a known unit is never
   freed between its first use in a forward and the end of backward, on any rank: `held` are those that
   every rank is sure to have. A backward begins with one gather of each known unit that is not held.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from zeor.runtime.unit import Unit

if TYPE_CHECKING:
    from zeor.runtime.engine import Engine


class Outside:
    def __init__(self, engine: Engine):
        self._engine = engine
        self.known: set[int] = set()  # as agreed by all ranks
        self.now: set[int] = set()  # read on this rank in the pass under way
        self.held: set[int] = set()  # known, and present on every rank

    def keeps(self, unit: int) -> bool:
        return unit in self.known or unit in self.now

    def read(self, unit: Unit) -> bool:
        """Bring a unit that is read here and now; False where no pass is under way."""
        engine, passes = self._engine, self._engine.passes
        again = inside_backward() and engine.backward.running  # a forward is computed again
        walk = engine.backward.walk if again else engine.forward.walk
        if walk is not None:
            walk.entered.append(unit.index)
        elif not passes.open:
            return False
        # Without a walk, some unit was called outside the model's forward: every rank does the same.
        passes.gathers.arrive(unit, walk)
        self.now.add(unit.index)
        return True

    # ---- the passes tell

    def end_forward(self, read: Iterable[int], order: Sequence[int], train: bool) -> None:
        """A forward along `order` ends; `read`: what any rank read. Without gradients nobody needs it again."""
        self.held = self.held | (self.known & set(order)) if train else set()
        self.known.update(read)
        self.now.clear()

    def end_lone_call(self) -> None:
        """A unit called outside the model's forward is left; every rank has done the same."""
        if torch.is_grad_enabled():
            self.known |= self.now
            self.held |= self.now
        else:
            for index in self.now - self.known:
                self._engine.units[index].free()
        self.now.clear()

    def begin_backward(self) -> None:
        for index in sorted(self.known - self.held):
            self._engine.passes.gathers.take_part(index)
        for index in self.known:
            self._engine.units[index].wait()  # any node may read it: gather -> backward
        self.held = set(self.known)

    def end_backward(self, stay: set[int]) -> None:
        """Nobody reads them any more, save what must stay for a second backward."""
        for index in (self.known | self.now) - stay:
            self._engine.units[index].free()
        self.held &= stay
        self.now.clear()

    def forget(self) -> None:
        """Units were freed without asking."""
        self.now.clear()
        self.held.clear()

    def advice(self) -> str:
        """What to do about a parameter that is read outside any pass."""
        return _advice(self._engine.units[0].module)


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _advice(root: nn.Module | None) -> str:
    """What to do about a parameter that is not here; where a method of the user's reads it, with its name."""
    names = {} if root is None else {id(module): name for name, module in root.named_modules()}
    found, frame = None, sys._getframe(1)
    while frame is not None:
        owner, method = frame.f_locals.get("self"), frame.f_code.co_name
        if id(owner) in names and method not in ("_call_impl", "_wrapped_call_impl"):
            found = f"{names[id(owner)]}.{method}" if names[id(owner)] else method
        frame = frame.f_back  # type: ignore[assignment]
    if found == "forward":
        return "call model(...), not model.forward(...)"
    if found is None:
        return "read it inside `with zeor.full_params(model):`"
    return (
        f"it was read by {found!r}, called outside the model's forward: give zeor.shard(..., methods=({found!r},)), "
        "or call it inside `with zeor.full_params(model):`"
    )
