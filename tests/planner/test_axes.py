"""Ranks on two axes: what the planner says of a mesh of 2 x 2 is what four ranks hold, for every pair of stages.

By role to the byte, as the table of each axis says; what comes and goes within its bound.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zeor
from tests.planner.test_rests import Block, Model, options_of
from zeor.memory.roles import Sizes
from zeor.planner.shape import Shape

PAIRS = [*((inside, across) for inside in range(4) for across in range(3)), (3, 3)]
# (stages, precision, what else): pairs with everything on the device, and some with tiers and formats.
RUNS = [(pair, precision, "not offloaded") for pair in PAIRS for precision in ("fp32", "bf16")]
RUNS += [((3, 1), "bf16", case) for case in ("host", "gradients too", "half", "int8", "delayed", "released")]
RUNS += [((3, 0), "bf16", case) for case in ("host", "compute too", "gradients too", "released")]
RUNS += [((2, 0), "bf16", "int8, host"), ((3, 3), "bf16", "compute too"), ((1, 2), "bf16", "host")]
# `make test` has each pair of stages once, and of the rest every third.
FEW = {*RUNS[: 2 * len(PAIRS) : 4], *RUNS[3 : 2 * len(PAIRS) : 4], *RUNS[2 * len(PAIRS) :: 3]}
MARKED = [pytest.param(run, id=str(run), marks=[] if run in FEW else pytest.mark.whole) for run in RUNS]


def stage_of(pair: tuple[int, int]) -> dict[str, int]:
    return {"gpu": pair[0], "node": pair[1]}


def held(pair: tuple[int, int], precision: str, case: str, folder: str) -> dict[str, int]:
    """After two steps, gradients still there."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = options_of(case, folder)
    zeor.shard(model, optimizer, mesh=mesh, stage=stage_of(pair), precision=precision, units=[Block], **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 7)).float().square().mean().backward()
        optimizer.step()
    found = zeor.report(model)
    zeor.unshard(model, optimizer)
    return found


@pytest.fixture(scope="module")
def measured(ranks: Callable[..., list[Any]], tmp_path_factory: Any) -> tuple[str, Callable[[Any], list[Any]]]:
    """The folder of tiers, and what four ranks hold in a run: run once, when the first test asks."""
    folder = str(tmp_path_factory.mktemp("tiers"))
    return folder, functools.cache(lambda run: ranks(held, 4, *run, folder))


def said(pair: tuple[int, int], precision: str, case: str, folder: str) -> zeor.planner.Prediction:
    with torch.device("meta"):
        model = Model()
    options = options_of(case, folder)
    world = {"node": 2, "gpu": 2}
    return zeor.predict(model, world=world, stage=stage_of(pair), precision=precision, units=[Block], **options)


@pytest.mark.parametrize("run", MARKED)
def test_resident_bytes_are_those_that_four_ranks_hold(measured: Any, run: Any) -> None:
    folder, by_run = measured
    predicted, found = said(*run, folder), by_run(run)
    for role in ("compute", "master", "padding"):
        assert {rank[role] for rank in found} == {getattr(predicted, role)}, role
    assert max(rank["moments"] for rank in found) == predicted.moments
    if run[2] != "gradients too":  # on the host where that is asked, and counted there
        assert {rank["grad"] for rank in found} == {predicted.grad}


@pytest.mark.parametrize("run", MARKED)
def test_what_comes_and_goes_stays_within_its_bound(measured: Any, run: Any) -> None:
    folder, by_run = measured
    bound = said(*run, folder).transient
    for rank in by_run(run):
        assert min(1, bound) <= rank["transient_peak"] <= bound


def test_a_sum_on_its_way_across_is_in_the_bound() -> None:
    """fp32, over Gloo: a unit of n elements receives n and leaves n / 2; the one before it sends n / 2 across and
    receives as much. With one axis only n is received."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
    unit = 4 * 64 * 64
    one, two = (
        zeor.predict(model, world=world, stage=2, units=[torch.nn.Linear], native_reduce=False).transient
        for world in (4, {"node": 2, "gpu": 2})
    )
    assert one == 2 * unit + unit
    assert two == 2 * unit + (unit + unit // 2) + (unit // 2 + unit // 2)


def test_a_backend_that_reduces_by_itself_receives_only_parts() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
    unit = 4 * 64 * 64
    found = zeor.predict(model, world={"node": 2, "gpu": 4}, stage=2, units=[torch.nn.Linear], native_reduce=True)
    # The last hop of one unit has its part and receives half of that, and so has the one whose last hop begins.
    assert found.transient == 2 * unit + 2 * (unit // 4 + unit // 8)


def test_a_hierarchy_is_a_mesh_of_nodes() -> None:
    with torch.device("meta"):
        model = Model()
    by_mesh = zeor.predict(model, world={"node": 2, "gpu": 4}, stage={"gpu": 3, "node": 1}, units=[Block])
    assert zeor.predict(model, world=8, hierarchy=4, stage=3, units=[Block]) == by_mesh
    flat = zeor.predict(model, world=8, stage=3, units=[Block])
    assert (by_mesh.moments, by_mesh.master) == (flat.moments, flat.master)
    assert by_mesh.compute > flat.compute
    assert Shape.parse(8, 8) == Shape.parse(8) == Shape(Sizes(8))
    assert Shape.parse({"node": 2, "gpu": 4}).stages(3, 4) == {"stage": 3, "across": 1}
    assert str(Shape.parse({"node": 2, "gpu": 4})) == "2 node x 4 gpu" and str(Shape.parse(4)) == "4 ranks"


def test_mistakes_about_axes_get_one_sentence() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"stage=\{'gpu': 3\} names axes, but the ranks have none"):
        zeor.predict(model, world=8, stage={"gpu": 3})
    with pytest.raises(ValueError, match=r"there is no axis 'gpus' \(did you mean 'gpu'\?\); the axes are"):
        zeor.predict(model, world={"node": 2, "gpu": 4}, stage={"gpus": 3, "node": 1})
    with pytest.raises(ValueError, match="hierarchy=3 ranks per node do not divide the 8 ranks there are"):
        zeor.predict(model, world=8, hierarchy=3)
    with pytest.raises(ValueError, match=r"names the axes already; leave out hierarchy="):
        zeor.predict(model, world={"node": 2, "gpu": 4}, hierarchy=4)
    with pytest.raises(ValueError, match=r"world\['gpu'\]=0; give how many ranks there are"):
        zeor.predict(model, world={"node": 2, "gpu": 0})
    with pytest.raises(ValueError, match="3 axes; give one or two, the inner one last"):
        zeor.predict(model, world={"pod": 2, "node": 2, "gpu": 2})


def first_line(stage: Any, hierarchy: int | None) -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zeor")
    level, log.level = log.level, logging.INFO
    log.addHandler(handler)
    try:
        zeor.unshard(zeor.shard(Model(), stage=stage, hierarchy=hierarchy))
    finally:
        log.removeHandler(handler)
        log.level = level
    return lines[0] if lines else ""


def test_the_first_line_names_both_stages_and_the_shape(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(first_line, 4, 3, 2)[0].startswith("stage 3 inside, 1 across on 4 rank(s) (2 x 2), cpu, gloo")
    assert ranks(first_line, 4, 2, 2)[0].startswith("stage 2 on 4 rank(s) (2 x 2), cpu, gloo")
    assert ranks(first_line, 4, 3, None)[0].startswith("stage 3 on 4 rank(s), cpu, gloo")
