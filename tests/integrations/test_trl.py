"""TRL's SFT and DPO at two ranks equal them in one process without zeor; resumed; generation; folders of plain weights.

TRL is not among the packages of the `dev` extra: `pip install trl`, then `pytest -m "" tests/integrations`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.launching import start

pytest.importorskip("trl")
pytestmark = pytest.mark.whole
PROGRAM = "trl_program"
STAGES = ["1", "3"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found, and what one process did, which begins where they left checkpoints."""
    folder = str(tmp_path_factory.mktemp("trl"))
    two = start(PROGRAM, 2, "two", folder)
    return {"two": two, "one": start(PROGRAM, 1, "one", folder)[0]}


@pytest.mark.parametrize("stage", STAGES)
def test_sft(found, stage):
    plain = found["one"]["sft"]
    for rank in found["two"]:
        mine = rank[f"sft {stage}"]
        assert mine["loss"] == pytest.approx(plain["loss"], rel=0, abs=1.1e-6)
        assert mine["grad_norm"] == pytest.approx(plain["grad_norm"], rel=2e-6)
        assert mine["generated"] == plain["generated"] and mine["same"]
        assert rank[f"sft {stage} resumed"] == mine
    elsewhere = found["one"][f"sft {stage}"]
    assert elsewhere["loss"] == pytest.approx(found["two"][0][f"sft {stage}"]["loss"], rel=0, abs=1.1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_dpo_with_a_reference_model_that_follows_on_slices(found, stage):
    plain = found["one"]["dpo"]
    for rank in found["two"]:
        mine = rank[f"dpo {stage}"]
        assert mine["loss"] == pytest.approx(plain["loss"], rel=0, abs=1.1e-6)
        assert mine["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5) and mine["same"]
