"""What a stepper keeps: its state counted, taken to pieces, put back and shown, wherever it rests.

State lies in the optimizer itself, or, where lanes are streamed, on tiers and in formats (streaming/moments.py). The
rest of zeor asks here and does not know the difference.

Note [Asked with a parameter]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The entries of `optimizer.state` are keyed by what this rank steps on: segments, and wholes on an owner. A user asks for
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeor.layout import Segment
from zeor.optim.kernels.run import OnePass
from zeor.optim.parts import mark
from zeor.optim.parts.pieces import Piece, pieces_of, put_piece, tensors_in
from zeor.optim.parts.segments import Segments
from zeor.optim.streaming.moments import COUNTERS
from zeor.optim.streaming.streaming import Streaming
from zeor.step.lane import Lane
from zeor.step.unit import Slot

_NONE: Any = object()


class KeptOf(NamedTuple):
    """This rank's state of one parameter. `rests`: not in the optimizer itself, but on a tier."""

    slot: Slot
    pieces: Callable[[], Iterator[Piece]]
    rests: bool


class KeptState:
    """Of one optimizer. `drain` waits for everything under way."""

    def __init__(self, segments: Segments, one_pass: OnePass, streaming: Streaming | None, drain: Callable[[], None]):
        self._optimizer, self.segments = segments.optimizer, segments
        self.one_pass, self._streaming, self.drain = one_pass, streaming, drain
        segments.resting = self.resting
        self.take_all()
        self.own_state()

    def streamed(self, param: Tensor) -> tuple[Lane, Segment, nn.Parameter] | None:
        """Where this rank's state of a parameter rests, if that is not the optimizer itself."""
        streaming, mine = self._streaming, self.segments.of(param)
        lane = self.segments.slots[id(param)].lane
        if streaming is None or mine is None or id(param) in self.segments.owners.owned or not streaming.takes(lane):
            return None
        return lane, self.segments.at(param), mine

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self._optimizer.param_groups for param in group["params"])

    def resting(self, param: Tensor) -> dict[str, Tensor]:
        """What rests of this rank's state of a parameter, by name."""
        found = self.streamed(param)
        return {} if found is None or self._streaming is None else self._streaming.moments.show(*found)

    def take_all(self) -> None:
        """What the optimizer holds of streamed lanes goes to where it rests."""
        for param in self._params():
            found = self.streamed(param)
            if found is not None and self._streaming is not None:
                self._streaming.moments.take(*found)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the optimizer's own state is complete."""
        for param in self._params():
            values, mine = self.resting(param), self.segments.of(param)
            if values and mine is not None:
                self._optimizer.state[mine].update(values)
        try:
            yield
        finally:
            self.take_all()

    def state_dict(self) -> dict[str, Any]:
        """The stock state dict over this rank's segments: it loads on the same world."""
        self.heed_new_state()
        self.drain()
        with self.shown(), self.segments.in_groups():
            found = type(self._optimizer).state_dict(self._optimizer)
            state = {key: dict(value) if isinstance(value, dict) else value for key, value in found["state"].items()}
        return mark.mark(self.segments, {**found, "state": state})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state dict made by `state_dict` on this rank, or a plain one of whole parameters."""
        state_dict = mark.unmark(self.segments, state_dict)
        self.drain()
        segments = self.segments
        order = list(self._params())
        state = {
            key: segments.cut_state(order[key], value) if isinstance(key, int) else value
            for key, value in state_dict["state"].items()
        }
        state = {k: v for k, v in state.items() if not isinstance(k, int) or segments.of(order[k]) is not None}
        self.take_cut({**state_dict, "state": state})

    def take_cut(self, state_dict: dict[str, Any]) -> None:
        """A stock state dict over this rank's segments."""
        with self.segments.in_groups():
            type(self._optimizer).load_state_dict(self._optimizer, state_dict)
        self.own_state()
        self.forget_moments()
        self.take_all()

    def own_state(self) -> None:
        """`optimizer.state` answers for parameters too: after something has put another dict in its place."""
        self._optimizer.state = OwnState(self, self._optimizer.state)

    def heed_new_state(self) -> None:
        """The user may have put another dict in the place of `optimizer.state`: what it holds counts from here on."""
        optimizer = self._optimizer
        if type(optimizer.state) is not OwnState:
            self.drain()
            self.own_state()
            self.forget_moments()
            for param in self._params():
                self.segments.adopt(param, optimizer.state)
            self.take_all()

    def moments_nbytes(self) -> int:
        """Bytes of state as allocated on this rank, an owner's matrices included; step counters are not counted."""
        storages = {}
        for mine in self.segments.all():
            for name, state in self._optimizer.state.get(mine, {}).items():
                for value in tensors_in(state):
                    if name not in COUNTERS and (value.dim() > 0 or value.shape == mine.shape):
                        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return sum(storages.values()) + (self._streaming.moments.nbytes() if self._streaming else 0)

    def on_device(self) -> Iterator[Tensor]:
        """Every tensor of it that does not rest elsewhere."""
        yield from tensors_in(dict(self._optimizer.state))
        if self._streaming is not None:
            yield from (rest.tensor for rest in self._streaming.moments.all() if not rest.away)

    def whole(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each of the user's parameters, whole, on every rank; a collective."""
        self.heed_new_state()
        self.drain()
        return {param: state for param in list(self._params()) if (state := self.segments.whole(param))}

    def pieces(self) -> Iterator[Piece]:
        """This rank's state of every parameter, piece by piece; see parts/pieces.py."""
        for kept in self.by_param():
            yield from kept.pieces()

    def by_param(self) -> list[KeptOf]:
        """How to take this rank's state of each parameter to pieces, later too: as long as nothing is updated, wherever
        the optimizer has moved to by then."""
        self.heed_new_state()
        self.drain()
        found: list[KeptOf] = []
        for param in self._params():
            mine = self.segments.of(param)
            if mine is not None:
                entry = self._optimizer.state.get(mine, {})
                slot, rests = self.segments.slots[id(param)], self.streamed(param) is not None
                found.append(KeptOf(slot, partial(self._take_apart, param, mine, entry), rests))
        return found

    def _take_apart(self, param: Tensor, mine: nn.Parameter, entry: dict[str, Any]) -> Iterator[Piece]:
        found = self.streamed(param)
        reads = {} if found is None or self._streaming is None else self._streaming.moments.reads(*found)
        state = {**entry, **self.resting(param)}
        return pieces_of(self.segments.slots[id(param)], mine, self.segments.at(param), state, reads)

    def put(self, pieces: Iterable[Piece], adopt: bool = False) -> None:
        """State from pieces made by any number of ranks: of each, this rank takes what it keeps. `adopt`: nobody else
        holds them, so their memory may be kept."""
        params = {self.segments.slots[id(p)].name: p for p in self._params()}
        for piece in pieces:
            if piece.name not in params:
                raise ValueError(
                    f"There is state for {piece.name!r}, which {type(self._optimizer).__name__} does not hold; load it "
                    "into an optimizer over the same parameters."
                )
            param = params[piece.name]
            mine = self.segments.of(param)
            if mine is None:
                continue
            found = self.streamed(param)
            if found is not None and piece.begin is not None and len(piece.key) == 1:
                self._put_to_rest(piece, found)
            else:
                put_piece(piece, mine, self.segments.at(param), self._optimizer.state[mine], adopt)
        self.one_pass.forget_state()

    @torch.no_grad()
    def _put_to_rest(self, piece: Piece, found: tuple[Lane, Segment, nn.Parameter]) -> None:
        lane, where, mine = found
        assert self._streaming is not None and lane.master is not None
        moments, name = self._streaming.moments, str(piece.key[0])
        lane.master.settle()
        moment = moments.need(lane, name, piece.value.dtype)
        if name not in moments.names(mine):
            moments.names(mine).append(name)
        values = moments.show(*found)[name]
        put_piece(piece, mine, where, {name: values})
        if moments.format != "exact":
            moments.write(lane, where, moment, values)

    def forget_moments(self) -> None:
        """What is kept beside the optimizer's own state, or as a cache of it, is void."""
        self.one_pass.forget_state()
        if self._streaming is not None:
            self._streaming.moments.forget()


class Absent(dict[str, Any]):
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


class OwnState(defaultdict[Any, Any]):
    """`optimizer.state` of a sharded optimizer: see Note [Asked with a parameter]."""

    def __init__(self, kept: KeptState, entries: dict[Any, Any]):
        super().__init__(dict)
        self._kept = kept
        for key, value in entries.items():
            dict.__setitem__(self, key, value)

    # A copied or pickled one is a plain one.
    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    __copy__ = copy

    # ---- the user's parameters

    def _slot(self, key: Any) -> Slot | None:
        """Of a parameter of the model that trains; None where the key itself counts."""
        if not isinstance(key, Tensor) or dict.__contains__(self, key):
            return None
        slot = self._kept.segments.slots.get(id(key))
        return slot if slot is not None and slot.lane.grads is not None else None

    def _part(self, slot: Slot) -> Any:
        """What this rank steps on for a parameter, or None. Whoever asks may edit: caches of the entries are void."""
        kept = self._kept
        kept.drain()
        if kept.streamed(slot.param) is not None:
            raise RuntimeError(
                f"The optimizer's state of {slot.name!r} rests outside the optimizer (offload=, moments= or delay=), "
                "so optimizer.state cannot show or change it; edit optimizer.state_dict() and load it back, "
                "or call optimizer.state.clear() to begin anew."
            )
        kept.one_pass.forget_state()
        return kept.segments.of(slot.param)

    def __missing__(self, key: Any) -> Any:
        slot = self._slot(key)
        if slot is None:
            return super().__missing__(key)
        mine = self._part(slot)
        return Absent(slot.name, slot.lane.axes.everyone.rank) if mine is None else self[mine]

    def _own(self, key: Any) -> Any:
        """What stands for a key in here: for a parameter this rank's part of it, which nothing may be."""
        slot = self._slot(key)
        return key if slot is None else self._part(slot)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._own(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._own(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        slot = self._slot(key)
        if slot is not None:
            mine = self._part(slot)
            value = self._kept.segments.cut_state(slot.param, value)
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
                return Absent(slot.name, slot.lane.axes.everyone.rank) if default is _NONE else default
            key = mine
        return super().pop(key) if default is _NONE else super().pop(key, default)

    def update(self, *others: Any, **more: Any) -> None:
        for other in others:
            pairs: Iterable[tuple[Any, Any]] = other.items() if hasattr(other, "items") else other
            for key, value in pairs:
                self[key] = value

    def clear(self) -> None:
        """Every parameter begins anew, wherever its state rests."""
        self._kept.drain()
        super().clear()
        self._kept.forget_moments()
