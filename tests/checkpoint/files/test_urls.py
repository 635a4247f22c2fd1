"""Checkpoints in fsspec filesystems: saved and loaded in every bit, committed by the manifest, refused when damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeor
from tests.checkpoint.files import shelf
from tests.checkpoint.test_reshard import everything, make, steps
from zeor.checkpoint.files import store
from zeor.checkpoint.files.disk import DISK
from zeor.checkpoint.files.urls import Uploads, Url, place_of
from zeor.checkpoint.files.writer import Source, write_file
from zeor.checkpoint.verify import checkpoints_of, describe, verify

shelf.put_up()


def save_steps(url: str, stage: int, which: list[int], keep: int | None, asynchronous: bool = False) -> Any:
    """Save after each of these steps. Where the last one went, and what it held."""
    shelf.put_up()
    model, optimizer, scheduler = make(stage)
    path: Any = None
    for step in which:
        steps(model, optimizer, scheduler, range(step, step + 1))
        path = zeor.save(url, model, optimizer, step=step, keep=keep, asynchronous=asynchronous)  # type: ignore[call-overload]
        path = path.wait() if asynchronous else path
    return str(path), everything(model, optimizer)


def load_latest(url: str, stage: int) -> Any:
    shelf.put_up()
    model, optimizer, _ = make(stage, seed=11)
    loaded = zeor.load(url, model, optimizer)
    return loaded.step, str(loaded.path), everything(model, optimizer)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def failure(fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except zeor.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_memory_is_saved_and_loaded_in_every_bit(asynchronous: bool) -> None:
    url = f"memory://run{asynchronous}"
    path, saved = save_steps(url, 3, [1, 2, 3, 4], 2, asynchronous)
    assert path == f"{url}/step-000000000004"
    step, found, values = load_latest(url, 1)
    assert (step, found) == (4, path) and same(saved, values)
    assert [each.step for each in store.complete(place_of(url))] == [3, 4]
    assert place_of(url).names() == ["step-000000000003", "step-000000000004"]  # type: ignore[union-attr]


def test_a_store_that_two_ranks_share_loads_at_any_world(ranks: Any, tmp_path: Path) -> None:
    url = f"shelf://{tmp_path}/run"
    results = ranks(save_steps, 2, url, 3, [1, 2], 3)
    assert [path for path, _ in results] == [f"{url}/step-000000000002"] * 2
    for world, stage in ((1, 0), (2, 3), (3, 2)):
        for step, _, values in ranks(load_latest, world, url, stage):
            assert step == 2 and same(results[0][1], values)
    assert sorted(p.name for p in (tmp_path / "run/step-000000000002").iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def refused_save(url: str) -> str:
    shelf.put_up()
    model, optimizer, _ = make(3)
    os.environ["SHELF_REFUSES"] = "rank-00001"
    try:
        return failure(lambda: zeor.save(url, model, optimizer, step=9))
    finally:
        del os.environ["SHELF_REFUSES"]


def test_an_upload_that_fails_is_told_to_every_rank_and_leaves_nothing(ranks: Any, tmp_path: Path) -> None:
    url = f"shelf://{tmp_path}/run"
    _, saved = ranks(save_steps, 2, url, 2, [1], 3)[0]
    for text in ranks(refused_save, 2, url):
        assert "rank-00001.safetensors: the shelf is full. Nothing of it is visible" in text
        assert "earlier checkpoints are as they were" in text
    assert os.listdir(tmp_path / "run") == ["step-000000000001"]
    step, _, values = ranks(load_latest, 2, url, 2)[1]
    assert step == 1 and same(saved, values)


def test_ranks_that_do_not_share_the_store_are_told_so(ranks: Any) -> None:
    for text in ranks(lambda: failure(save_steps, "memory://apart", 3, [1], 3), 2):
        assert "rank-00001.safetensors is not there" in text and "a URL that all ranks share" in text


def test_files_without_a_manifest_are_no_checkpoint_and_go_once_a_later_one_is_there(tmp_path: Path) -> None:
    url, run = f"shelf://{tmp_path}/run", tmp_path / "run"
    save_steps(url, 0, [1], None)
    (run / "step-000000000002").mkdir()
    (run / "step-000000000002" / "rank-00000.safetensors").write_bytes(b"of a rank that was killed")
    assert load_latest(url, 0)[0] == 1
    path, _ = save_steps(url, 0, [2], None)
    assert path.endswith("step-000000000002.1")  # the dead rank's store may still take its file
    assert sorted(os.listdir(run)) == ["step-000000000001", "step-000000000002.1"]


def test_half_a_manifest_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"shelf://{tmp_path}/run"
    path, _ = save_steps(url, 0, [1, 2], None)
    manifest = Path(path.removeprefix("shelf://")) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    assert load_latest(url, 0)[0] == 1
    assert "step-000000000002 is passed over" in caplog.text


def test_a_checkpoint_goes_manifest_first(tmp_path: Path) -> None:
    url = f"shelf://{tmp_path}/run"
    shelf.Shelf.removed.clear()
    save_steps(url, 0, [1, 2], 1)
    assert [Path(path).name for path in shelf.Shelf.removed] == ["manifest.json"]  # then the folder with the rest
    assert os.listdir(tmp_path / "run") == ["step-000000000002"]


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    url = f"shelf://{tmp_path}/run"
    path, _ = save_steps(url, 0, [1], None)
    file = Path(path.removeprefix("shelf://")) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data if damage == "flipped" else data[:-1])
    if damage == "missing":
        file.unlink()
    told = {"flipped": "do not match their hash", "shorter": "its manifest says", "missing": "No such file"}[damage]
    text = failure(load_latest, url, 0)
    assert f"{path}/rank-00000.safetensors" in text and told in text
    found = describe(checkpoints_of(place_of(url))[0])
    verify(found)
    assert len(found.problems) == 1 and told in found.problems[0]


def test_a_url_is_exported_from(tmp_path: Path) -> None:
    path, saved = save_steps("memory://exported", 2, [1], None)
    out = zeor.export(path, tmp_path / "out")
    from safetensors.torch import load_file

    values = load_file(out / "model.safetensors")
    assert values and all(torch.equal(values[name], saved[name]) for name in values)


def test_a_file_of_many_blocks_is_uploaded_as_it_is_written_locally(tmp_path: Path) -> None:
    value = torch.randn(9 << 20, generator=torch.Generator().manual_seed(0))
    sources = [Source("param/a@0", torch.float32, tuple(value.shape), lambda: value)]
    url = place_of("memory://blocks/a.safetensors")
    assert isinstance(url, Url)
    here = write_file(DISK, tmp_path / "a.safetensors", sources)
    assert write_file(Uploads(), url, sources) == here and len(here.blocks) == 10
    assert url.read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_a_file_url_is_a_plain_path_with_its_guarantees(tmp_path: Path) -> None:
    assert place_of(f"file://{tmp_path}/a") == tmp_path / "a"
    path, _ = save_steps(f"file://{tmp_path}/run", 0, [1], None)
    assert path == f"{tmp_path}/run/step-000000000001"


def test_an_unknown_scheme_is_a_sentence() -> None:
    with pytest.raises(zeor.CheckpointError, match="nowhere://run cannot be used: Protocol not known: nowhere"):
        place_of("nowhere://run")
