"""zeor.choose: what it lists, what it leaves out and why, what it ranks first, and what zeor.shard makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from benchmarks.decoder import SIZES, Decoder
from zeor.memory import device as devices
from zeor.planner.asked import Asked, Where
from zeor.planner.choose import Choice
from zeor.planner.machine import MACHINES
from zeor.planner.plans import micro_batches

GIB = 2**30


def model() -> Decoder:
    return Decoder(SIZES["1.3B"], recompute=False)


def chosen(batch: tuple[int, int] = (4, 2048), **options: Any) -> Choice:
    return zeor.choose(model, "AdamW", batch, **{"gpu": "H100", **options})


def predicted(found: Choice, **options: Any) -> Any:
    with torch.device("meta"):
        built = model()
    given = {"gpu": "H100", "batch": (4, 2048), "world": found.shape.world, **found.options, **options}
    return zeor.predict(built, **given)


def test_the_choice_is_the_fastest_that_fits_and_says_what_predict_says() -> None:
    found = chosen(world=32)
    limit = 0.98 * (MACHINES["H100"].memory - GIB)
    assert predicted(found) == found.prediction
    assert found.prediction.device_peak <= limit
    times = [each.seconds for each in found.others]
    assert times == sorted(times) and found.best.seconds <= 1.01 * times[0]
    for each in found.others:
        assert each.prediction is not None and each.prediction.device_peak <= limit and each.why
    for each in found.refused:
        assert each.prediction is None or each.prediction.device_peak > limit


def test_a_slow_link_between_hosts_keeps_gathers_inside_them() -> None:
    slow = chosen(world=32, link="25Gbit/s")
    stage = slow.options["stage"]
    assert slow.options["hierarchy"] == 8 and stage["gpu"] == 3 and stage["node"] in (1, 2)
    plain = next(each for each in slow.others if str(each.option) == "stage 3")
    assert plain.seconds > 1.3 * slow.best.seconds
    assert "slower: waiting for gather along node" in plain.why


def test_one_host_has_no_second_axis_and_one_rank_no_stages() -> None:
    assert {str(each.option) for each in chosen(world=8).others} <= {f"stage {n}" for n in range(4)}
    assert "hierarchy" not in chosen(world=8).options
    alone = chosen(world=1)
    assert alone.options == {"precision": "bf16", "stage": 3} and alone.others == ()


def test_a_mesh_that_was_named_is_kept() -> None:
    found = chosen(world={"host": 2, "card": 4})
    assert set(found.options["stage"]) == {"host", "card"} and "hierarchy" not in found.options


def test_memory_decides_before_time() -> None:
    """Plans that save memory are looked at only where those that do not are too large."""
    small = chosen(world=1, gpu=replace(MACHINES["H100"], memory=28 * GIB), host="200GiB")
    assert small.best.option.recompute == "auto" or small.best.option.away
    assert small.prediction.device_peak <= 0.98 * 27 * GIB
    told = [each.why for each in small.refused]
    assert any("GiB on the device" in why for why in told)


def test_micro_batches_come_where_a_whole_batch_is_too_large() -> None:
    whole = chosen((8, 2048), world=4)
    assert whole.accumulation == 1
    cut = chosen((64, 2048), world=4, gpu=replace(MACHINES["H100"], memory=30 * GIB))
    assert cut.accumulation > 1 and f"{cut.accumulation} micro-batches" in str(cut)
    assert micro_batches(12) == [1, 2, 4] and micro_batches(None) == [1] and micro_batches(7) == [1]


@pytest.mark.parametrize(("batch", "gib"), [(8, 14), (8, 11), (4, 9), (16, 15)], ids=str)
def test_no_plan_on_one_gpu_is_foreseen_to_be_much_faster_than_the_choice(batch: int, gib: int) -> None:
    """Brute force over recomputation, state on the host and micro-batches, by predict's own figures."""
    machine, host = replace(MACHINES["H200"], memory=gib * GIB), "100GiB"
    short = replace(SIZES["1.3B"], layers=4)
    found = zeor.choose(lambda: Decoder(short), "AdamW", (batch, 2048), world=1, gpu=machine, host=host)
    budgets = {"device_budget": int(0.98 * (gib - 1) * GIB), "host_budget": host}
    times = []
    for count in (n for n in micro_batches(batch) if n <= 4):
        for again in (False, True, "auto"):
            for away in ({}, {"offload": {"auto": True, **budgets}}):
                with torch.device("meta"):
                    built = Decoder(short)
                plan: dict[str, Any] = {"precision": "bf16", "recompute": again, "accumulation": count, **away}
                try:
                    said = zeor.predict(built, gpu=machine, batch=(batch // count, 2048), **plan)
                except ValueError:  # it does not fit
                    continue
                if said.device_peak <= 0.98 * (gib - 1) * GIB:
                    assert said.time is not None
                    times.append(said.time.seconds)
    assert len(times) >= 4 and found.best.seconds <= 1.05 * min(times) < 0.9 * max(times)


def test_only_what_keeps_results_is_tried_unless_more_is_allowed() -> None:
    tight: dict[str, Any] = {"world": 1, "gpu": replace(MACHINES["H100"], memory=24 * GIB), "host": "100GiB"}

    def tried(**options: Any) -> set[str]:
        found = chosen(**tight, **options)
        every = [found.best, *found.others, *found.refused]
        return {each.option.moments for each in every} | {f"release {each.option.release}" for each in every} | {
            f"delay {each.option.delay}" for each in every
        }  # fmt: skip

    assert tried() == {"exact", "release False", "delay 0"}
    assert tried(allow="int8") == {"exact", "int8", "release False", "delay 0"}
    assert "release True" not in tried(allow=["release"])  # the loop clips
    assert "release True" in tried(allow=["release"], clip=False)
    assert "delay 1" in tried(allow=["delay"])


def test_where_nothing_fits_it_says_what_would() -> None:
    with pytest.raises(ValueError, match=r"No plan fits on 1 rank of A100; the nearest, stage 3, needs 88") as told:
        zeor.choose(lambda: Decoder(SIZES["7B"]), "AdamW", (1, 2048), world=1, gpu="A100")
    assert "It would fit on 2 ranks, or on 1 with int8 moments (allow='int8')." in str(told.value)


def test_the_table_names_the_machine_and_a_reason_for_each_row() -> None:
    lines = str(chosen(world=32, link="25Gbit/s")).splitlines()
    assert lines[0] == "32 ranks of H100, 76.5 GiB each to use"
    assert lines[1].split() == ["plan", "s/step", "TFLOP/s", "GPU", "GiB", "host", "GiB"]
    assert lines[2].startswith("stage 3 inside, ") and max(map(len, lines)) < 140
    assert all("slower" in line or "as fast" in line or "the fastest" in line for line in lines[2:8])


def test_mistakes_get_one_sentence() -> None:
    with pytest.raises(TypeError, match=r"zeor.choose has no option 'comile' \(did you mean 'compile'\?\)"):
        chosen(comile=True)
    with pytest.raises(ValueError, match=r"allow='int4' is not known \(did you mean 'int8'\?\)"):
        chosen(allow="int4")
    with pytest.raises(ValueError, match="ranks plans by the time of a step; give batch="):
        zeor.choose(model, "AdamW")
    with pytest.raises(ValueError, match="optimizer='Adan' is not known to the planner"):
        zeor.choose(model, "Adan", (1, 8))


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


LINEAR = {"inputs": torch.zeros(2, 8), "gpu": "80GiB", "world": 3}


@pytest.mark.parametrize(
    ("made", "optimizer", "options", "sentence"),
    [
        (lambda: nn.Linear(8, 8), "AdamW", {"inputs": None, "batch": 4}, "batch=4; give \\(sequences, tokens\\)"),
        (lambda: nn.Linear(8, 8), "AdamW", {"inputs": None, "batch": (True, 8)}, "batch=\\(True, 8\\); give"),
        (lambda: nn.Linear(8, 8), torch.optim.AdamW, {}, "AdamW'>; give its name in torch.optim, such as 'AdamW'"),
        (lambda: nn.Linear(8, 8), None, {}, "optimizer=None; give its name in torch.optim"),
        (lambda: nn.Linear(8, 8), -1, {}, "optimizer=-1; give its name in torch.optim"),
        (ByName, "AdamW", {}, "cannot be called with what it was given .*; give loss=, a function of the model and"),
        (frozen, "AdamW", {}, "Nothing of the model trains, so a step has no backward"),
        (lambda: None, "AdamW", {}, "takes a torch.nn.Module, or a function that makes one, not None"),
        ("gpt2", "AdamW", {}, "takes a torch.nn.Module, or a function that makes one, not 'gpt2'"),
        (lambda: nn.Linear(8, 8), "AdamW", {"gpu": "1MiB"}, "of 0.00 MiB on the device"),
    ],
)
def test_odd_input_gets_one_sentence(made: Any, optimizer: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        zeor.choose(made, optimizer, **{**LINEAR, **options})


def test_a_model_that_takes_names_is_called_by_loss_and_no_host_memory_is_no_mistake() -> None:
    loss = lambda model, x: model(x=x).mean()
    assert zeor.choose(ByName, "AdamW", **LINEAR, loss=loss, host=0).best.why


# ---- zeor.shard(plan=)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])


def trained(plan: Any, **options: Any) -> tuple[str, list[float]]:
    built = small()
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    if plan == "choose":
        found = zeor.choose(small, optimizer, inputs=torch.zeros(2, 16), precision="fp32")
        assert found.shape.world == 2
        plan = found
    zeor.shard(built, optimizer, plan=plan, **options)
    stage = str(zeor.api._state(built).engine.plan.stages)
    for step in range(2):
        built(torch.ones(2, 16) * step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zeor.unshard(built, optimizer)
    return stage, [float(param.detach().sum()) for param in built.parameters()]


def test_shard_takes_a_choice_and_trains_as_without(ranks: Callable[..., list[Any]]) -> None:
    plain = ranks(trained, 2, None)[0][1]
    for plan in ("choose", "auto"):
        assert ranks(trained, 2, plan)[0][1] == plain


def test_auto_neither_compiles_nor_recomputes_a_model_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(devices, "compiles", lambda: True)
    defaults = {"recompute": False, "offload": None, "compile": False, "hierarchy": None}
    asked = Asked(Where(None, None, None), dict(defaults), None)
    whole = asked.with_plan("auto", defaults, False).options
    assert (whole["compile"], whole["offload"], whole["recompute"]) == (True, "auto", "auto")
    cut = asked.with_plan("auto", defaults, True).options
    assert (cut["compile"], cut["offload"], cut["recompute"]) == (False, "auto", False)


def test_plan_takes_the_place_of_defaults_and_of_nothing_that_was_given() -> None:
    built = small()
    choice = zeor.choose(small, inputs=torch.zeros(2, 16), precision="fp32", gpu="80GiB")
    with pytest.raises(ValueError, match="precision='bf16' was given beside plan=, which says precision='fp32'"):
        zeor.shard(built, plan=choice, precision="bf16")
    zeor.shard(built, plan="auto", recompute=True)
    assert zeor.api._state(built).engine.plan.recompute is True
    zeor.unshard(built)
    with pytest.raises(ValueError, match=r"plan='best' is not known; give what zeor.choose returns, or 'auto'"):
        zeor.shard(built, plan="best")
    assert trained("auto", recompute="auto")[1] == trained(None)[1]
