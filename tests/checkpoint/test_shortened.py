"""A file of the disk tier that something else shortens: a save says so in one sentence, and the process lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import os, pathlib, sys
import torch
import zeor
from tests.offloads import made, one_step
from zeor.checkpoint import contents, saver

root, moments, when = sys.argv[1:]
options = {} if moments == "exact" else {"moments": moments}
model, optimizers = made(stage=2, precision="bf16", offload=zeor.Offload("disk", "disk", folder=root), **options)
for step in range(2):
    one_step(model, optimizers, step, "clip")
arrays = sorted(pathlib.Path(root).glob("zeor-offload-*/*.array"))
assert arrays

def shorten():
    for path in arrays:
        os.truncate(path, 0)

if when == "before":
    shorten()
else:  # what is to be written is known, and nothing of it is read yet
    real = saver.saving.collect
    def collect(*given):
        found = real(*given)
        shorten()
        return found
    saver.saving.collect = collect
try:
    zeor.save(f"{root}/saved", model, optimizers[0], step=2, asynchronous=when == "asynchronous")
except (zeor.CheckpointError, RuntimeError) as error:
    print("refused:", error)
folder = pathlib.Path(root, "saved")
print("left:", sorted(os.listdir(folder)) if folder.is_dir() else [])
"""


@pytest.mark.parametrize(
    "moments, when",
    [
        ("exact", "before"),
        ("exact", "after"),
        pytest.param("exact", "asynchronous", marks=pytest.mark.whole),
        pytest.param("int8", "before", marks=pytest.mark.whole),
        pytest.param("int8", "after", marks=pytest.mark.whole),
    ],
)
def test_a_save_from_a_shortened_file_is_one_sentence(tmp_path: Path, moments: str, when: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), moments, when],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert "refused:" in done.stdout and "something else has shortened it" in done.stdout
    assert done.stdout.count("\n") == 2 and "left: []" in done.stdout
