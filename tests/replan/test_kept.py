"""What a user holds of a running job is his own, and goes on, when its plan changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import offloads
from tests.features import test_fp8 as in_8_bits
from tests.features.test_nonfinite import logged
from tests.loops import assert_equal
from tests.parity.models import Setting, placed
from tests.parity.test_axes import muon


def as_options(plan: dict[str, Any]) -> dict[str, Any]:
    """A pair of stages stands for the mesh 2 x 2; any other stage for one axis."""
    if isinstance(plan.get("stage"), tuple):
        return {**plan, **placed(Setting(plan["stage"], shape=(2, 2)))}
    return {**plan, "mesh": None}


# ---- optimizers, worlds and weights of other kinds


def in_turn(folder: str, make: Callable, plans: list[dict[str, Any]]) -> None:
    """One job that changes its plan again and again; each time it is what a job is that loads its checkpoint."""
    options = as_options(plans[0])
    model, optimizers = offloads.made(make, **options)
    for number, plan in enumerate(plans[1:]):
        offloads.one_step(model, optimizers, 3 * number, "plain")
        zeor.save(folder, model, optimizers, step=number, keep=1)
        changes = as_options(plan)
        zeor.replan(model, optimizers, **changes)
        options = {**options, **changes}
        other, others = offloads.made(make, **options)
        zeor.load(folder, other, others)
        for step in (3 * number + 1, 3 * number + 2):
            mine, theirs = (offloads.one_step(*each, step, "plain") for each in ((model, optimizers), (other, others)))
            assert mine == theirs, (number, step)
        offloads.same(offloads.left(model), offloads.left(other), (number, plan))


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("make", [muon, adafactor])
def test_matrices_of_owners_travel(ranks: Callable, tmp_path: Path, make: Callable) -> None:
    plans = [{"stage": 3}, {"stage": 0}, {"stage": (3, 1)}, {"stage": 1}, {"stage": (3, 3)}]
    ranks(in_turn, 4, str(tmp_path), make, plans)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_worlds(ranks: Callable, tmp_path: Path, world: int) -> None:
    plans = [
        {"stage": 2, "precision": "bf16"},
        {"stage": 3, "offload": "host"},
        {"offload": None, "keep_whole": 0},
        {"stage": 0, "precision": "fp32", "delay": 1},
        {"delay": 0, "stage": 1, "release": True},
    ]
    ranks(in_turn, world, str(tmp_path), offloads.adamw, plans)


def in_and_out_of_fp8(folder: str) -> None:
    options: dict[str, Any] = {"stage": 3, "precision": "bf16"}
    model, optimizer = in_8_bits.make(**options)
    classes = {name: type(module) for name, module in model.named_modules()}
    for number, change in enumerate(({"precision": "fp8"}, {"stage": 1}, {"precision": "bf16", "stage": 3})):
        in_8_bits.steps(model, optimizer)
        zeor.save(folder, model, optimizer, step=number, keep=1)
        options |= change
        zeor.replan(model, optimizer, **change)
        other, its = in_8_bits.make(**options)
        zeor.load(folder, other, its)
        assert in_8_bits.steps(model, optimizer) == in_8_bits.steps(other, its), change
        assert_equal(in_8_bits.full(model), in_8_bits.full(other))
        assert zeor.report(model)["compute"] == zeor.report(other)["compute"]
        eight = sum(type(module) is not classes[name] for name, module in model.named_modules())
        assert (eight > 0) is (options["precision"] == "fp8")


def test_linears_take_up_8_bits_and_leave_them(ranks: Callable, tmp_path: Path) -> None:
    ranks(in_and_out_of_fp8, 2, str(tmp_path))


# ---- everything around the parameters


class Net(nn.Module):
    """With buffers that training changes, dropout, and a part that is frozen from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48))
        self.frozen, self.head = nn.Linear(48, 48), nn.Linear(48, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.body(x)))


class Job:
    """As a user writes one: a schedule and an average beside the optimizer, hooks, a scaler of gradients."""

    def __init__(self, **options: Any):
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.called: list[str] = []
        self.model.head.weight.register_post_accumulate_grad_hook(lambda param: self.called.append("before"))
        zeor.shard(self.model, self.optimizer, **options)
        self.average = zeor.ema(self.model, 0.9, optimizer=self.optimizer)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)  # after: it wraps step()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.model.head.weight.register_post_accumulate_grad_hook(lambda param: self.called.append("after"))
        self.model.head.register_forward_hook(lambda *_: self.called.append("forward"))
        self.optimizer.register_step_pre_hook(lambda *_: self.called.append("step"))

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x, y = torch.randn(12, 8, generator=generator), torch.randn(12, 1, generator=generator)
        loss = (self.model(x).float() - y).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()

    @property
    def extra(self) -> dict[str, Any]:
        return {"average": self.average, "schedule": self.schedule, "scaler": self.scaler}

    def all(self) -> dict[str, Any]:
        found = {**offloads.left(self.model), **{n: b.clone() for n, b in self.model.named_buffers()}}
        with self.average.applied(), zeor.full_params(self.model):
            found |= {f"average of {name}": param.detach().clone() for name, param in self.model.named_parameters()}
        return {**found, "lr": self.optimizer.param_groups[0]["lr"], "scale": self.scaler.get_scale()}


def seeds(number: int) -> None:
    torch.manual_seed(number + dist.get_rank())
    random.seed(number)
    np.random.seed(number)


def numbers() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def keep_everything(folder: str) -> None:
    old, new = as_options({"stage": (3, 1), "precision": "bf16"}), as_options({"stage": 2, "precision": "fp32"})
    job = Job(**old)
    seeds(5)
    for step in range(3):
        job.step(step)
    job.model.body[4].requires_grad_(False)  # it keeps its state, and may train on
    zeor.save(folder, job.model, job.optimizer, step=3, extra=job.extra)
    held = dict(job.model.named_parameters()), job.optimizer.param_groups, zeor.traffic(job.model)["bytes_sent"]

    assert zeor.replan(job.model, job.optimizer, **new) == (job.model, job.optimizer)
    assert zeor.traffic(job.model)["bytes_sent"] >= held[2] > 0
    assert all(param is held[0][name] for name, param in job.model.named_parameters())
    assert all(group is before for group, before in zip(job.optimizer.param_groups, held[1], strict=True))
    assert not any(param.requires_grad for param in job.model.body[4].parameters())
    job.model.body[4].requires_grad_(True)

    other = Job(**new)
    zeor.load(folder, other.model, other.optimizer, extra=other.extra)
    drawn = numbers()
    zeor.load(folder, other.model, other.optimizer, extra=other.extra)
    assert numbers() == drawn  # those of the checkpoint, which replan has not touched
    offloads.same(job.all(), other.all(), "at once")
    for run in (job, other):
        run.called.clear()
        seeds(6)
        run.losses = [run.step(step) for step in range(3, 6)]
    assert job.losses == other.losses
    offloads.same(job.all(), other.all(), "later")
    once = ["forward", "before", "after", "step"]
    assert job.called == once * 3, job.called
    zeor.save(folder, job.model, job.optimizer, step=6, extra=job.extra)


def test_everything_around_the_parameters_is_kept(ranks: Callable, tmp_path: Path) -> None:
    ranks(keep_everything, 4, str(tmp_path))


def random_numbers_and_data() -> None:
    data = zeor.data.shard(torch.utils.data.TensorDataset(torch.arange(64.0)), shuffle=True, seed=1)
    model, optimizers = offloads.made(stage=3)
    loader = iter(torch.utils.data.DataLoader(data, batch_size=4) if not hasattr(data, "__iter__") else data)
    seen = [next(loader) for _ in range(2)]
    seeds(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    position = data.state_dict() if hasattr(data, "state_dict") else None
    zeor.replan(model, optimizers, stage=1)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert position is None or data.state_dict() == position
    assert seen


def test_random_generators_and_loaders_stand_where_they_stood(ranks: Callable) -> None:
    ranks(random_numbers_and_data, 2)


def methods_of_a_model() -> None:
    replanned, optimizers = offloads.made(stage=1)
    zeor.replan(replanned, optimizers, stage=3)
    other, others = offloads.made(stage=3)
    for model, its in ((replanned, optimizers), (other, others)):
        with model.no_sync():
            offloads.loss_of(model, 1).backward()
        offloads.one_step(model, its, 0, "plain")
    offloads.same(offloads.left(replanned), offloads.left(other))
    zeor.replan(replanned, optimizers, release=True)
    assert replanned.no_sync.func is zeor.accumulate
    zeor.unshard(replanned, optimizers)
    assert not hasattr(replanned, "no_sync")


def test_what_a_model_answers_by_itself_is_kept(ranks: Callable) -> None:
    ranks(methods_of_a_model, 2)


def list_of_stages() -> None:
    def made(**options: Any) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.ModuleList([nn.Linear(40, 40), nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))])
        return zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)

    replanned, other = made(stage=1), made(stage=3)
    zeor.replan(*replanned, stage=3)
    for model, optimizer in (replanned, other):
        for step in range(2):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
            model[1](model[0](x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    offloads.same(offloads.left(replanned[0]), offloads.left(other[0]))


def test_modules_of_a_list_are_still_called_one_by_one(ranks: Callable) -> None:
    ranks(list_of_stages, 2)


def gradient_that_is_not_finite() -> None:
    model, optimizers = offloads.made(stage=2)
    with logged() as told:
        offloads.one_step(model, optimizers, 0, "plain")
        loss = offloads.loss_of(model, 1)
        (loss * math.nan if dist.get_rank() == 1 else loss).backward()
        optimizers[0].step()
        model.zero_grad()
        zeor.replan(model, optimizers, stage=3)
        assert not told  # what a rank has found is told with the next backward
        offloads.loss_of(model, 2).backward()
    assert ["Step 2: " in text for text in told] == [True] * (dist.get_rank() == 0)


def test_what_is_still_to_be_told_of_a_step_is_told(ranks: Callable) -> None:
    ranks(gradient_that_is_not_finite, 2)


class Sided(offloads.Net):
    """With a unit that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(offloads.WIDTH, 60)


def unit_that_is_not_used(release: bool) -> None:
    model = Sided()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer, stage=2, release=release)
    offloads.one_step(model, [optimizer], 0, "plain")
    assert zeor.report(model)["grad"] == 0  # nor is anything kept for it until the next backward
    zeor.park(model, optimizer)
    zeor.unpark(model, optimizer)
    zeor.replan(model, optimizer, stage=3)


@pytest.mark.parametrize("release", [False, True])
def test_a_unit_that_the_last_step_did_not_use_is_no_gradient(ranks: Callable, release: bool) -> None:
    ranks(unit_that_is_not_used, 2, release)


# ---- parameters that have no values yet, and those without an optimizer


def without_values() -> None:
    def empty() -> tuple[nn.Module, torch.optim.Optimizer]:
        with zeor.on_meta():
            model = nn.Sequential(nn.Linear(offloads.WIDTH, 60), nn.Tanh(), nn.Linear(60, offloads.OUT))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = zeor.shard(*empty(), stage=3)
    zeor.replan(model, optimizer, stage=1)
    with pytest.raises(RuntimeError, match="has no values yet"):
        offloads.loss_of(model, 0)
    other, its = zeor.shard(*empty(), stage=1)
    for each in ((model, [optimizer]), (other, [its])):
        zeor.init_parameters(each[0], seed=4)
        offloads.one_step(*each, 0, "plain")
    offloads.same(offloads.left(model), offloads.left(other), "filled later")


def test_a_model_without_values_stays_one(ranks: Callable) -> None:
    ranks(without_values, 2)


def only_evaluated() -> None:
    model = offloads.net()
    zeor.shard(model, stage=3)
    with torch.no_grad():
        wanted = offloads.loss_of(model, 0)
        assert zeor.replan(model, stage=0, precision="fp32") is model
        assert torch.equal(offloads.loss_of(model, 0), wanted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer)
    offloads.one_step(model, [optimizer], 0, "plain")
    assert zeor.replan(model, [optimizer], stage=3) == (model, [optimizer])
    plain, its = zeor.unshard(model, optimizer)
    fresh = offloads.net()
    other = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    zeor.shard(fresh, other, stage=3)
    offloads.one_step(fresh, [other], 0, "plain")
    zeor.unshard(fresh, other)
    assert_equal(dict(plain.named_parameters()), dict(fresh.named_parameters()))
    assert its is optimizer and type(plain.head.weight) is nn.Parameter


def test_a_model_without_an_optimizer(ranks: Callable) -> None:
    ranks(only_evaluated, 2)


def graph_and_memory() -> None:
    model, optimizers = offloads.made(stage=3)
    offloads.one_step(model, optimizers, 0, "plain")
    loss = offloads.loss_of(model, 1)
    zeor.replan(model, optimizers, stage=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    offloads.one_step(model, optimizers, 1, "plain")


def test_a_graph_from_before_is_refused(ranks: Callable) -> None:
    ranks(graph_and_memory, 2)
