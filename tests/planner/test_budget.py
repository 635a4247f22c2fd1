"""offload="auto" keeps the budget it was given, also where no batch tells what a step computes; or it is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

import zeor
from zeor.planner import Prediction
from zeor.tools import cli
from zeor.tools.plan import SIZES, meta_model

GIB = 1 << 30
CHOICES: list[dict[str, Any]] = [{}, {"release": True}, {"moments": "int8"}]


def planned(size: str, budget: int, stage: int, world: int, **options: Any) -> Prediction:
    offload = zeor.Offload(auto=True, device_budget=budget, host_budget=1000 * GIB)
    given = {"precision": "bf16", "native_reduce": True, "offload": offload, **options}
    return zeor.predict(meta_model(SIZES[size]), world=world, stage=stage, **given)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_without_a_batch_the_device_stays_within_its_budget(stage: int, options: dict[str, Any]) -> None:
    for world in (1, 2):
        for budget in (16 * GIB, 12 * GIB):  # all of the state would be 18 GiB beside 6 of compute and gradients
            found = planned("gpt2-xl", budget, stage, world, **options)
            assert found.device <= budget and found.device_peak <= budget, (world, budget)
            assert found.grad + found.compute <= found.device


def test_gradients_have_their_room_where_nothing_was_traced() -> None:
    """13 billion parameters: bf16 compute and gradients take 24.4 GiB each, and what is left of 80 is the state's."""
    found = planned("13b", 80 * GIB, 3, 1)
    assert 0.85 * 80 * GIB < found.device_peak <= 80 * GIB
    assert found.host > 90 * GIB


def test_what_cannot_fit_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"A step needs 49.\d GiB on the device, but the budget is 40.0 GiB"):
        planned("13b", 40 * GIB, 3, 1)
    with pytest.raises(ValueError, match=r"needs .* GiB on the device, [\d.]+ GiB of it activations, but"):
        planned("gpt2-xl", 8 * GIB, 3, 1, batch=(64, 1024), recompute=False)


def test_the_table_shows_no_figure_above_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--size", "13b", "--precision", "bf16", "--offload", "auto", "--host-budget", "500GiB"]
    assert cli.main([*asked, "--device-budget", "30GiB", "--stages", "1", "3", "--worlds", "1", "8"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = printed[next(number for number, line in enumerate(printed) if line.startswith("-----")) + 1 :]
    assert [line.split()[2:] for line in lines[:3]] == [["-"] * 7] * 3, "one rank, or whole gradients: too much"
    assert 0 < float(lines[3].split()[2]) <= 30
    assert [line.partition(":")[0] for line in lines[4:] if line.startswith("stage")] == [
        "stage 1 on 1 rank(s) does not fit", "stage 1 on 8 rank(s) does not fit", "stage 3 on 1 rank(s) does not fit",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=re.escape("zeor: stage 3 on 1 rank(s) does not fit: A step needs")):
        cli.main([*asked, "--device-budget", "30GiB", "--stages", "3", "--worlds", "1"])


def test_budgets_that_are_not_given_are_the_memory_of_the_machine_that_is() -> None:
    model = meta_model(SIZES["13b"])
    given: dict[str, Any] = {"precision": "bf16", "world": 2, "gpu": "80GiB"}
    found = zeor.predict(model, offload="auto", host="800GiB", **given)
    by_hand = zeor.Offload(auto=True, device_budget=int(0.98 * 79 * GIB), host_budget=400 * GIB)  # less the context
    assert found == zeor.predict(model, offload=by_hand, **given)
    assert found.device_peak <= 0.98 * 79 * GIB and found.host > 0
    assert zeor.predict(model, offload=zeor.Offload(auto=True, host_budget=400 * GIB), **given) == found
    with pytest.raises(ValueError, match=r"how much memory a host has, .*; give host= too, such as host='500GiB'\."):
        zeor.predict(model, offload="auto", **given)
    with pytest.raises(ValueError, match=r"host='1GiB' is what offload='auto' may take beside gpu=; give both"):
        zeor.predict(model, offload="host", host="1GiB", **given)
