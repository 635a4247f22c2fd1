"""`zeor plan`: bytes per rank and role for a GPT of some size, by stage and number of ranks.

Nothing is allocated: the model is built on the meta device and only its shapes are read. predict() is the one
place in tools/ that asks the planner.
"""

from __future__ import annotations

import argparse

import torch

import zeor
from zeor.planner.bytes import MOMENTS
from zeor.tools.gpt import GPT, GPTConfig
from zeor.tools.show import human_bytes, table

ROLES = ("compute", "grad", "master", "moments")
# The columns of a table of bytes. Padding is part of the roles; the transient bytes come on top of them.
COLUMNS = (*ROLES, "padding", "resident", "transient")
SIZES = {
    "tiny": GPTConfig(),
    "gpt2": GPTConfig(layers=12, width=768, heads=12, context=1024, vocab=50257),
    "gpt2-medium": GPTConfig(layers=24, width=1024, heads=16, context=1024, vocab=50257),
    "gpt2-large": GPTConfig(layers=36, width=1280, heads=20, context=1024, vocab=50257),
    "gpt2-xl": GPTConfig(layers=48, width=1600, heads=25, context=1024, vocab=50257),
    "7b": GPTConfig(layers=32, width=4096, heads=32, context=4096, vocab=50257),
    "65b": GPTConfig(layers=80, width=8192, heads=64, context=4096, vocab=50257),
}


def predict(
    config: GPTConfig, world: int, stage: int, precision: str | None = None, optimizer: str = "AdamW"
) -> dict[str, int]:
    """Bytes on one rank under the names of COLUMNS."""
    model = meta_model(config)
    found = zeor.predict(model, world=world, stage=stage, precision=precision, optimizer=optimizer)
    return found.as_dict()


def meta_model(config: GPTConfig) -> GPT:
    """The model's shapes, without its bytes."""
    with torch.device("meta"):
        return GPT(config)


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """A built-in size, and options that change it."""
    parser.add_argument(
        "--size", choices=SIZES, default="tiny", help="a built-in size to start from (default: %(default)s)"
    )
    for name, meaning in (
        ("layers", "transformer blocks"),
        ("width", "width of the residual stream"),
        ("heads", "attention heads"),
        ("context", "longest sequence"),
        ("vocab", "number of tokens"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{meaning} (default: the size's)")


def chosen_size(options: argparse.Namespace) -> GPTConfig:
    """The size that the options describe."""
    base = SIZES[options.size]
    names = ("layers", "width", "heads", "context", "vocab")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    try:
        return GPTConfig(**{**vars(base), **given})
    except ValueError as error:
        raise SystemExit(f"zeor: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zeor plan`."""
    add_size_arguments(parser)
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0, 1, 2, 3], help="default: all"
    )
    parser.add_argument(
        "--worlds", type=int, nargs="+", default=[1, 2, 8, 64], metavar="N", help="ranks (default: 1 2 8 64)"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="what forward computes in (default: fp32)"
    )
    parser.add_argument(
        "--optimizer", choices=sorted(MOMENTS), default="AdamW", help="of torch.optim (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """`zeor plan` with its options read."""
    config = chosen_size(options)
    numel = sum(parameter.numel() for parameter in meta_model(config).parameters())
    print(f"{config.layers} layers, width {config.width}, vocabulary {config.vocab}: {numel:,} parameters")
    print(f"bytes per rank with {options.optimizer}, {options.precision or 'fp32'}\n")
    header = ["stage", "ranks", *COLUMNS, "peak"]
    rows = []
    for stage in options.stages:
        for world in options.worlds:
            counts = predict(config, world, stage, options.precision, options.optimizer)
            peak = counts["resident"] + counts["transient"]
            sizes = [*(counts[column] for column in COLUMNS), peak]
            rows.append([str(stage), str(world), *map(human_bytes, sizes)])
    print(table(header, rows))
    return 0
