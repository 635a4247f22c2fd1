"""`zeor import`: checkpoints of others, which are pickles, into zeor's format, which is none.

A pickle can run anything when it is loaded. So the files are read in a process of its own (unpickle.py), by torch's
safe loader, and what that refuses only where the user says so; plain values come back as JSON and safetensors, and
are made a checkpoint here. zeor.load and zeor.save never come near this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zeor.checkpoint.files import plain
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.tensorfile import read_header
from zeor.checkpoint.weights.hf_folder import local_folder
from zeor.tools.importers import deepspeed, state_dicts
from zeor.tools.importers.foreign import Foreign, value_of, write

KINDS = ("torch", "deepspeed", "dcp")
_START = """\
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module("zeor.tools.importers.unpickle", run_name="__main__", alter_sys=True)
"""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "TMPDIR", "SYSTEMROOT")  # of the environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a checkpoint for zeor.load of one that others wrote. Those formats are pickles, which can run any code "
        "when loaded: they are read in a separate process, by torch's safe loader, and beyond it only with "
        "--allow-pickle."
    )
    parser.add_argument("source", type=Path, help="a file of torch.save, or the folder of DeepSpeed or DCP")
    parser.add_argument("out", help="a local folder of checkpoints, as zeor.save's")
    parser.add_argument(
        "--from", dest="kind", choices=KINDS, required=True,
        help="torch: a state dict, alone or with an optimizer's; deepspeed: ZeRO stages 1 to 3; dcp: FSDP2's",
    )  # fmt: skip
    parser.add_argument("--allow-pickle", action="store_true", help="also read what torch's safe loader refuses")
    parser.add_argument("--optimizer", type=Path, help="torch: a file of its own with the optimizer's state dict")
    parser.add_argument("--names", type=Path, help="torch, dcp: the names of the optimizer's parameters, one per line")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: what the source says, or 0)")


def run(options: argparse.Namespace) -> int:
    try:
        path, found = import_checkpoint(
            options.kind, options.source, options.out,
            allow_pickle=options.allow_pickle, optimizer=options.optimizer, names=options.names, step=options.step,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"zeor: {error}", file=sys.stderr)
        return 1
    moments = sorted({str(key) for entries in found.state.values() for key in entries})
    print(f"{path}: {len(found.params)} parameters, step {found.step}; optimizer: {', '.join(moments) or 'none'}")
    for note in found.notes:
        print(f"zeor: {note}.", file=sys.stderr)
    return 0


def import_checkpoint(  # noqa: PLR0913 (one for each option of `zeor import`)
    kind: str,
    source: Path,
    out: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    optimizer: Path | None = None,
    names: Path | None = None,
    step: int | None = None,
) -> tuple[Path, Foreign]:
    """Where the new checkpoint is, and what was found."""
    folder = local_folder(out, "zeor import")
    if not source.exists():
        raise CheckpointError(f"{source} does not exist, so there is nothing to import.")
    if step is not None and step < 0:
        raise CheckpointError(f"--step {step} is no step; give 0 or more.")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".importing-", dir=folder))  # beside the result: it takes as much room
    try:
        reader = _Reader(scratch, allow_pickle)
        found = _read(reader, kind, source, optimizer, names)
        found.step = found.step if step is None else step
        return write(found, folder, kind), found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read(reader: _Reader, kind: str, source: Path, optimizer: Path | None, names: Path | None) -> Foreign:
    if kind == "deepspeed":
        return deepspeed.read(source, lambda path: reader.tree("torch", path, entries=True))
    if kind == "dcp" and not (source / ".metadata").is_file():
        raise CheckpointError(f"{source} holds no .metadata, so it is no torch DCP checkpoint.")
    if kind == "torch" and source.is_dir():
        raise CheckpointError(f"{source} is a folder; --from torch takes a file of torch.save.")
    tree = reader.tree(kind, source)
    apart = reader.tree("torch", optimizer) if optimizer is not None else None
    given = [line.strip() for line in names.read_text().splitlines() if line.strip()] if names is not None else None
    return state_dicts.read(tree, apart, given, str(source))


class _Reader:
    """Runs unpickle.py once per file and reads what it handed over; believes neither more than it must."""

    def __init__(self, scratch: Path, allow: bool):
        self._scratch, self._allow, self._count = scratch, allow, 0

    def tree(self, kind: str, source: Path, entries: bool = False) -> Any:
        """The values of a file; its tensors as places in a safetensors file, or as Values."""
        self._count += 1
        place = self._scratch / f"{self._count:05d}"
        place.mkdir()
        self._start(kind, source, place)
        try:
            table = read_header(place / "values.safetensors")
            tree = json.loads((place / "tree.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{source}: what was read of it is malformed ({error}).") from error
        give: Any = (lambda key: table[key]) if entries else (lambda key: value_of(table[key], f"{source}:{key}"))
        return plain.decode(tree, give)

    def _start(self, kind: str, source: Path, place: Path) -> None:
        paths = [str(Path(path).resolve()) for path in sys.path if path and os.path.isabs(path)]
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-I", "-c", _START, json.dumps([root, *paths])]
        command += [kind, str(source.resolve()), str(place.resolve())]
        command += ["--allow-pickle"] if self._allow else []
        environment = {key: os.environ[key] for key in _KEPT if key in os.environ}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=place, check=False
        )
        if done.returncode:
            error_file = place / "error.txt"
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            text = error_file.read_text() if error_file.is_file() else ""
            raise CheckpointError(text or f"{source}: the process that read it ended with {done.returncode} ({last}).")
