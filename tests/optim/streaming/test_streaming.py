"""Updates that go chunk by chunk: every optimizer that may, in the bits of its own step; what may not says so.

The reference is the same run without offload, which tests/optim compares with plain PyTorch.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zeor
from tests import offloads
from tests.offloads import CHUNK, adamw, left, made, one_step, run, same
from zeor import Offload
from zeor.access.sharded import state_of

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ASGD": ("ASGD", {"lr": 0.1, "t0": 1}),
    "Adadelta": ("Adadelta", {"weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adagrad fused": ("Adagrad", {"lr": 0.1, "fused": True}),
    "Adam amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "Adam foreach": ("Adam", {"lr": 0.01, "foreach": True, "maximize": True}),
    "Adam tensor lr": ("Adam", {"lr": torch.tensor(0.01)}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "Adamax": ("Adamax", {"lr": 0.01}),
    "NAdam": ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ("RAdam", {"lr": 0.01, "betas": (0.9, 0.9)}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "Rprop": ("Rprop", {}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD momentum nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": True}),
}


def by_name(name: str, model: nn.Module) -> Optimizer:
    cls, settings = OPTIMIZERS[name]
    copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
    return getattr(torch.optim, cls)(model.parameters(), **copied)


def check_optimizers(names: list[str], offload: Offload, options: dict[str, Any]) -> int:
    for name in names:
        steps = 7 if name == "RAdam" else 3  # it changes its arithmetic at the sixth
        runs = [
            run(lambda model: by_name(name, model), steps=steps, offload=each, loop="clip", **options)  # noqa: B023
            for each in (None, offload)
        ]
        same(runs[1], runs[0], name)
    return len(names)


@pytest.mark.long
def test_every_optimizer_takes_its_own_step_chunk_by_chunk(ranks):
    offload = Offload(chunk=CHUNK)
    assert ranks(check_optimizers, 2, list(OPTIMIZERS), offload, {"stage": 3, "precision": "bf16"}) == [17, 17]


def test_on_the_host_every_optimizer_takes_its_own_step_or_the_fused_one(ranks):
    names = [name for name, (cls, _) in OPTIMIZERS.items() if cls not in HAVE_FUSED or name.endswith(" fused")]
    offload = Offload(update="host", chunk=CHUNK)
    assert ranks(check_optimizers, 2, names, offload, {"stage": 2, "precision": None}) == [len(names)] * 2


HAVE_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")  # which an update on the host uses, asked or not


# ---- groups, settings, several optimizers


def two_groups(model: nn.Module) -> Optimizer:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02}], lr=0.01)


def one_group_tensor_lr(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))  # schedulers write into it


def check_scheduled(make: Any, offload: Offload | None) -> dict[str, Any]:
    """A scheduler changes the settings at once after step(), while an update may still be under way."""
    model, (optimizer,) = made(make, stage=2, offload=offload)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        one_step(model, [optimizer], step, "plain")
        scheduler.step()
        for group in optimizer.param_groups:
            group["weight_decay"] += 0.1
    return left(model)


def check_groups(path: str) -> None:
    for make in (two_groups, one_group_tensor_lr):
        wanted = check_scheduled(make, None)
        for offload in (Offload(chunk=CHUNK), Offload("disk", "host", folder=path, chunk=CHUNK)):
            same(check_scheduled(make, offload), wanted, make.__name__)


def test_groups_keep_their_settings_and_schedulers_their_step(ranks, tmp_path):
    ranks(check_groups, 2, str(tmp_path))


def check_late(path: str | None) -> dict[str, Any]:
    """The thread that updates begins only after a scheduler has written into the learning rate."""
    offload = Offload("disk", "disk", folder=path, chunk=CHUNK) if path else None
    model, (optimizer,) = made(one_group_tensor_lr, stage=3, offload=offload)
    streaming = state_of(model).steppers[0].streaming
    for step in range(3):
        offloads.loss_of(model, step).backward()
        changed = threading.Event()
        if streaming is not None:
            streaming._submit(changed.wait)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"].mul_(0.5)
        changed.set()
    return left(model)


def check_all_late(path: str) -> None:
    same(check_late(path), check_late(None))


def test_an_update_under_way_keeps_the_settings_and_gradients_of_its_step(ranks, tmp_path):
    ranks(check_all_late, 2, str(tmp_path), timeout=60)


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [param for name, param in model.named_parameters() if param.dim() == 2 and "blocks" in name]
    taken = {id(param) for param in matrices}
    others = [param for param in model.parameters() if id(param) not in taken]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def check_muon(path: str) -> None:
    for stage in (1, 3):
        wanted = run(muon_and_adamw, stage=stage, loop="clip")
        for offload in (Offload(chunk=CHUNK), Offload("disk", "disk", folder=path, chunk=CHUNK)):
            same(run(muon_and_adamw, stage=stage, loop="clip", offload=offload), wanted, stage)


def test_muons_matrices_go_to_their_owners_beside_adamws_chunks(ranks, tmp_path):
    ranks(check_muon, 2, str(tmp_path))


class Counting(torch.optim.SGD):
    """A counter in its group, that grows at each call."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["calls"])


def check_refused(options: dict[str, Any]) -> str:
    model = offloads.net()
    with pytest.raises(ValueError) as caught:
        zeor.shard(model, Counting(model.parameters(), lr=0.1), **options)
    return str(caught.value)


def test_an_optimizer_with_counters_of_its_groups_is_refused(ranks):
    wanted = (
        "Counting keeps counters for all parameters together, so it cannot be called for some of them at a time, as "
        "offload=, moments= and delay= need; leave those out."
    )
    for options in ({"offload": "host"}, {"moments": "int8"}, {"delay": 1}):
        assert ranks(check_refused, 2, options) == [wanted] * 2
    wanted = (
        "Counting keeps counters for all parameters together, so it cannot update unit by unit inside backward; leave "
        "out release=True."
    )
    assert ranks(check_refused, 2, {"release": True}) == [wanted] * 2


# ---- loss scaling


def check_scaler(offload: Offload | None, moments: str, fused: bool) -> dict[str, Any]:
    model, (optimizer,) = made(
        lambda model: adamw(model, fused=fused), stage=3, precision="fp16", offload=offload, moments=moments
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        loss = offloads.loss_of(model, step)
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        if not fused:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {**left(model), "scale": scaler.get_scale()}


def check_scalers(path: str) -> None:
    for fused in (False, True):
        for moments in ("exact", "int8"):
            wanted = check_scaler(None, moments, fused)
            assert wanted["scale"] == 1024.0, "one step of four was skipped"
            for offload in (Offload(chunk=CHUNK), Offload("disk", "disk", "host", folder=path, chunk=CHUNK)):
                same(check_scaler(offload, moments, fused), wanted, (fused, moments))


def test_gradscaler_skips_and_scales_as_without_offload(ranks, tmp_path):
    ranks(check_scalers, 2, str(tmp_path))


# ---- what the user sees of gradients


def check_gradients(offload: Offload | None) -> dict[str, Any]:
    """Read, change, drop and replace gradients between backward and step, which brings them back where they rest."""
    model, (optimizer,) = made(stage=2, offload=offload)
    params = dict(model.named_parameters())
    found: dict[str, Any] = {}
    for step in range(3):
        offloads.loss_of(model, step).backward()
        found[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=1.0 + step).item()
        params["head.weight"].grad.mul_(0.5)
        params["head.bias"].grad = None
        params["blocks.1.up.weight"].grad.clamp_(-1e-3, 1e-3)
        if step == 1:
            offloads.loss_of(model, 10 + step).backward()
        with zeor.full_params(model, grads=True):
            found.update({f"{step} {k}": p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return {**found, **left(model)}


def check_all_gradients(path: str) -> None:
    wanted = check_gradients(None)
    for state in ("host", "disk"):
        for grads in ("device", "host", "disk"):
            same(check_gradients(Offload(state, state, grads, folder=path, chunk=CHUNK)), wanted, (state, grads))


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_at_rest_can_be_read_changed_and_dropped(ranks, tmp_path, world):
    ranks(check_all_gradients, world, str(tmp_path))


# ---- a disk that fails


def check_failing(path: str, stage: int) -> tuple[list[str], list[str]]:
    """(what forward, step and save say after a write has failed, what was saved)"""
    offload = Offload("disk", "disk", folder=f"{path}/offload", chunk=CHUNK)
    model, (optimizer,) = made(stage=stage, precision="bf16", offload=offload)
    one_step(model, [optimizer], 0, "plain")
    left(model)  # nothing is under way
    offloads.loss_of(model, 1).backward()
    written, real = [], os.pwritev

    def fails(descriptor: int, parts: Any, position: int) -> int:
        written.append(position)
        if len(written) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, parts, position)

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", fails)
        try:
            optimizer.step()
            state_of(model).engine.drain()
        except RuntimeError as error:
            said.append(str(error))
    for call in (
        lambda: offloads.loss_of(model, 2),
        lambda: zeor.save(f"{path}/checkpoints", model, optimizer, step=1),
        lambda: left(model),
    ):
        with pytest.raises(RuntimeError) as caught:  # somebody who went on all the same
            call()
        said.append(str(caught.value))
    return said, os.listdir(f"{path}/checkpoints") if os.path.isdir(f"{path}/checkpoints") else []


@pytest.mark.parametrize("stage", [2, 3])
def test_after_a_write_has_failed_nothing_goes_on_with_torn_state(ranks, tmp_path, stage):
    ((said, saved),) = ranks(check_failing, 1, str(tmp_path), stage)
    assert len(said) == 4 and saved == []
    for text in said:
        assert "could not be written at byte" in text and "the disk has failed there" in text, said
        assert "restart from the last checkpoint" in text


# ---- where things are


def check_resting() -> list[dict[str, Any]]:
    model, (optimizer,) = made(stage=3, precision="bf16", offload=Offload(chunk=CHUNK))
    one_step(model, [optimizer], 0, "plain")
    state = state_of(model)
    lanes = [lane for unit in state.engine.units for lane in unit.lanes]
    own = [value for mine in optimizer.state.values() for value in mine.values()]
    assert all(value.dim() == 0 for value in own), "only counters stay in the optimizer"
    moments = state.steppers[0].streaming.moments
    assert sum(not lane.segments for lane in lanes) <= 1, "a rank may have no part of the root's one number"
    return [
        {
            "master": lane.master.format,
            "remainder": lane.master.remainder.tier,
            "compute": lane.master.compute.tier,
            "moments": {name: moment.codes.tier for name, moment in moments.of(lane).items()},
        }
        for lane in lanes
        if lane.segments
    ]


def test_between_steps_state_is_where_it_was_asked_to_be(ranks):
    wanted = {"master": "split", "remainder": "host", "compute": "device"}
    for found in ranks(check_resting, 2):
        assert len(found) >= 3
        for lane in found:
            assert lane == {**wanted, "moments": {"exp_avg": "host", "exp_avg_sq": "host"}}


def check_fractions() -> dict[str, list[int]]:
    halves = Offload({"device": 0.5, "host": 0.5}, {"device": 0.25, "host": 0.75}, chunk=CHUNK)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(16)))
    zeor.shard(model, torch.optim.AdamW(model.parameters()), stage=2, offload=halves)
    lanes = [lane for unit in state_of(model).engine.units for lane in unit.lanes]
    return {
        role: [sum(lane.layout.numel for lane in lanes if getattr(lane.rest.tiers, role) == tier) for tier in where]
        for role, where in (("moments", ("device", "host")), ("master", ("device", "host")))
    }


def test_fractions_are_kept_by_whole_lanes(ranks):
    for found in ranks(check_fractions, 2):
        total = 16 * 72
        assert found == {"moments": [total // 2, total // 2], "master": [total // 4, 3 * total // 4]}
