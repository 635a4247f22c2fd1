"""`optimizer.state` of a sharded optimizer: this rank's, answering for the user's own parameters too.

The entries are keyed by what this rank steps on: segments, and wholes on an owner. A user asks for
`optimizer.state[param]` with a parameter of the model. The answer is the live entry of this rank's part, so that a
read shows it and an edit works on it. An optimizer's own step finds its segments at once and pays nothing for this.

| asked with                        | answer                                                             |
| a segment                         | the entry itself, as in any defaultdict                            |
| a parameter with a part here      | the entry of that part                                             |
| a parameter without a part here   | an entry that is empty, keeps nothing, and says so                 |
| one whose state rests elsewhere   | a sentence: a copy would be shown, and an edit of it would be lost |
| anything else                     | as in any defaultdict                                              |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zeor.runtime.unit import Slot

if TYPE_CHECKING:
    from zeor.optim.stepper import Stepper

_NONE: Any = object()


class Absent(dict):
    """The state of a parameter of which this rank holds nothing. Writes into it are dropped: other ranks keep it."""

    def __init__(self, name: str, rank: int):
        super().__init__()
        self._name, self._rank = name, rank

    def __missing__(self, key: Any) -> Any:
        raise KeyError(
            f"{key!r} of {self._name!r}: rank {self._rank} updates no part of this parameter, so it keeps no state of "
            "it; look at it on the ranks that do (p in optimizer.state says who), or call zeor.unshard first."
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return default

    def update(self, *args: Any, **kwargs: Any) -> None:
        pass


class OwnState(defaultdict):
    def __init__(self, stepper: Stepper, entries: dict[Any, Any]):
        super().__init__(dict)
        self._stepper = stepper
        for key, value in entries.items():
            dict.__setitem__(self, key, value)

    # A copied or pickled one is a plain one.
    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __copy__(self) -> Any:
        return self.plain()

    def copy(self) -> Any:
        return self.plain()

    def plain(self) -> defaultdict:
        return defaultdict(dict, self.items())

    # ---- the user's parameters

    def _slot(self, key: Any) -> Slot | None:
        """Of a parameter of the model that trains; None where the key itself counts."""
        if not isinstance(key, Tensor) or dict.__contains__(self, key):
            return None
        slot = self._stepper.segments.slots.get(id(key))
        return slot if slot is not None and slot.lane.grads is not None else None

    def _part(self, slot: Slot) -> Any:
        """What this rank steps on for a parameter, or None. Whoever asks may edit: caches of the entries are void."""
        stepper = self._stepper
        stepper.engine.drain()
        if stepper.streams(slot.param):
            raise RuntimeError(
                f"The optimizer's state of {slot.name!r} rests outside the optimizer (offload=, moments= or delay=), "
                "so optimizer.state cannot show or change it; edit optimizer.state_dict() and load it back, "
                "or call optimizer.state.clear() to begin anew."
            )
        if stepper.one_pass is not None:
            stepper.one_pass.forget_state()
        return stepper.segments.of(slot.param)

    def __missing__(self, key: Any) -> Any:
        slot = self._slot(key)
        if slot is None:
            return super().__missing__(key)
        mine = self._part(slot)
        return Absent(slot.name, slot.lane.mesh.rank) if mine is None else self[mine]

    def __contains__(self, key: Any) -> bool:
        slot = self._slot(key)
        if slot is None:
            return super().__contains__(key)
        mine = self._part(slot)
        return mine is not None and super().__contains__(mine)

    def get(self, key: Any, default: Any = None) -> Any:
        slot = self._slot(key)
        if slot is not None:
            key = self._part(slot)
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        slot = self._slot(key)
        if slot is not None:
            mine = self._part(slot)
            value = self._stepper.segments.cut_state(slot.param, value)
            if mine is None:
                return
            key = mine
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: Any) -> None:
        slot = self._slot(key)
        if slot is None:
            super().__delitem__(key)
        else:
            super().pop(self._part(slot), None)

    def pop(self, key: Any, default: Any = _NONE) -> Any:
        slot = self._slot(key)
        if slot is not None:
            mine = self._part(slot)
            if mine is None or not super().__contains__(mine):
                return Absent(slot.name, slot.lane.mesh.rank) if default is _NONE else default
            key = mine
        return super().pop(key) if default is _NONE else super().pop(key, default)

    def update(self, *others: Any, **more: Any) -> None:
        for other in others:
            pairs: Iterable[tuple[Any, Any]] = other.items() if hasattr(other, "items") else other
            for key, value in pairs:
                self[key] = value

    def clear(self) -> None:
        """Every parameter begins anew, wherever its state rests."""
        self._stepper.engine.drain()
        super().clear()
        self._stepper.forget_moments()
