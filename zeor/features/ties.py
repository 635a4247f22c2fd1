"""Parameters of two stages of a pipeline that are one: their gradients are added up, and they count once in the norm.

A model whose head is its embedding has the same parameter in its first and in its last stage. Each stage trains its own
copy; both begin with the same values and get the same gradient, so they stay the same.

Note [Ties]
~~~~~~~~~~~
1. Gradients are exchanged between the two ranks at the end of a step of the schedule, before they are reduced: in the
   middle of it the last stage would wait for the first, which waits for gradients from the last. Until then both stages
   leave theirs unreduced. A sum of two numbers is the same in either order, so both hold the same bits.
2. A tie that nobody has told of would train two parameters where there was one. So stages tell each other the shapes of
   their matrices, and where one has the shape of another stage's embedding, a digest of the values.
3. Codes of a wire, and moments in int8, are made for blocks of a lane, whose other members differ between two stages:
   the copies would be rounded apart. `rounds` says so of a plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.features.stages import Local
from zeor.plan import Plan
from zeor.step.unit import Slot, gather_values


class Place(NamedTuple):
    """A parameter, by the number of its stage and its name in it."""

    stage: int
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} of stage {self.stage}"


def rounds(plan: Plan) -> str:
    """The option by which copies of one parameter would be rounded apart, or nothing: see step 3 of the Note."""
    if plan.wire is not None and not plan.wire.is_exact:
        return "wire="
    return "moments='int8'" if plan.moments == "int8" else ""


Tie = tuple[Place, Place]  # the stage with the lower number first


def places_of(tied: Sequence[Any], count: int) -> list[Tie]:
    """What the user gave, checked as far as numbers and kinds go. `count`: stages."""
    ties = [_tie(pair, count) for pair in tied]
    places = [place for tie in ties for place in tie]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"tied= names parameter {place} twice; a parameter is tied to one other.")
    return ties


def _tie(pair: Any, count: int) -> Tie:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"tied= holds {pair!r}; give pairs such as ('embed.weight', 'head.weight').")
    first, second = sorted((_place(pair[0], 0, count), _place(pair[1], count - 1, count)))
    if first.stage == second.stage:
        raise ValueError(f"tied= holds {pair!r}, two parameters of stage {first.stage}; tie them in the module.")
    return first, second


def _place(given: Any, default: int, count: int) -> Place:
    if isinstance(given, str):
        return Place(default, given)
    if isinstance(given, (tuple, list)) and [type(each) for each in given] == [int, str] and -count <= given[0] < count:
        return Place(given[0] % count, given[1])
    raise ValueError(
        f"tied= holds {given!r}, which is no parameter of a stage; give its name, or (stage, name) with a stage below "
        f"{count}."
    )


class Ties:
    """Of one rank. `locals_`: by the number of a stage, of those that are here."""

    def __init__(self, stages: Sequence[Any], locals_: dict[int, Local], ties: list[Tie], axis: Axis):
        self._stages, self._locals, self._axis = stages, locals_, axis
        self._slots: dict[Place, Slot] = {}
        for stage in stages:
            by_param = {id(slot.param): slot for slot in locals_[stage.stage_index].engine.slots}
            for name, param in stage.submod.named_parameters():
                self._slots[Place(stage.stage_index, name)] = by_param[id(param)]
        # One object in two stages that were sharded together has the sum of its gradients by itself.
        self._ties = [(first, second) for first, second in ties if not self._are_one(first, second)]
        self.copies = {self._slots[second] for _, second in self._ties if second in self._slots}
        for place in (place for tie in self._ties for place in tie):
            if place.stage in locals_:
                locals_[place.stage].waits = True

    def _are_one(self, first: Place, second: Place) -> bool:
        return first in self._slots and self._slots[first] is self._slots.get(second)

    def originals(self) -> dict[Slot, Place]:
        """For each parameter here that is tied to one of an earlier stage: which that is."""
        return {self._slots[second]: first for first, second in self._ties if second in self._slots}

    # ---- what was told, and what was not

    def check(self, undeclared: bool) -> None:
        """ValueError, on every rank of the pipeline, where tied parameters differ or, `undeclared`, where an embedding
        is tied without being told. A collective."""
        mine = [
            [place.stage, place.name, _shape(slot), isinstance(slot.owners[0][0], nn.Embedding), slot.trains]
            for place, slot in self._slots.items()
            if len(slot.shape) >= 2 or any(place in tie for tie in self._ties)
        ]
        found: dict[Place, tuple[str, bool, bool]] = {}
        for told in exchange(self._axis, mine, "shapes of the stages of a pipeline"):
            found |= {Place(stage, name): (shape, embeds, trains) for stage, name, shape, embeds, trains in told}
        self._check_shapes(found)
        pairs = [*self._ties, *(_suspects(found, self._ties) if undeclared else ())]
        wanted = sorted({place for pair in pairs for place in pair})
        digests: dict[Place, str] = {}
        for told in exchange(self._axis, self._digests(wanted), "digests of parameters that may be tied"):
            digests |= {Place(stage, name): digest for stage, name, digest in told}
        self._compare(pairs, digests)

    def _check_shapes(self, found: dict[Place, tuple[str, bool, bool]]) -> None:
        for tie in self._ties:
            for place in tie:
                if place not in found:
                    raise ValueError(f"tied= names parameter {place}, which that stage does not have.")
            (shape, _, trains), (other, _, its) = (found[place] for place in tie)
            if shape != other or trains != its:
                what = f"the shapes {shape} and {other}" if shape != other else "one frozen, one not"
                raise ValueError(f"tied= names {tie[0]} and {tie[1]}, which cannot be one parameter: {what}.")

    @torch.no_grad()
    def _digests(self, wanted: Sequence[Place]) -> list[list[Any]]:
        """Of those that are here: a collective along the axes of their engine."""
        told: list[list[Any]] = []
        for place in wanted:
            slot = self._slots.get(place)
            if slot is None or slot in self._locals[place.stage].engine.unfilled.slots:
                continue
            value = gather_values(slot.lane, [slot])[slot].cpu()
            if bool((value != value.flatten()[0]).any()):  # many parameters begin with zeros
                digest = hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                told.append([place.stage, place.name, digest])
        return told

    def _compare(self, pairs: Sequence[Tie], digests: dict[Place, str]) -> None:
        for first, second in pairs:
            same = digests.get(first) == digests.get(second)
            if (first, second) in self._ties and not same:
                raise ValueError(
                    f"tied= names {first} and {second}, which hold different values; give both the same before "
                    "zeor.shard."
                )
            if (first, second) not in self._ties and same and first in digests:
                raise ValueError(
                    f"Parameters {first} and {second} hold the same values: where they are one parameter of the model, "
                    f"pass zeor.pipeline(..., tied=[({tuple(first)}, {tuple(second)})]); where they are two, tied=[]."
                )

    # ---- gradients

    @torch.no_grad()
    def exchange(self) -> None:
        """Step 1 of the Note."""
        for first, second in self._ties:
            here = {place: other for place, other in ((first, second), (second, first)) if place in self._slots}
            if not any(self._locals[place.stage].reduces for place in here):
                continue
            if any(self._slots[place].lane.grads is None for place in here):
                continue  # frozen: both are
            own = {place: self._unreduced(place).clone() for place in here}
            for place, other in here.items():
                grad = own[other] if other in own else self._swap(place, other, own[place])
                if self._slots[place].trains:  # a gradient of one that was frozen since then would move it
                    self._locals[place.stage].add_grad(self._slots[place], grad)

    def _unreduced(self, place: Place) -> Tensor:
        """What the stage's backwards have summed of it; zeros where none came to it."""
        slot = self._slots[place]
        assert slot.lane.grads is not None
        return slot.lane.grads.unreduced(slot.index).view(slot.shape)

    def _swap(self, mine: Place, theirs: Place, grad: Tensor) -> Tensor:
        stage = next(stage for stage in self._stages if stage.stage_index == mine.stage)
        peer = dist.get_global_rank(stage.group, stage.stage_index_to_group_rank[theirs.stage])
        received = torch.empty_like(grad)
        sends = dist.P2POp(dist.isend, grad.contiguous(), peer, stage.group)
        for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, peer, stage.group)]):
            work.wait()
        return received


def _shape(slot: Slot) -> str:
    """And how tensor parallelism has cut it: each rank hands its part to the one at the same place."""
    return f"{slot.whole_shape}{f' as {slot.placed.describe()}' if slot.placed else ''}"


def _suspects(found: dict[Place, tuple[str, bool, bool]], ties: Sequence[Tie]) -> list[Tie]:
    """Step 2 of the Note."""
    told = {place for tie in ties for place in tie}
    left = sorted((place, *found[place]) for place in found if place not in told)
    embeddings = [(place, shape) for place, shape, embeds, _ in left if embeds]
    pairs = {
        (min(place, other), max(place, other))
        for place, shape in embeddings
        for other, its, _, _ in left
        if its == shape and other.stage != place.stage
    }
    return sorted(pairs)
