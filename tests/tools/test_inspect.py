"""`zeor inspect` and `zeor export`: what is inside a checkpoint, whether it is sound, and its weights as files."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import zeor
from tests import loops
from zeor.checkpoint.api import save
from zeor.tools import cli


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints of one rank."""
    model = loops.net(torch.float32)
    model.head.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = zeor.shard(model, optimizer, stage=2)
    for step in range(2):
        loops.own_loss(model, step, torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
        save(tmp_path / "run", model, optimizer, step=step + 1, extra={"note": 1})
    return tmp_path / "run"


def test_it_prints_what_is_inside(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    model = loops.net()
    numel, frozen = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.head.parameters())
    assert "2 complete checkpoints" in out and out.count("complete\n") == 2
    assert f"checkpoint  {saved / 'step-000000000002'}\nstep        2\nwritten by  1 rank(s), stage 2, " in out
    assert f"parameters  {numel:,} in {len(list(model.parameters()))} tensors, {numel - frozen:,} of them train" in out
    assert "optimizer 0 AdamW, 1 group(s)" in out and "extra       note" in out
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in out.splitlines()}
    assert numel * 4 < 1024 and lines["param"] == f"{numel * 4} B"
    assert lines["optimizer.0.exp_avg"] == lines["optimizer.0.exp_avg_sq"]
    assert "rank-00000.safetensors" in lines
    assert "health      complete (--verify checks every hash)" in out


def test_a_flipped_bit_is_found_by_verify_and_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(saved), "--verify"]) == 0
    done = capsys.readouterr()
    assert "every hash is right" in done.out and "[####" in done.err
    file = saved / "step-000000000001" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    assert cli.main(["inspect", str(saved)]) == 0  # the size is right
    capsys.readouterr()
    assert cli.main(["inspect", str(saved), "--verify"]) == 1
    done = capsys.readouterr()
    assert f"{file} is damaged" in done.err and "every hash" not in done.out
    rows = {line.split()[0]: line.split()[-1] for line in done.out.splitlines() if line.startswith("step-")}
    assert rows == {"step-000000000001": "damaged", "step-000000000002": "verified"}
    assert cli.main(["inspect", str(saved / "step-000000000002"), "--verify"]) == 0


def test_missing_truncated_and_foreign_files_are_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latest = saved / "step-000000000002"
    (latest / "stray.bin").write_bytes(b"")
    assert cli.main(["inspect", str(latest)]) == 1
    assert "stray.bin is not part of the checkpoint" in capsys.readouterr().err
    (latest / "stray.bin").unlink()
    file = latest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert cli.main(["inspect", str(latest)]) == 1
    assert f"{file} has " in capsys.readouterr().err
    file.unlink()
    assert cli.main(["inspect", str(latest), "--verify"]) == 1
    assert f"{file} cannot be read: No such file or directory" in capsys.readouterr().err
    manifest = latest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step":2', '"step":3'))
    assert cli.main(["inspect", str(latest)]) == 1
    assert "does not match its own hash" in capsys.readouterr().err


def test_no_checkpoint_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_export_on_the_command_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", str(saved), str(out), "--dtype", "bf16", "--trainable-only", "--max-file", "100"]) == 0
    assert "model-00001-of-" in capsys.readouterr().out
    found = {}
    for file in out.glob("*.safetensors"):
        found.update(safetensors.torch.load_file(file))
    assert found.keys() == {name for name, _ in loops.net().named_parameters() if not name.startswith("head")}
    assert all(value.dtype == torch.bfloat16 for value in found.values())
    assert cli.main(["export", str(saved), str(out)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["export", str(saved), str(tmp_path / "new"), "--dtype", "int3"]) == 1
    assert "dtype='int3' is not known" in capsys.readouterr().err
