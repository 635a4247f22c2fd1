"""zeor.trace: one file of all ranks that keeps the format's rules and holds every action, with the bytes that were
sent; and what happens to it when something goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests.traces import Found, read
from zeor import api
from zeor.access import trace as tracing
from zeor.comm import attendance
from zeor.step.schedule import FIRST_READER

HOST_OFFLOAD = {"moments": "host", "master": "host", "grads": "host", "compute": "host"}


def built(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, nonfinite="ignore", **options)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model(torch.full((2, 64), 1.0 + rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sent(model: nn.Module) -> dict[str, int]:
    return dict(zeor.traffic(model)["bytes_by_verb"])


def traced(path: str, options: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Bytes that were sent in one traced step, and what the schedule lists for it."""
    model, optimizer = built(**options)
    engine = api._state(model).engine
    for _ in range(2):
        step(model, optimizer)
    engine.drain()  # what the step before left under way is no part of it
    before = sent(model)
    with zeor.trace(model, path):
        step(model, optimizer)
    after = sent(model)
    names = [unit.name for unit in engine.units]
    planned = [
        f"{action.verb} {names[action.unit]}" + (f", lane {action.lane}" if action.lane else "")
        for event, _, actions in engine.schedule.rows
        if event != FIRST_READER
        for action in actions
    ]
    return {verb: after[verb] - before.get(verb, 0) for verb in after}, planned


def check_trace(found: Found, results: list[tuple[dict[str, int], list[str]]]) -> None:
    assert found.processes == {rank: f"rank {rank}, cpu" for rank in range(len(results))}
    for rank, (nbytes, planned) in enumerate(results):
        actions = found.of(rank, "action")
        assert sorted(action["name"] for action in actions) == sorted(planned)
        moved: dict[str, int] = dict.fromkeys(nbytes, 0)
        for move in found.of(rank, "move"):
            moved[move["name"].split()[0]] += move["args"]["bytes"]
        assert moved == nbytes
        tracks = {found.tracks[bar["pid"], bar["tid"]] for bar in found.bars if bar["pid"] == rank}
        assert {"compute", "update", "host actions"} <= tracks
        passes = [bar["name"] for bar in found.of(rank, "pass")]
        assert passes.count("step") == 1 and [p for p in passes if p.startswith("forward")] == [
            "forward root", "forward 0", "forward 1", "forward 2",
        ]  # fmt: skip
        assert sorted(p for p in passes if p.startswith("backward")) == [
            "backward 0", "backward 1", "backward 2", "backward root",
        ]  # fmt: skip
        resting = [c["args"] for c in found.counters if c["pid"] == rank and c["name"] == "resident bytes"]
        assert resting and resting[0]["moments"] > 0
        assert set(resting[0]) == {"compute", "grad", "master", "moments", "residual"}
    assert {bar["args"]["step"] for bar in found.bars} == {2}


# The last two go on in threads of their own.
OFFLOADS = [HOST_OFFLOAD, {**HOST_OFFLOAD, "compute": "device", "update": "host"}, "disk"]
SETTINGS = [{"stage": stage} for stage in (0, 1, 2, 3)] + [{"offload": o, "precision": "bf16"} for o in OFFLOADS]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_step_of_two_ranks_is_in_one_file(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "trace.json"
    results = ranks(traced, 2, str(path), options)
    found = read(path)
    check_trace(found, results)
    assert os.listdir(tmp_path) == ["trace.json"]
    assert results[0][0]["reduce"] > 0 and "exposed wait" in found.tracks.values()
    if "offload" in options:
        tiers = {bar["args"].get("tier") for bar in found.bars if bar["name"].split()[0] in ("fetch", "spill")}
        assert tiers == {"disk" if options["offload"] == "disk" else "host"}


def test_a_rank_alone_writes_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    results = [traced(str(path), {"stage": 3})]
    check_trace(read(path), results)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert read(path).of(0, "move") == [], "nothing is sent"


def of_drop_in(path: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = zeor.optim.AdamW(model.parameters())
    with zeor.trace(optimizer, path):
        step(model, optimizer)
    return []


def test_a_drop_in_optimizer_is_traced(ranks: Any, tmp_path: Path) -> None:
    ranks(of_drop_in, 2, str(tmp_path / "trace.json"))
    found = read(tmp_path / "trace.json")
    for rank in (0, 1):
        assert {bar["name"].split()[0] for bar in found.of(rank, "action")} >= {"reduce", "finish", "update", "publish"}


def of_two_steps(path: str) -> bool:
    model, optimizer = built(stage=2)
    with zeor.trace(model, path, steps=2):
        for _ in range(4):
            step(model, optimizer)
    return bool(api._state(model).engine.observer.on)


def test_steps_bound_the_trace(ranks: Any, tmp_path: Path) -> None:
    assert ranks(of_two_steps, 2, str(tmp_path / "trace.json")) == [False, False]
    assert {bar["args"]["step"] for bar in read(tmp_path / "trace.json").bars} == {0, 1}


# ---- what goes wrong


def raised(act: Callable[[nn.Module], Any]) -> str:
    model, optimizer = built(stage=2)
    try:
        act(model)
    except (ValueError, RuntimeError, OSError) as error:
        step(model, optimizer)  # training goes on
        return f"{type(error).__name__}: {error}"
    return "nothing"


def enter(*args: Any, **kwargs: Any) -> Callable[[nn.Module], Any]:
    return lambda model: zeor.trace(model, *args, **kwargs).__enter__()


def test_bad_paths_are_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    folder = f"{tmp_path} is a folder; give zeor.trace the name of a file in it, such as trace.json.gz."
    assert ranks(raised, 2, enter(str(tmp_path))) == [f"ValueError: On rank 0: {folder}"] * 2
    missing = f"{tmp_path}/no, where zeor.trace is to write, is no folder; make it first."
    assert ranks(raised, 2, enter(str(tmp_path / "no" / "t.json"))) == [f"ValueError: On rank 0: {missing}"] * 2


def test_paths_that_differ_are_refused(ranks: Any, tmp_path: Path) -> None:
    def act(model: nn.Module) -> None:
        zeor.trace(model, f"{tmp_path}/trace-{dist.get_rank()}.json").__enter__()

    for text in ranks(raised, 2, act):
        assert text.startswith("ValueError: The ranks' arguments of zeor.trace differ: rank 0 has path")
        assert "trace-0.json" in text and "trace-1.json" in text


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3"])
def test_a_number_of_steps_is_at_least_one(tmp_path: Path, steps: Any) -> None:
    wanted = f"ValueError: zeor.trace takes steps of at least 1, or None for the whole block; it was given {steps!r}."
    assert raised(enter(str(tmp_path / "t.json"), steps)) == wanted


def test_one_trace_at_a_time(tmp_path: Path) -> None:
    def act(model: nn.Module) -> None:
        with zeor.trace(model, tmp_path / "a.json"), zeor.trace(model, tmp_path / "b.json"):
            pass

    wanted = "RuntimeError: zeor.trace is open for this model already; leave it before another is entered."
    assert raised(act) == wanted
    assert os.listdir(tmp_path) == []


def test_not_inside_a_join(ranks: Any, tmp_path: Path) -> None:
    def act(model: nn.Module) -> None:
        with zeor.join(model):
            zeor.trace(model, tmp_path / "a.json").__enter__()

    wanted = "RuntimeError: zeor.trace was entered inside zeor.join, where a rank may be out of data; enter it around."
    assert ranks(raised, 2, act) == [wanted] * 2


def test_after_an_exception_nothing_is_written_and_another_trace_works(ranks: Any, tmp_path: Path) -> None:
    def act(path: Path) -> tuple[bool, bool]:
        model, optimizer = built(stage=3)
        with pytest.raises(KeyError, match="the user's"):
            with zeor.trace(model, path):
                step(model, optimizer)
                raise KeyError("the user's")
        dist.barrier()
        written, on = path.exists(), api._state(model).engine.observer.on
        with zeor.trace(model, path):
            step(model, optimizer)
        return written, on

    assert ranks(act, 2, tmp_path / "trace.json") == [(False, False)] * 2
    assert {bar["args"]["step"] for bar in read(tmp_path / "trace.json").bars} == {1}


def test_a_rank_that_raised_keeps_no_other_waiting(ranks: Any, tmp_path: Path) -> None:
    def act() -> str:
        model, optimizer = built(stage=2)
        with patch.object(attendance, "PATIENCE_SECONDS", 0.5):
            with pytest.raises((KeyError, attendance.AbsentRanksError)) as raised:
                with zeor.trace(model, tmp_path / "trace.json"):
                    step(model, optimizer)
                    if dist.get_rank() == 1:
                        raise KeyError("the user's")
        step(model, optimizer)  # training goes on
        return str(raised.value)

    told, own = ranks(act, 2)
    assert told.startswith("Every rank must call the end of zeor.trace; ranks [1] did not within 0.5 s.")
    assert own == repr("the user's")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_is_told_on_every_rank_and_leaves_what_was_there(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("before")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def act(model: nn.Module) -> None:
        with patch.object(tracing.os, "replace", fail), zeor.trace(model, path):
            pass

    wanted = f"OSError: On rank 0: zeor.trace could not write {path}: No space left on device."
    assert ranks(raised, 2, act) == [wanted] * 2
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["trace.json"]


def test_a_plain_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"This model is not sharded; call zeor\.shard"):
        zeor.trace(nn.Linear(2, 2), tmp_path / "t.json").__enter__()


# ---- what travels as codes


def by_codes(path: str, stage: int) -> tuple[int, dict[str, Any]]:
    """Bytes that codes have saved in one traced step, and what zeor.traffic says of it."""
    model, optimizer = built(stage=stage, wire=zeor.Wire("int8", "int4", rotate=True))
    for _ in range(2):
        step(model, optimizer)
    engine = api._state(model).engine
    engine.drain()
    saved = engine.observer.traffic.saved_nbytes.total()
    with zeor.trace(model, path):
        step(model, optimizer)
        engine.drain()
    return engine.observer.traffic.saved_nbytes.total() - saved, zeor.traffic(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_encoding_and_decoding_are_shown_with_the_bytes_they_save(ranks: Any, tmp_path: Path, stage: int) -> None:
    results = ranks(by_codes, 2, str(tmp_path / "trace.json"), stage)
    found = read(tmp_path / "trace.json")
    for rank, (saved, traffic) in enumerate(results):
        codes = found.of(rank, "code")
        args = {verb: [c["args"] for c in codes if c["name"].split()[0] == verb] for verb in ("encode", "decode")}
        assert len(args["encode"]) == len(args["decode"]) > 0
        assert all({"unit", "label", "bytes", "exact bytes"} <= set(each) for each in args["encode"] + args["decode"])
        assert sum(each["exact bytes"] - each["bytes"] for each in args["encode"]) == saved > 0
        assert {found.tracks[bar["pid"], bar["tid"]].split(" (")[0] for bar in codes} == {"host actions"}
        ratios = traffic["compression"]["ranks"]
        assert 3.0 < ratios["gather"] < 32 / 8 and 4.0 < ratios["reduce"] < 32 / 4  # biases travel as they are
        last = traffic["last_step_codes"]
        assert 3.0 < last["compression"] < 32 / 4 and min(last["encode"], last["decode"]) > 0
        assert traffic["coding_seconds"]["encode"] > last["encode"]
