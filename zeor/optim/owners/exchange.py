"""The journeys of whole parameters: segments to their owners, new values back into the slices; and of owners' state.

    slices --start--> owners: gradient and master, whole --the stock step--> --send_back--> slices --finish--> master

One exchange there and one back per round, overlapped as `run` says. Zero-length parts are legal, so every rank takes
part in every exchange, in the same order. This module knows rounds and lanes; who owns what is decided in owners.py.
An owner's state may be of any shape and nesting (a row's statistics, a list of preconditioners). First its description
travels, as JSON; then each tensor in it, from the owner's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.memory.buffers import Ledger
from zeor.optim.owners.owners import Owned

ALIGN_NUMEL = 64  # a whole starts where a tensor of its own would, so that kernels choose alike


class Journey:
    """One round of one step: those of its parameters that have a gradient."""

    def __init__(self, axis: Axis, ledger: Ledger, members: Sequence[Owned], label: str):
        assert members
        self.members, self._axis, self._ledger, self._label = members, axis, ledger, label
        self._by_owner = [[m for m in members if m.owner == rank] for rank in range(axis.size)]
        self.mine = self._by_owner[axis.rank]  # computed here
        # Elements of this rank's segments by owner, and of the parameters computed here by the rank that holds them.
        self._given = [sum(_held(m, axis.rank) for m in owned) for owned in self._by_owner]
        self._taken = [sum(_held(m, rank) for m in self.mine) for rank in range(axis.size)]
        self._sent: Tensor
        self._wholes: Tensor
        self._move: verbs.Move

    def _take(self, numel: int) -> Tensor:
        dtype = self.members[0].slot.lane.master.dtype  # type: ignore[union-attr]  # it trains, so it has one
        return self._ledger.take("owners", numel, dtype, self._axis.device)

    def _give(self, *flats: Tensor) -> None:
        for flat in flats:
            self._ledger.give("owners", flat)

    # ---- there

    @torch.no_grad()
    def _pack_gradient(self, member: Owned, into: Tensor) -> None:
        """As wide as the master, times what the user multiplied by."""
        grads, index = member.slot.lane.grads, member.slot.index
        assert grads is not None
        into.copy_(grads.local(index))
        factor = grads.scales[index]
        if factor is not None:
            into.mul_(factor)

    def start(self) -> None:
        """This rank's segments, gradient then master, on their way to the owners."""
        self._sent, cursor = self._take(2 * sum(self._given)), 0
        for member in (m for owned in self._by_owner for m in owned):
            segment, lane = member.parts.get(self._axis.rank), member.slot.lane
            if segment is None:
                continue
            grad, master = self._sent[cursor : (cursor := cursor + 2 * segment.numel)].view(2, -1)
            self._pack_gradient(member, grad)
            lane.read_master(segment, master)
        received = self._take(2 * sum(self._taken))
        taken, given = [2 * n for n in self._taken], [2 * n for n in self._given]
        self._move = verbs.all_to_all(self._axis, received, self._sent, taken, given, f"{self._label} to their owners")

    def arrive(self) -> None:
        """What is computed here is whole: values and gradient in memory of their own, in the true shape."""
        received = self._move.wait()
        offsets, total = _place(self.mine)
        self._wholes, cursor = self._take(2 * total), 0
        masters, grads = self._wholes[:total], self._wholes[total:]
        for rank in range(self._axis.size):
            for member, offset in zip(self.mine, offsets):
                part = member.parts.get(rank)
                if part is None:
                    continue
                grad, master = received[cursor : (cursor := cursor + 2 * part.numel)].view(2, -1)
                begin, end = offset + part.start, offset + part.start + part.numel
                grads[begin:end].copy_(grad)
                masters[begin:end].copy_(master)
        self._give(self._sent, received)
        for member, offset in zip(self.mine, offsets):
            assert member.whole is not None
            member.whole.data = masters[offset : offset + member.numel].view(member.slot.shape)
            member.whole.grad = grads[offset : offset + member.numel].view(member.slot.shape)

    # ---- and back

    def send_back(self) -> None:
        """The new values on their way to the slices; the wholes' memory is given up."""
        self._sent, cursor = self._take(sum(self._taken)), 0
        for rank in range(self._axis.size):
            for member in self.mine:
                part = member.parts.get(rank)
                if part is not None:
                    values = member.whole.detach().reshape(-1)  # type: ignore[union-attr]  # it has arrived
                    new = values[part.start : part.start + part.numel]
                    self._sent[cursor : (cursor := cursor + part.numel)].copy_(new)
        for member in self.mine:
            member.rest()
        self._give(self._wholes)
        received = self._take(sum(self._given))
        label = f"{self._label} back from their owners"
        self._move = verbs.all_to_all(self._axis, received, self._sent, self._given, self._taken, label)

    def finish(self) -> None:
        """The new values into this rank's slices, master and compute."""
        received, cursor = self._move.wait(), 0
        for member in (m for owned in self._by_owner for m in owned):
            segment = member.parts.get(self._axis.rank)
            if segment is not None:
                new = received[cursor : (cursor := cursor + segment.numel)]
                member.slot.lane.store_part(segment.offset, new)
        self._give(self._sent, received)


class Visit(Journey):
    """A journey beside a step: values alone, whether there are gradients or not."""

    def _pack_gradient(self, member: Owned, into: Tensor) -> None:
        into.zero_()

    def arrive(self) -> None:
        super().arrive()
        for member in self.mine:
            member.whole.grad = None  # type: ignore[union-attr]  # it has arrived


def run(journeys: Sequence[Journey], compute: Callable[[Journey], None], done: Callable[[Journey], None]) -> None:
    """While a round is computed the next is on its way here and the one before on its way back; no more than these
    three have buffers. `done` is called once a round's slices hold their new values.

    The journeys' order, and with it that of the exchanges, is the same on every rank: start 0, start 1, back 0,
    start 2, back 1, ...
    """
    for number, journey in enumerate(journeys):
        if number == 0:
            journey.start()
        if number + 1 < len(journeys):
            journeys[number + 1].start()
        journey.arrive()
        compute(journey)
        journey.send_back()
        if number > 0:
            journeys[number - 1].finish()
            done(journeys[number - 1])
    if journeys:
        journeys[-1].finish()
        done(journeys[-1])


def _held(member: Owned, rank: int) -> int:
    part = member.parts.get(rank)
    return 0 if part is None else part.numel


def _place(members: Sequence[Owned]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for member in members:
        offsets.append(end)
        end += -(-member.numel // ALIGN_NUMEL) * ALIGN_NUMEL
    return offsets, end


# ---- an owner's state, on every rank


def state_from_owner(owned: Owned, state: dict[str, Any]) -> dict[str, Any]:
    """The owner's state of one parameter, on every rank; a collective. `state` counts on the owner alone."""
    lane, name = owned.slot.lane, owned.slot.name
    axis = lane.axes.over(lane.spec.table.cut("update"))
    told = _describe(state, name) if axis.rank == owned.owner else None
    everyone = exchange(axis, told, f"exchange about the optimizer's state of {name!r}")
    refused = _first_refusal(everyone[owned.owner])
    if refused:  # on every rank, so that none is left waiting
        raise RuntimeError(refused)
    label = f"broadcast of the optimizer's state of {name!r}"
    mine = state if axis.rank == owned.owner else None
    built: dict[str, Any] = _build(axis, owned.owner, everyone[owned.owner], mine, label)
    return built


def _describe(value: Any, name: str) -> list[Any]:
    if type(value) is Tensor:
        dtype = str(value.dtype).removeprefix("torch.")
        where = value.device.type == "cpu"  # step counters stay on the host
        return ["tensor", dtype, list(value.shape), where]
    if isinstance(value, dict):
        return ["dict", [[key, _describe(part, name)] for key, part in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["tuple" if isinstance(value, tuple) else "list", [_describe(part, name) for part in value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    refused = (
        f"The optimizer keeps a {type(value).__name__} in its state of {name!r}, which zeor cannot bring to other "
        "ranks; continue sharded, or take the values alone inside zeor.full_params."
    )
    return ["refused", refused]


def _first_refusal(described: list[Any]) -> str:
    kind, *rest = described
    if kind == "refused":
        return str(rest[0])
    parts = {"dict": lambda: [part for _, part in rest[0]], "list": lambda: rest[0], "tuple": lambda: rest[0]}
    return next(filter(None, map(_first_refusal, parts[kind]() if kind in parts else ())), "")


def _build(axis: Axis, owner: int, described: list[Any], value: Any, label: str) -> Any:
    """What was described, as a value: the owner's own, or memory the owner's tensors are sent into."""
    kind, rest = described[0], described[1:]
    if kind == "plain":
        return rest[0]
    if kind == "dict":
        have = value or {}
        return {key: _build(axis, owner, part, have.get(key), label) for key, part in rest[0]}
    if kind in ("list", "tuple"):
        parts = [_build(axis, owner, p, None if value is None else value[i], label) for i, p in enumerate(rest[0])]
        return tuple(parts) if kind == "tuple" else parts
    dtype, shape, on_host = getattr(torch, rest[0]), rest[1], rest[2]
    sent = torch.empty(shape, dtype=dtype, device=axis.device)
    if value is not None:
        sent.copy_(value)
    verbs.broadcast(axis, sent, label, owner)
    return sent.cpu() if on_host else sent
