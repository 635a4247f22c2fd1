"""A GPT in a pipeline lowers the loss on held-out text, at 2 x 1 and 2 x 2 ranks."""

from __future__ import annotations

import pytest

from tests.examples.run_example import run

SMALL = ["--limit", "2", "--steps", "12", "--batch", "8", "--context", "32", "--width", "64", "--lr", "1e-2"]
RUNS = [
    pytest.param(2, ["--schedule", "1F1B"], id="1f1b-2x1"),
    pytest.param(4, ["--schedule", "1F1B", "--keep", "action"], id="1f1b-2x2", marks=pytest.mark.whole),
    pytest.param(4, ["--schedule", "ZBVZeroBubble"], id="zbv-2x2", marks=pytest.mark.whole),
]


@pytest.mark.long
@pytest.mark.parametrize(("world", "more"), RUNS)
def test_a_pipeline_lowers_the_held_out_loss(tmp_path, world, more):
    result = run(tmp_path, "pipeline", *SMALL, *more, ranks=world)
    assert 5.3 < result["loss_before"] < 5.8  # log(256) = 5.5
    assert result["loss"] < result["loss_before"] - 1.5
