"""Which checkpoints a folder holds, which is the latest, what is kept and what is deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeor.checkpoint.files.commit import Attempt, clean, complete, find
from zeor.checkpoint.files.disk import DISK
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import NAME, Manifest


def made(folder: Path, step: int) -> Path:
    attempt = Attempt(DISK, folder, step)
    attempt.begin()
    attempt.commit(Manifest(step, 1, [], []).to_bytes())
    return attempt.final


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_latest_is_the_one_of_the_largest_step_by_number(tmp_path: Path) -> None:
    for step in (10**12, 7, 100):
        made(tmp_path, step)
    assert [each.step for each in complete(tmp_path)] == [7, 100, 10**12]
    assert find(tmp_path).name == "step-1000000000000"


def test_a_step_saved_again_gets_a_suffix_and_is_the_latest(tmp_path: Path) -> None:
    made_names = [made(tmp_path, 5).name for _ in range(11)]
    assert made_names[:3] == ["step-000000000005", "step-000000000005.1", "step-000000000005.2"]
    assert find(tmp_path).name == "step-000000000005.10"


def test_a_name_that_anything_has_is_not_taken_again(tmp_path: Path) -> None:
    (tmp_path / "step-000000000005").mkdir()
    (tmp_path / "step-000000000005" / "notes").touch()
    assert made(tmp_path, 5).name == "step-000000000005.1"
    assert [each.attempt for each in complete(tmp_path)] == [1]


def test_foreign_names_and_folders_without_a_manifest_are_no_checkpoints(tmp_path: Path) -> None:
    for name in (
        "step-5",
        "step-000000000009x",
        "xstep-000000000009",
        "step-000000000009",
        ".writing-step-000000000009",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000000010").touch()
    (tmp_path / "step-000000000011").mkdir()
    (tmp_path / "step-000000000011" / NAME).mkdir()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find(tmp_path)
    latest = made(tmp_path, 3)
    assert find(tmp_path) == latest


def test_a_checkpoint_may_be_named_itself(tmp_path: Path) -> None:
    first, _ = made(tmp_path, 1), made(tmp_path, 2)
    assert find(first) == first


def test_what_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        find(tmp_path / "nowhere")


def test_nothing_is_visible_before_the_commit_and_nothing_after_giving_up(tmp_path: Path) -> None:
    attempt = Attempt(DISK, tmp_path / "new" / "er", 5)
    attempt.begin()
    (attempt.writing / "rank-00000.safetensors").write_bytes(b"half")
    assert complete(tmp_path / "new" / "er") == []
    assert attempt.abandon()
    assert names(tmp_path / "new" / "er") == []


def test_giving_up_does_not_touch_what_was_committed(tmp_path: Path) -> None:
    attempt = Attempt(DISK, tmp_path, 5)
    attempt.begin()
    attempt.commit(Manifest(5, 1, [], []).to_bytes())
    assert not attempt.abandon()
    assert names(tmp_path) == ["step-000000000005"]


def test_keep_counts_the_new_one_whatever_its_step(tmp_path: Path) -> None:
    """A run that went back to step 50 keeps what it saves, though later steps lie there."""
    for step in (100, 200, 300):
        made(tmp_path, step)
    new = made(tmp_path, 50)
    clean(DISK, tmp_path, 3, new)
    assert [each.step for each in complete(tmp_path)] == [50, 200, 300]
    clean(DISK, tmp_path, 1, new)
    assert names(tmp_path) == [new.name]


def test_keep_none_deletes_no_checkpoint(tmp_path: Path) -> None:
    for step in range(5):
        new = made(tmp_path, step)
    clean(DISK, tmp_path, None, new)
    assert len(names(tmp_path)) == 5


def test_an_old_one_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        new = made(tmp_path, step)
    (tmp_path / "step-000000000001" / "notes").mkdir()
    with pytest.raises(OSError):
        clean(DISK, tmp_path, 1, new)
    assert [each.step for each in complete(tmp_path)] == [3]


def test_hidden_things_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in (".writing-x", ".writing-", ".git"):
        (tmp_path / name).mkdir()
    (tmp_path / ".removing-file").touch()
    new = made(tmp_path, 1)
    clean(DISK, tmp_path, 1, new)
    assert names(tmp_path) == [".git", ".removing-file", ".writing-", ".writing-x", new.name]
