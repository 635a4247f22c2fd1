"""zeor.export into a folder that holds other things: they stay, weights are not mixed, and it is all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeor
from tests import loops
from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.weights import hf_folder
from zeor.checkpoint.weights.export import export

WHOLE = "model.safetensors"
CONFIG = {"model_type": "mine", "width": 3}


class Config:
    def to_json_string(self) -> str:
        return json.dumps(CONFIG)


def trainers_folder(path: Path) -> dict[str, bytes]:
    """What transformers' Trainer leaves beside the model it saves."""
    (path / "checkpoint-500").mkdir(parents=True)
    (path / "checkpoint-500" / "model.safetensors").write_bytes(b"an older one")
    (path / "runs").mkdir()
    (path / "tokenizer.json").write_text("{}")
    (path / "training_args.bin").write_bytes(b"args")
    (path / "README.md").write_text("mine")
    return everything(path)


def everything(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("max_file", ["5GB", "500"])
def test_others_files_stay_and_the_export_is_whole(tmp_path: Path, max_file: str) -> None:
    theirs = trainers_folder(tmp_path)
    model = loops.net()
    assert export(model, tmp_path, max_file=max_file, config=Config()) == tmp_path
    found = everything(tmp_path)
    assert {name: found[name] for name in theirs} == theirs
    new = sorted(found.keys() - theirs.keys())
    assert new[0] == "config.json" and new[-1] == ("model.safetensors.index.json" if max_file == "500" else WHOLE)
    values = {}
    for file in tmp_path.glob("*.safetensors"):
        values.update(load_file(file))
    assert values.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(values[name], value), name
    zeor.load_pretrained(loops.net(seed=4), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "name", [WHOLE, "adapter_model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
             "pytorch_model-00001-of-00002.bin", "config.json"],
)  # fmt: skip
def test_weights_or_another_config_that_lie_there_are_a_sentence(tmp_path: Path, name: str) -> None:
    trainers_folder(tmp_path)
    (tmp_path / name).write_text('{"model_type": "other"}')
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} exists already in .*move that away. Other files there may stay"):
        export(loops.net(), tmp_path, config=Config())
    assert everything(tmp_path) == before


def test_a_config_that_says_the_same_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG, indent=7))
    text = (tmp_path / "config.json").read_bytes()
    export(loops.net(), tmp_path, config=Config())
    assert (tmp_path / "config.json").read_bytes() == text and (tmp_path / WHOLE).is_file()


def test_a_file_where_the_folder_should_be_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already and is no folder"):
        export(loops.net(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


class Failing(Disk):
    """Renames `left` files, then the disk is full."""

    def __init__(self, left: int) -> None:
        self.left, self.renamed = left, list[str]()

    def rename(self, source: Path, target: Path) -> None:
        if not self.left:
            raise OSError(28, "No space left on device")
        self.left -= 1
        self.renamed.append(target.name)
        super().rename(source, target)


@pytest.mark.parametrize("renames", [0, 1, 4])
def test_a_failure_on_the_way_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    theirs = trainers_folder(tmp_path)
    disk = Failing(renames)
    monkeypatch.setattr(hf_folder, "DISK", disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export(loops.net(), tmp_path, max_file="500", config=Config())
    assert len(disk.renamed) == renames and "model.safetensors.index.json" not in disk.renamed
    assert everything(tmp_path) == theirs
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_every_rank_hears_of_weights_that_lie_there(ranks: Any, tmp_path: Path) -> None:
    def job(out: str) -> str:
        model = zeor.shard(loops.net(), stage=3)
        with pytest.raises(CheckpointError) as found:
            export(model, out)
        return str(found.value)

    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"theirs")
    said = ranks(job, 2, str(tmp_path))
    assert said[0] == said[1] and "model-00001-of-00002.safetensors exists already" in said[0]
