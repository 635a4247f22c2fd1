"""A GPT with mixtures of experts lowers the loss on held-out text at dp x ep = 2 x 2, and goes on at another mesh."""

from __future__ import annotations

import pytest

from tests.examples.run_example import run

SMALL = ["--limit", "2", "--batch", "4", "--context", "32", "--width", "64", "--layers", "2", "--lr", "5e-3"]


@pytest.mark.long
def test_experts_lower_the_held_out_loss(tmp_path):
    kept = str(tmp_path / "checkpoints")
    result = run(tmp_path, "experts", *SMALL, "--steps", "12", "--ep", "2", "--checkpoints", kept, ranks=4)
    assert 5.3 < result["loss_before"] < 5.8  # log(256) = 5.5
    assert result["loss"] < result["loss_before"] - 1.0
    (tmp_path / "result.json").unlink()
    then = run(tmp_path, "experts", *SMALL, "--steps", "2", "--ep", "1", "--checkpoints", kept, ranks=2)
    assert then["begun_at"] == 12
    assert abs(then["loss_before"] - result["loss"]) < 0.05  # divided among fewer ranks, batches end elsewhere
