"""delay=1: the forward of a step reads what the update before the last left, and nothing else changes.

The reference is a plain loop in which that is written out. The masters, which full_params shows and a checkpoint
holds, are those of the last update.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests import offloads
from tests.offloads import CHUNK, adamw, left, loss_of, made, one_step, run, same
from zeor import Offload

STEPS = 5


def reference(make: Any, clip: bool) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """(weights after the last update, losses, the same loop's without delay)."""
    model = offloads.net()
    optimizer = make(model)
    newest = [param.detach().clone() for param in model.parameters()]
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)  # with what the update before the last left
        loss.backward()
        losses.append(loss.item())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen = newest
        put(model, newest)
        optimizer.step()
        newest = [param.detach().clone() for param in model.parameters()]
        put(model, seen)
        optimizer.zero_grad()
    put(model, newest)
    at_once = offloads.net()
    plain_optimizer = make(at_once)
    plain = [one_step(at_once, [plain_optimizer], step, "clip" if clip else "plain") for step in range(STEPS)]
    return {name: param.detach().clone() for name, param in model.named_parameters()}, losses, plain


@torch.no_grad()
def put(model: nn.Module, values: list[torch.Tensor]) -> None:
    for param, value in zip(model.parameters(), values):
        param.copy_(value)


MAKERS = {
    "AdamW": adamw,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


def check_reference(stage: int) -> None:
    for name, make in MAKERS.items():
        for clip in (False, True):
            weights, losses, plain = reference(make, clip)
            assert losses[:2] != plain[:2] or losses[2:] != plain[2:], "it is not the plain loop"
            found = run(make, stage=stage, delay=1, steps=STEPS, loop="clip" if clip else "plain")
            assert found["losses"].tolist() == torch.tensor(losses).tolist(), (name, clip)
            for key, value in weights.items():
                if clip:  # one process sums a norm in another order
                    torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(found[key], value), (name, key)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_alone_it_equals_a_plain_loop_with_the_delay_written_out(ranks, stage):
    ranks(check_reference, 1, stage)


def check_stages(path: str) -> None:
    for precision in (None, "bf16"):
        whole = {}
        for stage in (0, 1, 2, 3):
            options = {"stage": stage, "precision": precision, "delay": 1, "steps": 4}
            wanted = run(loop="clip", **options)
            whole[stage] = {name: value for name, value in wanted.items() if "/" not in name}
            same(whole[stage], whole[0], (precision, stage))
            where = Offload("disk", "host", folder=path, chunk=CHUNK) if stage % 2 else Offload(chunk=CHUNK)
            same(run(loop="clip", offload=where, **options), wanted, (precision, stage, "offload"))
        away = Offload(compute="host", chunk=CHUNK)
        same(run(loop="clip", offload=away, **options), wanted, (precision, "compute on the host"))


def test_stages_and_places_are_the_same_bits(ranks, tmp_path):
    ranks(check_stages, 2, str(tmp_path))


def check_loops() -> None:
    for loop in ("backwards", "no_sync", "accumulate"):
        wanted = run(stage=0, delay=1, loop=loop)
        found = run(stage=3, delay=1, loop=loop, offload=Offload(chunk=CHUNK))
        same(*({k: v for k, v in each.items() if "/" not in k} for each in (found, wanted)), loop)


def test_so_are_loops_that_accumulate(ranks):
    ranks(check_loops, 2)


def check_small() -> None:
    for moments in ("bf16", "int8"):
        options = {"stage": 2, "delay": 1, "moments": moments, "steps": 4}
        same(run(offload=Offload(chunk=CHUNK), **options), run(**options), moments)


def test_so_are_small_formats(ranks):
    ranks(check_small, 2)


# ---- what others see


def check_seen(stage: int) -> None:
    """full_params and an average see the last update; forward the one before. A write is seen by both at once."""
    model, (optimizer,) = made(stage=stage, delay=1)
    before = left(model)
    one_step(model, [optimizer], 0, "plain")
    after = left(model)
    assert not torch.equal(before["head.weight"], after["head.weight"])
    with torch.no_grad():
        loss = loss_of(model, 9).item()
        twin = offloads.net()
        assert loss == loss_of(twin, 9).item(), "forward still reads the first weights"
    with zeor.full_params(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    with torch.no_grad():
        put(twin, [after[name] * 0.5 for name, _ in twin.named_parameters()])
        assert loss_of(model, 9).item() == loss_of(twin, 9).item(), "a write is read at once"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forward_is_one_update_behind_what_full_params_shows(ranks, stage):
    ranks(check_seen, 2, stage)


def check_unsharded() -> None:
    model, (optimizer,) = made(stage=3, delay=1, offload=Offload(chunk=CHUNK))
    for step in range(3):
        one_step(model, [optimizer], step, "plain")
    wanted = left(model)
    zeor.unshard(model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), wanted[name]), name
        assert int(optimizer.state[param]["step"]) == 3


def test_unshard_gives_the_last_update(ranks):
    ranks(check_unsharded, 2)


def resumed(path: str, stage: int, offload: Offload | None) -> dict[str, Any]:
    """A run that goes on after a save, and one that loads it. A load shows forward the last update, as there is no
    other; so the run that goes on is first let catch up by a write of its own weights."""
    model, (optimizer,) = made(stage=stage, delay=1, offload=offload)
    for step in range(3):
        one_step(model, [optimizer], step, "plain")
    saved = left(model)
    zeor.save(path, model, optimizer, step=3)
    again, (optimizer_again,) = made(stage=stage, delay=1, offload=offload)
    zeor.load(path, again, optimizer_again)
    same(left(again), saved, "what was saved is what was loaded")
    with zeor.full_params(model, write=True):
        pass
    for step in range(3, 5):
        one_step(model, [optimizer], step, "plain")
        one_step(again, [optimizer_again], step, "plain")
    same(left(again), left(model), "and goes on alike")
    return left(again)


def check_resumed(path: str) -> None:
    for stage in (1, 3):
        for number, offload in enumerate((None, Offload(chunk=CHUNK))):
            resumed(f"{path}/{stage}-{number}", stage, offload)


def test_a_checkpoint_holds_the_last_update_and_a_run_goes_on_from_it(ranks, tmp_path):
    ranks(check_resumed, 2, str(tmp_path))
