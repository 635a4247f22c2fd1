"""Frozen, mixed-dtype and integer parameters, and freezing and unfreezing while training goes on.

Every run is compared with plain PyTorch doing the same to its own parameters on the joint batch, in float64, and with
the other stages bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops
from zeor import api

STAGES = (0, 1, 2, 3)
Event = dict[int, Callable[[nn.Module, Any], None]]  # by step: what happens before it


def full_values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


def run(model: nn.Module, optimizer: Any, events: Event, steps: int, loss: Callable) -> None:
    for step in range(steps):
        if step in events:
            events[step](model, optimizer)
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(events: Event, stage: int, **options: Any) -> dict[str, Tensor]:
    """The sharded run beside the plain one; returns the sharded values."""
    build = options.get("build", lambda: loops.net())
    make = options.get("make", lambda model: torch.optim.AdamW(model.parameters(), lr=0.05))
    plain, model = build(), build()
    theirs, mine = make(plain), make(model)
    zeor.shard(model, mine, stage=stage, overlap=options.get("overlap", True))
    run(plain, theirs, events, options.get("steps", 6), loops.joint_loss)
    run(model, mine, events, options.get("steps", 6), loops.own_loss)
    found = full_values(model)
    loops.assert_close(found, loops.values(plain))
    for name, param in plain.named_parameters():
        assert model.get_parameter(name).requires_grad == param.requires_grad, name
    return found


def same_at_every_stage(ranks: Callable, world: int, check: Callable, *args: Any) -> None:
    """Runs `check(stage, *args)` at each stage; what rank 0 returns must be the same bits."""
    found = [ranks(check, world, stage, *args)[0] for stage in STAGES]
    for other in found[1:]:
        loops.assert_equal(other, found[0])


def frozen_net(*frozen: str) -> nn.Module:
    model = loops.net()
    for name, param in model.named_parameters():
        param.requires_grad_(not any(name.startswith(prefix) for prefix in frozen))
    return model


# ---- unfreezing


def check_unfreezing(stage: int) -> dict[str, Tensor]:
    events = {
        2: lambda model, _: model.blocks[0].up.requires_grad_(True),
        3: lambda model, _: (model.head.requires_grad_(True), model.blocks[0].requires_grad_(True)),
        5: lambda model, _: setattr(model.scale, "requires_grad", True),
    }
    return compare(events, stage, build=lambda: frozen_net("blocks.0", "head", "scale"), steps=7)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_frozen_at_shard_can_be_unfrozen_at_any_step(ranks, world):
    same_at_every_stage(ranks, world, check_unfreezing)


def check_frozen_groups_added_later(stage: int) -> dict[str, Tensor]:
    def unfreeze(model: nn.Module, optimizer: Any) -> None:
        model.head.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.01})

    def make(model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

    return compare({3: unfreeze}, stage, build=lambda: frozen_net("head"), make=make)


def test_an_unfrozen_parameter_may_join_the_optimizer_by_add_param_group(ranks):
    same_at_every_stage(ranks, 2, check_frozen_groups_added_later)


def check_freezing_and_back(stage: int) -> dict[str, Tensor]:
    def freeze(model: nn.Module, _: Any) -> None:
        model.blocks[1].requires_grad_(False)
        model.head.weight.requires_grad_(False)

    def again(model: nn.Module, _: Any) -> None:
        model.blocks[1].requires_grad_(True)
        model.blocks[0].requires_grad_(False)

    return compare({2: freeze, 4: again}, stage, steps=7)


@pytest.mark.parametrize("world", [2, 3])
def test_freezing_later_keeps_the_optimizer_state_for_the_day_it_trains_again(ranks, world):
    same_at_every_stage(ranks, world, check_freezing_and_back)


def check_everything_in_one_life(stage: int) -> dict[str, Tensor]:
    """Frozen at shard, trained, frozen, trained; with accumulation in which the change falls."""
    build = lambda: frozen_net("blocks.0.up", "blocks.1")
    plain, model = build(), build()
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    for each, optimizer, loss in ((plain, theirs, loops.joint_loss), (model, mine, loops.own_loss)):
        for step in range(8):
            loss(each, 2 * step).backward()
            if step in (2, 6):
                each.blocks[0].up.requires_grad_(True)
            if step == 4:
                each.blocks[0].requires_grad_(False)
            loss(each, 2 * step + 1).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    found = full_values(model)
    loops.assert_close(found, loops.values(plain))
    return found


def test_a_change_between_two_accumulated_backwards_counts_for_the_second(ranks):
    same_at_every_stage(ranks, 2, check_everything_in_one_life)


def check_no_sync(stage: int) -> dict[str, Tensor]:
    """What no_sync holds of a parameter that is frozen before the reduce is a gradient like any other."""
    plain, model = loops.net(), loops.net()
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    for _ in range(2):
        loops.joint_loss(plain, 0).backward()
        with zeor.no_sync(model):
            loops.own_loss(model, 0).backward()
        for each in (plain, model):
            each.blocks[1].requires_grad_(False)
        loops.joint_loss(plain, 1).backward()
        loops.own_loss(model, 1).backward()
        for each, optimizer in ((plain, theirs), (model, mine)):
            optimizer.step()
            optimizer.zero_grad()
            each.blocks[1].requires_grad_(True)
    found = full_values(model)
    loops.assert_close(found, loops.values(plain))
    return found


def test_a_gradient_held_by_no_sync_survives_the_freezing_of_its_parameter(ranks):
    same_at_every_stage(ranks, 2, check_no_sync)


def check_old_graph(stage: int) -> None:
    """A forward, then an unfreezing, another forward, one backward of both: the first graph still has its values."""
    plain, model = frozen_net("blocks.0", "head"), frozen_net("blocks.0", "head")
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    for each, optimizer, loss in ((plain, theirs, loops.joint_loss), (model, mine, loops.own_loss)):
        for step in range(3):
            first = loss(each, 2 * step)
            if step == 1:
                each.requires_grad_(True)
            (first + loss(each, 2 * step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_the_graph_of_a_forward_before_the_unfreezing_stays_usable(ranks, stage):
    ranks(check_old_graph, 2, stage)


class Experts(nn.Module):
    """Parts of one size, of which each rank uses its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: Tensor, chosen: range) -> Tensor:
        for number in chosen:
            x = torch.tanh(self.experts[number](x))
        return x.square().sum()


def freeze_what_one_rank_uses(stage: int) -> None:
    def losses(model: nn.Module, step: int) -> list[Callable[[], Tensor]]:
        x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(2, 40) * (step + 1)
        return [lambda: model(x[:1], range(3)), lambda: model(x[1:], range(3 if step < 2 else 2))]

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Experts().double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    plain, theirs = built()
    model, mine = zeor.shard(*built(), stage=stage)
    for step in range(4):
        if step == 2:
            plain.experts[2].requires_grad_(False)
            model.experts[2].requires_grad_(False)
        sum(loss() for loss in losses(plain, step)).div(2).backward()
        losses(model, step)[dist.get_rank()]().backward()
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_may_be_used_by_one_rank_alone_at_once(ranks, stage):
    """In the very backward in which all ranks hear of it, some have reduced its zeros by then."""
    ranks(freeze_what_one_rank_uses, 2, stage)


# ---- ranks that differ


def check_differing(stage: int, at_shard: bool) -> str:
    model = frozen_net("head") if at_shard else loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, timeout=30)
    loops.train(model, optimizer, range(1), loops.own_loss)
    if dist.get_rank() == 1:
        model.head.bias.requires_grad_(at_shard)
    try:
        loops.train(model, optimizer, range(1, 2), loops.own_loss)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("at_shard", [True, False], ids=["unfrozen on one rank", "frozen on one rank"])
def test_ranks_that_differ_in_what_trains_are_told_on_every_rank(ranks, stage, at_shard):
    trains, frozen = (1, 0) if at_shard else (0, 1)
    for text in ranks(check_differing, 2, stage, at_shard):
        assert text == (
            f"Parameter 'head.bias' trains on rank {trains} and is frozen on rank {frozen}; call requires_grad_ alike "
            "on every rank."
        )


# ---- bytes


def reduced(model: nn.Module) -> int:
    return zeor.traffic(model)["bytes_by_verb"].get("reduce", 0)


def check_bytes(stage: int) -> None:
    model = frozen_net("blocks", "head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    loops.own_loss(model, 2).backward()
    before = zeor.report(model)
    assert before["grad"] <= 8 * 2 and before["moments"] <= 2 * 8, "only the scale trains"
    model.head.weight.requires_grad_(True)
    loops.train(model, optimizer, range(2, 3), loops.own_loss)
    loops.own_loss(model, 3).backward()
    after = zeor.report(model)
    part = 1 if stage == 0 else 2
    weight = model.head.weight.numel() * 8
    assert abs(after["moments"] - before["moments"] - 2 * weight // part) <= 16
    assert after["grad"] - before["grad"] <= weight // (part if stage >= 2 else 1) + 16
    optimizer.step()
    optimizer.zero_grad()
    # Frozen again, everything but the scale: after the step that confirms it, only the scale travels.
    model.head.requires_grad_(False)
    loops.train(model, optimizer, range(4, 5), loops.own_loss)
    start = reduced(model)
    loops.train(model, optimizer, range(5, 6), loops.own_loss)
    assert 0 < reduced(model) - start <= 8


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_cost_no_gradient_state_or_reduce_whenever_they_are_frozen(ranks, stage):
    ranks(check_bytes, 2, stage)


# ---- dtypes


class Adapted(nn.Module):
    """A frozen base in bf16, a trainable adapter in fp32 and integer codes, all in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(8, 6).bfloat16(), requires_grad=False)
        self.codes = nn.Parameter(torch.randint(0, 255, (13,), dtype=torch.uint8), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.flags = nn.Parameter(torch.rand(7) > 0.5, requires_grad=False)
        self.adapter = nn.Linear(6, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ (self.base.float() + self.adapter.weight).t() + self.codes[:8].float() / 255
        return (x * self.flags[:1].float().add(1) + self.counts.sum() * 1e-3)[:, :6]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted(), Adapted()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.float())
        return x


def mixed() -> nn.Module:
    torch.manual_seed(5)
    return Mixed()


def check_mixed(stage: int) -> dict[str, Tensor]:
    """The base is unfrozen at step 2: its master is the bf16 value in fp32, which is what plain PyTorch has here."""
    plain, model = mixed(), mixed()
    for block in plain.blocks:
        block.base = nn.Parameter(block.base.float(), requires_grad=False)  # what the fp32 master is equal to
    floating = lambda model: [p for p in model.parameters() if p.is_floating_point()]
    theirs, mine = (torch.optim.SGD(floating(m), lr=0.05) for m in (plain, model))
    zeor.shard(model, mine, stage=stage, precision=zeor.Precision(compute=torch.float32))
    before = {name: p.clone() for name, p in plain.named_parameters()}
    for step in range(5):
        if step == 2:
            found = full_values(model)
            for name in before:
                if "adapter" not in name:
                    assert torch.equal(found[name].to(before[name].dtype), before[name]), name
            for each in (plain, model):
                each.blocks[1].base.requires_grad_(True)
        for each, optimizer, take in ((plain, theirs, lambda x: x), (model, mine, loops.mine)):
            each(take(loops.batch(step, torch.float32)[0])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = full_values(model)
    assert found["blocks.0.codes"].dtype == torch.uint8 and found["blocks.0.flags"].dtype == torch.bool
    for name, param in plain.named_parameters():
        if "base" not in name:
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["blocks.1.base"].float(), plain.blocks[1].base.detach(), rtol=5e-3, atol=1e-6)
    assert torch.equal(found["blocks.0.base"].float(), plain.blocks[0].base)
    return found


def test_bf16_fp32_and_integer_parameters_live_in_one_block_and_the_base_can_be_unfrozen(ranks):
    same_at_every_stage(ranks, 2, check_mixed)


def check_integers() -> str:
    model = mixed()
    zeor.shard(model, stage=3)
    with pytest.raises(RuntimeError) as error:
        model.blocks[0].codes.requires_grad_(True)
    return str(error.value)


def test_unfreezing_an_integer_parameter_names_it(ranks):
    assert ranks(check_integers, 1)[0] == (
        "Parameter 'blocks.0.codes' is torch.uint8 and cannot train; leave it frozen."
    )


def check_exact(stage: int, precision: str) -> None:
    """fp32 parameters frozen under half-precision compute keep every bit, and start to train from it."""
    model, plain = loops.net(torch.float32), loops.net(torch.float32)
    for each in (model, plain):
        each.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    zeor.shard(model, optimizer, stage=stage, precision=precision)
    loss = lambda step: loops.own_loss(model, step, torch.float32)
    loss(0).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = full_values(model)
    for name, param in plain.blocks[0].named_parameters(prefix="blocks.0"):
        assert torch.equal(found[name], param), "frozen values keep every bit"
    model.blocks[0].requires_grad_(True)
    loss(1).backward()
    with zeor.full_params(model, grads=True):
        grads = {name: p.grad.clone() for name, p in model.blocks[0].named_parameters(prefix="blocks.0")}
    optimizer.step()
    found = full_values(model)
    for name, param in plain.blocks[0].named_parameters(prefix="blocks.0"):
        torch.testing.assert_close(found[name], param.detach() - 2.0**-10 * grads[name], rtol=0, atol=0)
    lanes = [lane for unit in api._state(model).engine.units for lane in unit.lanes if lane.grads is None]
    assert not lanes, "nothing is frozen any more"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_in_fp32_keeps_its_bits_under_half_precision_and_trains_from_them(ranks, stage, precision):
    ranks(check_exact, 2, stage, precision)


def check_prediction(stage: int, precision: str) -> None:
    model = loops.net(torch.float32)
    model.blocks.requires_grad_(False)
    predicted = zeor.predict(model, world=2, stage=stage, precision=precision, optimizer="SGD")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage, precision=precision)
    loops.own_loss(model, 0, torch.float32).backward()
    report = zeor.report(model)
    assert {role: report[role] for role in ("compute", "grad", "master")} == {
        "compute": predicted.compute, "grad": predicted.grad, "master": predicted.master,
    }  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_the_bytes_that_keep_frozen_values_exact_are_predicted(ranks, stage):
    ranks(check_prediction, 2, stage, "bf16")


# ---- all at once


def check_flags_inside_full_params(stage: int) -> dict[str, Tensor]:
    def unfreeze(model: nn.Module, _: Any) -> None:
        if hasattr(model, "_zeor_sharded"):
            with zeor.full_params(model):
                model.head.requires_grad_(True)
        else:
            model.head.requires_grad_(True)

    return compare({2: unfreeze}, stage, build=lambda: frozen_net("head"), steps=4)


def test_unfreezing_inside_full_params_lasts(ranks):
    same_at_every_stage(ranks, 2, check_flags_inside_full_params)


def check_unshard_after(stage: int) -> None:
    model = frozen_net("blocks", "head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage)
    loops.train(model, optimizer, range(1), loops.own_loss)
    model.blocks[1].requires_grad_(True)
    loops.train(model, optimizer, range(1, 3), loops.own_loss)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    wanted = full_values(model)
    zeor.unshard(model)
    loops.assert_equal(loops.values(model), wanted)
    weight = model.blocks[1].up.weight
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape and int(optimizer.state[weight]["step"]) == 2
    assert model.head.weight not in optimizer.state


@pytest.mark.parametrize("stage", STAGES)
def test_unshard_and_state_dicts_know_parameters_that_were_unfrozen(ranks, stage):
    ranks(check_unshard_after, 2, stage)


def check_joined(stage: int) -> dict[str, Tensor]:
    """Rank 1 has one batch, rank 0 three; the loop unfreezes the head at step 2, where rank 1 is out of data."""
    model = frozen_net("head")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage)
    with zeor.join(model):
        for step in range(3 if dist.get_rank() == 0 else 1):
            model.head.requires_grad_(step == 2)
            loops.train(model, optimizer, range(step, step + 1), loops.own_loss)
    assert model.head.weight.requires_grad
    return full_values(model)


def reference_of_joined() -> dict[str, Tensor]:
    plain = frozen_net("head")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        plain.head.requires_grad_(step == 2)
        x, y = loops.batch(step)
        rows = slice(None) if step == 0 else slice(0, None, 2)
        (plain(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return loops.values(plain)


def test_a_rank_that_is_out_of_data_follows_an_unfreezing(ranks):
    same_at_every_stage(ranks, 2, check_joined)
    loops.assert_close(ranks(check_joined, 2, 3)[1], reference_of_joined())


# ---- what cannot be


def check_drop_in() -> str:
    model = frozen_net("head")
    optimizer = zeor.optim.SGD(model.parameters(), lr=0.1)
    model.head.requires_grad_(True)
    loops.own_loss(model, 0).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_a_drop_in_optimizer_says_that_it_was_made_before_the_unfreezing(ranks):
    assert "was frozen when the optimizer was made" in ranks(check_drop_in, 2)[0]


def check_complex() -> str:
    model = loops.net()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError) as error:
        zeor.shard(model)
    return str(error.value)


def test_a_complex_parameter_that_trains_is_named(ranks):
    assert ranks(check_complex, 1)[0].startswith("Parameter 'phase' is torch.complex64 and trains")
