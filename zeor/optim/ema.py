"""`ema`: an exponential moving average of the weights, on slices.

Each rank averages its own slice of the masters, at every stage: one slice of memory, no message. `applied()` puts the
average in the weights' place for a while: what is computed, gathered, saved or exported inside is the average. Knows
lanes and masters; nothing of how or when a step is taken, except by its hook.

Note [What is averaged]
~~~~~~~~~~~~~~~~~~~~~~~
Every parameter in a trainable lane, one that was frozen later included. What was frozen at `shard` is its own
average; unfrozen, it starts from there. Buffers are not averaged: inside `applied()` they are the model's own, which
is what torch's AveragedModel(use_buffers=False) shows after an update. The first update copies the weights, and each
later one moves the average by (1 - decay), as AveragedModel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.access.sharded import Sharded, state_of
from zeor.comm.agree import numbers_of
from zeor.comm.along import gather_into
from zeor.features.freezing import Freezing
from zeor.layout import Segment
from zeor.optim.parts.pieces import Piece, put_piece
from zeor.step.engine import Engine
from zeor.step.lane import Lane
from zeor.step.unit import Slot

Decay = float | Callable[[int], float]


def ema(
    model: nn.Module,
    decay: Decay = 0.999,
    *,
    dtype: torch.dtype | None = None,
    warmup: bool = False,
    optimizer: Optimizer | None = None,
) -> EMA:
    """An average of a sharded model's weights. Call `.update()` after each optimizer.step(), and evaluate or save
    inside `with average.applied():`.

    decay      what is kept at an update: 0.999, or a function of the number of updates so far; lambda n: n / (n + 1)
               makes the plain mean of all updates (stochastic weight averaging).
    dtype      of the average; None: as the master (fp32 or wider).
    warmup     the decay is at most (1 + n) / (10 + n), so that early weights are forgotten sooner.
    optimizer  update after each of its steps, without being called.
    """
    made = EMA(state_of(model), decay, dtype, warmup)
    if optimizer is not None:
        made.follow(optimizer)
    return made


class EMA:
    def __init__(self, state: Sharded, decay: Decay, dtype: torch.dtype | None, warmup: bool):
        if not callable(decay) and not 0.0 <= decay <= 1.0:
            raise ValueError(f"zeor.ema(decay={decay!r}): give what is kept at each update, between 0 and 1.")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"zeor.ema(dtype={dtype}): give a floating dtype, or None for the master's.")
        self._state, self._engine, self._slots = state, state.engine, state.engine.slots
        self._engine.unfilled.check()
        self._decay, self._dtype, self._warmup = decay, dtype, warmup
        self.updates = 0
        self._of: dict[Lane, Tensor] = {}
        self._inside = False
        self.thawed(self._slots)
        self._engine.feature(Freezing).watch(self)
        self.number = state.averages_made  # the same on every rank
        state.averages_made += 1
        state.averages.add(self)

    def move(self, engine: Engine) -> Callable[[], None]:
        """Average the slices of another engine from here on, beginning with what they hold now; `put` brings the
        average. What is returned undoes it."""
        before = dict(vars(self))

        def undo() -> None:
            vars(self).update(before)

        self._engine, self._slots, self._of = engine, engine.slots, {}
        try:
            self.thawed(self._slots)
            engine.feature(Freezing).watch(self)
        except BaseException:
            undo()
            raise
        return undo

    # ---- averaging

    def follow(self, optimizer: Optimizer) -> Any:
        """Update after each step of an optimizer; returns the handle of its hook."""
        return optimizer.register_step_post_hook(lambda *_: self.update())

    def decay(self) -> float:
        """Of the next update."""
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        return min(decay, (1 + self.updates) / (10 + self.updates)) if self._warmup else decay

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        self._check_outside("update()")
        weight = 1.0 if self.updates == 0 else 1.0 - self.decay()
        for lane, flat in self._of.items():
            with _own_master(lane) as own:
                if weight == 1.0:
                    flat.copy_(own)
                else:
                    flat.lerp_(own.to(flat.dtype), weight)
        self.updates += 1

    @torch.no_grad()
    def thawed(self, slots: Sequence[Slot]) -> None:
        """These parameters begin to train: see features/freezing.py."""
        for lane in dict.fromkeys(slot.lane for slot in slots if slot.lane.grads is not None):
            with _own_master(lane) as own:
                self._of[lane] = own.to(self._dtype or own.dtype, copy=True)

    # ---- in the weights' place

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model's weights are the average: evaluate, generate, or save within zeor.full_params. Training is
        refused there, and the weights come back in every bit, whatever happens. Every rank must enter."""
        self._check_outside("applied()")
        if self._state.shown:
            raise RuntimeError("zeor.full_params is open; enter ema.applied() first, and zeor.full_params inside it.")
        kept: dict[Lane, Tensor] = {}
        with self._engine.borrowing("ema.applied()"):
            self._check_updates()
            self._inside = True
            try:
                for lane, flat in self._of.items():
                    kept[lane] = _exchange(lane, flat)
                self._engine.forget_gathered()
                yield
            finally:
                self._inside = False
                for lane, values in kept.items():
                    _exchange(lane, values)

    def _check_updates(self) -> None:
        """Every rank averages its own slice, so one that leaves out an update has a part of another step."""
        counts = numbers_of(self._engine.axes.everyone, self.updates, "exchange of how often an average was updated")
        odd = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if odd is not None:
            raise RuntimeError(
                f"This average was updated {int(counts[0])} times on rank 0 and {int(counts[odd])} times on rank "
                f"{odd}, so its parts are of different steps; call update() alike on every rank, or let zeor.ema(..., "
                "optimizer=optimizer) do it (zeor.join takes it along then, and else as on_step=)."
            )

    def _check_outside(self, what: str) -> None:
        self._engine.announcer.check_here(f"ema.{what} was called")
        inside = self._engine.borrowed.by
        if inside is not None:
            raise RuntimeError(f"ema.{what} was called inside {inside}, where the weights are an average.")

    # ---- state

    def on_device(self) -> Iterable[Tensor]:
        return self._of.values()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the average, by parameter: it loads at the same world size, at any stage. For other
        worlds see `pieces`."""
        values = {slot.name: part.clone() for slot, _, part in self._parts()}
        return {"updates": self.updates, "values": values}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state dict of this rank, or one whose values are whole parameters (of the whole model's shapes, where it is
        cut by tensor or expert parallelism, or DTensors)."""
        values, parts = state_dict["values"], list(self._parts())
        found = [_own_part(slot, segment, values) for slot, segment, _ in parts]
        for (_, _, part), value in zip(parts, found):
            part.copy_(value)
        self.updates = int(state_dict["updates"])

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of the average, told without world size or stage; see pieces.py. Each element is in the
        pieces of exactly one rank."""
        for slot, segment, part in self._parts():
            yield Piece(slot.name, ("ema",), segment.start, part)

    @torch.no_grad()
    def put(self, pieces: Iterable[Piece], updates: int) -> None:
        """Take what belongs here from any pieces."""
        mine = {slot.name: (segment, part) for slot, segment, part in self._parts()}
        for piece in pieces:
            if piece.name in mine and piece.begin is not None:
                segment, part = mine[piece.name]
                put_piece(piece._replace(key=("ema",)), part, segment, {"ema": part})
        self.updates = updates

    def nbytes(self) -> int:
        return sum(flat.untyped_storage().nbytes() for flat in self._of.values())

    def _parts(self) -> Iterator[tuple[Slot, Segment, Tensor]]:
        """(parameter, which of its elements, the average of these) on this rank."""
        if self._inside:
            raise RuntimeError("The state of an average is read outside its applied().")
        for slot in self._slots:
            if slot.lane in self._of:
                for segment in slot.lane.layout.segments_in(slot.lane.fine):
                    if segment.param == slot.index:
                        end = segment.offset + segment.numel
                        yield slot, segment, self._of[slot.lane][segment.offset : end]


def _own_part(slot: Slot, segment: Segment, values: Mapping[str, Tensor]) -> Tensor:
    """What a state dict says of these elements."""
    if slot.name not in values:
        raise ValueError(f"The state of the average has no {slot.name!r}, which trains in this model.")
    found = values[slot.name].detach()
    if slot.placed is not None and tuple(found.shape) == tuple(slot.whole_shape):
        found = slot.placed.local_of(found)
    if tuple(found.shape) != tuple(slot.shape) and found.numel() != segment.numel:
        raise ValueError(
            f"The average of {slot.name!r} has {found.numel()} elements on this rank, not {segment.numel}: it was "
            "saved at another world size or on another mesh; load it there, or give whole parameters."
        )
    flat = found.reshape(-1)
    return flat if flat.numel() == segment.numel else flat[segment.start : segment.start + segment.numel]


@contextmanager
def _own_master(lane: Lane) -> Iterator[Tensor]:
    """This rank's slice of a lane's exact values, to be read."""
    assert lane.master is not None
    lane.master.fetch()
    values = lane.master.values
    try:
        yield lane.fine_of(values)
    finally:
        lane.master.leave()


@torch.no_grad()
def _exchange(lane: Lane, flat: Tensor) -> Tensor:
    """Put these values in the place of this rank's slice; compute follows, on every rank. Returns what was there, in
    the same memory where the dtype allows."""
    lane.wait()
    master = lane.master
    assert master is not None
    master.fetch()
    own = lane.fine_of(master.values)
    before = own.clone()
    own.copy_(flat)
    gather_into(lane.axes, lane.legs("fine", "update"), master.values, "gather of averaged weights", lane.updated.begin)
    master.spill()
    lane.catch_up()
    if lane.publishes:
        lane.start_publish("gather of averaged weights")
        lane.wait()
    if flat.dtype != before.dtype:
        return before
    return flat.copy_(before)
