"""The average of the weights: sharded, equal to torch's AveragedModel in one process, swapped in for evaluation.

The reference is torch.optim.swa_utils.AveragedModel around a plain model trained on the joint batch, in float64; the
stages are the same bits.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import swa_utils

import zeor
from tests import loops
from zeor.optim.parts.pieces import Piece

STAGES = (0, 1, 2, 3)


def pair(stage: int, frozen: str = "none", **options: Any) -> tuple[nn.Module, nn.Module, Any, Any]:
    plain, model = loops.net(), loops.net()
    for each in (plain, model):
        for name, param in each.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
    theirs, mine = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, model))
    zeor.shard(model, mine, stage=stage, **options)
    return plain, model, theirs, mine


def values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


def averaged(average: zeor.optim.ema.EMA, model: nn.Module) -> dict[str, Tensor]:
    with average.applied():
        return values(model)


def same_at_every_stage(ranks: Callable, world: int, check: Callable, *args: Any) -> None:
    found = [ranks(check, world, stage, *args)[0] for stage in STAGES]
    for other in found[1:]:
        loops.assert_equal(other, found[0])


def check_average(stage: int, hooked: bool) -> dict[str, Tensor]:
    plain, model, theirs, mine = pair(stage)
    reference = swa_utils.AveragedModel(plain, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    average = zeor.ema(model, 0.9, optimizer=mine if hooked else None)
    loops.assert_close(averaged(average, model), loops.values(plain))
    for step in range(5):
        loops.train(plain, theirs, range(step, step + 1))
        reference.update_parameters(plain)
        loops.train(model, mine, range(step, step + 1), loops.own_loss)
        if not hooked:
            average.update()
    assert average.updates == 5
    found = averaged(average, model)
    loops.assert_close(found, loops.values(reference.module))
    loops.assert_close(values(model), loops.values(plain))
    with average.applied(), torch.no_grad():
        x = loops.batch(9)[0]
        torch.testing.assert_close(model(x), reference(x), **loops.TIGHT)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), **loops.TIGHT)
    return found


@pytest.mark.parametrize("hooked", [False, True], ids=["called", "hooked to the optimizer"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_average_equals_torch_averaged_model(ranks, world, hooked):
    same_at_every_stage(ranks, world, check_average, hooked)


def check_mean(stage: int) -> dict[str, Tensor]:
    plain, model, theirs, mine = pair(stage)
    reference = swa_utils.AveragedModel(plain)
    average = zeor.ema(model, lambda n: n / (n + 1))
    for step in range(4):
        loops.train(plain, theirs, range(step, step + 1))
        reference.update_parameters(plain)
        loops.train(model, mine, range(step, step + 1), loops.own_loss)
        average.update()
    found = averaged(average, model)
    loops.assert_close(found, loops.values(reference.module))
    return found


def test_a_decay_of_n_over_n_plus_one_is_stochastic_weight_averaging(ranks):
    same_at_every_stage(ranks, 2, check_mean)


def check_warmup() -> list[float]:
    _, model, _, _ = pair(3)
    average, decays = zeor.ema(model, 0.5, warmup=True), []
    for _ in range(20):
        decays.append(average.decay())
        average.update()
    return decays


def test_warmup_forgets_early_weights_sooner(ranks):
    assert ranks(check_warmup, 1)[0] == [min(0.5, (1 + n) / (10 + n)) for n in range(20)]


def check_between_passes(stage: int) -> dict[str, Tensor]:
    """An evaluation with the average between a forward and its backward, and between two micro-batches."""
    plain, model, theirs, mine = pair(stage)
    average = zeor.ema(model, 0.9)
    for step in range(3):
        loops.joint_loss(plain, 2 * step).backward()
        loops.joint_loss(plain, 2 * step + 1).backward()
        loss = loops.own_loss(model, 2 * step)
        with average.applied(), torch.no_grad():
            model(loops.batch(9)[0])
        loss.backward()
        with average.applied(), torch.no_grad():
            model(loops.batch(9)[0])
        loops.own_loss(model, 2 * step + 1).backward()
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
        average.update()
    found = values(model)
    loops.assert_close(found, loops.values(plain))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_evaluating_the_average_in_the_middle_of_a_step_changes_nothing(ranks, world):
    same_at_every_stage(ranks, world, check_between_passes)


def check_unfrozen(stage: int) -> dict[str, Tensor]:
    """Frozen at first, trained from step 2 on, frozen again from step 4 on."""
    plain, model, theirs, mine = pair(stage, "blocks.0")
    reference = swa_utils.AveragedModel(plain, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))
    average = zeor.ema(model, 0.8)
    before = average.nbytes()
    for step in range(6):
        for each in (plain, model):
            each.blocks[0].requires_grad_(2 <= step < 4)
        loops.train(plain, theirs, range(step, step + 1))
        reference.update_parameters(plain)
        loops.train(model, mine, range(step, step + 1), loops.own_loss)
        average.update()
    assert average.nbytes() > before
    found = averaged(average, model)
    loops.assert_close(found, loops.values(reference.module))
    return found


def test_the_average_follows_what_is_frozen_and_unfrozen(ranks):
    same_at_every_stage(ranks, 2, check_unfrozen)


def check_half(stage: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """bf16 compute: the average is of the fp32 masters, and they come back in every bit."""
    model = loops.net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, precision="bf16")
    average, wanted = zeor.ema(model, 0.75, dtype=dtype), {}
    for step in range(3):
        loops.own_loss(model, step, torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        now = values(model)
        if step == 0:
            wanted = {name: value.to(dtype or torch.float32) for name, value in now.items()}
        else:
            for name, value in now.items():
                wanted[name].lerp_(value.to(wanted[name].dtype), 0.25)
    found = averaged(average, model)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype is None else {"rtol": 1e-2, "atol": 1e-3}
    loops.assert_close(found, {name: value.float() for name, value in wanted.items()}, **tolerance)
    loops.assert_equal(values(model), now)
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_average_is_of_the_masters_which_come_back_in_every_bit(ranks, dtype):
    same_at_every_stage(ranks, 2, check_half, dtype)


# ---- inside applied()


def check_refusals(stage: int) -> list[str]:
    _, model, _, mine = pair(stage)
    average = zeor.ema(model)
    loops.train(model, mine, range(1), loops.own_loss)
    average.update()
    loops.own_loss(model, 1).backward()
    before = values(model)
    calls: list[Callable] = [
        lambda: loops.own_loss(model, 1).backward(),
        mine.step,
        average.update,
        average.state_dict,
        lambda: model.load_state_dict(before),
        average.applied().__enter__,
    ]
    found = []
    for call in calls:
        with pytest.raises(RuntimeError) as error, average.applied():
            call()
        found.append(str(error.value))
        loops.assert_equal(values(model), before)
    with zeor.full_params(model), pytest.raises(RuntimeError) as error, average.applied():
        pass
    mine.step()
    return [*found, str(error.value)]


@pytest.mark.parametrize("stage", [1, 3])
def test_inside_applied_training_is_refused_and_every_exception_restores_the_weights(ranks, stage):
    backward, step, update, state, write, again, shown = ranks(check_refusals, 2, stage)[0]
    assert backward == ("backward() was called inside ema.applied(), where the weights are an average; do it outside.")
    assert step.startswith("step() was called inside ema.applied()")
    assert update.startswith("ema.update() was called inside ema.applied()")
    assert state == "The state of an average is read outside its applied()."
    assert "was written inside ema.applied()" in write
    assert again.startswith("ema.applied() was called inside ema.applied()")
    assert shown.startswith("zeor.full_params is open")


def check_copy_error() -> str:
    _, model, _, _ = pair(3)
    with pytest.raises(RuntimeError) as error:
        swa_utils.AveragedModel(model)
    return str(error.value)


def test_copying_a_sharded_model_for_an_average_names_zeor_ema(ranks):
    assert "use zeor.ema(model)" in ranks(check_copy_error, 2)[0]


# ---- state and bytes


def check_state(stage: int) -> None:
    _, model, _, mine = pair(stage)
    average = zeor.ema(model, 0.9)
    for step in range(3):
        loops.train(model, mine, range(step, step + 1), loops.own_loss)
        average.update()
    wanted = averaged(average, model)
    other = zeor.ema(model, 0.9)
    other.load_state_dict(copy.deepcopy(average.state_dict()))
    assert other.updates == 3
    loops.assert_equal(averaged(other, model), wanted)
    whole = zeor.ema(model, 0.9)
    whole.load_state_dict({"updates": 3, "values": wanted})
    loops.assert_equal(averaged(whole, model), wanted)
    wrong = {name: value[:-1] if value.dim() == 1 else value for name, value in wanted.items()}
    with pytest.raises(ValueError, match="saved at another world size"):
        whole.load_state_dict({"updates": 3, "values": wrong})
    del wrong["head.bias"]
    wrong = {name: wanted[name] for name in wrong}
    parts = average.state_dict()["values"]
    if "head.bias" in parts:
        with pytest.raises(ValueError, match=r"has no 'head\.bias'"):
            whole.load_state_dict({"updates": 3, "values": wrong})


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_an_average_is_saved_and_loaded(ranks, stage):
    ranks(check_state, 2, stage)


def check_pieces(stage: int) -> list[Any]:
    _, model, _, mine = pair(stage)
    average = zeor.ema(model, 0.9)
    loops.train(model, mine, range(2), loops.joint_loss)
    average.update()
    return [averaged(average, model), [(p.name, p.begin, p.value.clone()) for p in average.pieces()]]


def check_put(stage: int, pieces: list[Any]) -> dict[str, Tensor]:
    _, model, _, _ = pair(stage)
    average = zeor.ema(model, 0.9)
    average.put((Piece(name, ("ema",), begin, value) for name, begin, value in pieces), updates=1)
    assert average.updates == 1
    return averaged(average, model)


def test_an_average_goes_to_another_world_and_stage_by_its_pieces(ranks):
    saved = ranks(check_pieces, 3, 3)
    pieces = [piece for _, mine in saved for piece in mine]
    assert sum(value.numel() for _, _, value in pieces) == sum(p.numel() for p in loops.net().parameters())
    for world, stage in ((2, 1), (1, 3), (2, 0)):
        loops.assert_equal(ranks(check_put, world, stage, pieces)[0], saved[0][0])


def check_bytes(stage: int) -> None:
    _, model, _, _ = pair(stage)
    assert "ema" not in zeor.report(model)
    average = zeor.ema(model)
    held = zeor.report(model)["ema"]
    numel = sum(p.numel() for p in model.parameters())
    assert held == average.nbytes() and 8 * numel / 3 <= held <= 8 * (numel / 3 + 16), "a third of the model"
    del average
    gc.collect()
    assert "ema" not in zeor.report(model)


@pytest.mark.parametrize("stage", STAGES)
def test_the_average_costs_one_slice_at_every_stage(ranks, stage):
    ranks(check_bytes, 3, stage)


def check_settings() -> list[str]:
    _, model, _, _ = pair(1)
    found = []
    for options in ({"decay": 1.5}, {"dtype": torch.int8}):
        with pytest.raises(ValueError) as error:
            zeor.ema(model, **options)
        found.append(str(error.value))
    return found


def an_update_left_out() -> None:
    _, model, _, mine = pair(2)
    average = zeor.ema(model, 0.9)
    with zeor.join(model):
        for step in range(1 + dist.get_rank()):
            loops.own_loss(model, step).backward()
            mine.step()
            mine.zero_grad()
            average.update()
    with pytest.raises(RuntimeError, match=r"updated 1 times on rank 0 and 2 times on rank 1, .* alike"):
        average.applied().__enter__()
    with pytest.raises(ValueError, match="rank 0 has average 0 after 1 updates, rank 1 has average 0 after 2 updates"):
        zeor.replan(model, mine, stage=3)
    average.updates = 2
    averaged(average, model)


def test_an_average_of_which_a_rank_left_out_an_update_is_refused(ranks):
    """Each rank averages its own slice; one that was out of data did not come to update()."""
    ranks(an_update_left_out, 2)


def test_settings_that_make_no_average_are_refused(ranks):
    decay, dtype = ranks(check_settings, 1)[0]
    assert "decay=1.5" in decay and "between 0 and 1" in decay
    assert "torch.int8" in dtype
