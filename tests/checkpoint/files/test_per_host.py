"""Hosts without a shared disk: each keeps the files of its ranks, and all load whatever ranks they come back as.

A rank's host is the folder it works in: "run" is another place on each, and no host sees another's.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeor
from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint.files import fetch, opening
from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.manifest import BLOCK_NBYTES
from zeor.checkpoint.run import run_of
from zeor.checkpoint.save import Destination, collect, write

Hosts = list[int]  # by rank
STEP1, STEP2 = "step-000000000001", "step-000000000002"


def on_hosts(root: str, hosts: Hosts, fn: Callable[..., Any], *args: Any) -> Any:
    """On each rank, from its host's folder."""
    before, here = os.getcwd(), Path(root) / f"host{hosts[dist.get_rank()]}"
    here.mkdir(exist_ok=True)
    os.chdir(here)
    try:
        return fn(*args)
    finally:
        os.chdir(before)


def save_steps(stage: int, which: list[int], asynchronous: bool = False) -> Any:
    """What was held at each of these steps, and where it was saved."""
    model, optimizer, scheduler = make(stage)
    held: dict[int, dict[str, Tensor]] = {}
    path: Any = None
    for step in which:
        steps(model, optimizer, scheduler, range(step, step + 1))
        extra = {"big": torch.arange(100)}
        path = zeor.save("run", model, optimizer, step=step, extra=extra, asynchronous=asynchronous)  # type: ignore[call-overload]
        path = path.wait() if asynchronous else path
        held[step] = everything(model, optimizer)
    return held, str(path)


def load_latest(stage: int) -> Any:
    """The step and all values; or the error, if nothing has changed."""
    model, optimizer, _ = make(stage, seed=11)
    before = everything(model, optimizer)
    try:
        loaded = zeor.load("run", model, optimizer)
    except zeor.CheckpointError as error:
        assert same(before, everything(model, optimizer))
        return str(error)
    assert torch.equal(loaded.extra["big"], torch.arange(100))
    return loaded.step, everything(model, optimizer)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def listed(root: Path, host: int) -> list[str]:
    folder = root / f"host{host}/run"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def saved(ranks: Any, tmp_path: Path) -> Any:
    """Steps 1 and 2, saved by four ranks on two hosts."""
    return ranks(on_hosts, 4, str(tmp_path), [0, 0, 1, 1], save_steps, 3, [1, 2])[0][0]


def test_each_host_holds_the_files_of_its_ranks_and_the_manifest(saved: Any, tmp_path: Path) -> None:
    for host, files in ((0, ("rank-00000", "rank-00001")), (1, ("rank-00002", "rank-00003"))):
        names = ["manifest.json", *(f"{file}.safetensors" for file in files)]
        assert listed(tmp_path, host) == [f"{step}/{name}" for step in (STEP1, STEP2) for name in names]
    manifests = [(tmp_path / f"host{host}/run/{STEP2}/manifest.json").read_bytes() for host in (0, 1)]
    assert manifests[0] == manifests[1]


def test_it_loads_at_any_world_on_any_hosts_and_leaves_nothing_behind(ranks: Any, saved: Any, tmp_path: Path) -> None:
    before = [listed(tmp_path, host) for host in (0, 1)]
    worlds: list[tuple[Hosts, int]] = [([0, 0, 1, 1], 3), ([1, 0], 2), ([0, 1, 7], 1), ([7, 1, 1, 0], 3)]
    for hosts, stage in worlds:  # host 7 is new and has nothing
        for step, values in ranks(on_hosts, len(hosts), str(tmp_path), hosts, load_latest, stage):
            assert step == 2 and same(values, saved[2])
    assert [listed(tmp_path, host) for host in (0, 1)] == before
    assert os.listdir(tmp_path / "host7") == []


def test_a_crash_between_the_renames_of_two_hosts_leaves_the_one_before(ranks: Any, saved: Any, tmp_path: Path) -> None:
    for uncommitted in (0, 1):
        final = tmp_path / f"host{uncommitted}/run/{STEP2}"
        hidden = final.with_name(f".writing-{STEP2}-elsewhere-1-00000000")
        final.rename(hidden)
        for step, values in ranks(on_hosts, 4, str(tmp_path), [0, 0, 1, 1], load_latest, 3):
            assert step == 1 and same(values, saved[1])
        hidden.rename(final)
    shutil.rmtree(tmp_path / "host0/run" / STEP2)
    # Step 2 again: its name is free on host 0 and taken on host 1.
    held, path = ranks(on_hosts, 4, str(tmp_path), [0, 0, 1, 1], save_steps, 3, [2])[2]
    assert path == f"run/{STEP2}.1" and (tmp_path / f"host0/{path}").is_dir()
    for step, values in ranks(on_hosts, 2, str(tmp_path), [0, 1], load_latest, 3):
        assert step == 2 and same(values, held[2])


def test_a_lost_host_is_told_by_files_and_parameters(ranks: Any, saved: Any, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "host1")
    texts = ranks(on_hosts, 2, str(tmp_path), [0, 1], load_latest, 3)
    assert texts[0] == texts[1]
    lost = "rank-00002.safetensors, rank-00003.safetensors"
    assert f"run/{STEP2} cannot be loaded: {lost}: on no rank's disk" in texts[0]
    assert "parts of parameters: " in texts[0] and "'head.weight'" in texts[0]


def test_a_lost_file_of_a_host_that_has_the_rest_is_refused(ranks: Any, saved: Any, tmp_path: Path) -> None:
    (tmp_path / f"host1/run/{STEP2}/rank-00003.safetensors").unlink()
    for text in ranks(on_hosts, 4, str(tmp_path), [0, 0, 1, 1], load_latest, 3):
        assert f"{STEP2} cannot be loaded: rank-00003.safetensors: on no rank's disk" in text


def test_a_damaged_block_is_refused_by_who_fetches_it(ranks: Any, saved: Any, tmp_path: Path) -> None:
    file = tmp_path / f"host0/run/{STEP2}/rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for text in ranks(on_hosts, 2, str(tmp_path), [1, 0], load_latest, 3):
        assert text.startswith("On rank 0: rank-00001.safetensors, as rank 1 has it, is damaged")


class _Refusing(Disk):
    """Fails at the manifest, or at the rename of a whole checkpoint."""

    def __init__(self, what: str):
        self._what = what

    def create(self, path: Any) -> int:
        if self._what == "create" and path.name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._what == "rename" and target.name.startswith("step-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(source, target)


def save_on_bad_disk(what: str, bad: int) -> str:
    model, optimizer, _ = make(3)
    run = run_of(model, optimizer)
    try:
        disk = _Refusing(what if dist.get_rank() == bad else "")
        write(run.everyone, run.lineage, collect(run, None, None), Destination(Path("run"), 3, 3), disk)
    except zeor.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["create", "rename"])
def test_where_one_host_cannot_commit_none_does(ranks: Any, saved: Any, tmp_path: Path, what: str) -> None:
    before = [listed(tmp_path, host) for host in (0, 1)]
    for bad in (0, 2):
        texts = ranks(on_hosts, 4, str(tmp_path), [0, 0, 1, 1], save_on_bad_disk, what, bad)
        assert len(set(texts)) == 1 and "earlier checkpoints are as they were" in texts[0]
        assert os.strerror(errno.ENOSPC if what == "create" else errno.EIO) in texts[0]
        assert [listed(tmp_path, host) for host in (0, 1)] == before
        for host in (0, 1):
            assert sorted(os.listdir(tmp_path / f"host{host}/run")) == [STEP1, STEP2]


def test_an_asynchronous_save_finds_the_hosts_too(ranks: Any, tmp_path: Path) -> None:
    held, path = ranks(on_hosts, 2, str(tmp_path), [0, 1], save_steps, 2, [1], True)[0]
    assert path == f"run/{STEP1}"
    for step, values in ranks(on_hosts, 2, str(tmp_path), [1, 0], load_latest, 2):
        assert step == 1 and same(values, held[1])


def failing_save() -> str:
    try:
        save_steps(3, [2])
    except zeor.CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_that_was_shared_and_is_not_any_more_is_an_error(ranks: Any, tmp_path: Path) -> None:
    ranks(on_hosts, 2, str(tmp_path), [0, 0], save_steps, 3, [1])
    for text in ranks(on_hosts, 2, str(tmp_path), [0, 1], failing_save):
        assert text.startswith("Ranks 1 do not see what rank 0 writes to run") and "bring back the mount" in text
    assert os.listdir(tmp_path / "host0/run") == [STEP1] and os.listdir(tmp_path / "host1/run") == []


def fetched_nbytes(width: int) -> tuple[int, int]:
    """Of a load by the ranks that saved, on their own hosts: bytes that came from others, and of a rank's file."""
    model = torch.nn.Linear(width, width, bias=False)
    model, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    path = zeor.save("run", model, optimizer, step=1, extra={"note": torch.arange(100)})
    got, original = 0, fetch.move

    def counted(mesh: Any, transfers: Any, *rest: Any) -> None:
        nonlocal got
        got += sum(each.nbytes for each in transfers if each.target == mesh.rank)
        original(mesh, transfers, *rest)

    fetch.move = counted
    try:
        zeor.load("run", model, optimizer)
    finally:
        fetch.move = original
    assert isinstance(path, Path)
    return got, (path / f"rank-{dist.get_rank():05d}.safetensors").stat().st_size


def test_only_the_blocks_that_are_needed_are_fetched(ranks: Any, tmp_path: Path) -> None:
    (mine, _), (others, file_nbytes) = ranks(on_hosts, 2, str(tmp_path), [0, 1], fetched_nbytes, 1536)
    assert mine == 0  # rank 0 needs nothing of rank 1's file
    assert 0 < others <= 2 * BLOCK_NBYTES < file_nbytes // 1.5  # of rank 0's: its header, and `extra` near the end


def test_files_of_all_hosts_in_one_folder_load_in_one_process(ranks: Any, saved: Any, tmp_path: Path) -> None:
    for step in (STEP1, STEP2):
        shutil.copytree(tmp_path / f"host1/run/{step}", tmp_path / f"host0/run/{step}", dirs_exist_ok=True)
    step, values = ranks(on_hosts, 1, str(tmp_path), [0], load_latest, 0)[0]
    assert step == 2 and same(values, saved[2])
    for name in ("rank-00002", "rank-00003"):  # as if host 1 had not committed step 2
        (tmp_path / f"host0/run/{STEP2}/{name}.safetensors").unlink()
    step, values = ranks(on_hosts, 1, str(tmp_path), [0], load_latest, 0)[0]
    assert step == 1 and same(values, saved[1])


def load_what_vanishes(stage: int) -> Any:
    """The manifest goes between its choice and its sending, on every host."""
    opened = opening._opened

    def vanish(mesh: Any, folder: Any, one: Any, *args: Any) -> Any:
        dist.barrier()
        (folder / one.name / "manifest.json").unlink(missing_ok=True)
        dist.barrier()
        return opened(mesh, folder, one, *args)

    with patch.object(opening, "_opened", vanish):
        return load_latest(stage)


def test_a_manifest_that_vanishes_on_the_way_is_told_to_every_rank(ranks: Any, saved: Any, tmp_path: Path) -> None:
    texts = ranks(on_hosts, 4, str(tmp_path), [0, 0, 1, 1], load_what_vanishes, 3)
    assert set(texts) == {f"On rank 0: run/{STEP2}/manifest.json cannot be read: No such file or directory."}
