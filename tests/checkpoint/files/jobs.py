"""A job that saves to a folder, step by step: a process of its own that does what it is told, one thing at a time.

    python -m tests.checkpoint.files.jobs

Lines of JSON come in, [what, arguments...]; each is answered by a line, [result] or [null, error]. `Job` sends them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from zeor.checkpoint.files import commit
from zeor.checkpoint.files.branches import Lineage
from zeor.checkpoint.files.commit import Attempt
from zeor.checkpoint.files.disk import DISK, Disk
from zeor.checkpoint.files.manifest import FileInfo, Manifest, Stored, StoredPiece
from zeor.checkpoint.files.writer import Source, write_file
from zeor.checkpoint.verify import describe, verify
from zeor.layout.boxes import whole


class Steps:
    """What zeor.save does to a folder, one after the other, with values that tell whose they are."""

    def __init__(self, disk: Disk = DISK) -> None:
        self._disk, self._line = disk, Lineage()

    def begin(self, folder: str, step: int, value: float) -> str:
        self._folder, self._value = Path(folder), value
        self.attempt = Attempt(self._disk, self._folder, step)
        self.attempt.begin()
        return self.attempt.writing.name

    def write(self) -> None:
        tensor = torch.full((100,), self._value)
        source = Source("param/weight@0", torch.float32, (100,), lambda: tensor)
        self._info = write_file(self._disk, self.attempt.writing / "rank-00000.safetensors", [source])

    def prepare(self) -> None:
        self._branch = self._line.next(self._folder, commit.complete(self._folder))
        self.attempt.prepare(manifest_of(self.attempt.step, self._info, self._branch))

    def publish(self) -> str:
        self.attempt.publish()
        self._line.saved(self._folder, self.attempt.final, self._branch)
        return self.attempt.final.name

    def abandon(self) -> bool:
        return self.attempt.abandon()

    def clean(self, folder: str, keep: int) -> None:
        commit.clean(self._disk, Path(folder), keep, self.attempt.final)


def manifest_of(step: int, info: FileInfo, branch: Any = None) -> bytes:
    stored = Stored("param", "weight", (100,), "float32", [StoredPiece(0, whole((100,)))])
    return Manifest(step, 1, [info], [stored], branch=branch).to_bytes()


def saved(folder: Path, step: int, value: float, disk: Disk = DISK) -> Path:
    """A checkpoint, by all the steps but cleaning."""
    steps = Steps(disk)
    steps.begin(str(folder), step, value)
    steps.write()
    steps.prepare()
    steps.publish()
    return steps.attempt.final


def problems(folder: Path) -> list[str]:
    """What is wrong with any checkpoint that is visible in a folder, down to its last byte."""
    found = []
    for each in commit.complete(folder):
        description = describe(each.path)
        verify(description)
        found += description.problems
    return found


class Job:
    """A process that takes those steps. `before`: a command to start it with, unshare say."""

    def __init__(self, *before: str) -> None:
        command = [*before, sys.executable, "-m", "tests.checkpoint.files.jobs"]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, what: str, *arguments: Any) -> Any:
        """The result; RuntimeError where the step raised."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([what, *arguments]), file=self.process.stdin, flush=True)
        result, *error = json.loads(self.process.stdout.readline())
        if error:
            raise RuntimeError(error[0])
        return result

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    steps = Steps()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "begin":
            steps = Steps()
        try:
            answer = [getattr(steps, what)(*arguments)]
        except OSError as error:
            answer = [None, error.strerror]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
