"""`zeor inspect`: what a checkpoint holds and whether it is sound. Reads the manifest; with --verify every byte.
`zeor export`: plain safetensors out of a checkpoint, in one process, without a process group.

Both end with 1 where anything is wrong, so that a script can ask.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import Manifest
from zeor.checkpoint.files.urls import Place, place_of, shown
from zeor.checkpoint.verify import Description, bytes_by_role, checkpoints_of, describe, parameter_counts, verify
from zeor.checkpoint.weights.export import export
from zeor.tools.show import Progress, human_bytes, table

_MOST_FILES = 20  # lines of files before the rest is summed up


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="a checkpoint, or a folder or URL of them: the latest is described")
    parser.add_argument("--verify", action="store_true", help="read every file and check every hash")


def run_inspect(options: argparse.Namespace) -> int:
    try:
        found = [describe(path) for path in checkpoints_of(place_of(options.folder))]
    except CheckpointError as error:
        print(f"zeor: {error}", file=sys.stderr)
        return 1
    if options.verify:
        _verify(found)
    if len(found) > 1:
        print(f"{shown(options.folder)}: {len(found)} complete checkpoints\n")
        good = "verified" if options.verify else "complete"
        rows = [[each.path.name, human_bytes(each.nbytes), "damaged" if each.problems else good] for each in found]
        print(table(["checkpoint", "size", "health"], rows), end="\n\n")
    latest = found[-1]
    if latest.manifest is not None:
        _print(latest.path, latest.manifest)
    problems = [problem for each in found for problem in each.problems]
    for problem in problems:
        print(f"zeor: {problem}", file=sys.stderr)
    if not problems:
        checked = "every hash is right" if options.verify else "complete (--verify checks every hash)"
        print(f"\nhealth      {checked}")
    return 1 if problems else 0


def _verify(found: list[Description]) -> None:
    total = sum(each.nbytes for each in found)
    progress, done = Progress(max(total, 1), unit="byte", stream=sys.stderr), 0
    for each in found:
        name = each.path.name

        def advance(nbytes: int, name: str = name) -> None:
            nonlocal done
            done += nbytes
            progress.update(done, f"in {name}")

        verify(each, advance)


def _print(path: Place, manifest: Manifest) -> None:
    tensors, numel, trains = parameter_counts(manifest)
    software = _dict(manifest.state.get("software"))
    stage = software.pop("stage", None)
    written = f"{manifest.world} rank(s)" + (f", stage {stage}" if stage is not None else "")
    print(f"checkpoint  {path}")
    print(f"step        {manifest.step}")
    print(f"written by  {written}{''.join(f', {key} {value}' for key, value in software.items())}")
    print(f"parameters  {numel:,} in {tensors} tensors, {trains:,} of them train")
    optimizers = manifest.state.get("optimizers")
    for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else []):
        groups = _dict(optimizer).get("groups")
        count = len(groups) if isinstance(groups, list) else 0
        print(f"optimizer {number} {_dict(optimizer).get('class')}, {count} group(s)")
    extra = _dict(manifest.state.get("extra"))
    if extra:
        print(f"extra       {', '.join(map(str, extra))}")
    roles = [[role, human_bytes(nbytes)] for role, nbytes in bytes_by_role(manifest).items()]
    print("\n" + table(["role", "bytes"], roles))
    files = [[file.name, human_bytes(file.nbytes)] for file in manifest.files]
    more = files[_MOST_FILES:]
    if more:
        rest = sum(file.nbytes for file in manifest.files[_MOST_FILES:])
        files = [*files[:_MOST_FILES], [f"and {len(more)} more", human_bytes(rest)]]
    print("\n" + table(["file", "bytes"], files))


def _dict(value: Any) -> dict[str, Any]:
    """A manifest is input: what should be an object may be anything."""
    return dict(value) if isinstance(value, dict) else {}


# ---- zeor export


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="a checkpoint, or a folder or URL of them: the latest is exported")
    parser.add_argument("out", help="a local folder, without weights in it")
    parser.add_argument("--dtype", help="bf16, fp16 or fp32 (default: each parameter's own)")
    parser.add_argument("--max-file", default="5GB", help="begin another file here (default: %(default)s)")
    parser.add_argument("--trainable-only", action="store_true", help="what was trained alone: adapters")
    parser.add_argument("--config", help="a folder with a config.json to put beside the weights")


def run_export(options: argparse.Namespace) -> int:
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
