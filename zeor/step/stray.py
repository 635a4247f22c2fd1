"""Parameters that are read while their own module does not run.

A decoder that ends with `F.linear(x, self.embed.weight)`, attention that reads `self.out_proj.weight`, a loss
inside forward that looks at `self.head.weight`: the module that holds the parameter is not running, so its unit
is not gathered. Where compute rests SLICE this module brings it. It knows no hooks and no gradients.

Note [Stray reads]
~~~~~~~~~~~~~~~~~~
A read inside a pass gathers the unit through the pass's walk, like an entry, so that ranks may differ. In a forward the
unit then stays until the forward ends. What autograd saved of it is a handle (saved.py), which brings the unit again
in backward; in a backward (a forward that is computed again, a hook that reads) it stays as long as any unit that
backward demanded. Outside any pass there is no walk, and other ranks may do something else: such a read is refused.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType

from zeor.step.backward import Backward
from zeor.step.passes import Passes, inside_backward
from zeor.step.unit import Unit


class StrayReads:
    def __init__(self, passes: Passes, backward: Backward):
        self._passes, self._backward = passes, backward

    def read(self, unit: Unit) -> bool:
        """Bring a unit that is read here and now; False where no pass is under way."""
        passes = self._passes
        if inside_backward():
            self._backward.demand(unit)
            return True
        walk = passes.forward_walk
        if walk is not None:
            walk.entered.append(unit.index)
        elif passes.residents.open:
            passes.lone.append(unit)  # every rank does the same
        else:
            return False
        passes.gathers.arrive(unit, walk)
        return True

    def advice(self) -> str:
        """What to do about a parameter that is read outside any pass; where a method of the user's reads it, with its
        name."""
        root = self._passes.units[0].module
        names = {} if root is None else {id(module): name for name, module in root.named_modules()}
        found: str | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            method = code.co_name
            # One that the user calls by this name: not torch's way into it, nor the inside of a decorator.
            inner = method in ("_call_impl", "_wrapped_call_impl")
            # Statically: a property would be evaluated, and come here again.
            if id(owner) in names and not inner and callable(inspect.getattr_static(owner, method, None)):
                found = f"{names[id(owner)]}.{method}" if names[id(owner)] else method
            frame = frame.f_back
        if found == "forward":
            return "call model(...), not model.forward(...)"
        if found is None:
            return "read it inside `with zeor.full_params(model):`"
        return (
            f"it was read by {found!r}, called outside the model's forward: give zeor.shard(..., "
            f"methods=({found!r},)), or call it inside `with zeor.full_params(model):`"
        )
