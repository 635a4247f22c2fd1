"""`zeor export`: plain safetensors out of a checkpoint, in one process, without a process group."""

from __future__ import annotations

import argparse
import sys

from zeor.checkpoint.weights.export import export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zeor export`."""
    parser.add_argument("folder", help="a checkpoint, or a folder or URL of them: the latest is exported")
    parser.add_argument("out", help="a local folder, without weights in it")
    parser.add_argument("--dtype", help="bf16, fp16 or fp32 (default: each parameter's own)")
    parser.add_argument("--max-file", default="5GB", help="begin another file here (default: %(default)s)")
    parser.add_argument("--trainable-only", action="store_true", help="what was trained alone: adapters")
    parser.add_argument("--config", help="a folder with a config.json to put beside the weights")


def run(options: argparse.Namespace) -> int:
    """`zeor export` with its options read."""
    try:
        out = export(
            options.folder,
            options.out,
            dtype=options.dtype,
            max_file=options.max_file,
            trainable_only=options.trainable_only,
            config=options.config,
        )
    except ValueError as error:  # CheckpointError is one
        print(f"zeor: {error}", file=sys.stderr)
        return 1
    names = sorted(path.name for path in out.iterdir())
    print(f"{out}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}")
    return 0
