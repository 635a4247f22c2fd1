"""A GPT on pp x dp x tp ranks lowers the loss on held-out text, and goes on at another mesh from one checkpoint."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.examples.run_example import run

SMALL = ["--limit", "2", "--batch", "8", "--context", "32", "--width", "64", "--lr", "1e-2", "--layers", "4"]


@pytest.mark.long
def test_a_checkpoint_goes_on_at_another_mesh_and_is_exported(tmp_path):
    for name in ("first", "then"):
        (tmp_path / name).mkdir()
    more = [*SMALL, "--checkpoints", str(tmp_path / "runs")]
    first = run(tmp_path / "first", "parallel_gpt", *more, "--steps", "12", "--pp", "2", ranks=2)
    assert 5.3 < first["loss_before"] < 5.8  # log(256) = 5.5
    assert first["loss"] < first["loss_before"] - 1.5
    out = tmp_path / "weights"
    then = run(tmp_path / "then", "parallel_gpt", *more, "--steps", "3", "--tp", "2", "--export", str(out), ranks=2)
    assert then["begun_at"] == 12 and abs(then["loss_before"] - first["loss"]) < 1e-4
    found = load_file(out / "model.safetensors")
    assert "head.weight" not in found and found["tokens.weight"].shape == (256, 64)
    assert {name.split(".")[1] for name in found if name.startswith("blocks")} == set("0123")


@pytest.mark.whole
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--pp", "2", "--keep", "action"], id="2x2x1"),
        pytest.param(["--tp", "2"], id="1x2x2"),
        pytest.param(["--pp", "2", "--tp", "2"], id="2x1x2"),
        pytest.param(["--pp", "2", "--schedule", "ZBVZeroBubble"], id="zbv-2x2x1"),
    ],
)
def test_four_ranks_lower_the_held_out_loss(tmp_path, more):
    result = run(tmp_path, "parallel_gpt", "--steps", "12", *SMALL, *more, ranks=4)
    assert 5.3 < result["loss_before"] < 5.8
    assert result["loss"] < result["loss_before"] - 1.5
