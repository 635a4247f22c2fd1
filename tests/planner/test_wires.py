"""Wires foreseen: bytes at rest as measured, transient bytes never under, and what is sent to the byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests import offloads
from zeor import Wire
from zeor.access.sharded import state_of
from zeor.planner.network import moves_of

WIRES = (Wire("int8", "int4"), Wire("int4", "fp8"), Wire(reduce="int8"), Wire("bf16", "bf16"))
KEEPING = (zeor.Wire(reduce=zeor.TopK(0.1)), zeor.Wire(reduce=zeor.PowerSGD(2, 0)), Wire("int8", zeor.Sign(0)))
BLOCKS = {"keep_whole": 30, "units": [offloads.Block]}


def wide(blocks: int = 3) -> nn.Module:
    """Blocks of several thousand elements, so that transient bytes are mostly those of the large lanes."""
    return offloads.net(blocks)


def measured(options: dict[str, Any]) -> dict[str, Any]:
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer, **options, **BLOCKS)
    for step in range(3):
        offloads.one_step(model, [optimizer], step, "clip")
    found = zeor.report(model)
    engine = state_of(model).engine
    before = zeor.traffic(model)["bytes_by_verb"]
    offloads.one_step(model, [optimizer], 3, "plain")
    for unit in engine.units:
        unit.wait()
    after = zeor.traffic(model)["bytes_by_verb"]
    sent = {verb: after[verb] - before.get(verb, 0) for verb in ("gather", "reduce")}
    axes = [("ranks", engine.axes.everyone.size, zeor.Link(1e9))]
    moves = [moves_of(lane.spec, axes) for unit in engine.units for lane in unit.lanes]
    known = {
        "gather": sum(cost.nbytes for move in moves for cost in (*move.spread, *move.publish)),
        "reduce": sum(cost.nbytes for move in moves for cost in move.reduce),
    }
    return {"report": found, "sent": sent, "known": known}


def check(options: dict[str, Any], world: int, found: list[dict[str, Any]]) -> None:
    said = zeor.predict(wide(), world=world, native_reduce=False, **options, **BLOCKS)
    for rank in found:
        report = rank["report"]
        assert (said.compute, said.master) == (report["compute"], report["master"])
        assert said.residual == report.get("residual", 0)
        assert report["transient_peak"] <= said.transient, (options, report["transient_peak"], said.transient)
        assert rank["sent"]["reduce"] == rank["known"]["reduce"]
        if options["stage"] < 3:
            assert rank["sent"]["gather"] == rank["known"]["gather"]


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_as_foreseen(ranks, world):
    for wire, stage, precision in itertools.product(WIRES, (0, 1, 2, 3), (None, "bf16")):
        if stage == 3 and wire.gather == "int4":
            continue
        options = {"wire": wire, "stage": stage, "precision": precision}
        check(options, world, ranks(measured, world, options))


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_of_what_is_kept_are_as_foreseen(ranks, world):
    for wire, (stage, precision) in itertools.product(KEEPING, ((0, None), (1, "bf16"), (2, None), (3, "bf16"))):
        options = {"wire": wire, "stage": stage, "precision": precision}
        check(options, world, ranks(measured, world, options))


def test_what_a_residual_takes():
    """4 bytes for each element that is sent; a node's slice where it is for what crosses nodes."""
    model, wire = nn.Linear(512, 512, bias=False), zeor.TopK(0.01)
    said = zeor.predict(model, world=4, stage=2, native_reduce=False, wire=wire)
    assert said.residual == 4 * 512 * 512 * 3 // 4
    assert said.resident == said.compute + said.grad + said.master + said.moments + said.residual
    across = {"world": {"node": 2, "gpu": 4}, "stage": {"node": 1, "gpu": 3}, "native_reduce": False}
    assert zeor.predict(model, **across, wire=Wire(across=wire)).residual == 4 * 512 * 512 // 4 // 2
    low = zeor.predict(model, world=4, stage=2, native_reduce=False, wire=zeor.PowerSGD(4))
    assert low.residual == 4 * 512 * 512 + 4 * 4 * 512


def test_codes_take_less_than_what_they_stand_for():
    exact, coded = (
        zeor.predict(nn.Linear(512, 512), world=4, stage=3, native_reduce=False, wire=wire) for wire in (None, "int8")
    )
    assert coded.resident == exact.resident
    # One gather: codes beside the whole. One reduce: codes out and in, in place of a whole buffer.
    assert coded.transient - exact.transient < 4 * 130 * 512
    parted = zeor.predict(nn.Linear(512, 512), world=4, stage=2, native_reduce=False, wire="int8")
    resident = zeor.predict(nn.Linear(512, 512), world=4, stage=2, native_reduce=False)
    assert parted.compute - resident.compute == resident.grad  # a slice, of as many bytes
