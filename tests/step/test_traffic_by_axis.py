"""Bytes of a step by axis and verb, time hidden and exposed: in zeor.traffic, the trace, and `zeor schedule`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeor
from zeor.memory.roles import Sizes
from zeor.tools.gpt import GPT, GPTConfig
from zeor.tools.plan import planned_step
from zeor.tools.record import Run

CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16, vocab=48)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randint(CONFIG.vocab, (2, CONFIG.context))).float().logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(stage: int, hierarchy: int | None, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, stage=stage, hierarchy=hierarchy)
    for _ in range(3):
        one_step(model, optimizer)
    before = zeor.traffic(model)
    assert before["steps"] == 3 and before["seconds_by_axis"] == {}
    with zeor.trace(model, f"{folder}/trace.json", steps=2):
        for _ in range(2):
            one_step(model, optimizer)
    found = zeor.traffic(model)
    assert found["steps"] == 5 and found["last_step"].keys() <= found["bytes_by_axis"].keys()
    return found


@pytest.mark.parametrize(("stage", "hierarchy"), [(3, 2), (3, None), (2, 2), (0, 2)])
def test_a_step_sends_what_its_schedule_says_along_each_axis(
    ranks: Callable, tmp_path: Path, stage: int, hierarchy: int | None
) -> None:
    found = ranks(trained, 4, stage, hierarchy, str(tmp_path))[0]
    with torch.device("meta"):
        model = GPT(CONFIG)
    _, sent = planned_step(model, Sizes(2, 2) if hierarchy else Sizes(4), Run(stage, 1, hierarchy))
    told = {(axis, verb): nbytes for axis, verbs in found["last_step"].items() for verb, nbytes in verbs.items()}
    moved = {key: nbytes for key, nbytes in told.items() if key[1] in ("gather", "reduce")}
    assert moved == {key: nbytes for key, nbytes in sent.items() if nbytes}
    for axis, verb in moved:
        times = found["seconds_by_axis"][axis][verb]
        assert times["under_way"] > 0 and times["exposed"] >= 0
        assert times["hidden"] == pytest.approx(max(times["under_way"] - times["exposed"], 0.0))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    axes = {event["args"]["axis"] for event in events if "axis" in event.get("args", {})}
    assert {axis for axis, _ in moved} <= axes
