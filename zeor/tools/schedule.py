"""`zeor schedule`: prints the actions of one training step, unit by unit, for a GPT and a stage.

step/schedule.py makes the schedule, which is data; one_step() is the one place in tools/ that asks for it.
The model is built on the meta device: nothing is allocated, and no rank is started.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from zeor.model.discover import find_units
from zeor.plan import Plan
from zeor.spec.keys import small_numel
from zeor.spec.lane_spec import spec_units
from zeor.spec.places import Places
from zeor.step.schedule import Schedule, traits_of
from zeor.tools.plan import add_size_arguments, chosen_size, meta_model


def one_step(model: nn.Module, world: int, stage: int, prefetch: int = 1) -> Schedule:
    """The schedule of the first step, whose order of units is that of registration."""
    plan = Plan.parse({"stage": stage})
    units = find_units(model, None, small_numel(plan, world))
    lanes = spec_units(units, plan, world, Places(plan, torch.device("cpu")))
    traits = tuple(traits_of(unit.name, [spec for spec, _ in found]) for unit, found in zip(units, lanes))
    forward = tuple(range(len(traits)))
    return Schedule(traits, forward, forward[::-1], prefetch)


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
