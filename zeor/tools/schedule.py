"""`zeor schedule`: prints the actions of one training step, unit by unit, for a GPT and a stage.

The runtime makes the schedule, which is data; one_step() is the one place in tools/ that asks for it.
The model is built on the meta device: nothing is allocated, and no rank is started.
"""

from __future__ import annotations

import argparse

from torch import nn

from zeor.memory.roles import STAGES, Residency
from zeor.plan import Plan
from zeor.runtime.discover import find_units
from zeor.runtime.keys import small_numel
from zeor.runtime.schedule import Schedule, Traits
from zeor.tools.plan import add_size_arguments, chosen_size, meta_model


def one_step(model: nn.Module, world: int, stage: int, prefetch: int = 1) -> Schedule:
    """The schedule of the first step, whose order of units is that of registration."""
    column = STAGES[stage]
    frees = column.compute is Residency.SLICE and world > 1
    publishes = column.compute is Residency.FULL and column.update is Residency.SLICE and world > 1
    units = []
    small = small_numel(Plan.parse({"stage": stage}), world)
    for spec in find_units(model, None, small):
        trains = any(param.requires_grad for _, param, _ in spec.params)
        whole = any(param.requires_grad and param.numel() <= small for _, param, _ in spec.params)
        sliced = any(param.numel() > small for _, param, _ in spec.params)
        units.append(Traits(spec.name, frees and sliced, trains, (publishes and trains) or (frees and whole)))
    forward = tuple(range(len(units)))
    return Schedule(tuple(units), forward, forward[::-1], prefetch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zeor schedule`."""
    add_size_arguments(parser)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--prefetch", type=int, default=1, metavar="N", help="units gathered ahead (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """`zeor schedule` with its options read."""
    model = meta_model(chosen_size(options))
    print(one_step(model, options.ranks, options.stage, options.prefetch))
    return 0
