"""wire="auto" in training: measured steps are set, so that what is chosen is known; everything else is real."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeor
from tests import offloads
from tests.parity.models import Setting, placed
from zeor import Link, Wire
from zeor.access.sharded import state_of
from zeor.comm.links import Links
from zeor.comm.meter import Meter, Metered
from zeor.features import auto_wire
from zeor.features.auto_wire import MEASURED, WARM_UP, AutoWire, as_plain, from_plain
from zeor.memory.coding_speed import Speed

AFTER = WARM_UP + MEASURED  # steps
LINKS = Links((Link(1e15),))  # alone; so all that is waited for goes by bytes
FAST = Speed(1e15, 1e15)


@contextlib.contextmanager
def measuring(waited: Callable[[], float] = lambda: 0.9, speed: Speed = FAST) -> Iterator[None]:
    """Steps of one second, in which a rank has waited for so long."""
    patch = mock.patch.object
    with (
        patch(Meter, "end", lambda self: Metered(1.0, waited())),
        patch(auto_wire, "measure_along", lambda axes: LINKS),
        patch(auto_wire, "speed_of", lambda codec, device: speed),
    ):
        yield


def made(**options: Any) -> Any:
    return offloads.made(keep_whole=30, wire="auto", **options)


def of(model: Any) -> AutoWire:
    return state_of(model).engine.feature(AutoWire)


def steps(model: Any, optimizers: Any, numbers: range, loop: str = "clip") -> None:
    for step in numbers:
        offloads.one_step(model, optimizers, step, loop)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "wire='auto'" in record.getMessage():
            self.found.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    log, lines = logging.getLogger("zeor"), Lines()
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield lines.found
    finally:
        log.removeHandler(lines)
        log.setLevel(level)


# ---- what is chosen, when, and that training goes on as by set_wire


def chosen_after(stage: Any, precision: Any, loop: str = "clip", **options: Any) -> None:
    """Exact bits until the choice; from there on those of a run that was told the same by set_wire."""
    where = {"stage": stage} if isinstance(stage, int) else placed(Setting(stage, shape=(2, 2)))
    where |= options
    with measuring(), listening() as lines:
        model, optimizers = made(precision=precision, **where)
        steps(model, optimizers, range(AFTER - 1), loop)
        assert not of(model).decided and not lines
        exact = plain(where, precision, AFTER - 1, loop)
        offloads.same(offloads.whole(model), exact, "before the choice all is exact")
        steps(model, optimizers, range(AFTER - 1, AFTER), loop)
        assert of(model).decided
        steps(model, optimizers, range(AFTER, AFTER + 2), loop)
    wire = of(model).wire
    assert wire.reduce == "int4" or wire.across.reduce == "int4", wire
    found = offloads.whole(model)
    other, its = offloads.made(keep_whole=30, precision=precision, wire=Wire(auto=True), **where)
    of(other).decided = True  # never by itself
    steps(other, its, range(AFTER), loop)
    zeor.set_wire(other, wire)
    steps(other, its, range(AFTER, AFTER + 2), loop)
    offloads.same(found, offloads.whole(other), (stage, wire))
    assert len(lines) == (dist.get_rank() == 0)
    for line in lines:
        assert "waited 0.9 s for links" in line and "; foreseen " in line and "exact 1 s" in line, line
    share = zeor.traffic(model)["compression"]
    assert all(ratio > 1 for verbs in share.values() for ratio in verbs.values())


def plain(where: Any, precision: Any, count: int, loop: str) -> Any:
    model, optimizers = offloads.made(keep_whole=30, precision=precision, **where)
    steps(model, optimizers, range(count), loop)
    return offloads.whole(model)


@pytest.mark.parametrize("stage, precision", [(0, None), (2, "bf16"), (3, None)])
def test_exact_until_the_choice_and_then_as_by_set_wire(ranks, stage, precision):
    ranks(chosen_after, 2, stage, precision)


@pytest.mark.parametrize("stage", [2, 3])
def test_with_updates_beside_the_next_step(ranks, stage):
    """What is under way when the wire changes ends first."""
    away = {"offload": zeor.Offload(chunk=offloads.CHUNK)}
    ranks(chosen_after, 2, stage, "bf16", **away)
    if stage == 3:
        ranks(chosen_after, 2, stage, "bf16", loop="plain", delay=1, **away)
        ranks(chosen_after, 2, stage, None, loop="plain", release=True)


def test_the_choice_on_two_axes(ranks):
    ranks(chosen_after, 4, (3, 1), None)


def stays(waited: float, speed: Speed) -> tuple[str, str]:
    with measuring(lambda: waited, speed=speed), listening() as lines:
        model, optimizers = made(stage=2)
        steps(model, optimizers, range(AFTER))
    assert of(model).decided and "compression" not in zeor.traffic(model)
    return of(model).wire.reduce, "".join(lines)


def test_what_hides_already_or_codes_too_slowly_stays_exact(ranks):
    (wire, said), (other, silent) = ranks(stays, 2, 0.04, FAST)
    assert wire == other == "exact" and silent == ""
    assert said == "wire='auto': exact, as steps of 1 s wait 0.04 s for links"
    (wire, said), _ = ranks(stays, 2, 0.9, Speed(1.0, 1.0))
    assert wire == "exact" and "the fastest, as nothing hides it" in said


# ---- ranks agree


def disagree() -> str:
    """Rank 1 waits for the link alone, as rank 0 is late: nobody's bytes are too many."""
    with measuring(lambda: 0.9 if dist.get_rank() else 0.0):
        model, optimizers = made(stage=2)
        steps(model, optimizers, range(AFTER))
    return of(model).wire.reduce


def test_a_rank_that_waits_for_another_is_not_waiting_for_a_link(ranks):
    assert ranks(disagree, 2) == ["exact", "exact"]


def evaluated_alone() -> tuple[bool, bool]:
    """Rank 0 evaluates in every step that is measured, so none of them counts, and all measure once more."""
    with measuring():
        model, optimizers = made(stage=2)
        for step in range(AFTER):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    offloads.loss_of(model, 50)
            offloads.one_step(model, optimizers, step, "clip")
        first = of(model).decided
        steps(model, optimizers, range(AFTER, 2 * AFTER))
    return first, of(model).decided


def test_steps_with_an_evaluation_do_not_count(ranks):
    assert ranks(evaluated_alone, 2) == [(False, True)] * 2


@pytest.mark.parametrize("loop", ["no_sync", "accumulate", "backwards"])
def test_accumulation_is_one_step(ranks, loop):
    def check() -> None:
        with measuring():
            model, optimizers = made(stage=2)
            steps(model, optimizers, range(AFTER - 1), loop)
            assert not of(model).decided
            steps(model, optimizers, range(AFTER - 1, AFTER + 1), loop)
            assert of(model).decided and of(model).wire.reduce == "int4"

    ranks(check, 2)


def settled() -> None:
    """Ranks whose paths are settled wait for no answer, and choose all the same; two optimizers step once per step."""
    model = offloads.net()
    halves = list(model.blocks.parameters()), [*list(model.head.parameters()), model.scale]
    optimizers = [torch.optim.AdamW(params, lr=1e-2) for params in halves]
    with measuring():
        zeor.shard(model, optimizers, stage=3, wire="auto", keep_whole=30, paths="static")
        steps(model, optimizers, range(AFTER - 1))
        assert state_of(model).engine.passes.settling.settled and not of(model).decided
        steps(model, optimizers, range(AFTER - 1, AFTER + 2))
    assert of(model).wire.reduce == "int4"


def test_settled_paths_and_two_optimizers(ranks):
    ranks(settled, 2)


def with_real_clocks() -> tuple[str, float]:
    """Nothing is set: what is measured is whatever it is, and all ranks do the same."""
    model, optimizers = made(stage=2)
    steps(model, optimizers, range(AFTER + 1))
    assert of(model).decided
    return str(of(model).wire), zeor.traffic(model)["seconds_by_axis"]["ranks"]["reduce"]["under_way"]


def test_real_measurements_give_one_answer(ranks):
    found = ranks(with_real_clocks, 4)
    assert len({wire for wire, _ in found}) == 1 and all(seconds > 0 for _, seconds in found)


# ---- checkpoints


def resumed(folder: str, stage: int) -> None:
    """A checkpoint holds the choice; a run that resumes takes it at once and has the bits of the one that went on."""
    with measuring():
        model, optimizers = made(stage=stage)
        steps(model, optimizers, range(AFTER + 1))
        zeor.save(folder, model, optimizers, step=AFTER + 1)
        steps(model, optimizers, range(AFTER + 1, AFTER + 3))
    wire, wanted = of(model).wire, offloads.whole(model)
    with measuring(lambda: 0.0), listening() as lines:
        model, optimizers = made(stage=stage)
        zeor.load(folder, model, optimizers)
        assert of(model).decided and of(model).wire == wire
        steps(model, optimizers, range(AFTER + 1, AFTER + 3))
    offloads.same(offloads.whole(model), wanted, stage)
    assert [line.endswith("as the checkpoint says") for line in lines] == [True] * (dist.get_rank() == 0)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_that_resumes_goes_on_by_the_wire_that_was_chosen(ranks, tmp_path, stage):
    ranks(resumed, 2, str(tmp_path), stage)


def resumed_by_a_method(folder: str, wire: Wire) -> None:
    """The run began by a method and stays with it, as nothing waits."""
    with measuring(lambda: 0.0):
        model, optimizers = offloads.made(keep_whole=30, stage=2, wire=wire)
        steps(model, optimizers, range(AFTER))
        zeor.save(folder, model, optimizers, step=AFTER)
        assert of(model).saved() is not None
        model, optimizers = offloads.made(keep_whole=30, stage=2, wire=wire)
        zeor.load(folder, model, optimizers)
    assert of(model).decided and of(model).wire == wire


def test_a_checkpoint_holds_a_method_too(ranks, tmp_path):
    ranks(resumed_by_a_method, 2, str(tmp_path), Wire(reduce=zeor.TopK(0.05, warmup=3), auto=True))


def test_wires_in_plain_values():
    for wire in (Wire("int8", "int4", across="bf16", rotate=True), Wire(across=zeor.PowerSGD(2), auto=True)):
        assert from_plain(json.loads(json.dumps(as_plain(wire)))) == wire
    for given in ({"reduce": {"method": "topkk"}}, {"reduce": {"fraction": 0.1}}):
        with pytest.raises(ValueError, match="gradients travel by the method"):
            from_plain(given)


def loads_elsewhere(folder: str, options: dict[str, Any], decided: bool) -> str:
    model, optimizers = offloads.made(keep_whole=30, **options)
    zeor.load(folder, model, optimizers)
    auto = state_of(model).engine.find(AutoWire)
    assert (auto is not None and auto.decided) is decided
    with measuring(lambda: 0.0):
        steps(model, optimizers, range(1))
    return "none" if auto is None else auto.wire.reduce


def saved_before(folder: str) -> None:
    with measuring():
        model, optimizers = made(stage=2)
        steps(model, optimizers, range(2))
        zeor.save(folder, model, optimizers, step=2)


def test_other_runs_load_it_and_choose_for_themselves(ranks, tmp_path):
    chosen, early = tmp_path / "chosen", tmp_path / "early"
    ranks(resumed, 2, str(chosen), 2)
    ranks(saved_before, 2, str(early))
    auto = {"wire": "auto", "stage": 2}
    assert ranks(loads_elsewhere, 2, str(chosen), auto, True) == ["int4"] * 2
    assert ranks(loads_elsewhere, 2, str(early), auto, False) == ["exact"] * 2  # saved before the choice
    assert ranks(loads_elsewhere, 4, str(chosen), auto, False) == ["exact"] * 4  # cut otherwise
    assert ranks(loads_elsewhere, 2, str(chosen), {"wire": "int8", "stage": 3}, False) == ["none"] * 2
    assert ranks(loads_elsewhere, 1, str(chosen), auto, True) == ["exact"]  # nothing travels


# ---- set_wire, refusals


def told_by_hand() -> None:
    with measuring():
        model, optimizers = made(stage=2)
        steps(model, optimizers, range(2))
        zeor.set_wire(model, "int8")
        steps(model, optimizers, range(2, AFTER + 2))
        assert of(model).wire.reduce == "int8" and of(model).saved() is None
        zeor.set_wire(model, "auto")
        assert of(model).wire == Wire(auto=True) and not of(model).decided
        steps(model, optimizers, range(AFTER))
        assert of(model).decided and of(model).wire.reduce == "int4"
    plain_model, _ = offloads.made(stage=2, wire="int8")
    with pytest.raises(ValueError, match="is for runs that began with wire='auto'"):
        zeor.set_wire(plain_model, "auto")


def test_set_wire_ends_the_choosing_and_auto_begins_it_anew(ranks):
    ranks(told_by_hand, 2)


def test_one_rank_has_nothing_to_choose():
    model, optimizers = made(stage=2)
    assert of(model).decided
    steps(model, optimizers, range(2))
    assert of(model).saved() is None


def test_what_says_nothing_sensible():
    with pytest.raises(ValueError, match="pass wire='auto' alone"):
        Wire(across="auto")
    with pytest.raises(ValueError, match=r"Wire.auto=3; give True or False"):
        Wire(auto=3)
    with pytest.raises(ValueError, match="did you mean 'auto'"):
        Wire.parse("autp")


def test_predict_counts_a_run_as_it_begins(ranks):
    """One slice of compute more than exact at stages 1 and 2, as measured; nothing more at stages 0 and 3."""

    def check(stage: int) -> Any:
        model, optimizers = made(stage=stage)
        steps(model, optimizers, range(2))
        return zeor.report(model)

    for stage in (0, 2, 3):
        said = zeor.predict(offloads.net(), world=2, stage=stage, native_reduce=False, keep_whole=30, wire="auto")
        for report in ranks(check, 2, stage):
            assert (report["compute"], report["master"]) == (said.compute, said.master)
            assert report["transient_peak"] <= said.transient
