"""What a stepper keeps: its state counted, taken to pieces, put back and shown, wherever it rests.

State lies in the optimizer itself, or, where lanes are streamed, on tiers and in formats (moments.py). The rest of
zeor asks here and does not know the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeor.layout import Segment
from zeor.optim.own_state import OwnState
from zeor.optim.parts import mark
from zeor.optim.parts.pieces import Piece, pieces_of, put_piece, tensors_in
from zeor.optim.streaming.moments import COUNTERS
from zeor.runtime.lane import Lane

if TYPE_CHECKING:
    from zeor.optim.stepper import Stepper


def _streamed(stepper: Stepper, param: Tensor) -> tuple[Lane, Segment, nn.Parameter] | None:
    """Where this rank's state of a parameter rests, if that is not the optimizer itself."""
    streaming, mine = stepper.streaming, stepper.segments.of(param)
    lane = stepper.segments.slots[id(param)].lane
    if streaming is None or mine is None or stepper.owners.of(param) is not None or not streaming.takes(lane):
        return None
    return lane, stepper.segments.at(param), mine


def is_streamed(stepper: Stepper, param: Tensor) -> bool:
    return _streamed(stepper, param) is not None


def _params(stepper: Stepper) -> Iterator[Tensor]:
    return (param for group in stepper.optimizer.param_groups for param in group["params"])


def resting(stepper: Stepper, param: Tensor) -> dict[str, Tensor]:
    """What rests of this rank's state of a parameter, by name."""
    found = _streamed(stepper, param)
    return {} if found is None or stepper.streaming is None else stepper.streaming.moments.show(*found)


def take_all(stepper: Stepper) -> None:
    """What the optimizer holds of streamed lanes goes to where it rests."""
    for param in _params(stepper):
        found = _streamed(stepper, param)
        if found is not None and stepper.streaming is not None:
            stepper.streaming.moments.take(*found)


@contextmanager
def shown(stepper: Stepper) -> Iterator[None]:
    """Inside, the optimizer's own state is complete."""
    for param in _params(stepper):
        values, mine = resting(stepper, param), stepper.segments.of(param)
        if values and mine is not None:
            stepper.optimizer.state[mine].update(values)
    try:
        yield
    finally:
        take_all(stepper)


def state_dict(stepper: Stepper) -> dict[str, Any]:
    heed_new_state(stepper)
    stepper.engine.drain()
    with shown(stepper), stepper.segments.in_groups():
        found = type(stepper.optimizer).state_dict(stepper.optimizer)
        state = {key: dict(value) if isinstance(value, dict) else value for key, value in found["state"].items()}
    return mark.mark(stepper, {**found, "state": state})


def load_state_dict(stepper: Stepper, state_dict: dict[str, Any]) -> None:
    state_dict = mark.unmark(stepper, state_dict)
    stepper.engine.drain()
    optimizer, segments = stepper.optimizer, stepper.segments
    order = list(_params(stepper))
    state = {
        key: segments.cut_state(order[key], value) if isinstance(key, int) else value
        for key, value in state_dict["state"].items()
    }
    state = {k: v for k, v in state.items() if not isinstance(k, int) or segments.of(order[k]) is not None}
    with segments.in_groups():
        # The stock method makes new groups; the parameters in them become the user's own again.
        before = [group["params"] for group in optimizer.param_groups]
        type(optimizer).load_state_dict(optimizer, {**state_dict, "state": state})
        for group, params in zip(optimizer.param_groups, before):
            group["params"] = params
    owner = {id(segments.of(param)): param for param in order}
    for group in optimizer.param_groups:
        group["params"] = [owner.get(id(param), param) for param in group["params"]]
    own_state(stepper)
    stepper.forget_moments()
    take_all(stepper)


def own_state(stepper: Stepper) -> None:
    """`optimizer.state` is of the kind that own_state.py tells of: after something has put another in its place."""
    optimizer = stepper.optimizer
    optimizer.state = OwnState(stepper, optimizer.state)


def heed_new_state(stepper: Stepper) -> None:
    """The user may have put another dict in the place of `optimizer.state`: what it holds counts from here on."""
    optimizer = stepper.optimizer
    if type(optimizer.state) is not OwnState:
        stepper.engine.drain()
        own_state(stepper)
        stepper.forget_moments()
        for param in _params(stepper):
            stepper.segments.adopt(param, optimizer.state)
        take_all(stepper)


def moments_nbytes(stepper: Stepper) -> int:
    """Bytes of state as allocated on this rank, an owner's matrices included; step counters are not counted."""
    storages = {}
    for mine in stepper.segments.all():
        for name, state in stepper.optimizer.state.get(mine, {}).items():
            for value in tensors_in(state):
                if name not in COUNTERS and (value.dim() > 0 or value.shape == mine.shape):
                    storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values()) + (stepper.streaming.moments.nbytes() if stepper.streaming else 0)


def pieces(stepper: Stepper) -> Iterator[Piece]:
    heed_new_state(stepper)
    stepper.engine.drain()
    for param in _params(stepper):
        mine = stepper.segments.of(param)
        if mine is not None:
            slot = stepper.segments.slots[id(param)]
            state = {**stepper.optimizer.state.get(mine, {}), **resting(stepper, param)}
            found = _streamed(stepper, param)
            reads = {} if found is None or stepper.streaming is None else stepper.streaming.moments.reads(*found)
            yield from pieces_of(slot, mine, stepper.segments.at(param), state, reads)


def put(stepper: Stepper, pieces: Iterable[Piece], adopt: bool) -> None:
    params = {stepper.segments.slots[id(p)].name: p for p in _params(stepper)}
    for piece in pieces:
        if piece.name not in params:
            raise ValueError(
                f"There is state for {piece.name!r}, which {type(stepper.optimizer).__name__} does not hold; load it "
                "into an optimizer over the same parameters."
            )
        param = params[piece.name]
        mine = stepper.segments.of(param)
        if mine is None:
            continue
        found = _streamed(stepper, param)
        if found is not None and piece.begin is not None and len(piece.key) == 1:
            _put_to_rest(stepper, piece, found)
        else:
            put_piece(piece, mine, stepper.segments.at(param), stepper.optimizer.state[mine], adopt)
    if stepper.one_pass is not None:
        stepper.one_pass.forget_state()


@torch.no_grad()
def _put_to_rest(stepper: Stepper, piece: Piece, found: tuple[Lane, Segment, nn.Parameter]) -> None:
    lane, where, mine = found
    assert stepper.streaming is not None and lane.master is not None
    moments, name = stepper.streaming.moments, str(piece.key[0])
    lane.master.settle()
    moment = moments.need(lane, name, piece.value.dtype)
    if name not in moments.names(mine):
        moments.names(mine).append(name)
    values = moments.show(*found)[name]
    put_piece(piece, mine, where, {name: values})
    if moments.format != "exact":
        moments.write(lane, where, moment, values)
