"""One folder for all stages of a pipeline: any (pp, dp, tp, stage) loads at any other, and exports as one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import zeor
from tests.features.test_auto_wire import AFTER, measuring
from tests.parallel.grid import Grid, Run, differs, loss_of, made, new_mesh, reference
from zeor.access.sharded import state_of
from zeor.features.auto_wire import AutoWire

STEP = 2


def bits(values: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in values.items()}


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: a stage without a member of one has an empty one."""
    outer = [param for name, param in model.named_parameters() if "blocks" not in name]
    blocks = [param for name, param in model.named_parameters() if "blocks" in name]
    return torch.optim.AdamW([{"params": outer, "weight_decay": 0.0}, {"params": blocks}], lr=1e-2, weight_decay=0.1)


def saved(folder: str, grid: Grid, asynchronous: bool = False) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What a run holds when it is saved, and after another step."""
    run = Run(grid, grouped)
    run.train(*range(STEP))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 100)
    average = zeor.ema(run.model, 0.5)
    average.update()
    extra = {"scheduler": scheduler, "average": average, "word": "as it was"}
    found = zeor.save(folder, run.model, run.optimizer, step=STEP, extra=extra, asynchronous=asynchronous)
    there = bits(run.values())
    if asynchronous:
        found.wait()
    run.train(STEP)
    return there, bits(run.values())


def resumed(folder: str, grid: Grid) -> dict[str, Any]:
    run = Run(grid, grouped)
    run.train(9)  # other weights and state than those that are loaded
    scheduler, average = torch.optim.lr_scheduler.StepLR(run.optimizer, 100), zeor.ema(run.model, 0.5)
    loaded = zeor.load(folder, run.model, run.optimizer, extra={"scheduler": scheduler, "average": average})
    there = bits(run.values())
    with average.applied():
        averages = bits(run.values())
    run.train(STEP)
    about = (loaded.step, loaded.extra["word"], loaded.missing, loaded.unexpected)
    return {"there": there, "averages": averages, "after": run.values(), "about": about}


def agree(loads: list[dict[str, Any]], there: dict[str, bytes]) -> None:
    """`there`: of all stages. The ranks together hold all of it."""
    names: set[str] = set()
    for each in loads:
        assert each["about"] == (STEP, "as it was", [], [])
        assert each["there"] and all(there[name] == value for name, value in each["there"].items())
        assert each["averages"] == each["there"], "an average of one update is the values themselves"
        names |= each["there"].keys()
    assert names | {"head.weight"} == there.keys() | {"head.weight"}


def united(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in by_rank:
        assert all(found.setdefault(name, value) == value for name, value in each.items())
    return found


FROM = Grid(2, 1, 2, 3)
TO = [
    Grid(1, 1, 1, 1), Grid(2, 2, 1, 1, "zbv"), Grid(1, 2, 2, 2), Grid(4, 1, 1, 3, micro=4), Grid(1, 2, 1, 0),
    Grid(2, 1, 1, 2, "interleaved"),
]  # fmt: skip


def test_a_checkpoint_loads_at_any_other_grid(ranks: Callable, tmp_path: Path) -> None:
    there = united([now for now, _ in ranks(saved, 4, str(tmp_path), FROM)])
    for grid in TO:
        agree(ranks(resumed, grid.world, str(tmp_path), grid), there)


ACROSS = [
    (Grid(2, 1, 1, 3), Grid(1, 1, 1, 1)),
    (Grid(1, 1, 1, 3), Grid(2, 1, 2, 2, "zbv")),
    (Grid(2, 1, 2, 1), Grid(4, 1, 1, 3, micro=4)),
]


@pytest.mark.parametrize(("before", "after"), ACROSS, ids=str)
def test_the_optimizer_goes_on_at_another_grid(ranks: Callable, tmp_path: Path, before: Grid, after: Grid) -> None:
    """Within 1e-10 of what one run would have been; tensor parallelism and micro-batches round in another order."""
    ranks(saved, before.world, str(tmp_path), before)
    wanted = united([then for _, then in ranks(saved, after.world, str(tmp_path / "own"), after)])
    for each in ranks(resumed, after.world, str(tmp_path), after):
        for name, value in each["after"].items():
            far = (value - torch.frombuffer(bytearray(wanted[name]), dtype=torch.float64).view(value.shape)).abs().max()
            assert float(far) < 1e-10, name


def through(folder: str, grid: Grid, asynchronous: bool) -> bool:
    _, after = saved(folder, grid, asynchronous)
    return bits(resumed(folder, grid)["after"]) == after


SAME = [(Grid(2, 1, 2, 3), True), (Grid(2, 2, 1, 2, "zbv"), False)]


@pytest.mark.parametrize(("grid", "asynchronous"), SAME, ids=str)
def test_a_resumed_run_goes_on_in_the_same_bits(
    ranks: Callable, tmp_path: Path, grid: Grid, asynchronous: bool
) -> None:
    assert ranks(through, 4, str(tmp_path), grid, asynchronous) == [True] * 4


def manifest_of(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("step-*/manifest.json")
    return json.loads(path.read_bytes())["manifest"]


def test_a_tied_parameter_is_stored_once_and_groups_are_one(ranks: Callable, tmp_path: Path) -> None:
    ranks(saved, 4, str(tmp_path), FROM)
    found = manifest_of(tmp_path)
    names = [tensor["name"] for tensor in found["tensors"] if tensor["role"] == "param"]
    assert sorted(names) == sorted(name for name, _ in made().named_parameters())
    assert found["state"]["aliases"] == {"head.weight": "embed.weight"}
    [optimizer] = found["state"]["optimizers"]
    assert [sorted(group["params"]) for group in optimizer["groups"]] == [
        sorted(name for name in names if ("blocks" in name) is inside) for inside in (False, True)
    ]
    assert found["state"]["stages"] == [2, 2] and found["state"]["divided"] == [1, 2]


# ---- one model in, one model out


def exported(folder: str, grid: Grid) -> dict[str, bytes]:
    run = Run(grid)
    run.train(0)
    zeor.export(run.modules[0], folder)
    zeor.export(run.model, folder + "-bf16", dtype="bf16", max_file=4096)
    return bits(run.values())


@pytest.mark.parametrize("grid", [Grid(2, 1, 2, 3), Grid(2, 2, 1, 3, "zbv")], ids=str)
def test_all_stages_are_exported_as_one_model(ranks: Callable, tmp_path: Path, grid: Grid) -> None:
    there = united(ranks(exported, 4, str(tmp_path / "out"), grid))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {name for name, _ in made().named_parameters()}
    assert bits(found) == {name: there[name] for name in found}
    short = {}
    for file in (tmp_path / "out-bf16").glob("*.safetensors"):
        short |= load_file(file)
    assert bits({name: value.bfloat16().view(torch.int16) for name, value in found.items()}) == bits(
        {name: value.view(torch.int16) for name, value in short.items()}
    )
    plain = made()
    plain.load_state_dict(found, strict=False)
    assert differs({name: value.detach() for name, value in plain.named_parameters()}, found) == 0


def from_files(folder: str, grid: Grid) -> tuple[dict[str, bytes], list[float]]:
    run = Run(grid, meta=True)
    zeor.load_pretrained(run.model, folder)
    return bits(run.values()), run.train(0, 1)


@pytest.mark.parametrize("grid", [Grid(2, 1, 2, 3), Grid(2, 2, 1, 1, "interleaved"), Grid(1, 2, 2, 3)], ids=str)
def test_a_folder_goes_straight_into_stages_on_the_meta_device(ranks: Callable, tmp_path: Path, grid: Grid) -> None:
    whole = {name: value.detach() for name, value in made().named_parameters()}
    save_file(whole, tmp_path / "model.safetensors")
    _, norms = reference(grid.dp, 2)
    for found, theirs in ranks(from_files, 4, str(tmp_path), grid):
        assert found.items() <= bits({**whole, "head.weight": whole["embed.weight"]}).items()
        assert max(abs(a - b) for a, b in zip(norms, theirs, strict=True)) < 1e-10


# ---- names


class Half(nn.Module):
    """A stage with names of its own, which begin anew, and a buffer."""

    def __init__(self, number: int, marks: tuple[float, float] = (1.0, 1.0)):
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.register_buffer("mark", torch.tensor([marks[number]]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.mark


def halves(marks: tuple[float, float] = (1.0, 1.0), names: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    mesh = new_mesh(Grid(2, 1, 1))
    rank = mesh.get_local_rank("pp")
    stage = Half(rank, marks)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    zeor.shard(stage, optimizer, mesh=mesh["dp"])
    piped = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = schedules.ScheduleGPipe(piped, 2, loss_fn=loss_of)
    zeor.pipeline(schedule, tied=[], names=names, **options)
    return stage, optimizer


def by_layer(stage: int, name: str) -> str:
    """As an nn.Sequential of all layers would call them."""
    kind, _, rest = name.partition(".")
    if kind != "layers":
        return name
    number, _, attr = rest.partition(".")
    return f"{2 * stage + int(number)}.{attr}"


def text_of(do: Callable[[], Any]) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def named(folder: str) -> dict[str, str]:
    stage, optimizer = halves(names=by_layer)
    zeor.save(folder, stage, optimizer, step=1)
    local, its = halves()
    other, _ = halves(marks=(1.0, 2.0), names=by_layer)
    wrong, _ = halves(names=lambda stage, name: 7)
    rank = torch.distributed.get_rank()
    return {
        "local names": text_of(lambda: zeor.save(folder, local, its, step=2)),
        "local load": text_of(lambda: zeor.load(folder, local, its)),
        "buffers": text_of(lambda: zeor.save(folder, other, step=2)),
        "no name": text_of(lambda: zeor.save(folder, wrong, step=2)),
        "folders": text_of(lambda: zeor.save(f"{folder}/{rank}", stage, optimizer, step=2)),
    }


SAID = {
    "local names": "ValueError: 'layers.0.weight' is one tensor beside stage 0 of the pipeline and another beside",
    "local load": "ValueError: 'layers.0.weight' is one tensor",
    "buffers": "ValueError: 'mark' is one tensor beside stage 0 of the pipeline and another beside stage 1",
    "no name": "TypeError: names(",
    "folders": "ValueError: The ranks' folders and optimizers, which are one for all stages, differ: rank 0 has ",
}


def test_names_of_stages_become_those_of_the_model(ranks: Callable, tmp_path: Path) -> None:
    for found in ranks(named, 2, str(tmp_path)):
        assert found.keys() == SAID.keys()
        assert all(found[what].startswith(text) for what, text in SAID.items()), found
    zeor.export(tmp_path, tmp_path / "out")
    whole = load_file(tmp_path / "out" / "model.safetensors")
    assert whole.pop("mark").tolist() == [1.0]
    plain = nn.Sequential(*(layer for number in (0, 1) for layer in Half(number).layers))
    assert bits(whole) == bits(plain.state_dict())


def apart() -> str:
    """Two stages of a rank that were sharded each by itself."""
    mesh = new_mesh(Grid(2, 1, 1))
    rank = mesh.get_local_rank("pp")
    modules = [Half(0), Half(1)]
    for module in modules:
        zeor.shard(module, torch.optim.SGD(module.parameters(), lr=0.1), mesh=mesh["dp"])
    group = mesh["pp"].get_group()
    stages = [PipelineStage(m, rank + 2 * n, 4, torch.device("cpu"), group=group) for n, m in enumerate(modules)]
    zeor.pipeline(schedules.ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_of), tied=[])
    return text_of(lambda: zeor.save("nowhere", modules[0], step=1))


def test_stages_that_were_sharded_apart_are_refused(ranks: Callable) -> None:
    for found in ranks(apart, 2):
        assert found.startswith("ValueError: Stages [") and "nn.ModuleList" in found


# ---- wires: each stage has its own


class Uneven:
    """The first stage is so small that nothing of its gradients stays behind."""

    def __init__(self, wire: Any):
        mesh = new_mesh(Grid(2, 2, 1))
        self.rank, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
        torch.manual_seed(self.rank)
        self.stage = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8)) if self.rank else nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=0.1)
        zeor.shard(self.stage, self.optimizer, mesh=mesh["dp"], stage=2, keep_whole=64, wire=wire)
        piped = PipelineStage(self.stage, self.rank, 2, torch.device("cpu"), group=group)
        self.schedule = schedules.ScheduleGPipe(
            piped, 2, loss_fn=lambda found, wanted: (found - wanted).square().mean()
        )
        zeor.pipeline(self.schedule, names=lambda stage, name: f"{stage}.{name}")

    def train(self, steps: int) -> None:
        for _ in range(steps):
            given = {"target": torch.ones(4, 8)} if self.rank else {}
            self.schedule.step(*(() if self.rank else (torch.randn(4, 8),)), **given)
            self.optimizer.step()
            self.optimizer.zero_grad()


def left_by_stage(folder: str) -> tuple[int, list[bool]]:
    run, then = Uneven(zeor.TopK(0.1)), Uneven(zeor.TopK(0.1))
    run.train(1)
    zeor.save(folder, run.stage, run.optimizer, step=1)
    zeor.load(folder, then.stage, then.optimizer)
    slots = state_of(then.stage).engine.slots
    left = [
        bool(slot.lane.grads.flushed(each).any())
        for slot in slots
        for each in slot.lane.layout.segments_in(slot.lane.fine)
    ]
    return run.rank, left


def test_what_is_left_of_gradients_of_a_later_stage_alone(ranks: Callable, tmp_path: Path) -> None:
    for stage, left in ranks(left_by_stage, 4, str(tmp_path)):
        assert any(left) == bool(stage)


def chosen_by_stage(folder: str) -> tuple[int, str, str]:
    run, then = Uneven("auto"), Uneven("auto")
    with measuring(lambda: 0.9 if run.rank else 0.0):
        run.train(AFTER)
        zeor.save(folder, run.stage, run.optimizer, step=AFTER)
        zeor.load(folder, then.stage, then.optimizer)
    before, after = (state_of(each.stage).engine.feature(AutoWire) for each in (run, then))
    assert before.decided and after.decided
    return run.rank, before.wire, after.wire


def test_each_stage_goes_on_by_the_wire_that_it_chose(ranks: Callable, tmp_path: Path) -> None:
    for stage, before, after in ranks(chosen_by_stage, 4, str(tmp_path)):
        assert before == after and (before.reduce == "exact") is (stage == 0)
