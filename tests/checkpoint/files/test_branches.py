"""A run that went back: what it saves is the latest, and what it left goes first. In folders, on hosts and at URLs."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.files import shelf
from tests.checkpoint.files.jobs import saved
from tests.checkpoint.files.test_per_host import on_hosts
from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint import load as loading
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files import branches, opening, store
from zeor.checkpoint.files.branches import Complete, Lineage, is_newer, ordered, surplus
from zeor.checkpoint.files.commit import clean, complete, find, read_manifest
from zeor.checkpoint.files.disk import DISK
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import MOST_ORDER, NAME, Branch, Manifest, parse
from zeor.checkpoint.files.urls import place_of
from zeor.checkpoint.weights.export import export

NAMES = {step: f"step-{step:012d}" for step in (1000, 1100, 1200, 1300, 1400, 2000, 3000)}


def steps_in(folder: str) -> list[int]:
    """The latest last."""
    return [each.step for each in store.complete(place_of(folder))]


def go_back(folder: str) -> tuple[list[list[int]], int]:
    """Load step 1000 of 1000, 2000 and 3000, save three times, begin anew. What was there each time, and the latest."""
    shelf.put_up()
    model, optimizer, scheduler = make(2)
    for step in (1000, 2000, 3000):
        steps(model, optimizer, scheduler, range(1))
        save(folder, model, optimizer, step=step)
    load(f"{folder}/{NAMES[1000]}", model, optimizer)
    seen = []
    for step in (1100, 1200, 1300):
        steps(model, optimizer, scheduler, range(1))
        save(folder, model, optimizer, step=step, keep=3)
        if dist.is_initialized():
            dist.barrier()
        seen.append(steps_in(folder))
    again = make(2, seed=5)[:2]
    latest = load(folder, *again).step
    assert all(value.equal(everything(*again)[name]) for name, value in everything(model, optimizer).items())
    save(folder, *again, step=1400, keep=3)
    if dist.is_initialized():
        dist.barrier()
    return [*seen, steps_in(folder)], latest


SEEN = [[1000, 3000, 1100], [1000, 1100, 1200], [1100, 1200, 1300], [1200, 1300, 1400]]


@pytest.mark.parametrize("kind", ["path", "shelf", "memory"])
def test_a_run_that_went_back_goes_on_with_its_own(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = {"path": f"{tmp_path}/run", "shelf": f"shelf://{tmp_path}/run", "memory": "memory://went_back"}[kind]
    with caplog.at_level(logging.WARNING, "zeor"):
        assert go_back(folder) == (SEEN, 1300)
    told = [record.getMessage() for record in caplog.records if "the run went back, or" in record.getMessage()]
    assert len(told) == 1 and f"step 1100 is saved to {folder}, where {NAMES[3000]} lies" in told[0]


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_ranks_and_hosts_agree_on_it(ranks: Any, tmp_path: Path, hosts: list[int]) -> None:
    assert ranks(on_hosts, 2, str(tmp_path), hosts, go_back, "run") == [(SEEN, 1300)] * 2


def without_branch(folder: Path) -> None:
    """As an older zeor wrote it."""
    for each in complete(folder):
        manifest = dataclasses.replace(read_manifest(each.path), branch=None)
        (each.path / NAME).write_bytes(manifest.to_bytes())


def test_checkpoints_of_an_older_zeor_go_by_their_steps_and_before_newer_ones(tmp_path: Path) -> None:
    model, optimizer, _ = make(0)
    for step in (3000, 1000, 2000):
        save(tmp_path, model, optimizer, step=step)
    without_branch(tmp_path)
    assert steps_in(str(tmp_path)) == [1000, 2000, 3000] and load(tmp_path, model, optimizer).step == 3000
    load(tmp_path / NAMES[1000], model, optimizer)
    for step in (1100, 1200):
        save(tmp_path, model, optimizer, step=step, keep=4)
    assert steps_in(str(tmp_path)) == [2000, 3000, 1100, 1200]
    assert load(tmp_path, model, optimizer).step == 1200


def test_a_run_that_begins_anew_in_an_old_folder_is_the_latest(tmp_path: Path) -> None:
    for step in (2000, 3000):
        saved(tmp_path, step, 1.0)
    model, optimizer, _ = make(0)
    save(tmp_path, model, optimizer, step=1000, keep=2)
    assert steps_in(str(tmp_path)) == [3000, 1000] and load(tmp_path, model, optimizer).step == 1000


def test_a_second_folder_is_a_line_of_its_own(tmp_path: Path) -> None:
    """Every step goes to one folder, the best to another; what was left in the first goes first all the same."""
    model, optimizer, _ = make(0)
    for step in (1000, 2000, 3000):
        save(tmp_path / "all", model, optimizer, step=step)
    load(tmp_path / "all" / NAMES[1000], model, optimizer)
    for step in (1100, 1200):
        save(tmp_path / "all", model, optimizer, step=step, keep=3)
        save(tmp_path / "best", model, optimizer, step=step, keep=1)
    assert steps_in(str(tmp_path / "all")) == [1000, 1100, 1200] and steps_in(str(tmp_path / "best")) == [1200]
    first = read_manifest(tmp_path / "all" / NAMES[1000]).branch
    second = read_manifest(tmp_path / "all" / NAMES[1100]).branch
    assert first is not None and second is not None
    assert (second.parent, second.parent_name) == (first.id, NAMES[1000])


def test_a_load_that_failed_is_no_way_back(tmp_path: Path) -> None:
    model, optimizer, _ = make(0)
    for step in (1000, 2000):
        save(tmp_path, model, optimizer, step=step)
    file = tmp_path / NAMES[1000] / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="its manifest says"):
        load(tmp_path / NAMES[1000], model, optimizer)
    save(tmp_path, model, optimizer, step=3000)
    branch = read_manifest(tmp_path / NAMES[3000]).branch
    assert branch is not None and branch.parent_name == NAMES[2000]


def test_a_clock_that_goes_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 2000, 1.0)
    monkeypatch.setattr(branches.time, "time_ns", lambda: 0)
    for step in (1000, 1100):
        saved(tmp_path, step, 1.0)
    assert steps_in(str(tmp_path)) == [2000, 1000, 1100]
    assert find(tmp_path).name == NAMES[1100]


def test_an_order_as_large_as_can_be_stops_nobody(tmp_path: Path) -> None:
    path = saved(tmp_path, 2000, 1.0)
    manifest = dataclasses.replace(read_manifest(path), branch=Branch("0" * 32, MOST_ORDER))
    (path / NAME).write_bytes(manifest.to_bytes())
    assert saved(tmp_path, 3000, 1.0) == find(tmp_path)


def test_the_latest_is_refused_where_it_is_damaged_and_not_forgotten(tmp_path: Path) -> None:
    for step in (1000, 2000):
        saved(tmp_path, step, 1.0)
    manifest = tmp_path / NAMES[2000] / NAME
    for damage in (b"", b"x" + manifest.read_bytes()[1:], manifest.read_bytes()[:60]):
        manifest.write_bytes(damage)
        model, optimizer, _ = make(0)
        with pytest.raises(CheckpointError, match=f"{NAMES[2000]}/manifest.json"):
            load(tmp_path, model, optimizer)


# ---- the rules


def each(step: int, order: int = 0, parent: int = 0, damaged: bool = False) -> Complete:
    branch = Branch(f"{order:032x}", order, f"{parent:032x}" if parent else "") if order else None
    return Complete(step, 0, Path(f"step-{step:012d}"), branch, damaged)


@pytest.mark.parametrize(
    ("keep", "new", "gone"),
    [
        (1, 1200, [2000, 3000, 1000, 1100]),
        (2, 1200, [2000, 3000, 1000]),
        (3, 1200, [2000, 3000]),
        (4, 1200, [2000]),
        (5, 1200, []),
        (None, 1200, []),
        (1, 1100, [2000, 3000, 1000]),  # 1200 was written after it, by another job
        (1, 3000, [1000, 2000]),
    ],
)
def test_what_a_run_came_from_goes_after_what_it_left(keep: int | None, new: int, gone: list[int]) -> None:
    there = [each(1000, 1), each(2000, 2, 1), each(3000, 3, 2), each(1100, 4, 1), each(1200, 5, 4)]
    assert [old.step for old in surplus(ordered(there), keep, f"step-{new:012d}")] == gone


def test_a_circle_of_parents_ends() -> None:
    there = [each(1, 1, 2), each(2, 2, 1), each(3, 3, 2)]
    assert [old.step for old in surplus(there, 1, "step-000000000003")] == [1, 2]


def test_newer_is_what_was_written_later() -> None:
    assert is_newer(each(1, 5), each(9, 4)) and not is_newer(each(9, 4), each(1, 5))
    assert is_newer(each(2), each(1)) and not is_newer(each(2), each(2)) and not is_newer(None, each(1))
    assert is_newer(each(1), None) and not is_newer(None, None)


def test_a_parent_whose_name_no_manifest_may_have_is_named_by_its_id_alone() -> None:
    manifest = Manifest(1, 1, [], [], branch=Branch("a" * 32, 7))
    for name, told in (("best", "best"), ("my best {1}", ""), (".x", ""), ("x" * 101, ""), ("\u0665", "")):
        line = Lineage()
        line.loaded(Path(name), manifest)
        found = line.next(Path("run"), [])
        assert (found.parent, found.parent_name) == ("a" * 32, told)
        assert parse(dataclasses.replace(manifest, branch=found).to_bytes(), "it").branch == found


# ---- a checkpoint that is deleted while it is loaded


class Pruning:
    """Saves step 2 and deletes step 1, as another job does, before the first call of a function does its work."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, owner: Any, name: str):
        self.folder, self.calls = folder, 0
        original = getattr(owner, name)

        def hooked(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                self.act()
            return original(*args, **options)

        patch.setattr(owner, name, hooked)

    def act(self) -> None:
        ranked = dist.is_initialized()
        if not ranked or dist.get_rank() == 0:
            new = shutil.move(self.folder / "later" / "step-000000000002", self.folder / "run")
            clean(DISK, self.folder / "run", 1, Path(new))
        if ranked:
            dist.barrier()


def prepared(root: Path) -> Any:
    """Step 1 in run/, step 2 in later/, and what was held at step 2."""
    model, optimizer, scheduler = make(2)
    for step, folder in ((1, "run"), (2, "later")):
        steps(model, optimizer, scheduler, range(step, step + 1))
        save(root / folder, model, optimizer, step=step)
    return everything(model, optimizer)


def load_while_pruned(root: str, owner: Any, name: str) -> tuple[int, bool, int]:
    folder = Path(root)
    wanted = prepared(folder)
    model, optimizer, _ = make(2, seed=7)
    with pytest.MonkeyPatch.context() as patch:
        pruning = Pruning(folder, patch, owner, name)
        step = load(folder / "run", model, optimizer).step
    found = everything(model, optimizer)
    return step, all(value.equal(found[name]) for name, value in wanted.items()), pruning.calls


@pytest.mark.parametrize(
    ("owner", "name", "calls"), [(opening, "_look", 1), (loading.Load, "read", 2)], ids=["look", "read"]
)
def test_a_load_whose_checkpoint_is_deleted_meanwhile_takes_the_newer_one(
    ranks: Any, tmp_path: Path, owner: Any, name: str, calls: int
) -> None:
    for world in (1, 2):
        (tmp_path / str(world)).mkdir()
        assert ranks(load_while_pruned, world, str(tmp_path / str(world)), owner, name) == [(2, True, calls)] * world


def test_an_export_whose_checkpoint_is_deleted_meanwhile_takes_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeor.checkpoint.weights import export as exporting

    wanted = prepared(tmp_path)
    pruning = Pruning(tmp_path, monkeypatch, exporting, "read_all")
    from safetensors.torch import load_file

    values = load_file(export(tmp_path / "run", tmp_path / "out") / "model.safetensors")
    assert pruning.calls == 2 and values.keys() <= wanted.keys()
    assert {name: value.equal(wanted[name]) for name, value in values.items()} == dict.fromkeys(values, True)
    assert sorted(os.listdir(tmp_path)) == ["later", "out", "run"]


def test_one_that_is_named_itself_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path)
    model, optimizer, _ = make(2, seed=7)
    pruning = Pruning(tmp_path, monkeypatch, loading.Load, "read")
    with pytest.raises(CheckpointError, match=r"step-000000000001/rank-00000\.safetensors cannot be read"):
        load(tmp_path / "run" / "step-000000000001", model, optimizer)
    assert pruning.calls == 1
