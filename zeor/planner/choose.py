"""`zeor.choose`: which plan to run, for this machine or for one that is elsewhere.

Plans are listed (plans.py), those that do not fit are left out by `predict`'s own figures, and the rest is ranked by
the time of a step, and by memory where that is alike. Nothing is allocated, and what a model computes is traced once
for all of them. Only what keeps results exact is tried; the user may allow more. The answer holds its reasons and the
runners-up, and prints a table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zeor.optim.streaming.auto import HOST_SHARE, size
from zeor.plan import Plan, _nbytes, nearest
from zeor.planner.automatic import OverBudgetError
from zeor.planner.bytes import (
    Loop,
    Prediction,
    Source,
    check_optimizer,
    kind_of,
    limit_nbytes,
    pace_of,
    predicted,
    setting_of,
)
from zeor.planner.machine import Machine
from zeor.planner.plans import ALLOWED, Option, Room, micro_batches, options_of
from zeor.planner.shape import Shape
from zeor.planner.step_time import StepTime, step_time
from zeor.tiers.host import free_host_nbytes

_OPTIONS = ("inputs", "loss", "units", "compile", "keep_whole", "prefetch", "kernel", "clip")
_SHOWN, _MOST_RANKS = 5, 1 << 16
_ALIKE = 0.01  # times that differ by less are equal: the model knows no better
_CUT = 0.05  # of a step, which a plan that cuts a batch once more has to save


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at. `why`: what it loses by, or why it is out; of the first, what it is good for."""

    option: Option
    prediction: Prediction | None
    why: str = ""

    @property
    def time(self) -> StepTime:
        assert self.prediction is not None and self.prediction.time is not None
        return self.prediction.time

    @property
    def seconds(self) -> float:
        return self.time.seconds


@dataclass(frozen=True)
class Choice:
    """`best` is the fastest plan that fits; `others` fit too, the fastest first; `refused` do not fit.

    `options` is what zeor.shard takes: `zeor.shard(model, optimizer, **choice.options)`, or plan=choice. With
    `accumulation` above 1 the loop cuts each batch into so many micro-batches.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    machine: Machine
    shape: Shape
    common: dict[str, Any]  # options that all of them have

    @property
    def options(self) -> dict[str, Any]:
        return {**self.common, **self.best.option.shard()}

    @property
    def accumulation(self) -> int:
        return self.best.option.accumulation

    @property
    def prediction(self) -> Prediction:
        assert self.best.prediction is not None
        return self.best.prediction

    def __str__(self) -> str:
        """A table: the choice, runners-up, and the plans that came nearest to fitting."""
        fit = [self.best, *self.others]
        shown = [*fit[: 1 + _SHOWN], *self.refused[: _SHOWN if len(fit) > 1 else 2 * _SHOWN]]
        rows = [("plan", "s/step", "TFLOP/s", "GPU GiB", "host GiB", ""), *map(_row, shown)]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [f"{self.shape} of {self.machine.name}, {limit_nbytes(self.machine) / 2**30:.1f} GiB each to use"]
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:]))]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        left = len(fit) + len(self.refused) - len(shown)
        lines += [f"and {left} more"] * bool(left) + [self._sums()] * (self.accumulation > 1)
        return "\n".join(lines)

    def _sums(self) -> str:
        """What micro-batches cost, and what does without."""
        return (
            f"Of the choice's memory {size(self.prediction.accumulated)} are sums of gradients over micro-batches, in "
            "fp32. Several ranks that reduce every backward (no zeor.no_sync) keep slices of them; a batch that is not "
            "cut has none (docs/offload.md)."
        )


def _row(found: Candidate) -> tuple[str, ...]:
    said = found.prediction
    if said is None or said.time is None:
        return str(found.option), "-", "-", "-", "-", found.why
    time = said.time
    cells = f"{time.seconds:.4g}", f"{time.operations / time.seconds / 1e12:.0f}"
    return str(found.option), *cells, f"{said.device_peak / 2**30:.1f}", f"{said.host_peak / 2**30:.1f}", found.why


def choose(  # noqa: PLR0913 (public: each option is a keyword)
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | str | int = "AdamW",
    batch: tuple[int, int] | None = None,
    *,
    world: Any = None,
    gpu: Any = None,
    host: Any = None,
    link: Any = None,
    precision: Any = "bf16",
    allow: str | Sequence[str] = (),
    **options: Any,
) -> Choice:
    """The plan with the shortest step of those that fit, with its reasons and the runners-up; print it.

    `model` is a module (it may be on the meta device) or a function that makes one, which is called there. `batch` is
    (sequences, tokens) of one rank and step; or inputs= and loss=, as zeor.predict takes them.

    world=None       ranks: a number, or {"node": 2, "gpu": 8}; None: those that are here.
    gpu=None         "H100", "80GiB" or a zeor.Machine; None: what is here.
    host=None        memory of one host, shared by its ranks, for state that does not fit on GPUs; None: what is free
                     here, or, where gpu= is given, nothing.
    link=None        links: one rate between hosts, {"gpu": "450GB/s", "node": "400Gbit/s 14us"}, or what
                     zeor.measure_links found; None: the machine's.
    precision="bf16" as for zeor.shard. It is yours to choose: it changes results.
    allow=()         what else may be tried although it changes results or what a loop may do: "bf16" or "int8" (the
                     format of moments), "delay", "release" (no clipping).

    options: units=, compile=, keep_whole=, prefetch=, kernel=, clip= (False: the loop computes no norm), as for
    zeor.predict. Where nothing fits, ValueError says what would.
    """
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"zeor.choose has no option {name!r}{nearest(name, list(_OPTIONS))}.")
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in allowed:
        if name not in ALLOWED:
            raise ValueError(f"allow={name!r} is not known{nearest(name, list(ALLOWED))}; use some of {list(ALLOWED)}.")
    if batch is None and options.get("inputs") is None:
        raise ValueError("zeor.choose ranks plans by the time of a step; give batch=(sequences, tokens), or inputs=.")
    kind = kind_of([optimizer]) if isinstance(optimizer, Optimizer) else optimizer
    check_optimizer(kind)
    machine = Machine.here() if gpu is None else Machine.parse(gpu)
    shape = Shape.parse(_ranks_here() if world is None else world)
    hunt = _Hunt(
        Source(_built(model), {**options, "batch": batch}),
        kind,
        Room(machine, shape, limit_nbytes(machine), _host_nbytes(machine, shape, host, here=gpu is None)),
        link,
        {"precision": precision, **{name: options[name] for name in _OPTIONS[3:-1] if name in options}},
        bool(options.get("clip", True)),
    )
    return hunt.choice(allowed, None if batch is None else batch[0])


def _built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    found: Any = model
    if not isinstance(model, nn.Module) and callable(model):
        with torch.device("meta"):
            found = model()
    if not isinstance(found, nn.Module):
        raise TypeError(f"zeor.choose takes a torch.nn.Module, or a function that makes one, not {found!r}.")
    return found


def _ranks_here() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _host_nbytes(machine: Machine, shape: Shape, given: Any, here: bool) -> int:
    """Of one rank."""
    if given is None:
        nbytes = int(HOST_SHARE * (free_host_nbytes() or 0)) if here else 0
    else:
        nbytes = 0 if type(given) is int and not given else _nbytes("host", given) or 0
    return machine.host_share(nbytes, shape.world)


@dataclass(frozen=True)
class _Hunt:
    """What all plans share, and how one of them is looked at."""

    source: Source
    optimizer: str | int
    room: Room
    link: Any
    common: dict[str, Any]
    clip: bool

    def choice(self, allowed: Sequence[str], sequences: int | None) -> Choice:
        found = self._found(allowed, sequences)
        fit = sorted((each for each in found if not each.why), key=lambda each: each.seconds)
        refused = sorted((each for each in found if each.why), key=_peak)
        if not fit:
            raise ValueError(self._nothing(refused, allowed, sequences))
        lean, why = _leanest(fit)
        best = replace(lean, why=why)
        others = tuple(replace(each, why=_why(each, best)) for each in fit if each is not lean)
        return Choice(best, others, tuple(refused), self.room.machine, self.room.shape, self.common)

    def _found(self, allowed: Sequence[str], sequences: int | None) -> list[Candidate]:
        """A batch is cut into more micro-batches until a plan fits that gives up nothing else."""
        found: list[Candidate] = []
        for count in micro_batches(sequences):
            found += self._looked_at(allowed, count, sequences)
            if any(each.option.gives_up_nothing for each in found if not each.why):
                break
        return found

    def _looked_at(self, allowed: Sequence[str], count: int, sequences: int | None) -> list[Candidate]:
        """With so many micro-batches. Where a plan fits, those that only save memory beside it are left out."""
        found: list[Candidate] = []
        for options in options_of(self.room, allowed, self.clip, count):
            fit: list[Option] = []
            for option in options:
                if any(option.only_saves_beside(other) for other in fit):
                    break
                found.append(self.look(option, None if sequences is None else sequences // count))
                fit += [] if found[-1].why else [option]
        return found

    def look(self, option: Option, sequences: int | None) -> Candidate:
        """`why` is empty where it fits."""
        machine, shape, limit = self.room.machine, option.shape, self.room.device
        plan = Plan.parse({**self.common, **shape.stages(option.stage), **option.rest(self.room)})
        loop = Loop(option.accumulation)
        try:
            known = self.source.model(setting_of(plan, shape.sizes, self.optimizer, machine.native, loop), sequences)
            found = predicted(known, limit)
        except OverBudgetError as error:
            return Candidate(option, None, str(error))
        pace = pace_of(found, machine, machine.links(*shape, self.link), self.clip)
        said = replace(found.prediction, time=step_time(found.model, pace))
        why = ""
        if said.device_peak > limit:
            why = f"needs {size(said.device_peak)} of {size(limit)} on the device"
        elif said.host > self.room.host:
            why = f"needs {size(said.host)} of {size(self.room.host)} on the host"
        return Candidate(option, said, why)

    # ---- where nothing fits

    def _nothing(self, refused: Sequence[Candidate], allowed: Sequence[str], sequences: int | None) -> str:
        told = f"No plan fits on {self.room.shape} of {self.room.machine.name}"
        if refused:
            told += f"; the nearest, {refused[0].option}, {refused[0].why.rstrip('.')}"
        exact = self._ranks_that_fit(allowed, sequences)
        small = self._ranks_that_fit((*allowed, "int8"), sequences)
        would = [f"{exact} ranks"] if exact else []
        would += [f"{small} with int8 moments (allow='int8')"] if small and small != exact else []
        if would:
            return f"{told}. It would fit on {', or on '.join(would)}."
        return (
            f"{told}. No number of ranks would do: a unit and the activations of one micro-batch are too large for a "
            "rank; give fewer tokens or larger devices, or cut the units themselves by tensor parallelism."
        )

    def _ranks_that_fit(self, allowed: Sequence[str], sequences: int | None) -> int | None:
        """The least number of ranks on one axis that does with the leanest plan."""

        def fits(world: int) -> bool:
            room = replace(self.room, shape=Shape.parse(world))
            count = micro_batches(sequences)[-1]
            lean = [each for all_of in options_of(room, allowed, self.clip, count) for each in all_of if not each.delay]
            return not replace(self, room=room).look(lean[-1], None if sequences is None else sequences // count).why

        low, high = 1, 1
        while not fits(high):
            low, high = high + 1, high * 2
            if high > _MOST_RANKS:
                return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return high


def _leanest(fit: Sequence[Candidate]) -> tuple[Candidate, str]:
    """Of the fastest plans the one with the least memory, and what it is good for. Of those with the fewest
    micro-batches: the loop must cut batches for others, so these have to be faster by _CUT."""
    counts = sorted({each.option.accumulation for each in fit})
    by_count = [[each for each in fit if each.option.accumulation == count] for count in counts]
    chosen = by_count[0]
    for those in by_count[1:]:
        if those[0].seconds <= (1 - _CUT) * chosen[0].seconds:
            chosen = those
    lean = min((each for each in chosen if each.seconds <= (1 + _ALIKE) * chosen[0].seconds), key=_peak)
    if lean is chosen[0]:
        return lean, "the fastest" if lean is fit[0] else "the fastest with so few micro-batches"
    return lean, f"within {_ALIKE:.0%} of the fastest, less memory"


def _peak(found: Candidate) -> float:
    return float("inf") if found.prediction is None else found.prediction.device_peak


def _why(found: Candidate, best: Candidate) -> str:
    """What makes it slower: the part of a step that differs most."""
    parts = [_parts(each.time) for each in (found, best)]
    more = {name: parts[0].get(name, 0.0) - parts[1].get(name, 0.0) for name in {*parts[0], *parts[1]}}
    name = max(more, key=lambda each: more[each])
    slower = found.seconds / best.seconds - 1
    if slower <= _ALIKE:
        return f"as fast, {size(int(_peak(found) - _peak(best)))} more"
    return f"{slower:.0%} slower: {name} {more[name]:.3g} s more"


def _parts(time: StepTime) -> dict[str, float]:
    waits = {f"waiting for {verb}{' along ' + axis if axis else ''}": s for (verb, axis), s in time.exposed.items()}
    computed = {name: getattr(time, name) for name in ("forward", "backward", "update", "coding")}
    return {**computed, **waits}
