"""Names of checkpoints: those that zeor writes, in ASCII digits, and of the step that the manifest has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.files.jobs import saved
from zeor.checkpoint.files.commit import complete, find, read_manifest
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.names import is_own_file, name_of, numbers_of


@pytest.mark.parametrize(("step", "attempt"), [(0, 0), (5, 1), (10**12 - 1, 10), (10**12, 0), (2**60, 3)])
def test_what_is_written_is_read(step: int, attempt: int) -> None:
    assert numbers_of(name_of(step, attempt)) == (step, attempt)


@pytest.mark.parametrize(
    "name",
    # Arabic and full-width digits, which \d matches; and other spellings of 5.
    ["step-00000000000\u0665", "step-" + 11 * "\u0660" + "\u0665", "step-00000000000\uff15", "step-000000000005.\u0661",
     "step-000000000005.0", "step-000000000005.01", "step-0000000000005", "step-00000000005", "step-000000000005 ",
     "step-000000000005\n", "step-000000000005.", "Step-000000000005", "step--00000000005"],
)  # fmt: skip
def test_other_names_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    first = saved(tmp_path, 1, 1.0)
    saved(tmp_path / "other", 5, 2.0).rename(tmp_path / name)
    assert numbers_of(name) is None
    assert [each.path for each in complete(tmp_path)] == [first] and find(tmp_path) == first
    assert saved(tmp_path, 5, 2.0).name == "step-000000000005"


@pytest.mark.parametrize("name", ["step-000000009000", "step-000000000001", "step-000000009000.2"])
def test_a_folder_named_for_another_step_than_its_manifests_is_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, 5, 1.0)
    other = path.rename(tmp_path / name)
    words = rf"{name}/manifest.json is of step 5, .* rename the folder to step-0*5\."
    with pytest.raises(CheckpointError, match=words):
        read_manifest(other)
    assert read_manifest(other.rename(tmp_path / "best")).step == 5
    assert read_manifest((tmp_path / "best").rename(tmp_path / "step-000000000005.7")).step == 5


def test_files_of_a_checkpoint_are_known_by_name() -> None:
    assert all(map(is_own_file, ["manifest.json", "rank-00000.safetensors", "rank-123456.safetensors"]))
    for name in ("rank-0.safetensors", "rank-0000\u0663.safetensors", "rank-00000.safetensors.bak", ".lock", "lock"):
        assert not is_own_file(name)
