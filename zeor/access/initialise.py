"""init_parameters: the modules' own initialisers on a sharded model, by every rank for the part that it holds.

Random numbers come by position (draw.py), so a rank draws just its part, on its device. What an initialiser does that
is not element by element runs on full values in host memory, at most one unit of them at a time.

Note [Initialising through stand-ins]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Modules keep holding their own parameters while their initialisers run, as objects of their plain class. A torch
function mode stands between: whenever a parameter of this model is an argument, a `_Recorded` takes its place, a tensor
without memory.
1. Draws and element-wise operations become the parameter's recipe, which is carried out at the end, by each rank for
   its part.
2. At any other operation (a read, an index, a decomposition) its full value is made, in host memory, and is what
   initialisers work on until one overwrites the parameter. With eager=True that is so from the beginning.
When a full value of another unit is needed, those of the last one are cut and let go; one that is touched again later
is gathered. So an initialiser may reach into its children (attention does) or over the whole model, at the price of
gathers, never of memory. What a parameter becomes does not depend on its unit, so that the world's size does not show.
Values begin as NaN: one that still is NaN in the end was not initialised, and is named.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from zeor.access.draw import OVERWRITES, Recipe
from zeor.access.full import sum_of_bits
from zeor.access.meta import named_buffers, replace_buffer
from zeor.access.sharded import state_of
from zeor.comm.agree import same_everywhere
from zeor.comm.along import gather_into
from zeor.memory import param as parameters
from zeor.memory.view import Args, Func, Kwargs
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.unfilled import BufferPlace
from zeor.step.unit import Slot, Unit, gather_values

Init = Callable[[nn.Module], Any]
ALIASES = ("detach", "alias")  # `.data` is one
STORED_NUMEL = 1 << 26  # values that are made at a time beside where they go


def init_parameters(
    model: nn.Module, seed: int = 0, init: Init | None = None, missing_only: bool = False, eager: bool = False
) -> None:
    """Give a sharded model its initial values by its modules' own initialisers. Every parameter has a random stream of
    its own, by seed and name, of which each rank draws its part on its device: the values are the same at any world
    size and stage, and on CPU and GPU but for last bits of normal numbers. No stream of the caller's is touched.

    Children come before parents. Each module's reset_parameters (or _reset_parameters) runs; then, where the module has
    parameters of its own, `init(module)` if given, else `_init_weights` of a model around it, as transformers and many
    others define it. What nothing initialises is named. missing_only=True keeps what has values already, for a new
    head on loaded weights.

    eager=True draws from one stream instead, as a plain model does while it is built, on one thread of the CPU and on
    every rank (minutes for billions of parameters). Where constructors draw in reset_parameters alone (torch.nn's
    modules do), in the order in which they register modules, the values then equal those of building the model after
    torch.manual_seed(seed), on any device. They do not where a constructor draws otherwise (nn.Parameter(torch.randn(
    ...)), which also needs init=), where the model was cast after it was built, or where it is initialised once more
    at the end (transformers)."""
    engine = state_of(model).engine
    engine.refuse_divided(
        "zeor.init_parameters draws whole parameters; build the model with values, or use zeor.load_pretrained."
    )
    engine.announce(events.OTHER, "zeor.init_parameters")
    engine.drain()
    run = _Run(engine, model, missing_only, None if eager else seed)
    work = _find_work(run, init)
    generator = torch.default_generator  # the CPU's alone: other devices' streams are not touched
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        with torch.no_grad(), run.values:
            for initialise in work:
                initialise()
        run.values.spill()
        run.values.carry_out()
        run.check()
    except BaseException:
        for meta, blank, _ in run.buffers.values():
            replace_buffer(model, blank, meta)
        engine.passes.put_back()
        raise
    finally:
        run.values.let_go()
        generator.set_state(before)
    engine.forget_gathered()
    run.finish()


class _Recorded(Tensor):
    """Stands for a parameter whose values are not made yet: see Note [Initialising through stand-ins]."""

    owner: _Values
    slot: Slot

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own stub is narrower

    @classmethod
    def of(cls, owner: _Values, slot: Slot) -> _Recorded:
        made: _Recorded = Tensor._make_wrapper_subclass(cls, slot.shape, dtype=slot.dtype, device=torch.device("cpu"))
        made.owner, made.slot = owner, slot
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as the function that switches it off
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        own, name, kwargs = args[0] if args else None, func._schema.name.removeprefix("aten::"), kwargs or {}
        if not isinstance(own, _Recorded):
            args, kwargs = tree_map_only(_Recorded, _full, (args, kwargs))
            return func(*args, **kwargs)
        if name in ALIASES or own.owner.record(own.slot, name, args[1:], kwargs):
            return own
        rest, kwargs = tree_map_only(_Recorded, _full, (args[1:], kwargs))
        mine = _full(own)  # last: another unit's values may be let go once they are at hand, those written to may not
        out = func(mine, *rest, **kwargs)
        return own if out is mine else out  # what changes a tensor in place returns it


def _full(recorded: _Recorded) -> Tensor:
    return recorded.owner.full(recorded.slot)


class _Values(TorchFunctionMode):
    """What stands in the place of parameters. `seed`: of streams by position; None: full values from the beginning."""

    def __init__(self, slots: list[Slot], kept: set[Slot], seed: int | None):
        super().__init__()
        self.slots = {slot.held: slot for slot in slots}
        self.kept = kept  # have values that must stay: may be read, what is written is dropped
        self.sums: dict[Slot, int] = {}  # what has been stored, with a sum that tells whether ranks agree
        self.unwritten: dict[Slot, None] = {}
        self._seed = seed
        self._unit: Unit | None = None
        self._live: dict[Slot, Tensor] = {}
        self._recipes: dict[Slot, Recipe] = {}

    def __torch_function__(self, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        args, kwargs = tree_map_only(nn.Parameter, self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, param: nn.Parameter) -> Tensor:
        held = parameters.held_of(param)
        return param if held is None or held not in self.slots else _Recorded.of(self, self.slots[held])

    def record(self, slot: Slot, name: str, args: Args, kwargs: Kwargs) -> bool:
        """Whether this operation became part of the parameter's recipe."""
        if self._seed is None or slot in self.kept:
            return False
        recipe = self._recipes.get(slot) or Recipe(self._seed, slot.name, slot.dtype)
        exists = slot in self._live or (slot in self.sums and not recipe.deeds)
        if not recipe.takes(name, args, kwargs) or (exists and name not in OVERWRITES):
            return False
        self._recipes[slot] = recipe
        recipe.add(name, args, kwargs)
        if slot in self._live:  # somebody may hold a view of it
            self._live[slot].copy_(self._make(slot, recipe))
            recipe.forget()
        return True

    @staticmethod
    def _make(slot: Slot, recipe: Recipe) -> Tensor:
        return recipe.make(0, math.prod(slot.shape), slot.lane.axes.device).cpu().view(slot.shape)

    def full(self, slot: Slot) -> Tensor:
        """Its full value, in host memory."""
        if slot.unit is not self._unit:
            self.spill()
            self._unit = slot.unit
        recipe = self._recipes.get(slot)
        if slot in self._live:
            pass
        elif recipe is not None and recipe.deeds:
            self._live[slot] = self._make(slot, recipe)
            recipe.forget()
        elif slot in self.sums or slot in self.kept:
            members = [s for s in slot.unit.slots if s.lane is slot.lane and self._is_stored(s)]
            self._live.update({s: value.cpu() for s, value in gather_values(slot.lane, members).items()})
        else:
            blank = math.nan if slot.dtype.is_floating_point else 0
            self._live[slot] = torch.full(slot.shape, blank, dtype=slot.dtype, device="cpu")
        return self._live[slot]

    def _is_stored(self, slot: Slot) -> bool:
        """Its slices are its value."""
        recipe = self._recipes.get(slot)
        only_recipe = recipe is not None and bool(recipe.deeds)
        return slot not in self._live and not only_recipe and (slot in self.sums or slot in self.kept)

    @torch.no_grad()
    def spill(self) -> None:
        """This rank's part of every live value into its slice."""
        while self._live:
            slot, value = self._live.popitem()
            if slot not in self.kept:
                slot.lane.store(slot.index, value)
                self._note(slot, sum_of_bits(value), not (value.is_floating_point() and bool(value.isnan().any())))

    @torch.no_grad()
    def carry_out(self) -> None:
        """What is only a recipe becomes values: here those that this rank updates, elsewhere the others."""
        recipes = {slot: recipe for slot, recipe in self._recipes.items() if recipe.deeds}
        for slot, recipe in recipes.items():
            _carry_out(recipe, slot)
            self._note(slot, zlib.crc32(recipe.describe().encode()), recipe.is_whole)
        for lane in dict.fromkeys(slot.lane for slot in recipes):
            if lane.parted:
                lane.bring_anew("gather of initial values")
                lane.changed()
                continue
            if lane.frees:
                legs, into, begin = lane.legs("update", "compute"), lane.mine, lane.kept.begin
            else:  # not by the lane itself, which would dress its parameters
                legs, into, begin = lane.legs("update"), lane.full.flat, 0
            if legs:
                gather_into(lane.axes, legs, into, "gather of initial values", begin)
                lane.changed()

    def _note(self, slot: Slot, total: int, written: bool) -> None:
        self.sums[slot] = total
        self.unwritten.pop(slot, None)
        if not written:
            self.unwritten[slot] = None

    def let_go(self) -> None:
        self._live.clear()
        self._recipes.clear()

    def __enter__(self) -> Any:
        for slot in self.slots.values():
            slot.param.__class__ = slot.kind  # so that every operation, its own methods too, comes to this mode
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for lane in dict.fromkeys(slot.lane for slot in self.slots.values()):
            lane.dress()


def _carry_out(recipe: Recipe, slot: Slot) -> None:
    """For what this rank updates, chunk by chunk."""
    lane = slot.lane
    for segment in lane.segments:
        if segment.param == slot.index:
            for begin in range(0, segment.numel, STORED_NUMEL):
                first, end = segment.start + begin, segment.start + min(begin + STORED_NUMEL, segment.numel)
                lane.store_part(segment.offset + begin, recipe.make(first, end, lane.axes.device))


class _Run:
    """One call: what is to be filled, and what has become of it."""

    def __init__(self, engine: Engine, model: nn.Module, missing_only: bool, seed: int | None):
        self.axes, self.slots, self.unfilled, self.model = engine.axes, engine.slots, engine.unfilled, model
        self.wanted = set(self.unfilled.slots if missing_only else self.slots)
        self.values = _Values(self.slots, set(self.slots) - self.wanted, seed)
        self.buffers: dict[BufferPlace, tuple[Tensor, Tensor, int]] = {}  # place: (meta, blank, version)
        places = {(buffer.module, buffer.attr) for buffer in self.unfilled.meta_buffers()}
        self.meta_buffers = [buffer for buffer in named_buffers(model) if (buffer.module, buffer.attr) in places]

    def blank_buffers(self) -> None:
        for place in self.meta_buffers:
            meta = place.value
            assert meta is not None
            fill = math.nan if meta.is_floating_point() else 0
            blank = torch.full(meta.shape, fill, dtype=meta.dtype, device="cpu")
            replace_buffer(self.model, meta, blank)
            self.buffers[place] = (meta, blank, blank._version)

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
        same_everywhere(self.axes.everyone, "initial values", lines)

    def finish(self) -> None:
        for slot in self.wanted:
            self.unfilled.fill(slot)
        for place in self.buffers:
            value = place.value
            if value is not None:
                replace_buffer(self.model, value, value.to(self.axes.device))


def _find_work(run: _Run, init: Init | None) -> list[Callable[[], Any]]:
    """What to call for each module, children before parents: the order in which constructors end."""
    slots = {id(slot.param): slot for slot in run.slots}
    work: list[Callable[[], Any]] = []
    for name, module, ancestor in _post_order(run.model, "", None, set()):
        mine = (slots[id(param)] for param in module._parameters.values() if param is not None)
        # Whether it holds something of its own that is to be filled.
        own = any(slot in run.wanted for slot in mine) or any(b.module is module for b in run.meta_buffers)
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
        work += methods
    run.blank_buffers()
    return work


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


def _takes(method: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True
