"""Lightning's Trainer and Fabric at two ranks equal the same program in one process; checkpoints, a second fit, errors.

Lightning is not among the packages of the `dev` extra: `pip install lightning`, then `pytest -m "" tests/integrations`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.launching import start

pytest.importorskip("lightning")
pytestmark = pytest.mark.whole
PROGRAM = "lightning_program"
STAGES = ["1", "3"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found, and what one process did, which begins where they left checkpoints."""
    folder = str(tmp_path_factory.mktemp("lightning"))
    two = start(PROGRAM, 2, "two", folder)
    return {"two": two, "one": start(PROGRAM, 1, "one", folder)[0]}


def close(mine: list[float], wanted: list[float]) -> None:
    assert mine == pytest.approx(wanted, rel=0, abs=1.1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_fit_is_that_of_one_process_and_so_is_a_second(found, stage):
    plain = found["one"]["plain"]
    for rank in found["two"]:
        close(rank[stage]["losses"], plain["losses"])
        close(rank[stage]["second"], plain["second"])
        assert rank[stage]["rates"] == plain["rates"]
        assert rank[stage]["val"] == pytest.approx(plain["val"], abs=1.1e-6)
        assert rank[stage]["sum"] == pytest.approx(plain["sum"], abs=1e-4)
    assert len(plain["losses"]) == 8 and len(plain["second"]) == 4


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_fit_goes_on_in_every_bit(found, stage):
    for rank in found["two"]:
        whole, resumed = rank[stage], rank[f"{stage} resumed"]
        assert resumed["losses"] == whole["losses"][4:] and resumed["val"] == whole["val"]
        assert resumed["sum"] == whole["sum"]
        assert whole["files"] == ["meta.ckpt", "zeor"]
        assert rank[f"{stage} exported"] == whole["sum"]  # by plain torch, out of zeor.export's folder
    close(found["one"][stage]["losses"], found["two"][0][stage]["losses"][4:])


@pytest.mark.parametrize("stage", STAGES)
def test_fabric(found, stage):
    plain = found["one"]["fabric"]
    for rank in found["two"]:
        mine, resumed = rank[f"fabric {stage}"], rank[f"fabric {stage} resumed"]
        close(mine["losses"], plain["losses"])
        assert mine["norms"] == pytest.approx(plain["norms"], rel=2e-6)
        assert resumed["losses"] == mine["losses"][4:] and resumed["sum"] == mine["sum"]
    close(found["one"][f"fabric {stage}"]["losses"], found["two"][0][f"fabric {stage}"]["losses"][4:])


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_checkpoint_is_kept_and_loaded(found, stage):
    plain = found["one"]["best"]
    for rank in found["two"]:
        mine = rank[f"{stage} best"]
        assert mine["best"] == mine["score"] > mine["last"]
        assert (mine["score"], mine["last"]) == pytest.approx((plain["score"], plain["last"]), abs=1.1e-6)
        assert mine["files"] == plain["files"] == ["last.ckpt", "step=2.ckpt"]


def test_by_its_name_and_what_contradicts(found):
    for rank in found["two"]:
        assert rank["by name"]["losses"] == rank["3"]["losses"]
        assert rank["errors"]["precision"].startswith("precision='bf16-mixed' is Lightning's own; leave it out")
        assert "is no checkpoint of the zeor strategy: it has no meta.ckpt" in rank["errors"]["no checkpoint"]


def test_under_its_own_launcher(found, tmp_path):
    for rank in start(PROGRAM, 2, "launched", str(tmp_path / "trainer"), launcher=None):
        assert rank["3"]["losses"] == found["two"][0]["3"]["losses"]
        assert rank["3"]["sum"] == found["two"][0]["3"]["sum"]
        assert rank["fabric 3"]["losses"] == found["two"][0]["fabric 3"]["losses"]
    for rank in start(PROGRAM, 2, "launched by fabric", str(tmp_path / "fabric"), launcher=None):
        assert rank["fabric 3"] == found["two"][0]["fabric 3"]
