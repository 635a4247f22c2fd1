"""`zeor plan`: bytes per rank for a GPT of some size, by stage and number of ranks: by role, or by tier and peaks.

    zeor plan --size 7b                                        # by role, without activations
    zeor plan --size 7b --precision bf16 --offload host --batch 8 2048   # by tier, with activations
    zeor plan --precision bf16 --moments int8 --release --fits 24 40 80  # host GiB that each model needs beside a GPU
    zeor plan --size 65b --precision bf16 --pp 4 --tp 8 --worlds 8 --stages 3   # 4 x 8 x 8 ranks: one of them
    zeor plan --size 7b --gpu H100 --ranks 64 --batch 4 2048   # the fastest plan that fits (choose.py)
    zeor schedule                                              # the actions of one training step, unit by unit
    zeor schedule --ranks 4 --hierarchy 2                      # on two axes; what is sent along each
    zeor schedule --offload host                               # with what is fetched and spilled for updates
    zeor schedule --record                                     # and what a step on CPU ranks did, beside it

Nothing is allocated: the model is built on the meta device, its shapes are read, and forward and backward run without
values; no rank is started, but by --record (record.py). Only this file and choose.py in tools/ ask the planner, and
step/schedule.py, whose schedule is data.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import zeor
from zeor.comm.links import Link
from zeor.comm.meshes import GPU, NODE, stages_of
from zeor.comm.observe import in_words
from zeor.memory.roles import Sizes
from zeor.model.discover import find_units
from zeor.optim.streaming.moments import MOMENTS
from zeor.plan import Plan
from zeor.planner.automatic import OverBudgetError
from zeor.planner.bytes import beside
from zeor.planner.machine import Along
from zeor.planner.network import moves_of
from zeor.spec.keys import small_numel
from zeor.spec.lane_spec import LaneSpec, spec_units
from zeor.spec.places import Places
from zeor.step.schedule import Schedule, traits_of
from zeor.tools import choose
from zeor.tools.gpt import GPT, GPTConfig
from zeor.tools.record import Run, recorded
from zeor.tools.show import common_unit, in_unit, paragraph, table

ROLES = ("compute", "grad", "master", "moments")
# The columns of a table of bytes: resident is the sum of the roles, and the transient bytes come on top of it.
# No padding: zeor.report() takes it from the layout, as the planner does, so there is nothing to compare.
COLUMNS = (*ROLES, "resident", "transient")
PIPELINED = ("held", "accumulated")  # what a stage of a pipeline has besides, while a step runs
CUT = {
    "*.qkv.*": 0, "*.up.*": 0, "*.out.weight": 1, "*.down.weight": 1, "tokens.weight": 0, "head.weight": 0,
}  # fmt: skip
TIERS = ("device", "host", "disk", "window", "activations", "device_peak", "host_peak")
GIB = 1 << 30
BY_ROLE = (
    "resident: between steps, the sum of the four before it. transient: what of zeor's own comes on top while a step "
    "runs.{more} peak: all of it."
)
OF_STAGES = (
    "held: full parameters that a stage keeps through a step. accumulated: gradients of full size that wait for their "
    "reduce."
)
BY_TIER = (
    "device, host, disk: what rests there. window: what state passes through on its way. device peak, host peak: the "
    "most in use while a step runs."
)
NOT_COUNTED = (
    "Activations are NOT counted: what forward keeps for backward comes on top of {peaks}, and often is the larger "
    "part. --batch SEQUENCES TOKENS counts them."
)
COUNTED = "Activations are counted for {0} x {1} tokens a rank and step, {how}."
AGAIN = {
    "none": "nothing recomputed", "products": "blocks recomputed but for their products", "blocks": "blocks recomputed",
    "offload": "blocks recomputed, inputs on the host",
}  # fmt: skip
MEANINGS = {
    "layers": "transformer blocks", "width": "width of the residual stream", "heads": "attention heads",
    "context": "longest sequence", "vocab": "number of tokens",
}  # fmt: skip
SIZES = {
    "tiny": GPTConfig(),
    "gpt2": GPTConfig(layers=12, width=768, heads=12, context=1024, vocab=50257),
    "gpt2-medium": GPTConfig(layers=24, width=1024, heads=16, context=1024, vocab=50257),
    "gpt2-large": GPTConfig(layers=36, width=1280, heads=20, context=1024, vocab=50257),
    "gpt2-xl": GPTConfig(layers=48, width=1600, heads=25, context=1024, vocab=50257),
    "7b": GPTConfig(layers=32, width=4096, heads=32, context=4096, vocab=50257),
    "13b": GPTConfig(layers=40, width=5120, heads=40, context=4096, vocab=50257),
    "30b": GPTConfig(layers=48, width=7168, heads=56, context=4096, vocab=50257),
    "65b": GPTConfig(layers=80, width=8192, heads=64, context=4096, vocab=50257),
}


def predict(
    config: GPTConfig, world: int, stage: int, precision: str | None = None, optimizer: str = "AdamW", **mesh: Any
) -> dict[str, int]:
    """Bytes on one rank under the names of COLUMNS. `mesh`: pp= and tp=."""
    model = meta_model(config)
    found = zeor.predict(model, world=world, stage=stage, precision=precision, optimizer=optimizer, **mesh)
    return found.as_dict()


def meta_model(config: GPTConfig) -> GPT:
    """The model's shapes, without its bytes."""
    with torch.device("meta"):
        return GPT(config)


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """A built-in size, and options that change it."""
    parser.add_argument("--size", choices=SIZES, default="tiny", metavar="NAME",
                        help=f"a built-in size to start from: {', '.join(SIZES)} (default: %(default)s)")  # fmt: skip
    for name, meaning in MEANINGS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{meaning} (default: the size's)")


def chosen_size(options: argparse.Namespace) -> GPTConfig:
    """The size that the options describe."""
    base = SIZES[options.size]
    given = {name: getattr(options, name) for name in MEANINGS if getattr(options, name) is not None}
    try:
        return GPTConfig(**{**vars(base), **given})
    except ValueError as error:
        raise SystemExit(f"zeor: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    add = parser.add_argument
    add("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0, 1, 2, 3], help="default: all")
    add("--worlds", type=int, nargs="+", default=[1, 2, 8, 64], metavar="N", help="ranks (default: 1 2 8 64)")
    add("--pp", type=int, default=1, metavar="N", help="ranks in a row, with stages of it; --worlds are replicas")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share each matrix; --worlds are replicas")
    add("--precision", choices=("fp32", "bf16", "fp16", "fp8"), help="what forward computes in (default: fp32)")
    known = ", ".join(sorted(MOMENTS))
    add("--optimizer", choices=sorted(MOMENTS), default="AdamW", metavar="NAME",
        help=f"of torch.optim: {known} (default: %(default)s)")  # fmt: skip
    # Options that ask for bytes by tier, and for peaks.
    add("--offload", choices=("host", "disk", "auto"), help="where master and moments rest (default: device)")
    add("--moments", choices=("exact", "bf16", "int8"), default="exact", help="default: %(default)s")
    add("--release", action="store_true", help="gradients are used and freed inside backward")
    add("--recompute", choices=tuple(AGAIN), default="blocks",
        help="what a step's activations are counted with (default: %(default)s)")  # fmt: skip
    add("--batch", type=int, nargs=2, metavar=("SEQUENCES", "TOKENS"), help="count activations too")
    add("--device-budget", metavar="BYTES", help="of --offload auto, such as 80GiB")
    add("--host-budget", metavar="BYTES", help="of --offload auto, such as 500GiB")
    add("--fits", type=float, nargs="+", metavar="GIB", help="GiB of host memory that each size needs beside a GPU of "
        "so many GiB, filled first (one rank, stage 3)")  # fmt: skip
    choose.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    try:
        if options.gpu is not None:
            return choose.run(options, lambda: meta_model(_as_long_as(chosen_size(options), options.batch)))
        if options.model is not None:
            raise ValueError("--model goes with --gpu, which says for what machine.")
        return _fits(options) if options.fits else _plan(options)
    except ValueError as error:
        raise SystemExit(f"zeor: {error}") from None


def _as_long_as(config: GPTConfig, batch: Sequence[int] | None) -> GPTConfig:
    """With room for the sequences that were asked for."""
    return config if batch is None else GPTConfig(**{**vars(config), "context": max(config.context, batch[1])})


def _plan(options: argparse.Namespace) -> int:
    config = chosen_size(options)
    numel = sum(parameter.numel() for parameter in meta_model(config).parameters())
    by_tier = bool(options.offload or options.batch or options.release or options.moments != "exact")
    found: dict[tuple[int, int], list[int]] = {}  # by stage and ranks
    refused = []
    for stage in options.stages:
        for world in options.worlds:
            try:
                found[stage, world] = _sizes(options, config, stage, world, by_tier)
            except OverBudgetError as error:
                refused.append(f"stage {stage} on {world} rank(s) does not fit: {error}")
    if not found:
        raise SystemExit("\n".join(f"zeor: {line}" for line in refused))
    unit, nbytes = common_unit(size for sizes in found.values() for size in sizes)
    columns = TIERS if by_tier else (*_columns(options), "peak")
    rows = []
    for stage in options.stages:
        for world in options.worlds:
            sizes = found.get((stage, world), [None] * len(columns))
            rows.append([str(stage), str(world), *_cells(sizes, columns, nbytes, bool(options.batch))])
    print(f"{config.layers} layers, width {config.width}, vocabulary {config.vocab}: {numel:,} parameters")
    print(f"{unit} per rank with {options.optimizer}, {options.precision or 'fp32'}\n")
    if _mesh(options):
        told = f"{options.pp} ranks in a row x {options.tp} that share each matrix; ranks: replicas of each of them"
        print(paragraph(f"On {told}. Of the fullest pipeline stage's."), "", sep="\n")
    print(table(["stage", "ranks", *(column.replace("_", "\n") for column in columns)], rows))
    print(*map(paragraph, refused), "", *_notes(options, by_tier), sep="\n")
    return 0


def _cells(sizes: Sequence[int | None], columns: Sequence[str], unit_nbytes: int, counted: bool) -> list[str]:
    """A row's numbers; "-" for what is not known: the size of what does not fit, activations that nobody counted."""
    unknown = [size is None or (name == "activations" and not counted) for size, name in zip(sizes, columns)]
    return ["-" if hide else in_unit(size or 0, unit_nbytes) for size, hide in zip(sizes, unknown)]


def _notes(options: argparse.Namespace, by_tier: bool) -> list[str]:
    """What the columns mean, and whether activations are in them."""
    if options.batch:
        activations = COUNTED.format(*options.batch, how=AGAIN[options.recompute])
    else:
        activations = NOT_COUNTED.format(peaks="the device's peak" if by_tier else "the peak")
    meaning = BY_TIER if by_tier else BY_ROLE.format(more=" " + OF_STAGES if options.pp > 1 else "")
    return [paragraph(meaning), paragraph(activations)]


def _sizes(options: argparse.Namespace, config: GPTConfig, stage: int, world: int, by_tier: bool) -> list[int]:
    if by_tier:
        given = {**asked(options), **_mesh(options)}
        found = zeor.predict(meta_model(config), world=world, stage=stage, **given).as_dict()
        return [found[column] for column in TIERS]
    counts = predict(config, world, stage, options.precision, options.optimizer, **_mesh(options))
    columns = _columns(options)
    return [*(counts[column] for column in columns), sum(counts[name] for name in ("resident", *columns[5:]))]


def _mesh(options: argparse.Namespace) -> dict[str, Any]:
    """Options of zeor.predict where the model is cut."""
    divided = options.pp > 1 or options.tp > 1
    return {"pp": options.pp, "tp": options.tp, "cut": CUT} if divided else {}


def _columns(options: argparse.Namespace) -> tuple[str, ...]:
    """By role; those after `resident` come on top of it."""
    return (*COLUMNS, *PIPELINED) if options.pp > 1 else COLUMNS


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """The options of zeor.predict that the command line gives."""
    again = {"none": False, "blocks": True}.get(options.recompute, options.recompute)
    offload: Any = options.offload
    if offload != "auto" and (options.device_budget or options.host_budget):
        raise SystemExit("zeor plan: budgets are for --offload auto; give that, or leave them out.")
    if offload == "auto":
        offload = zeor.Offload(auto=True, device_budget=options.device_budget, host_budget=options.host_budget)
    return {
        "precision": options.precision, "optimizer": options.optimizer, "native_reduce": True, "offload": offload,
        "moments": options.moments, "release": options.release, "recompute": again,
        "batch": tuple(options.batch) if options.batch else None,
    }  # fmt: skip


def _fits(options: argparse.Namespace) -> int:
    """Of every built-in size of a billion parameters or more."""
    given = {**asked(options), "batch": tuple(options.batch or (1, 1024))}
    given.pop("offload")
    header = ["size", "parameters", *(f"{gib:g} GiB GPU" for gib in options.fits)]
    rows = []
    for name, config in SIZES.items():
        model = meta_model(config)
        numel = sum(parameter.numel() for parameter in model.parameters())
        if numel >= 1e9:
            found = [beside(model, int(gib * GIB), **given) for gib in options.fits]
            cells = ["-" if each is None else f"{each.host / GIB:,.0f}" for each in found]
            rows.append([name, f"{numel / 1e9:.1f}B", *cells])
    sequences, tokens = given["batch"]
    how = "released in backward" if options.release else "kept until the step"
    settings = f"{options.precision or 'fp32'}, {options.optimizer}, {options.moments} moments, gradients {how}"
    counted = f"Activations of {sequences} x {tokens} tokens are counted, {AGAIN[options.recompute]}"
    print(paragraph(f"GiB of host memory beside a GPU, which is filled first: {settings}. {counted}."))
    print("-: what must be on the GPU does not fit there\n")
    print(table(header, rows))
    return 0


# ---- zeor schedule


def one_step(model: nn.Module, world: int, stage: int, prefetch: int = 1) -> Schedule:
    """The schedule of the first step, whose order of units is that of registration."""
    return planned_step(model, Sizes(world), Run(stage, prefetch))[0]


def planned_step(model: nn.Module, sizes: Sizes, run: Run) -> tuple[Schedule, dict[tuple[str, str], int]]:
    """The schedule, and the bytes that a rank sends in it, by axis and verb."""
    inside, across = stages_of(run.stage, None, run.hierarchy)
    plan = Plan.parse({"stage": inside, "across": across, "prefetch": run.prefetch, "offload": run.offload})
    units = find_units(model, None, small_numel(plan, math.prod(sizes)))
    lanes = spec_units(units, plan, sizes, Places(plan, torch.device("cpu")))
    traits = tuple(traits_of(unit.name, found) for unit, found in zip(units, lanes))
    forward = tuple(range(len(traits)))
    schedule = Schedule(traits, forward, forward[::-1], plan)
    return schedule, sent_in(schedule, [[spec for spec, _ in found] for found in lanes], sizes)


def sent_in(schedule: Schedule, lanes: Sequence[Sequence[LaneSpec]], sizes: Sizes) -> dict[tuple[str, str], int]:
    """What the actions of a step send, leg by leg."""
    link = Link(1.0, 0.0)  # bytes are asked for, not seconds
    axes: list[Along] = [(GPU, sizes.inside, link), (NODE, sizes.across, link)]
    if sizes.across == 1:
        axes = [("ranks", sizes.inside, link)]
    found: Counter[tuple[str, str]] = Counter()
    for _, _, actions in schedule.rows:
        for action in actions:
            if action.lane is not None and action.verb in ("gather", "reduce", "publish"):
                moves = moves_of(lanes[action.unit][action.lane], axes)
                for verb in ("reduce", "spread") if action.verb == "reduce" else (action.verb,):
                    for cost in getattr(moves, verb):
                        of = sizes.inside if cost.axis == NODE else 1  # there a cost is that of the whole host
                        found[cost.axis, "reduce" if verb == "reduce" else "gather"] += round(cost.nbytes / of)
    return dict(found)


def sizes_of(ranks: int, hierarchy: int | None) -> Sizes:
    """ValueError where ranks do not stand on two axes so."""
    if hierarchy is None:
        return Sizes(ranks)
    if hierarchy < 1 or ranks % hierarchy:
        raise ValueError(f"--hierarchy {hierarchy} ranks per node do not divide {ranks}; give a number that does.")
    return Sizes(hierarchy, ranks // hierarchy)


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: %(default)s")
    nodes = "ranks per node; stage 3 then cuts parameters inside a node"
    parser.add_argument("--hierarchy", type=int, metavar="N", help=nodes)
    units = "units gathered ahead (default: %(default)s)"
    parser.add_argument("--prefetch", type=int, default=1, metavar="N", help=units)
    away = "where master and moments rest (default: device)"
    parser.add_argument("--offload", choices=("host", "disk"), help=away)
    ran = "run a few steps on so many CPU ranks, and print what was done beside it"
    parser.add_argument("--record", action="store_true", help=ran)


def run_schedule(options: argparse.Namespace) -> int:
    config = chosen_size(options)
    model = meta_model(config)
    try:
        sizes = sizes_of(options.ranks, options.hierarchy)
        asked_for = Run(options.stage, options.prefetch, options.hierarchy, options.offload)
        if options.record:
            print(recorded(config, options.ranks, asked_for))
        else:
            schedule, sent = planned_step(model, sizes, asked_for)
            rows = [[axis, verb, in_words(nbytes).strip()] for (axis, verb), nbytes in sorted(sent.items()) if nbytes]
            print(schedule, "", table(["axis", "verb", "sent per step and rank"], rows), sep="\n")
    except ValueError as error:
        raise SystemExit(f"zeor: {error}") from None
    return 0
