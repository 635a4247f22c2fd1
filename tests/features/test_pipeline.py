"""What a pipeline costs and leaves: gathers and reduces by lane, memory by role, no trace of finding shapes, errors.

That it trains as one process: tests/parity/test_pipelines.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import zeor
from tests.every_product import every_product
from tests.parity import pipes
from tests.parity.pipes import BATCH, DIM, SCHEDULES, TIED, Block, Part, Piped, Piping, batch_of, loss_of, mesh_of
from zeor.access.sharded import state_of


def states(run: Piped) -> dict[str, Tensor]:
    """Everything a run leaves on this rank: parameters and buffers."""
    found = {}
    for index, module in zip(run.indices, run.modules):
        with zeor.full_params(run._of(module)):
            found |= {f"{index} {name}": value.detach().clone() for name, value in module.state_dict().items()}
    return found


def same(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in mine.items())


# ---- what is sent


def calls_of_a_step(piping: Piping, mesh: Any) -> list[tuple[dict[str, int], int, int]]:
    """By engine: the collectives of one step, how many lanes it has, and how many are gathered."""
    run = Piped(piping, mesh)
    run.train(1)
    before = [zeor.traffic(model)["calls"] for model in run.models]
    run.train(1)
    found = []
    for model, old in zip(run.models, before):
        calls = {verb: count - old.get(verb, 0) for verb, count in zeor.traffic(model)["calls"].items()}
        lanes = [lane for unit in state_of(model).engine.units for lane in unit.lanes]
        found.append((calls, len(lanes), sum(lane.frees for lane in lanes)))
    return found


def one_gather_and_one_reduce(pipings: list[Piping]) -> int:
    mesh, checked = mesh_of(2), 0
    for piping in pipings:
        for calls, lanes, _ in calls_of_a_step(piping, mesh):
            assert (calls["gather"], calls["reduce"]) == (lanes, lanes), (piping, calls, lanes)
            checked += 1
    return checked


FEW = [Piping("zbv", 3), Piping("interleaved", 3, local=4), Piping("1f1b", 1)]
ALL = [Piping(schedule, stage, micro=8) for schedule in SCHEDULES for stage in (1, 2, 3)]
ALL += [Piping("interleaved", stage, micro=8, local=4) for stage in (1, 2, 3)]


@pytest.mark.parametrize("pipings", [FEW, pytest.param(ALL, marks=pytest.mark.whole)], ids=["few", "all"])
def test_one_gather_and_one_reduce_of_each_lane_and_step(ranks: Callable, pipings: list[Piping]) -> None:
    """At stages 1 and 2 the gather is the publishing of what was updated."""
    assert ranks(one_gather_and_one_reduce, 4, pipings, timeout=240) == [len(pipings)] * 4


def gathers_by_action() -> None:
    mesh = mesh_of(2)
    for schedule, gathers, stages in (("1f1b", 2, 1), ("zero bubble", 3, 2)):
        piping = Piping(schedule, 3, micro=4, keep="action", reduce="action")
        [(calls, lanes, freed)] = calls_of_a_step(piping, mesh)
        published = lanes - freed  # small parameters of all stages, in one lane
        assert calls["reduce"] == 4 * (freed + stages * published), (schedule, calls)
        # Each F, B, I and W gathers what it reads; a W that needs no weight gathers less.
        assert 4 * freed < calls["gather"] - published <= 4 * freed * gathers, (schedule, calls, lanes)


def test_by_action_each_action_gathers_and_each_micro_batch_reduces(ranks: Callable) -> None:
    ranks(gathers_by_action, 4)


# ---- what is held


def watch(run: Piped) -> list[tuple[int, int]]:
    """(units gathered, units there are) after each action of this rank, by wrapping what the schedule calls."""
    seen: list[tuple[int, int]] = []
    for stage in run.stages:
        for name in ("forward_maybe_with_nosync", "backward_maybe_with_nosync"):
            act = getattr(stage, name)

            def acted(*args: Any, act: Callable = act, **kwargs: Any) -> Any:
                result = act(*args, **kwargs)
                units = [unit for engine in run.engines for unit in engine.units if unit.frees]
                seen.append((sum(unit.present for unit in units), len(units)))
                return result

            setattr(stage, name, acted)
    return seen


def hold(keep: str, schedule: str) -> None:
    run = Piped(Piping(schedule, 3, keep=keep), mesh_of(2))
    seen = watch(run)
    run.train(2)
    assert len(seen) >= 2 * 8 and all(there > 0 for _, there in seen)
    assert all(here == (there if keep == "step" else 0) for here, there in seen), seen
    assert not any(unit.present for engine in run.engines for unit in engine.units if unit.frees)


@pytest.mark.parametrize("schedule", ["1f1b", "zero bubble"])
@pytest.mark.parametrize("keep", ["step", "action"])
def test_units_stay_for_a_step_or_for_an_action(ranks: Callable, keep: str, schedule: str) -> None:
    ranks(hold, 4, keep, schedule)


def memory(keep: str, reduce: str, stage: int) -> None:
    mesh = mesh_of(2)
    predicted = zeor.predict(
        nn.ModuleList([Part(32), Part(32)]), world=2, stage=stage, pipeline=keep, sums_each=reduce == "action",
        keep_whole=DIM, units=[Block],
    )  # fmt: skip
    torch.manual_seed(0)
    modules = nn.ModuleList([Part(32), Part(32)])
    optimizer = torch.optim.AdamW(modules.parameters())
    zeor.shard(modules, optimizer, stage=stage, mesh=mesh["dp"], keep_whole=DIM, units=[Block])
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stages = [PipelineStage(m, rank + 2 * n, 4, torch.device("cpu"), group=group) for n, m in enumerate(modules)]
    schedule = zeor.pipeline(
        schedules.ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda y, t: (y - t).square().mean()),
        keep=keep, reduce=reduce,
    )  # fmt: skip
    for step in range(3):
        if step == 1:  # the first one learns orders, and keeps what it has seen
            state_of(modules).engine.ledger.reset_peak()
        x = torch.randn(8, 32)
        schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": x}))
        optimizer.step()
    found = zeor.report(modules)
    lanes = sum(len(unit.lanes) for unit in state_of(modules).engine.units)
    assert [found[role] for role in ("compute", "grad", "master", "moments")] == [
        predicted.compute, predicted.grad, predicted.master, predicted.moments
    ]  # fmt: skip
    if reduce == "step":
        assert 0 <= predicted.accumulated - found["partial"] <= 512 * lanes
        assert found["partial"] > 4 * sum(p.numel() for p in modules.parameters()) - 1
    else:
        assert found["partial"] == 0
    if keep == "step":
        assert found["held"] == predicted.held and (predicted.held > 0) == (stage == 3)
    else:
        full = sum(lane.full.nbytes for unit in state_of(modules).engine.units for lane in unit.lanes if lane.frees)
        assert found["held"] < full and predicted.held == 0


@pytest.mark.parametrize(
    ("keep", "reduce", "stage"), [("step", "step", 3), ("step", "step", 2), ("action", "action", 3)]
)
def test_memory_is_what_was_predicted(ranks: Callable, keep: str, reduce: str, stage: int) -> None:
    ranks(memory, 4, keep, reduce, stage)


# ---- finding shapes leaves no trace


class Counting(Part):
    """It has statistics, draws random numbers and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(DIM)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(nn.functional.dropout(self.bn(x), 0.1, self.training))


def shapes(schedule: str, stage: int) -> None:
    mesh, found, sent = mesh_of(2), [], []
    example = torch.empty(BATCH // 4, DIM, dtype=torch.float64)
    for static in (False, True):
        plain, pipes.Part = pipes.Part, Counting  # type: ignore[misc]
        try:
            run = Piped(Piping(schedule, stage), mesh)
        finally:
            pipes.Part = plain  # type: ignore[misc]
        if static:
            for each in run.stages:
                meta = pipes.PipelineStage(
                    nn.Identity(), each.stage_index, each.num_stages, torch.device("cpu"), group=each.group,
                    input_args=example.requires_grad_(not each.is_first),
                    output_args=example.detach().requires_grad_(),
                )  # fmt: skip
                each._user_meta = meta._user_meta
        torch.manual_seed(dist.get_rank())
        run.train(2)
        for module in run.modules:
            module.eval()
        run.run(7, "eval")
        for module in run.modules:
            module.train()
        run.train(1)
        found.append(states(run))
        sent.append([zeor.traffic(model)["calls"] for model in run.models])
    same(found[0], found[1])
    assert sent[0] == sent[1]
    calls = [value for name, value in found[0].items() if name.endswith("calls")]
    assert calls and all(value == 3 * 4 for value in calls)


@pytest.mark.parametrize(("schedule", "stage"), [("gpipe", 3), ("zero bubble", 3), ("1f1b", 1)])
def test_finding_shapes_leaves_no_trace(ranks: Callable, schedule: str, stage: int) -> None:
    ranks(shapes, 4, schedule, stage)


# ---- loops


def loops(schedule: str, keep: str) -> None:
    """Evaluation in between changes no bit; two steps of the schedule add up, reduced each or once."""
    mesh = mesh_of(2)
    piping = Piping(schedule, 3, keep=keep)
    plain, between, twice, quiet = (Piped(piping, mesh) for _ in range(4))
    for step in range(2):
        plain.run(step)
        plain.finish()
        between.run(9, "eval")
        between.run(step)
        with torch.no_grad():
            between.run(9, "eval")
        between.finish()
    same(states(between), states(plain))
    for step in range(2):
        twice.run(2 * step)
        twice.run(2 * step + 1)
        twice.finish()
        with zeor.no_sync(quiet.models[0]):
            quiet.run(2 * step)
        quiet.run(2 * step + 1)
        quiet.finish()
    ours, theirs, wanted = states(twice), states(quiet), added(piping, mesh["dp"].size())
    for index, module in zip(twice.indices, twice.modules):
        for name, _ in module.named_parameters():
            value = wanted[index].get_parameter(name)
            assert (ours[f"{index} {name}"] - value).abs().max() < 1e-10
            assert (theirs[f"{index} {name}"] - value).abs().max() < 1e-10
    reduces = [zeor.traffic(run.models[0])["calls"]["reduce"] for run in (twice, quiet)]
    assert reduces[0] == 2 * reduces[1]


def added(piping: Piping, dp: int) -> list[nn.Module]:
    parts = pipes.parts_of(2 * piping.stages_per_rank)
    optimizer = torch.optim.AdamW([param for part in parts for param in part.parameters()], lr=0.1)
    for first in (0, 2):
        for step in (first, first + 1):
            x, y = (torch.cat(each) for each in zip(*(batch_of(step, replica) for replica in range(dp))))
            for part in parts:
                x = part(x)
            loss_of(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parts


@pytest.mark.parametrize(
    ("schedule", "keep"), [("1f1b", "step"), ("zero bubble", "step"), ("zbv", "step"), ("1f1b", "action")]
)
def test_evaluation_in_between_and_two_steps_of_the_schedule(ranks: Callable, schedule: str, keep: str) -> None:
    ranks(loops, 4, schedule, keep)


@every_product()
def features(schedule: str) -> None:
    """Whatever is on inside a stage, the bits are the same."""
    mesh, wanted = mesh_of(2), None
    for stage, options in (
        (2, {}), (3, {"overlap": False}), (3, {"recompute": True}), (3, {"prefetch": 2}), (3, {"recompute": "offload"}),
        (3, {"recompute": "products"}),
    ):  # fmt: skip
        run = Piped(Piping(schedule, stage, clip=True), mesh, **options)
        run.train(2)
        if wanted is None:
            wanted = states(run)
        same(states(run), wanted)
    half = Piped(Piping(schedule, 3), mesh, precision=zeor.Precision(compute=torch.float32))
    half.train(2)
    assert max((value - wanted[name]).abs().max() for name, value in states(half).items()) < 0.2


@pytest.mark.parametrize("schedule", ["1f1b", "zero bubble"])
def test_overlap_and_recomputation_keep_the_bits(ranks: Callable, schedule: str) -> None:
    ranks(features, 4, schedule)


def frozen_later() -> tuple[list[Tensor], list[Tensor]]:
    """A tied parameter after two steps, and after two more in which it was frozen."""
    run = Piped(Piping(tied=True), mesh_of(2))
    name = TIED[run.indices[0]]
    tied = dict(run.modules[0].named_parameters())[name]
    found = []
    for step in range(4):
        tied.requires_grad_(step < 2)
        run.run(step)
        run.finish()
        found.append(next(value for key, value in states(run).items() if key.endswith(name)))
    return found[:2], found[2:]


def test_tied_parameters_that_are_frozen_later_stay(ranks: Callable) -> None:
    for trained, frozen in ranks(frozen_later, 2):
        assert not torch.equal(*trained)
        assert torch.equal(trained[1], frozen[0]) and torch.equal(trained[1], frozen[1])


def behind_a_frozen_stage(schedule: str, keep: str, reduce: str) -> float:
    """How far this rank's stages are from one process, where the first stage is frozen."""
    run = Piped(Piping(schedule, keep=keep, reduce=reduce), mesh_of(2))
    wanted = pipes.parts_of(len(run.indices) * 2)
    wanted[0].requires_grad_(False)
    if run.is_first:
        run.modules[run.indices.index(0)].requires_grad_(False)
    optimizer = torch.optim.AdamW([param for part in wanted for param in part.parameters()], lr=0.1)
    for step in range(2):
        x, y = batch_of(step, 0)
        for part in wanted:
            x = part(x)
        loss_of(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.train(2)
    return run.differs(wanted)


@pytest.mark.parametrize(("keep", "reduce"), [("step", "step"), ("action", "action")])
@pytest.mark.parametrize("schedule", ["1f1b", "zero bubble", "zbv"])
def test_stages_behind_a_frozen_one_train(ranks: Callable, schedule: str, keep: str, reduce: str) -> None:
    assert max(ranks(behind_a_frozen_stage, 2, schedule, keep, reduce)) < 1e-10


# ---- errors


def raised(act: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as found:
        act()
    return str(found.value)


def bare(mesh: Any, modules: list[nn.Module], kind: type = schedules.ScheduleGPipe, **of_stage: Any) -> Any:
    rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    stage = PipelineStage(modules[rank], rank, size, torch.device("cpu"), group=mesh["pp"].get_group(), **of_stage)
    return kind(stage if kind is schedules.ScheduleGPipe else [stage], 4, loss_fn=loss_of)


def refused() -> dict[str, str]:
    mesh, told = mesh_of(2), {}
    rank = mesh["pp"].get_local_rank()

    def sharded(tied: bool = False, make: Callable = nn.Module.double, **options: Any) -> list[nn.Module]:
        modules = [make(part) for part in pipes.parts_of(2, tied)]
        zeor.shard(modules[rank], mesh=mesh["dp"], **(options if rank == 0 else {}))
        return modules

    told["keep"] = raised(lambda: zeor.pipeline(bare(mesh, sharded()), keep="never"))
    told["schedule"] = raised(
        lambda: zeor.pipeline(bare(mesh, sharded(), schedules.PipelineScheduleMulti)), TypeError
    )  # fmt: skip
    told["plain"] = raised(lambda: zeor.pipeline(bare(mesh, pipes.parts_of(2))))
    for name, options in (
        ("release", {"release": True}), ("auto", {"recompute": "auto"}), ("skip", {"nonfinite": "skip"})
    ):  # fmt: skip
        told[name] = raised(lambda options=options: zeor.pipeline(bare(mesh, sharded(**options))))
    once = bare(mesh, sharded())
    zeor.pipeline(once)
    told["twice"] = raised(lambda: zeor.pipeline(once))
    told["replan"] = raised(lambda: zeor.replan(once._stage.submod, stage=1))
    told["mean"] = raised(lambda: zeor.mean_loss(once._stage.submod, torch.ones(()), 3))
    told["undeclared"] = raised(lambda: zeor.pipeline(bare(mesh, sharded(tied=True))))
    told["no such"] = raised(lambda: zeor.pipeline(bare(mesh, sharded(tied=True)), tied=[("embed.weight", "head.w")]))
    told["shapes"] = raised(lambda: zeor.pipeline(bare(mesh, sharded()), tied=[("scale", "blocks.0.up.weight")]))
    told["values"] = raised(lambda: zeor.pipeline(bare(mesh, sharded()), tied=[("scale", "scale")]))
    given = [pipes.TIED] if rank == 0 else []
    told["other ties"] = raised(lambda: zeor.pipeline(bare(mesh, sharded(tied=True)), tied=given))
    told["one stage"] = raised(lambda: zeor.pipeline(bare(mesh, sharded()), tied=[((0, "a"), (0, "b"))]))
    told["pair"] = raised(lambda: zeor.pipeline(bare(mesh, sharded()), tied=["embed.weight"]))
    told["by action"] = raised(
        lambda: zeor.pipeline(bare(mesh, sharded(tied=True)), tied=[pipes.TIED], reduce="action")
    )
    for name, options in (("wire", {"wire": "bf16"}), ("moments", {"moments": "int8"})):
        rounded = sharded(tied=True, make=nn.Module.float, **options)
        told[name] = raised(lambda rounded=rounded: zeor.pipeline(bare(mesh, rounded), tied=[pipes.TIED]))
    for kind, name in ((schedules.ScheduleInterleavedZeroBubble, "compiled"), (schedules.ScheduleInterleaved1F1B, "")):
        schedule = bare(mesh, sharded(compile={"backend": "aot_eager"}), kind)
        if name:
            told[name] = raised(lambda schedule=schedule: zeor.pipeline(schedule))
        else:
            zeor.pipeline(schedule)
    zeor.pipeline(bare(mesh, sharded(tied=True)), tied=[])  # two that only begin with the same values
    exactly = sharded(tied=True)
    zeor.pipeline(bare(mesh, exactly), tied=[pipes.TIED])
    told["wire later"] = raised(lambda: zeor.set_wire(exactly[rank], "int8"))
    return told


ERRORS = {
    "keep": "keep='never' is not known",
    "schedule": "zeor.pipeline cannot drive a PipelineScheduleMulti",
    "plain": "Stage [01] of the pipeline is not sharded; call zeor.shard",
    "release": "On rank 0: Stage 0 of the pipeline was sharded with release=True",
    "auto": "On rank 0: Stage 0 of the pipeline was sharded with recompute='auto'",
    "skip": "On rank 0: Stage 0 of the pipeline was sharded with nonfinite='skip'",
    "twice": "is in a pipeline already",
    "replan": "zeor.replan was given a stage of a pipeline",
    "mean": "zeor.mean_loss was given a stage of a pipeline",
    "undeclared": "'embed.weight' of stage 0 and 'head.weight' of stage 1 hold the same values.*tied=",
    "no such": "'head.w' of stage 1, which that stage does not have",
    "shapes": r"cannot be one parameter: the shapes \(8,\) and \(16, 8\)",
    "values": "'scale' of stage 0 and 'scale' of stage 1, which hold different values",
    "other ties": "The ranks' arguments of zeor.pipeline differ: rank 0 has tied=.*rank 1 has tied=",
    "one stage": "two parameters of stage 0; tie them in the module",
    "pair": "give pairs such as",
    "compiled": "Stage 0 of the pipeline was sharded with compile=.*ScheduleInterleavedZeroBubble computes half",
    "by action": "tied= needs reduce='step'",
    "wire": "On rank 0: Stage 0 of the pipeline was sharded with wire=.*tied= names",
    "moments": "On rank 0: Stage 0 of the pipeline was sharded with moments='int8'.*tied= names",
    "wire later": "zeor.set_wire was given a stage of a pipeline with tied= parameters",
}


def test_errors_are_one_sentence_on_every_rank(ranks: Callable) -> None:
    for told in ranks(refused, 2):
        assert told.keys() == ERRORS.keys()
        for name, pattern in ERRORS.items():
            assert re.search(pattern.removeprefix("On rank 0: "), told[name]), (name, told[name])


def scaled() -> str:
    run, scaler = Piped(Piping(), mesh_of(2)), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    run.run(0)
    return raised(lambda: scaler.unscale_(run.optimizers[0]), RuntimeError)


def test_a_scaler_of_one_stage_is_refused(ranks: Callable) -> None:
    for told in ranks(scaled, 2):
        assert told.startswith("GradScaler would leave a step out on this stage")


def joined() -> str:
    run = Piped(Piping("1f1b"), mesh_of(2))
    with zeor.join(run.models[0]):
        return raised(run.schedule.step, RuntimeError)


def test_no_step_inside_a_join(ranks: Callable) -> None:
    for told in ranks(joined, 4):
        assert told.startswith("A step of a pipeline ran inside zeor.join")


def mid_step() -> None:
    """A loss that raises on every rank's last stage: what came before is given up, and the next step is right."""
    mesh = mesh_of(1)
    fails = [False]
    run = Piped(Piping("interleaved", 3), mesh)
    plain = run.schedule._loss_fn

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails[0] and len(run.schedule._internal_losses) == 2:
            raise ArithmeticError("as asked for")
        return plain(output, target)

    run.schedule._loss_fn = loss
    run.train(1)
    fails[0] = True
    with pytest.raises(ArithmeticError):
        run.run(5)
    fails[0] = False
    assert not any(unit.present for engine in run.engines for unit in engine.units if unit.frees)
    assert all(param.grad is None for module in run.modules for param in module.parameters())
    run.run(1)
    run.finish()
    other = Piped(Piping("interleaved", 3), mesh)
    other.train(2)
    same(states(run), states(other))


def test_after_an_exception_in_a_step(ranks: Callable) -> None:
    ranks(mid_step, 2)
