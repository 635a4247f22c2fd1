"""What a parameter and its gradient are outside forward and backward: they tell the truth, or say why not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]


def sharded(stage: int, lr: float = 0.1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = loops.net()
    return zeor.shard(model, torch.optim.SGD(model.parameters(), lr=lr), stage=stage, **options)


def error_of(call: Callable[[], Any]) -> str:
    """The one sentence a refused call raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


# ---- metadata


def check_metadata(stage: int) -> None:
    plain, reference = loops.net(), dict(loops.net().named_parameters())
    before = list(plain.parameters())
    model, _ = zeor.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), stage=stage)
    assert model is plain and all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for name, param in model.named_parameters():
        wanted = reference[name]
        assert isinstance(param, nn.Parameter) and isinstance(param, torch.Tensor)
        assert param.shape == wanted.shape and param.size() == wanted.size() and param.dim() == wanted.dim()
        assert param.numel() == wanted.numel() and param.nelement() == wanted.numel()
        assert param.dtype == torch.float64 and param.device == wanted.device
        assert param.requires_grad and param.is_leaf and param.grad_fn is None and param.grad is None
        assert param.element_size() == 8 and param.is_floating_point() and param.stride() == wanted.stride()
        if stage == 3:
            assert name in repr(param) and str(tuple(wanted.shape)) in repr(param)
        else:
            assert repr(param) == repr(wanted)
        assert wanted.dim() == 0 or len(param) == len(wanted)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.values())
    assert "Linear(in_features=6, out_features=7" in repr(model)


@pytest.mark.parametrize("stage", STAGES)
def test_metadata_tells_the_truth(ranks, stage):
    ranks(check_metadata, 2, stage)


def check_gradient_metadata(stage: int) -> None:
    model, _ = sharded(stage)
    loops.own_loss(model, 0).backward()
    for name, param in model.named_parameters():
        grad = param.grad
        assert grad is not None and grad.shape == param.shape and grad.dtype == param.dtype
        assert not grad.requires_grad and not isinstance(grad, nn.Parameter)
        assert param.grad is grad, "one object for one gradient"
        assert "gradient of" in repr(grad) and name in repr(grad)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_views_of_the_parameters_shape_and_dtype(ranks, stage):
    ranks(check_gradient_metadata, 2, stage)


def check_new_tensors(stage: int) -> None:
    """What only asks for shape, dtype and device must work where values are not at hand."""
    model, _ = sharded(stage)
    weight = model.get_parameter("head.weight")
    assert torch.equal(torch.zeros_like(weight), torch.zeros(5, 6, dtype=torch.float64))
    assert torch.equal(torch.full_like(weight, 2.5), torch.full((5, 6), 2.5, dtype=torch.float64))
    assert torch.ones_like(weight, dtype=torch.float32).dtype == torch.float32
    assert torch.empty_like(weight).stride() == (6, 1) and torch.randn_like(weight).shape == (5, 6)
    assert torch.equal(weight.new_zeros(3), torch.zeros(3, dtype=torch.float64))
    assert weight.new_full((2,), 7.0).tolist() == [7.0, 7.0]


@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_can_be_made_in_the_likeness_of_a_view(ranks, stage):
    ranks(check_new_tensors, 2, stage)


# ---- reads


def check_reads_are_values(stage: int) -> None:
    model, optimizer = sharded(stage)
    plain = loops.net()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    loops.train(model, optimizer, range(2), loops.own_loss)  # stages 1 and 2: the read waits for the publish
    loops.train(plain, other, range(2))
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param + 0, wanted + 0, **loops.TIGHT, msg=name)
        assert param.sum().item() == pytest.approx(wanted.sum().item(), abs=1e-10)
        assert torch.linalg.vector_norm(param).item() == pytest.approx(wanted.norm().item(), abs=1e-10)
    assert model.head.weight[0, 1].item() == pytest.approx(plain.head.weight[0, 1].item(), abs=1e-10)
    assert torch.isfinite(model.head.weight).all()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_reads_return_values_where_compute_rests_full(ranks, stage):
    ranks(check_reads_are_values, 2, stage)


def check_reads_raise() -> None:
    model, _ = sharded(3)
    param = model.get_parameter("blocks.1.up.weight")
    reads: list[Callable[[], Any]] = [
        lambda: param + 1,
        lambda: param.sum(),
        lambda: param[0],
        lambda: param.tolist(),
        lambda: param.cpu().numpy(),
        lambda: torch.cat([param]),
        lambda: param.clone(),
        lambda: param.float(),
        lambda: torch.nn.functional.linear(torch.ones(1, 6, dtype=torch.float64), param),
        lambda: torch.equal(param, param),
        lambda: param.data.sum(),
        lambda: param.detach().sum(),
        lambda: param.norm(),
    ]
    for read in reads:
        text = error_of(read)
        assert "'blocks.1.up.weight'" in text and "zeor.full_params" in text, text
    assert error_of(lambda: model.scale.item()).startswith("Parameter 'scale' is sharded")


def test_reads_raise_at_stage_3_naming_the_parameter_and_what_to_call(ranks):
    ranks(check_reads_raise, 2)


def check_gradient_reads(stage: int) -> None:
    model, _ = sharded(stage)
    plain = loops.net()
    loops.own_loss(model, 0).backward()
    loops.joint_loss(plain, 0).backward()
    grad, wanted = model.head.weight.grad, plain.head.weight.grad
    if stage == 0:
        torch.testing.assert_close(grad + 0, wanted, **loops.TIGHT)
    else:
        text = error_of(lambda: grad + 0)
        assert "'head.weight'" in text and "zeor.full_params(model, grads=True)" in text


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_read_at_stage_0_and_refused_beyond(ranks, stage):
    ranks(check_gradient_reads, 2, stage)


def test_a_world_of_one_reads_everything_at_every_stage():
    for stage in STAGES:
        model, _ = sharded(stage)
        loops.joint_loss(model, 0).backward()
        plain = loops.net()
        loops.joint_loss(plain, 0).backward()
        torch.testing.assert_close(model.head.weight + 0, plain.head.weight + 0, rtol=0, atol=0)
        torch.testing.assert_close(model.head.weight.grad + 0, plain.head.weight.grad, **loops.TIGHT)


# ---- writes


def check_writes_raise() -> None:
    model, _ = sharded(3)
    before = zeor_values(model)
    param = model.get_parameter("head.bias")

    def assign_item() -> None:
        param[0] = 1.0

    writes: list[Callable[[], Any]] = [
        lambda: param.mul_(2),
        lambda: param.add_(1),
        lambda: param.uniform_(),
        lambda: param.clamp_(0, 1),
        lambda: param.data.mul_(2),
        lambda: param.detach().zero_(),
        lambda: nn.init.normal_(param),
        lambda: nn.functional.relu(param, inplace=True),
        lambda: torch.ops.aten.add_.Scalar(param, 1.0),
        lambda: torch._foreach_mul_([param], 2.0),
        lambda: torch.add(torch.ones(5), 1, out=param),
        assign_item,
    ]
    with torch.no_grad():
        for number, write in enumerate(writes):
            text = error_of(write)
            assert "head.bias" in text and "zeor.full_params(model, write=True)" in text, (number, text)
    loops.assert_equal(zeor_values(model), before)


def test_writes_raise_and_change_nothing_where_the_bytes_are_away(ranks):
    ranks(check_writes_raise, 2)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "view": lambda p: p.view(-1)[1:].fill_(0.5),
    "data": lambda p: p.data[0].zero_(),
    "data.copy_": lambda p: p.data.copy_(torch.full(p.shape, 0.75)),
    "detach": lambda p: p.detach().clamp_(-0.1, 0.1),
    "item": lambda p: p.__setitem__(0, 1.0),
    "inplace": lambda p: nn.functional.relu(p, inplace=True),
    "aten": lambda p: torch.ops.aten.add_.Scalar(p, 1.0),
    "foreach": lambda p: torch._foreach_mul_([p], 3.0),
    "out": lambda p: torch.add(p.detach().clone(), 1, out=p),
}
ASSIGNMENTS: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy_": lambda p: p.copy_(torch.linspace(0, 1, p.numel()).view(p.shape)),
    "fill_": lambda p: p.fill_(0.1),
    "zero_": lambda p: p.zero_(),
    "data =": lambda p: setattr(p, "data", torch.full(p.shape, 0.25, dtype=p.dtype)),
}


def check_writes_last(stage: int, names: list[str]) -> None:
    """A write outside forward is in the values, and the next steps go on from there."""
    for name in names:
        model, optimizer = sharded(stage)
        plain = loops.net()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(2):
            loops.train(model, optimizer, range(number, number + 1), loops.own_loss)
            loops.train(plain, other, range(number, number + 1))
            with torch.no_grad():
                for each in (model, plain):
                    {**WRITES, **ASSIGNMENTS}[name](each.head.bias)
        loops.assert_close(zeor_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_writes_outside_forward_last(ranks, stage):
    ranks(check_writes_last, 2, stage, [*ASSIGNMENTS, *([] if stage == 3 else WRITES)])


def check_bf16_writes(stage: int, names: list[str]) -> None:
    """Under bf16 a write reaches the master within the rounding of compute, and never becomes NaN."""
    for name in names:
        model = loops.net().float()
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision="bf16")
        plain = loops.net().float()
        with torch.no_grad():
            for each in (model, plain):
                {**WRITES, **ASSIGNMENTS}[name](each.head.bias)
        exact = name in ASSIGNMENTS
        got, wanted = zeor_values(model)["head.bias"], plain.head.bias.detach()
        torch.testing.assert_close(got, wanted, rtol=0 if exact else 2**-7, atol=0 if exact else 1e-30, msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_writes_under_bf16_reach_the_master(ranks, stage):
    ranks(check_bf16_writes, 2, stage, [*ASSIGNMENTS, *([] if stage == 3 else WRITES)])


def zeor_values(model: nn.Module) -> dict[str, torch.Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


def check_gradient_replacement(stage: int) -> None:
    model, _ = sharded(stage)
    loops.own_loss(model, 0).backward()

    def replace() -> None:
        model.head.bias.grad = torch.zeros(5, dtype=torch.float64)

    text = error_of(replace)
    assert "'head.bias'" in text and "in place" in text and "None" in text


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_cannot_be_replaced(ranks, stage):
    ranks(check_gradient_replacement, 2, stage)


# ---- pickling


def check_pickling(stage: int) -> None:
    model, _ = sharded(stage)
    param = model.head.weight
    attempts: list[Callable[[], Any]] = [
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(param),
        *([lambda: torch.save(model.state_dict(), io.BytesIO())] * (stage == 3)),
        *([lambda: pickle.dumps(model.state_dict())] * (stage == 3)),
        lambda: copy.deepcopy(param),
        lambda: copy.deepcopy(model),
        lambda: copy.copy(param),
    ]
    for number, attempt in enumerate(attempts):
        text = error_of(attempt)
        assert "zeor.full_params(model)" in text and ("one rank's part" in text or "sharded" in text), (number, text)
    assert "head.weight" in error_of(lambda: pickle.dumps(param))


@pytest.mark.parametrize("stage", STAGES)
def test_pickling_and_copying_raise_naming_what_to_call(ranks, stage):
    ranks(check_pickling, 2, stage)


# ---- freezing and hooks


def check_freezing(stage: int) -> None:
    model, optimizer = sharded(stage)
    plain = loops.net()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for each in (model, plain):
        each.head.weight.requires_grad_(False)
        each.blocks[0].requires_grad_(False)
    assert not model.head.weight.requires_grad and not model.blocks[0].up.bias.requires_grad
    loops.train(model, optimizer, range(2), loops.own_loss)
    loops.train(plain, other, range(2))
    for each in (model, plain):
        each.head.weight.requires_grad = True
        each.blocks[0].requires_grad_(True)
    loops.train(model, optimizer, range(2, 4), loops.own_loss)
    loops.train(plain, other, range(2, 4))
    loops.assert_close(zeor_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_a_trainable_parameter_can_be_frozen_and_freed_again(ranks, stage):
    ranks(check_freezing, 2, stage)
