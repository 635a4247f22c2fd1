"""TRL's SFT of a real pretrained model on real text, on two ranks at stage 3: 100 steps with LoRA and with all
parameters, the first of them beside one process without zeor; then it generates, and plain tools load what it saved.

`pip install trl`, then `pytest -m "" tests/integrations/test_smollm2.py`; it fetches 93 MB (examples/fetch.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integrations.launching import start

pytest.importorskip("trl")
pytestmark = [pytest.mark.whole, pytest.mark.timeout(1800)]
STEPS, BESIDE = 100, 5


@pytest.mark.parametrize("what", ["lora", "full"])
def test_sft_of_smollm2_on_shakespeare(tmp_path, what, record_property):
    folder = str(tmp_path)
    two: list[dict[str, Any]] = start("smollm2_program", 2, what, folder, str(STEPS), timeout=1500)
    plain = start("smollm2_program", 1, what, folder, str(BESIDE), timeout=600)[0]
    first = two[0]
    told = {
        "parameters that train": first["trained"], "steps": len(first["loss"]),
        f"largest distance of the first {BESIDE} losses": max(abs(a - b) for a, b in zip(first["loss"], plain["loss"])),
        "held-out loss before": first["before"], "held-out loss after": first["after"], "generated": first["text"],
    }  # fmt: skip
    for name, value in told.items():
        record_property(name, json.dumps(value))
    for rank in two:
        assert len(rank["loss"]) == STEPS and rank["trained"] == plain["trained"]
        assert rank["loss"][:BESIDE] == pytest.approx(plain["loss"], rel=1e-5)
        assert rank["grad_norm"][:BESIDE] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert rank["after"] < rank["before"] - 0.1  # on text that it has not seen
        assert rank["made"] == first["loaded"]
    assert (first["files"] == ["adapter_model.safetensors"]) == (what == "lora")
