"""zeor.set_wire: a run that changes its wire goes on like one that had it all along from there, and what it refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeor
from tests import offloads
from zeor import Wire
from zeor.access.sharded import state_of


def made(**options: Any) -> Any:
    return offloads.made(keep_whole=30, **options)


def changed(stage: int, first: Any, then: Any, precision: Any) -> None:
    """Two steps by one wire, two by another: as a run that is loaded from the first two steps' checkpoint."""
    model, optimizers = made(stage=stage, wire=first, precision=precision)
    for step in range(2):
        offloads.one_step(model, optimizers, step, "clip")
    zeor.set_wire(model, then)
    start = offloads.whole(model)
    for step in range(2, 4):
        offloads.one_step(model, optimizers, step, "clip")
    found = offloads.whole(model)

    other, its = made(stage=stage, wire=first, precision=precision)
    for step in range(2):
        offloads.one_step(other, its, step, "clip")
    offloads.same(offloads.whole(other), start, "nothing but the wire changes")
    with zeor.full_params(other):
        values = {name: param.detach().clone() for name, param in other.named_parameters()}
    third, last = made(stage=stage, wire=then if stage == 3 or first is not None else None, precision=precision)
    for optimizer, source in zip(last, its, strict=True):
        optimizer.load_state_dict(source.state_dict())
    with zeor.full_params(third, write=True):
        for name, param in third.named_parameters():
            param.data.copy_(values[name])
    if stage < 3 and first is None:
        zeor.set_wire(third, then)
    for step in range(2, 4):
        offloads.one_step(third, last, step, "clip")
    offloads.same(offloads.whole(third), found, (stage, first, then))


@pytest.mark.parametrize(
    "stage, first, then",
    [
        (3, None, "int8"),
        (3, "int8", "exact"),
        (2, None, Wire(reduce="int4", rotate=True)),
        (2, "int8", "int4"),
        (1, "int4", "int8"),
        (0, None, "fp8"),
    ],
)
def test_a_run_goes_on_by_another_wire(ranks, stage, first, then):
    ranks(changed, 2, stage, first, then, None)


def refused() -> list[str]:
    found = []

    def refuses(model: Any, wire: Any) -> None:
        with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
            zeor.set_wire(model, wire)
        found.append(str(caught.value))

    model, optimizers = made(stage=2)
    refuses(model, "int8")
    refuses(model, "int5")
    refuses(model, {"gahter": "int8"})
    refuses(model, Wire(across="int8"))
    refuses(model, ("int8", "int4")[dist.get_rank()])
    offloads.one_step(model, optimizers, 0, "clip")
    model, _ = made(stage=3, wire="int8")
    refuses(model, "int4")
    return found


def test_what_is_refused_names_what_to_do(ranks):
    for found in ranks(refused, 2):
        begins, unknown, misspelt, across, differ, plain = found
        assert "give zeor.shard wire='auto', or a wire whose gathers are not exact" in begins
        assert "wire='int5' is not known (did you mean" in unknown
        assert "no field 'gahter' (did you mean 'gather'?)" in misspelt
        assert "there is one axis" in across
        assert "wires" in differ and "rank 1" in differ
        assert "at stage 3 they hold nothing" in plain


@pytest.mark.parametrize(
    "options, told",
    [
        ({"wire": "int4"}, "at stage 3 they hold nothing"),
        ({"wire": {"gather": "int2"}}, r"Wire.gather='int2' sends weights .* at stage 3 they hold nothing"),
        ({"wire": {"gather": "int2"}, "stage": 0}, "int2' is for weights, and at stage 0 summed gradients"),
        ({"wire": "int2", "stage": 2}, "Wire.reduce='int2' is too coarse for gradients"),
        ({"wire": Wire(across="int8")}, "there is one axis"),
        ({"wire": "int3"}, "wire='int3' is not known"),
        ({"wire": 8}, "wire=8 is not known"),
    ],
)
def test_shard_refuses_before_anything_changes(ranks, options, told):
    def check() -> None:
        model = offloads.net()
        with pytest.raises(ValueError, match=told):
            zeor.shard(model, **options)
        zeor.shard(model)

    ranks(check, 2)


def inside_a_forward() -> str:
    """On rank 1 alone; rank 0 would begin to send."""
    model, optimizers = made(stage=2, wire="int8")
    offloads.one_step(model, optimizers, 0, "clip")
    handle = None
    if dist.get_rank() == 1:
        handle = model.head.register_forward_pre_hook(lambda module, args: zeor.set_wire(model, "exact"))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        if handle is not None:
            offloads.loss_of(model, 0)
        else:
            zeor.set_wire(model, "exact")
    if handle is not None:
        handle.remove()
    offloads.one_step(model, optimizers, 1, "clip")
    return str(caught.value)


def test_a_rank_inside_a_forward_refuses_for_all(ranks):
    other, told = ranks(inside_a_forward, 2)
    assert told == "zeor.set_wire was called inside a forward or backward of the model; call it outside."
    assert other == f"On rank 1: {told}" or other.endswith(told), other


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def said_at_start(options: dict[str, Any]) -> list[str]:
    log, lines = logging.getLogger("zeor"), Lines()
    before, log.level = log.level, logging.INFO
    log.addHandler(lines)
    try:
        offloads.made(**options)
    finally:
        log.removeHandler(lines)
        log.setLevel(before)
    return [line for line in lines.found if line.startswith("wire ")]


@pytest.mark.parametrize(
    "options, told",
    [
        ({"wire": "int8", "keep_whole": 30}, ["wire int8: 9"]),  # less the norms
        ({"wire": Wire("int8", "int4"), "stage": 2, "keep_whole": 0}, ["wire int8/int4: "]),
        ({"wire": "bf16", "precision": "bf16"}, ["wire bf16: 0.0% of the parameters travel as codes"]),
        ({"wire": "auto"}, ["wire 'auto': exact, until some steps have been measured"]),
        ({}, []),
    ],
)
def test_the_start_up_block_says_what_travels_as_codes(ranks, options, told):
    first, second = ranks(said_at_start, 2, options)
    assert second == [] and len(first) == len(told)
    assert all(line.startswith(begin) for line, begin in zip(first, told, strict=True)), first


def disagree(one: Any, other: Any) -> str:
    model = offloads.net()
    with pytest.raises(ValueError) as caught:
        zeor.shard(model, wire=(one, other)[dist.get_rank()])
    zeor.shard(model, wire=one)  # nothing has changed
    return str(caught.value)


@pytest.mark.parametrize(
    "one, other",
    [("int8", None), ("int8", "bf16"), (Wire(reduce="int8"), Wire(reduce="int8", rotate=True)), ("auto", "exact")],
    ids=str,
)
def test_ranks_that_disagree_are_told_which_and_nothing_hangs(ranks, one, other):
    wires = [str(Wire.parse(each)) if each is not None else "None" for each in (one, other)]
    for told in ranks(disagree, 2, one, other):
        assert told == f"The ranks' plans differ: rank 0 has wire={wires[0]}, rank 1 has wire={wires[1]}."


@pytest.mark.parametrize(
    "given, told",
    [
        ({"gather": "int7"}, "Wire.gather='int7' is not known"),
        ({"reduce": "int8", "rounding": "random"}, "Wire.rounding='random' is not known"),
        ({"reduce": "bf16", "rotate": True}, "Wire.rotate=True is for formats in blocks"),
        ({"rotate": 1}, "Wire.rotate=1; give True or False"),
        ({"across": Wire(across="int8")}, "has an across= of its own"),
    ],
)
def test_a_wire_that_says_nothing_sensible(given, told):
    with pytest.raises(ValueError) as caught:
        Wire(**given)
    assert told in str(caught.value)


def told_apart() -> str:
    """What only one rank is refused, all are."""
    model, _ = made(stage=2, wire="int8")
    with pytest.raises(ValueError) as caught:
        zeor.set_wire(model, ("auto", "int8")[dist.get_rank()])
    return str(caught.value)


def test_what_one_rank_may_not_ask_is_refused_on_all(ranks):
    for text in ranks(told_apart, 2, timeout=50):
        assert "is for runs that began with wire='auto'" in text


def set_once_a_rank_has_left(model: Any, optimizers: Any) -> None:
    with zeor.join(model):
        for step in range(1 + dist.get_rank()):
            offloads.one_step(model, optimizers, step, "plain")
        if dist.get_rank():
            zeor.set_wire(model, "exact")


def inside_join() -> str:
    with pytest.raises(RuntimeError) as caught:
        set_once_a_rank_has_left(*made(stage=2, wire="int8"))
    return str(caught.value)


def test_inside_a_join_a_rank_that_is_out_of_data_is_not_waited_for(ranks):
    for text in ranks(inside_join, 2, timeout=50):
        assert "zeor.set_wire was called inside zeor.join after rank 0 had run out of data" in text


def replanned() -> tuple[str, str]:
    model, optimizers = made(stage=2, wire="int8")
    zeor.set_wire(model, "bf16")
    zeor.replan(model, optimizers, stage=3)
    auto, its = made(stage=2, wire="auto")
    zeor.set_wire(auto, "int8")
    zeor.replan(auto, its, stage=3)
    return tuple(str(state_of(each).engine.plan.wire) for each in (model, auto))


def test_another_plan_goes_on_by_the_wire_that_was_set(ranks):
    assert ranks(replanned, 2) == [(str(Wire("bf16", "bf16")), str(Wire("int8", "int8")))] * 2


def thawed(stage: int) -> dict[str, torch.Tensor]:
    """What begins to train while the wire is exact may yet travel as codes, as all else in such a run."""
    model = offloads.net()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    zeor.shard(model, optimizer, stage=stage, wire="auto", keep_whole=30)
    offloads.one_step(model, [optimizer], 0, "clip")
    zeor.set_wire(model, "exact")
    model.blocks[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
    offloads.one_step(model, [optimizer], 1, "clip")
    zeor.set_wire(model, "int8")
    for step in range(2, 4):
        offloads.one_step(model, [optimizer], step, "clip")
    return offloads.whole(model)


def test_what_thaws_in_a_run_that_was_made_exact_may_travel_as_codes(ranks):
    wanted = ranks(thawed, 2, 3)[0]
    for stage in (1, 2):
        offloads.same(ranks(thawed, 2, stage)[0], wanted, stage)
