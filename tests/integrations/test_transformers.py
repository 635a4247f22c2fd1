"""transformers.Trainer at two ranks equals Trainer in one process without zeor; checkpoints, folders, LoRA, options."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.launching import ACCELERATE_LAUNCH, start

PROGRAM = "trainer_program"
STAGES = ["1", "3"]
CLOSE = ("loss", "grad_norm", "learning_rate", "eval_loss")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found, and what one process did, which begins where they left checkpoints."""
    folder = str(tmp_path_factory.mktemp("trainer"))
    two = start(PROGRAM, 2, "two", folder)
    return {"two": two, "one": start(PROGRAM, 1, "one", folder)[0]}


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("more"))
    two = start(PROGRAM, 2, "more, two", folder)
    return {"two": two, "one": start(PROGRAM, 1, "more, one", folder)[0]}


def alike(mine: dict[str, Any], wanted: dict[str, Any], first: int = 0) -> None:
    """Losses to 1e-6; norms, which are sums of squares in another order, relatively."""
    assert mine["learning_rate"][first:] == wanted["learning_rate"][first:]
    assert mine["loss"][first:] == pytest.approx(wanted["loss"][first:], rel=0, abs=1.1e-6)
    assert mine["grad_norm"][first:] == pytest.approx(wanted["grad_norm"][first:], rel=2e-6)
    assert mine["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=0, abs=1.1e-6)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_is_that_of_one_process(found, stage):
    plain = found["one"]["plain"]
    for rank in found["two"]:
        alike(rank[stage], plain)
        assert rank[stage]["sum"] == pytest.approx(plain["sum"], abs=1e-4)
    assert len(plain["loss"]) == 6 and len(plain["eval_loss"]) == 3


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_model_is_loaded_and_not_the_last(found, stage):
    for rank in found["two"]:
        assert rank[stage]["best"].endswith("checkpoint-2")
        assert rank[stage]["evaluated"] == rank[stage]["eval_loss"][0] != rank[stage]["eval_loss"][2]


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_goes_on_in_every_bit(found, stage):
    for rank in found["two"]:
        assert {key: rank[f"{stage} resumed"][key] for key in CLOSE} == {key: rank[stage][key] for key in CLOSE}
    alike(found["one"][stage], found["two"][0][stage], first=4)  # in one process, from what two ranks have written


@pytest.mark.parametrize("stage", STAGES)
def test_folders_are_plain_and_hold_no_pickled_state_of_the_optimizer(found, stage):
    for rank in found["two"]:
        assert rank[f"{stage} loaded"]["sum"] == pytest.approx(rank[stage]["sum"], abs=1e-9)
        assert {"model.safetensors", "config.json", "zeor", "scheduler.pt"} <= set(rank[f"{stage} loaded"]["files"])
        assert "optimizer.pt" not in rank[f"{stage} loaded"]["files"]


@pytest.mark.whole
@pytest.mark.parametrize("stage", STAGES)
def test_lora(more, stage):
    for rank in more["two"]:
        alike(rank[f"lora {stage}"], more["one"]["lora"])
        resumed, whole = rank[f"lora {stage} resumed"], rank[f"lora {stage}"]
        assert {key: resumed[key] for key in CLOSE} == {key: whole[key] for key in CLOSE}
        assert whole["apart"] == 0.0  # plain peft loads the adapter, and computes the same
        assert "adapter_model.safetensors" in whole["files"]
        assert whole["refused"].startswith("merge_and_unload() would put other layers into a sharded model")
    assert more["two"][0][f"lora {stage}"]["merged apart"] < 1e-5
    alike(more["one"]["lora 3"], more["two"][0]["lora 3"], first=4)


@pytest.mark.whole
@pytest.mark.parametrize("stage", STAGES)
def test_texts_are_generated_during_evaluation(more, stage):
    for rank in more["two"]:
        plain, mine = rank["seq2seq plain"], rank[f"seq2seq {stage}"]
        assert mine["generated"] == plain["generated"] and len(mine["generated"]) == 3
        assert mine["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert mine["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


@pytest.mark.whole
def test_options_of_the_training_arguments(more):
    for rank in more["two"]:
        options, wanted = rank["options"], rank["options"]["meta"]
        for name in ("compiled", "recomputed"):
            assert options[name]["loss"] == pytest.approx(wanted["loss"], abs=1.1e-6)
        assert options["bf16"]["loss"] == pytest.approx(wanted["loss"], abs=2e-3)
        assert options["bf16"]["loss"] != wanted["loss"]
        assert options["release"]["loss"] == pytest.approx(options["unclipped"]["loss"], abs=1.1e-6)
        assert options["release"]["grad_norm"] == [] and len(options["unclipped"]["grad_norm"]) == 6
        assert options["line"] == {"prefetch": 2, "stage": 2}
        errors = dict(options["errors"])
        assert "The model is wrapped in DistributedDataParallel" in errors.pop("ddp")
        assert errors.pop("dispatch").startswith("dispatch_batches=True lets rank 0 read for all ranks")
        assert errors == {
            "twice": "zeor's stage is 3 in the training arguments and 1 in zeor=; leave one of them out.",
            "release": "zeor's release=True updates inside backward and cannot clip (max_grad_norm=0.5); set "
            "max_grad_norm=0, or leave release= out.",
            "fsdp": "fsdp= is set in the training arguments, and zeor shards the model itself; leave it out.",
            "deepspeed": "deepspeed= is set in the training arguments, and zeor shards the model itself; leave it out.",
            "json": "zeor_options='{stage' is no JSON object.",
        }


@pytest.mark.whole
def test_a_model_that_had_no_values_is_filled(found, more):
    assert more["two"][0]["options"]["meta"]["loss"] == found["two"][0]["3"]["loss"]


@pytest.mark.whole
def test_under_accelerates_launcher(found, tmp_path):
    for rank in start(PROGRAM, 2, "launched", str(tmp_path), launcher=ACCELERATE_LAUNCH):
        assert {key: rank[key] for key in CLOSE} == {key: found["two"][0]["3"][key] for key in CLOSE}
