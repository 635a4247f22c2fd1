"""init_parameters: the modules' own initialisers on a sharded model, at most one unit of full values at a time.

Every rank runs every initialiser on full tensors in host memory, from one seeded stream of the CPU's generator, and
keeps its own part: the values are the same at any world size, stage and device.

Note [Initialising through stand-ins]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Modules keep holding their own parameters while their initialisers run, as objects of their plain class. A torch
function mode stands between: whenever a parameter of this model is an argument, its full value takes its place. Values
are made when first touched and let go, each rank keeping its part, when a parameter of another unit is touched; one
touched again later is gathered. So an initialiser may reach
into its children (attention does) or over the whole model, at the price of gathers, never of memory.
Values begin as NaN: one that still is NaN in the end was not initialised, and is named.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from zeor.access.full import sum_of_bits
from zeor.access.meta import named_buffers, replace_buffer
from zeor.access.sharded import state_of
from zeor.comm.agree import same_everywhere
from zeor.memory import param as parameters
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.unfilled import BufferPlace
from zeor.step.unit import Slot, Unit, gather_values

Init = Callable[[nn.Module], Any]


def init_parameters(model: nn.Module, seed: int = 0, init: Init | None = None, missing_only: bool = False) -> None:
    """Give a sharded model its initial values by its modules' own initialisers, one unit at a time. The values are the
    same at any world size, stage and device; no random stream of the caller's is touched.

    Children come before parents. Each module's reset_parameters (or _reset_parameters) runs; then, where the module has
    parameters of its own, `init(module)` if given, else `_init_weights` of a model around it, as transformers and many
    others define it. What nothing initialises is named. missing_only=True keeps what has values already, for a new
    head on loaded weights.

    Where constructors draw random numbers in reset_parameters alone (torch.nn's modules do), in the order in which they
    register modules, the values equal those of building the model after torch.manual_seed(seed). They do not where a
    constructor draws otherwise (nn.Parameter(torch.randn(...)), which also needs init=), where the model was cast
    after it was built, or where it is initialised once more at the end (transformers): there the distribution is
    the same and the stream is not."""
    engine = state_of(model).engine
    engine.announce(events.OTHER, "zeor.init_parameters")
    engine.drain()
    run = _Run(engine, model, missing_only)
    work = list(_find_work(run, init))
    generator = torch.default_generator  # the CPU's alone: other devices' streams are not touched
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        with torch.no_grad(), run.values:
            for _, methods in work:
                for method in methods:
                    method()
        run.values.spill()
        run.check()
    except BaseException:
        run.restore_buffers()
        raise
    finally:
        run.values.drop()
        generator.set_state(before)
    run.finish()


class _Values(TorchFunctionMode):
    """Full values in the place of parameters. See Note [Initialising through stand-ins]."""

    def __init__(self, slots: list[Slot], kept: set[Slot]):
        super().__init__()
        self.slots = {slot.held: slot for slot in slots}
        self.kept = kept  # have values that must stay: may be read, what is written is dropped
        self.sums: dict[Slot, int] = {}  # what has been stored, with a sum over its bits
        self.unwritten: dict[Slot, None] = {}
        self._unit: Unit | None = None
        self._live: dict[Slot, Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = tree_map_only(nn.Parameter, self._full, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _full(self, param: nn.Parameter) -> Tensor:
        held = parameters.held_of(param)
        if held is None or held not in self.slots:
            return param
        slot = self.slots[held]
        if slot.unit is not self._unit:
            self.spill()
            self._unit = slot.unit
        if slot not in self._live:
            self._make(slot)
        return self._live[slot]

    def _make(self, slot: Slot) -> None:
        if slot in self.sums or slot in self.kept:
            members = [s for s in slot.unit.slots if s.lane is slot.lane and (s in self.sums or s in self.kept)]
            values = gather_values(slot.lane, [s for s in members if s not in self._live])
            self._live.update({s: value.cpu() for s, value in values.items()})
        else:
            blank = math.nan if slot.dtype.is_floating_point else 0
            self._live[slot] = torch.full(slot.shape, blank, dtype=slot.dtype, device="cpu")

    @torch.no_grad()
    def spill(self) -> None:
        """This rank's part of every live value into its slice."""
        while self._live:
            slot, value = self._live.popitem()
            if slot in self.kept:
                continue
            slot.lane.store(slot.index, value)
            self.sums[slot] = sum_of_bits(value)
            if value.is_floating_point() and bool(value.isnan().any()):
                self.unwritten[slot] = None
            else:
                self.unwritten.pop(slot, None)

    def drop(self) -> None:
        self._live.clear()
        self._unit = None

    def __enter__(self) -> Any:
        for slot in self.slots.values():
            slot.param.__class__ = slot.kind  # so that every operation, its own methods too, comes to this mode
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for lane in dict.fromkeys(slot.lane for slot in self.slots.values()):
            lane.dress()


class _Run:
    """One call: what is to be filled, and what has become of it."""

    def __init__(self, engine: Engine, model: nn.Module, missing_only: bool):
        self.mesh, self.slots, self.unfilled, self.model = engine.mesh, engine.slots, engine.unfilled, model
        self.wanted = set(self.unfilled.slots if missing_only else self.slots)
        self.values = _Values(self.slots, set(self.slots) - self.wanted)
        self.buffers: dict[BufferPlace, tuple[Tensor, Tensor, int]] = {}  # place: (meta, blank, version)
        places = {(buffer.module, buffer.attr) for buffer in self.unfilled.meta_buffers()}
        self.meta_buffers = [buffer for buffer in named_buffers(model) if (buffer.module, buffer.attr) in places]

    def concerns(self, module: nn.Module, slots: dict[int, Slot]) -> bool:
        """Whether a module holds something of its own that is to be filled."""
        own = [slots[id(p)] for p in module._parameters.values() if p is not None]
        return any(slot in self.wanted for slot in own) or any(b.module is module for b in self.meta_buffers)

    def blank_buffers(self) -> None:
        for place in self.meta_buffers:
            meta = place.value
            assert meta is not None
            fill = math.nan if meta.is_floating_point() else 0
            blank = torch.full(meta.shape, fill, dtype=meta.dtype, device="cpu")
            replace_buffer(self.model, meta, blank)
            self.buffers[place] = (meta, blank, blank._version)

    def restore_buffers(self) -> None:
        for meta, blank, _ in self.buffers.values():
            replace_buffer(self.model, blank, meta)

    def check(self) -> None:
        """Everything that was to be filled is."""
        for slot in self.slots:
            for module, attr in slot.owners:
                if module._parameters.get(attr) is not slot.param:
                    raise RuntimeError(
                        f"The initialiser of {type(module).__name__} put another parameter in the place of "
                        f"{slot.name!r}; let it write the values in place (nn.init, copy_)."
                    )
            if slot in self.wanted and (slot not in self.values.sums or slot in self.values.unwritten):
                raise RuntimeError(
                    f"No initialiser wrote all of parameter {slot.name!r} of a {type(slot.owners[0][0]).__name__}; "
                    "pass zeor.init_parameters(model, init=...) a function of a module that does."
                )
        for place, (_, blank, version) in self.buffers.items():
            unread = bool(blank.isnan().any()) if blank.is_floating_point() else blank._version == version
            if place.value is blank and unread:
                raise RuntimeError(
                    f"Buffer {place.name!r} is on the meta device and no initialiser of {type(place.module).__name__} "
                    "writes it; build the model inside `with zeor.on_meta():`, which keeps buffers real."
                )
        names = {slot.name: total for slot, total in self.values.sums.items()}
        lines = [f"{name!r} with the checksum {names[name]}" for name in sorted(names)]
        same_everywhere(self.mesh, "initial values", lines)

    def finish(self) -> None:
        for slot in self.wanted:
            self.unfilled.fill(slot)
        for place in self.buffers:
            value = place.value
            if value is not None:
                replace_buffer(self.model, value, value.to(self.mesh.device))


def _find_work(run: _Run, init: Init | None) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """(name, what to call) for each module, children before parents: the order in which constructors end."""
    slots = {id(slot.param): slot for slot in run.slots}
    work: list[tuple[str, list[Callable[[], Any]]]] = []
    for name, module, ancestor in _post_order(run.model, "", None, set()):
        own = run.concerns(module, slots)
        if not own and (module._parameters or len(run.wanted) < len(slots)):
            continue  # it has values that stay
        methods = _methods(module, ancestor, init if own else None)
        if own and not methods:
            held = [f"{name}.{attr}" if name else attr for attr, p in module._parameters.items() if p is not None]
            held += [buffer.name for buffer in run.meta_buffers if buffer.module is module]
            raise ValueError(
                f"Module {name or 'the root'!r} ({type(module).__name__}) holds {held[0]!r} but has no "
                "reset_parameters; give it one, or pass zeor.init_parameters(model, init=...) a function that fills it."
            )
        work.append((name, methods))
    run.blank_buffers()
    return iter(work)


def _methods(module: nn.Module, ancestor: nn.Module | None, init: Init | None) -> list[Callable[[], Any]]:
    """A module's own initialiser, then what overrides it: `init`, or `_init_weights` of a model around it."""
    found: list[Callable[[], Any]] = []
    for name in ("reset_parameters", "_reset_parameters", "_init_weights"):
        method = getattr(module, name, None)
        if callable(method) and _takes(method, 0):
            found.append(method)
            break
    if init is not None:
        found.append(partial(init, module))
    elif ancestor is not None:
        found.append(partial(getattr(ancestor, "_init_weights"), module))  # noqa: B009 (it is not a Tensor)
    return found


def _post_order(
    module: nn.Module, name: str, ancestor: nn.Module | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Each module once, children first, with the innermost module around it (or itself) that initialises others."""
    if module in seen:
        return
    seen.add(module)
    method = getattr(module, "_init_weights", None)
    if callable(method) and _takes(method, 1):
        ancestor = module
    for attr, child in module.named_children():
        yield from _post_order(child, f"{name}.{attr}" if name else attr, ancestor, seen)
    yield name, module, ancestor


def _takes(method: Callable, count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True
