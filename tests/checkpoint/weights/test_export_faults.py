"""zeor.export where something is wrong: every rank hears it in one sentence, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zeor
from tests import loops
from zeor.checkpoint.api import save
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.weights.export import export
from zeor.tools import cli


class Unwilling:
    def to_json_string(self) -> str:
        raise LookupError("no such layer")


def refusals(root: str) -> list[tuple[type, str]]:
    """Each with what differs between ranks, and then one export that goes well: the ranks are in step."""
    model, rank = zeor.shard(loops.net(), stage=3), dist.get_rank()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("memory://run/one", {}),
        (f"{root}/{'y' * 300}", {}),
        (f"{root}/a\0b", {}),
        (f"{root}/out", {"config": f"{root}/nowhere" if rank else None}),
        (f"{root}/out", {"config": f"{root}/{'y' * 300}" if rank else None}),
        (f"{root}/out", {"config": Unwilling() if rank else None}),
        (f"{root}/out", {"dtype": None if rank else "float99"}),
    ]
    said: list[tuple[type, str]] = []
    for out, options in wrong:
        try:
            export(model, out, **options)
        except Exception as error:
            said.append((type(error), str(error)))
    export(model, f"{root}/well")
    return said


def test_what_fails_on_one_rank_is_told_on_all_and_leaves_nothing(ranks, tmp_path: Path) -> None:
    first, second = ranks(refusals, 2, str(tmp_path))
    sentences = [
        "zeor.export writes a local folder, and 'memory://run/one' is a URL; give a folder of this machine and copy it "
        "from there.",
        f"The export to {tmp_path}/{'y' * 300} could not be written: File name too long. Nothing of it is visible.",
        f"The export to {tmp_path}/a\0b could not be written: embedded null byte. Nothing of it is visible.",
    ]
    assert first[:3] == second[:3] == [(CheckpointError, sentence) for sentence in sentences]
    there = f"config='{tmp_path}/nowhere': {tmp_path}/nowhere cannot be read: No such file or directory."
    long = f"{tmp_path}/{'y' * 300}"
    long = f"config='{long}': {long} cannot be read: File name too long."
    unknown = "dtype='float99' is not known; use one of ['bf16', 'fp16', 'fp32', 'fp64'] or the torch.dtype."
    assert second[3:] == [
        (ValueError, there),
        (ValueError, long),
        (LookupError, "no such layer"),
        (CheckpointError, f"On rank 0: {unknown}"),
    ]
    assert first[3:] == [
        (CheckpointError, f"On rank 1: {there}"),
        (CheckpointError, f"On rank 1: {long}"),
        (CheckpointError, "On rank 1: LookupError: no such layer"),
        (ValueError, unknown),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["well"]


def test_a_url_is_no_place_for_an_export_and_a_file_url_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save("saved", zeor.shard(loops.net(), stage=3), step=0)
    for source in (loops.net(), "saved"):
        with pytest.raises(CheckpointError, match="writes a local folder, and 's3://bucket/out' is a URL"):
            export(source, "s3://bucket/out")
    assert cli.main(["export", "saved", "memory://xx/yy"]) == 1
    assert "'memory://xx/yy' is a URL" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert export("saved", f"file://{tmp_path}/out") == tmp_path / "out"
    assert (tmp_path / "out" / "model.safetensors").is_file()
