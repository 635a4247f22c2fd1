"""What the user did to gradients since ranks last met: scaled, clamped, dropped. Kept to be told to ranks that follow.

A rank that ran out of data inside `join` holds its slice of every gradient but runs none of the user's code, so it
must be told what the others' code did to theirs. Numbers can travel; a tensor of many elements cannot, and
is refused by name when somebody would need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.memory.view import Held
from zeor.step.engine import Engine
from zeor.step.events import DROP, SCALE
from zeor.step.handle import Handle
from zeor.step.unit import Slot


class Edit(NamedTuple):
    engine: int
    slot: int
    verb: str
    args: tuple
    kwargs: dict[str, Any]


class Edits:
    def __init__(self, engines: Sequence[Engine]):
        self._engines = engines
        self._at = {slot.held: (e, s) for e, engine in enumerate(engines) for s, slot in enumerate(engine.slots)}
        self._log: list[Edit] = []

    def __len__(self) -> int:
        return len(self._log)

    def clear(self) -> None:
        self._log.clear()

    def note(self, held: Held, verb: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self._log.append(Edit(*self._at[held], verb, args, kwargs))

    def encode(self) -> list[list[Any]]:
        """As JSON; neighbours that differ in the parameter alone become one entry."""
        found: list[list[Any]] = []
        last: Edit | None = None
        for edit in self._log:
            if last is not None and (edit.engine, edit.verb) == (last.engine, last.verb) and _same(edit, last):
                found[-1][2].append(edit.slot)
            else:
                name = self._engines[edit.engine].slots[edit.slot].name
                args = [_encode(arg, edit.verb, name) for arg in edit.args]
                kwargs = {key: _encode(arg, edit.verb, name) for key, arg in edit.kwargs.items()}
                found.append([edit.engine, edit.verb, [edit.slot], args, kwargs])
            last = edit
        return found

    @torch.no_grad()
    def replay(self, entries: Sequence[Sequence[Any]], skip: int) -> None:
        """Do here what another rank's code did; this rank's own code had done the first `skip` of it."""
        for engine_index, verb, slots, encoded, encoded_by_name in entries:
            engine = self._engines[engine_index]
            args = [_decode(arg, engine.mesh.device) for arg in encoded]
            kwargs = {key: _decode(arg, engine.mesh.device) for key, arg in encoded_by_name.items()}
            for position in slots:
                if skip > 0:
                    skip -= 1
                    continue
                _do(engine.slots[position], verb, args, kwargs)
                if verb == DROP and engine.plain:
                    engine.slots[position].param.grad = None


def _do(slot: Slot, verb: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    held = slot.held
    assert isinstance(held, Handle)
    if verb == DROP:
        held.set_grad(None)
    elif verb == SCALE:
        held.scale_grad(args[0])
    else:
        getattr(torch.Tensor, verb)(held.local_grad(), *args, **kwargs)
        held.tell_edit(verb)


def _same(a: Edit, b: Edit) -> bool:
    mine, other = (*a.args, *a.kwargs.items()), (*b.args, *b.kwargs.items())
    return len(mine) == len(other) and all(x is y or (_plain(x) and x == y) for x, y in zip(mine, other))


def _plain(value: Any) -> bool:
    return type(value) in (int, float, bool, tuple) and not isinstance(value, Tensor)


def _encode(value: Any, verb: str, name: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"number": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise RuntimeError(
        f"{verb} on the gradient of {name!r} was given a {type(value).__name__} of many numbers inside zeor.join, "
        "where a rank that is out of data cannot follow; change gradients by single numbers there."
    )


def _decode(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["number"], dtype=getattr(torch, value["dtype"]), device=device)
    return value
