"""Accelerate: a real loop at two ranks equals that loop in one process without zeor; checkpoints, folders, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import ACCELERATE_LAUNCH, start

PROGRAM = "accelerate_program"
STAGES = ["1", "3"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found, and what one process did, which begins where they left checkpoints."""
    folder = str(tmp_path_factory.mktemp("accelerate"))
    two = start(PROGRAM, 2, "two", folder)
    return {"two": two, "one": start(PROGRAM, 1, "one", folder)[0], "folder": folder}


def close(mine: list[float], wanted: list[float]) -> None:
    assert mine == pytest.approx(wanted, rel=0, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_losses_norms_and_rates_are_those_of_one_process(found, stage):
    plain = found["one"]["plain"]
    for rank in found["two"]:
        close(rank[stage]["losses"], plain["losses"])
        assert rank[stage]["norms"] == pytest.approx(plain["norms"], rel=2e-6)
        assert rank[stage]["rates"] == pytest.approx(plain["rates"])
    assert len(plain["losses"]) == 5 and plain["losses"][4] < plain["losses"][0]


def test_both_stages_give_the_same_bits(found):
    assert found["two"][0]["1"]["losses"] == found["two"][0]["3"]["losses"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_goes_on_in_every_bit(found, stage):
    for rank in found["two"]:
        whole, resumed = rank[stage], rank[f"{stage} resumed"]
        assert resumed["begun"] == 3
        assert resumed["losses"] == whole["losses"][3:] and resumed["norms"] == whole["norms"][3:]
        assert resumed["rates"] == whole["rates"][3:]


@pytest.mark.parametrize("stage", STAGES)
def test_it_goes_on_in_one_process(found, stage):
    close(found["one"][stage]["losses"], found["two"][0][stage]["losses"][3:])


@pytest.mark.parametrize("stage", STAGES)
def test_folders_load_in_plain_transformers_and_plain_torch(found, stage):
    for rank in found["two"]:
        assert rank[f"{stage} loaded"]["same"]
        assert rank[f"{stage} loaded"]["sum"] == pytest.approx(found["one"]["plain"]["sum"], abs=1e-4)
    assert found["two"][0][stage]["saved"] == ["lm_head.weight"]
    assert found["two"][1][stage]["saved"] == []  # the main process alone has the state dict
    assert not list(Path(found["folder"]).rglob("optimizer*"))  # nothing of them is pickled


def test_mixed_precision_and_compilation_are_zeors(found):
    plain = found["one"]["plain"]["losses"]
    for rank in found["two"]:
        assert rank["bf16"] == pytest.approx(plain, abs=2e-3) and rank["bf16"] != plain
        close(rank["compiled"], plain)


def test_uneven_inputs_are_joined(found):
    (batches, total), (others, other) = (rank["uneven"] for rank in found["two"])
    assert (batches, others) == (2.0, 1.0) and total == other


SENTENCES = {
    "dispatch": "dispatch_batches=True lets rank 0 read for all ranks",
    "precision": "mixed_precision='bf16' and zeor's precision='fp16' contradict each other",
    "fsdp": "Accelerate is given fsdp_plugin=, and zeor shards the model itself; leave fsdp, deepspeed",
    "ACCELERATE_USE_FSDP": "Accelerate is given ACCELERATE_USE_FSDP=true, and zeor shards the model itself",
    "ACCELERATE_USE_DEEPSPEED": "Accelerate is given ACCELERATE_USE_DEEPSPEED=true, and zeor shards the model itself",
    "release": "zeor's release=True updates inside backward, so there is nothing left to clip",
    "ddp": "The model is wrapped in DistributedDataParallel",
    "meta": "The model is on the meta device and has no values; name the folder",
    "again": "zeor.drop_optimizer(model) gives up those it has",
    "no checkpoint": "holds no checkpoint of zeor for model 0",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_what_contradicts_is_one_sentence_on_every_rank(found, what):
    for rank in found["two"]:
        assert SENTENCES[what] in rank["errors"][what]


@pytest.mark.whole
def test_under_its_own_launcher(found):
    for rank in start(PROGRAM, 2, "launched", launcher=ACCELERATE_LAUNCH):
        assert rank["losses"] == found["two"][0]["3"]["losses"]
