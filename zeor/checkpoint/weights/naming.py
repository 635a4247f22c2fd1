"""What a model's tensors are called in files: as in the model itself or, for stages of a pipeline, as in the whole one.

    a model     the names of its own state dict
    stages      the names that zeor.pipeline(names=) gives, or those that parameters have in their stage. Of parameters
                that are tied across stages the first stage's name counts, and its values are written; the other name is
                an alias

A stage knows its own names alone. Before one folder is written or read for all of them, stages tell each other theirs
(`learn`): a name that means two things would lose one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeor.access.sharded import ATTRIBUTE, Sharded, stage_of
from zeor.checkpoint.weights.matching import Target, find_targets
from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.features.pipeline import Pipeline
from zeor.model.discover import named_owners


class Named(NamedTuple):
    """A tensor of another stage's."""

    shape: tuple[int, ...]
    dtype: str
    trains: bool
    is_buffer: bool


class Naming:
    """Of what one rank has of a model."""

    def __init__(self) -> None:
        self.params: dict[int, str] = {}  # names by id
        self.aliases: dict[str, str] = {}  # other names of tied parameters
        self.buffers: dict[str, Tensor] = {}  # those that a state dict holds, under their first name
        self.copies: set[int] = set()  # ids of parameters that are tied to one of another stage, which writes them
        self.pipeline: Pipeline | None = None
        # Of all stages, once they have been asked; nothing where there is one model.
        self.everywhere: dict[str, Named] = {}
        self.all_aliases: dict[str, str] = {}
        self._written_buffers: Sequence[str] = ()  # by these stages: others have the same, or none

    # ---- what is here

    def targets(self, model: nn.Module) -> list[Target]:
        """Parameters and buffers with all of their names, those in files first."""
        if self.pipeline is None:
            return find_targets(model)
        found: dict[int, Target] = {}
        for index, module in self.pipeline.modules():
            for target in find_targets(module):
                names = [self.pipeline.name(index, name) for name in target.names]
                each = found.setdefault(id(target.tensor), Target([], target.tensor, target.is_buffer))
                first = [] if target.is_buffer else [self.params[id(target.tensor)]]
                each.names[:] = dict.fromkeys([*each.names, *first, *names])
                each.owners.extend(target.owners)
        return list(found.values())

    def first_module(self, model: nn.Module) -> nn.Module:
        """The model or, in its place, the first of this rank's stages: what may have a config."""
        return model if self.pipeline is None else self.pipeline.modules()[0][1]

    def writes(self, target: Target) -> bool:
        """Whether it is this rank's stages that hand it out."""
        if self.pipeline is None:
            return True
        return target.name in self._written_buffers if target.is_buffer else id(target.tensor) not in self.copies

    @property
    def known(self) -> set[str]:
        """All names of other stages', and of these."""
        return {*self.everywhere, *self.all_aliases}

    def add(self, module: nn.Module, name_of: Any) -> None:
        """A module's parameters and buffers; `name_of` gives the whole model's name of one of its names."""
        prefixes = {each: prefix for prefix, each in module.named_modules()}
        for name, param, owners in named_owners(module):
            self.params.setdefault(id(param), name_of(name))
            for owner, attr in owners:
                self._alias(name_of(_joined(prefixes[owner], attr)), param)
        for name, buffer in persistent_buffers(module).items():
            self.buffers.setdefault(name_of(name), buffer)

    def _alias(self, name: str, param: Tensor) -> None:
        known = self.params[id(param)]
        if name != known:
            self.aliases[name] = known

    def rename(self, param: Tensor, name: str) -> None:
        """It is a copy of another stage's parameter of this name."""
        own = self.params[id(param)]
        for other, known in list(self.aliases.items()):
            if known == own:
                self.aliases[other] = name
        if own != name:
            self.aliases[own] = name
        self.params[id(param)] = name
        self.copies.add(id(param))

    @property
    def first_stage(self) -> int:
        return 0 if self.pipeline is None else self.pipeline.indices[0]

    @property
    def written_buffers(self) -> list[str]:
        """Of the buffers here those that this rank's stages write."""
        return list(self.buffers if self.pipeline is None else self._written_buffers)

    # ---- what other stages have

    def learn(self, axis: Axis, leads: bool, tensors: Mapping[str, Named]) -> None:
        """Every rank of all stages calls it. ValueError, on all of them, where a name means two things. `leads`: this
        rank speaks for its stages; `tensors`: what they hold, by name, without copies."""
        assert self.pipeline is not None
        first = self.first_stage
        mine = [first, [[name, *each] for name, each in tensors.items()], self.aliases] if leads else None
        told = sorted((each for each in exchange(axis, mine, "names of the stages of a pipeline") if each), key=_first)
        holders: dict[str, list[int]] = {}
        self.everywhere, self.all_aliases = {}, {}
        for stage, entries, aliases in told:
            self.all_aliases |= aliases
            for name, shape, dtype, trains, is_buffer in entries:
                found = Named(tuple(shape), dtype, trains, is_buffer)
                if name in holders and not (is_buffer and found == self.everywhere[name]):
                    raise ValueError(_two_meanings(name, holders[name][0], stage))
                holders.setdefault(name, []).append(stage)
                self.everywhere.setdefault(name, found)
        self._compare(axis, leads, {name: stages for name, stages in holders.items() if len(stages) > 1})
        self._written_buffers = [name for name in self.buffers if holders.get(name, [first])[0] == first]

    def _compare(self, axis: Axis, leads: bool, shared: Mapping[str, Sequence[int]]) -> None:
        """Buffers of one name in several stages are one if their values are."""
        if not shared:
            return
        mine = {name: _digest(buffer) for name, buffer in self.buffers.items() if leads and name in shared}
        known: dict[str, str] = {}
        for each in exchange(axis, mine, "comparison of the buffers of a pipeline's stages"):
            for name, digest in each.items():
                if known.setdefault(name, digest) != digest:
                    raise ValueError(_two_meanings(name, *shared[name][:2]))


def _first(told: Any) -> int:
    return int(told[0])


def _two_meanings(name: str, stage: int, other: int) -> str:
    return (
        f"{name!r} is one tensor beside stage {stage} of the pipeline and another beside stage {other}, and one folder "
        "holds all stages; give zeor.pipeline(schedule, names=lambda stage, name: ...) the whole "
        "model's name of each, or let stages keep those names (an nn.ModuleDict with the model's own layer numbers)."
    )


def state_around(module: nn.Module) -> Sharded | None:
    """What belongs to a sharded model, or to the stages of a pipeline of which it is one; None of a plain model."""
    state: Sharded | None = vars(module).get(ATTRIBUTE)
    if state is None:
        with contextlib.suppress(ValueError):
            state = stage_of(module)[0]
            return state if state.pipeline is not None else None
    return state


def naming_of(model: nn.Module, state: Sharded | None) -> Naming:
    """Of a model or, where its stages are in a pipeline, of all of this rank's."""
    naming = Naming()
    pipes: Pipeline | None = None if state is None else state.pipeline
    if pipes is None:
        naming.add(model, lambda name: name)
        return naming
    if len(pipes.locals) > 1:
        raise ValueError(
            f"Stages {pipes.indices} of the pipeline, all on this rank, were sharded apart, and one folder holds all "
            "stages; put them into an nn.ModuleList and give zeor.shard that, with one optimizer."
        )
    naming.pipeline = pipes
    for index, module in pipes.modules():
        naming.add(module, lambda name, index=index: pipes.name(index, name))
    for slot, (stage, name) in pipes.ties.originals().items():
        naming.rename(slot.param, pipes.name(stage, name))
    return naming


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers a state dict holds, under their first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for attr, buffer in module._buffers.items():
            if buffer is not None and attr not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), (_joined(prefix, attr), buffer))
    return dict(found.values())


def _joined(prefix: str, attr: str) -> str:
    return f"{prefix}.{attr}" if prefix else attr


def _digest(value: Tensor) -> str:
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
