"""Corners of saving and loading: names that meet, values nobody asks for, blocks that are read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests.checkpoint.test_reshard import make
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.blocks import BlockReader
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import FileInfo, digest
from zeor.memory.buffers import lasting


def test_extras_whose_names_meet_come_back_each_as_it_was(tmp_path: Path) -> None:
    model, optimizer, _ = make(1)
    extra = {"a/b": torch.arange(20), "a": {"b": torch.arange(30), "b'": torch.arange(40)}, "x[0]": torch.zeros(17)}
    save(tmp_path, model, optimizer, step=1, extra={**extra, "x": [torch.ones(18)]})
    found = load(tmp_path, model, optimizer).extra
    assert torch.equal(found["a/b"], extra["a/b"]) and torch.equal(found["a"]["b"], extra["a"]["b"])
    assert torch.equal(found["a"]["b'"], torch.arange(40))
    assert torch.equal(found["x[0]"], torch.zeros(17)) and torch.equal(found["x"][0], torch.ones(18))


def test_a_value_that_cannot_be_saved_leaves_no_trace(tmp_path: Path) -> None:
    model, optimizer, _ = make(1)
    for value in (object(), 10**5000, {"n": {1, 2}}):
        with pytest.raises(CheckpointError, match="extra/it"):
            save(tmp_path, model, optimizer, step=1, extra={"it": value})
    assert list(tmp_path.iterdir()) == []


class Two(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = nn.Linear(3, 4, bias=False)
        if tied:
            self.second.weight = self.first.weight


def test_a_tied_parameter_loads_into_two_that_are_not_tied(tmp_path: Path) -> None:
    tied = Two(True)
    tied, optimizer = zeor.shard(tied, torch.optim.SGD(tied.parameters(), lr=0.1), stage=1)
    wanted = tied.first.weight.detach().clone()
    save(tmp_path, tied, optimizer, step=1)
    apart = Two(False)
    apart, other = zeor.shard(apart, torch.optim.SGD(apart.parameters(), lr=0.1), stage=1)
    load(tmp_path, apart, other, strict=False)
    assert torch.equal(apart.first.weight, wanted) and torch.equal(apart.second.weight, wanted)


@pytest.mark.parametrize(
    "ranges", [[(0, 20000), (0, 20000)], [(0, 9000), (100, 20000), (4096, 8192)], [(5, 5), (3, 4)]]
)
@pytest.mark.parametrize("aligned", [True, False], ids=["in pages of their own", "anywhere"])
def test_ranges_that_meet_are_all_filled(tmp_path: Path, ranges: list[tuple[int, int]], aligned: bool) -> None:
    data = bytes(i % 251 for i in range(20000))
    (tmp_path / "file").write_bytes(data)
    blocks = [digest(data[i : i + 4096]) for i in range(0, len(data), 4096)]
    lasting_bytes = [lasting(20480, torch.uint8, torch.device("cpu")) for _ in ranges]
    into = [torch.zeros(end - begin, dtype=torch.uint8) for begin, end in ranges]
    if aligned:  # lying there as they do in the file, so that pages are read to where they stay
        into = [memory[begin:end] for memory, (begin, end) in zip(lasting_bytes, ranges)]
    with BlockReader(tmp_path / "file", FileInfo("file", len(data), blocks), 4096) as reader:
        reader.fill([(begin, end, each) for (begin, end), each in zip(ranges, into)])
        assert sum(reader.verify()) == len(data)
        for (begin, end), each in zip(ranges, into, strict=True):
            assert each.numpy().tobytes() == reader.bytes(begin, end) == data[begin:end]


def go_back(folder: str) -> Any:
    """Steps 10 and 20 are there; the run goes back to 10, and what it saves then stays, with what it came from."""
    model, optimizer, _ = make(2)
    for step in (10, 20):
        save(folder, model, optimizer, step=step, keep=2)
    load(f"{folder}/step-000000000010", model, optimizer)
    path = save(folder, model, optimizer, step=11, keep=2)
    dist.barrier()
    return path.is_dir(), sorted(each.name for each in Path(folder).iterdir()), load(folder, model, optimizer).step


def test_a_run_that_went_back_keeps_what_it_saves(ranks, tmp_path: Path) -> None:
    expected = (True, ["step-000000000010", "step-000000000011"], 11)
    assert ranks(go_back, 2, str(tmp_path)) == [expected, expected]
