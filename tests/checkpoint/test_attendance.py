"""Verbs that every rank must call, called by some: the others are named within seconds, and training may go on."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from zeor.comm import attendance
from zeor.comm.attendance import AbsentRanksError, attend


def quick(warn: float = 0.2, patience: float = 1.0) -> None:
    """On this rank, until patient()."""
    attendance.WARN_SECONDS, attendance.PATIENCE_SECONDS = warn, patience


def patient() -> None:
    attendance.WARN_SECONDS, attendance.PATIENCE_SECONDS = 5.0, 60.0


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    return zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def step(model: Any, optimizer: Any) -> float:
    loss = model(torch.ones(2, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def alone(verb: str, folder: str) -> tuple[str, float, list[float]]:
    """Rank 0 alone calls it, hears of it, and trains on with the others, which have been waiting in a step."""
    model, optimizer = made()
    losses = [step(model, optimizer)]
    said, waited = "", 0.0
    quick()
    try:
        if dist.get_rank() == 0:
            begun = time.monotonic()
            with pytest.raises(zeor.CheckpointError) as found:
                if verb == "save":
                    zeor.save(folder, model, optimizer, step=1)
                elif verb == "load":
                    zeor.load(folder, model, optimizer)
                else:
                    zeor.export(model, f"{folder}/out")
            said, waited = str(found.value), time.monotonic() - begun
        losses.append(step(model, optimizer))
    finally:
        patient()
    dist.barrier()
    if dist.get_rank() > 0:  # what the late ones hear, once
        heard = f"given up by the other ranks: every rank must call zeor.{verb}"
        with pytest.raises(zeor.CheckpointError, match=heard):
            zeor.save(folder, model, optimizer, step=2)
    dist.barrier()
    zeor.save(folder, model, optimizer, step=2)  # and then all are in step again
    return said, waited, losses


@pytest.mark.parametrize("verb", ["save", "load", "export"])
def test_one_rank_alone_is_told_and_nothing_is_broken(ranks: Any, tmp_path: Path, verb: str) -> None:
    (said, waited, first), *others = ranks(alone, 3, verb, str(tmp_path))
    assert f"Every rank must call zeor.{verb}; ranks [1, 2] did not within 1 s. Call it outside of `if rank" in said
    assert waited < 3
    assert all(losses == first for _, _, losses in others) and first[1] < first[0]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000000002"]


def test_a_plain_model_is_exported_by_all_or_not_at_all(ranks: Any, tmp_path: Path) -> None:
    def job(folder: str) -> str:
        quick()
        said = "given up"
        try:
            if dist.get_rank() == 0:
                with pytest.raises(zeor.CheckpointError) as found:
                    zeor.export(nn.Linear(2, 2), folder)
                said = str(found.value)
        finally:
            patient()
        dist.barrier()
        if dist.get_rank() > 0:
            with pytest.raises(zeor.CheckpointError, match="given up"):
                zeor.export(nn.Linear(2, 2), folder)
        return said

    assert ranks(job, 2, str(tmp_path / "out"))[0].startswith("Every rank must call zeor.export; ranks [1] did not")
    assert not (tmp_path / "out").exists()


def test_ranks_at_different_verbs_hear_of_it_at_once(ranks: Any) -> None:
    def job() -> tuple[str, float]:
        mesh = zeor.api._state(made()[0]).engine.axes.everyone
        begun = time.monotonic()
        with pytest.raises(AbsentRanksError) as found:
            attend(mesh, "zeor.save" if dist.get_rank() == 0 else "zeor.export")
        attend(mesh, "zeor.save")
        return str(found.value), time.monotonic() - begun

    found = ranks(job, 2)
    assert [text.partition(":")[2] for text, _ in found] == [
        " every rank must call it, but rank 0 is at zeor.save and rank 1 at zeor.export."
    ] * 2
    assert max(waited for _, waited in found) < 5


def test_a_rank_that_comes_late_is_waited_for_and_named(ranks: Any) -> None:
    def job() -> list[str]:
        mesh = zeor.api._state(made()[0]).engine.axes.everyone
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zeor").addHandler(handler)
        quick(patience=60.0)
        try:
            time.sleep(1.5 if dist.get_rank() == 1 else 0)
            attend(mesh, "zeor.save")
        finally:
            patient()
            logging.getLogger("zeor").removeHandler(handler)
        return told

    assert ranks(job, 3) == [
        ["zeor: zeor.save waits for ranks [1] on rank 0; every rank must call it."],
        [],
        ["zeor: zeor.save waits for ranks [1] on rank 2; every rank must call it."],
    ]


def test_a_rank_that_died_is_not_waited_for(ranks: Any, tmp_path: Path) -> None:
    def job(folder: str) -> None:
        model, optimizer = made()
        step(model, optimizer)
        if dist.get_rank() == 1:
            os._exit(3)
        begun = time.monotonic()
        with pytest.raises(zeor.CheckpointError, match=r"did not end on every rank.*rank 1 did not take part"):
            zeor.save(folder, model, optimizer, step=1)
        Path(folder, "waited").write_text(str(time.monotonic() - begun))
        time.sleep(0.5)

    with pytest.raises(AssertionError, match="exited with code 3"):
        ranks(job, 2, str(tmp_path))
    assert float((tmp_path / "waited").read_text()) < 10


def test_notes_do_not_pile_up(ranks: Any) -> None:
    def job() -> int:
        mesh = zeor.api._state(made()[0]).engine.axes.everyone
        store = dist.distributed_c10d._get_default_store()
        attend(mesh, "zeor.save")
        before = store.num_keys()
        for _ in range(20):
            attend(mesh, "zeor.save")
        dist.barrier()
        return store.num_keys() - before

    assert all(abs(more) <= 4 for more in ranks(job, 2))
