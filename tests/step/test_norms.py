"""Clipping, scaling and dropping gradients by every stock way, against plain PyTorch on the joint batch.

Also that norms cost one exchange however they are asked for, and are never remembered past a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]
INF = math.inf


class Pair:
    """A sharded model and the plain one it must equal, both after one backward."""

    def __init__(self, stage: int, **options: Any):
        self.model, self.plain = loops.net(), loops.net()
        self.optimizer = torch.optim.SGD(_groups(self.model), lr=0.5)
        self.plain_optimizer = torch.optim.SGD(_groups(self.plain), lr=0.5)
        zeor.shard(self.model, self.optimizer, stage=stage, **options)
        self.backward(0)

    def backward(self, step: int) -> None:
        loops.own_loss(self.model, step).backward()
        loops.joint_loss(self.plain, step).backward()

    def both(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        return [(self.model, self.optimizer), (self.plain, self.plain_optimizer)]

    def check_grads(self) -> None:
        with zeor.full_params(self.model, grads=True):
            found = {name: param.grad for name, param in self.model.named_parameters()}
        wanted = {name: param.grad for name, param in self.plain.named_parameters()}
        assert [name for name in found if found[name] is None] == [name for name in wanted if wanted[name] is None]
        loops.assert_close(*({n: g for n, g in grads.items() if g is not None} for grads in (found, wanted)))

    def check_step(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()
        with zeor.full_params(self.model):
            loops.assert_close(loops.values(self.model), loops.values(self.plain))

    def agreements(self) -> int:
        return zeor.traffic(self.model)["calls"].get("agree", 0)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:4]}, {"params": params[4:], "lr": 0.25}]


def same(found: Tensor, wanted: Tensor) -> None:
    assert type(found) is Tensor and found.dim() == 0
    torch.testing.assert_close(found, wanted, **loops.TIGHT)


# ---- clip_grad_norm_


def whole_model(model: nn.Module, optimizer: Any, norm_type: float, foreach: bool | None) -> list[Tensor]:
    return [clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type, foreach=foreach)]


def optimizer_groups(model: nn.Module, optimizer: Any, norm_type: float, foreach: bool | None) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [clip_grad_norm_(params, 0.05, norm_type=norm_type, foreach=foreach)]


def subset(model: nn.Module, optimizer: Any, norm_type: float, foreach: bool | None) -> list[Tensor]:
    return [clip_grad_norm_(model.head.parameters(), 0.01, norm_type=norm_type, foreach=foreach)]


def one_by_one(model: nn.Module, optimizer: Any, norm_type: float, foreach: bool | None) -> list[Tensor]:
    return [clip_grad_norm_(p, 0.01, norm_type=norm_type, foreach=foreach) for p in model.parameters()]


def group_by_group(model: nn.Module, optimizer: Any, norm_type: float, foreach: bool | None) -> list[Tensor]:
    return [
        clip_grad_norm_(group["params"], 0.02, norm_type=norm_type, foreach=foreach)
        for group in optimizer.param_groups
    ]


WAYS = [whole_model, optimizer_groups, subset, one_by_one, group_by_group]


def check_clipping(stage: int, way: Callable) -> None:
    for norm_type in (2.0, 1, INF, 0.5):
        for foreach in (None, True, False):
            pair = Pair(stage)
            before = pair.agreements()
            found, wanted = [way(*each, norm_type, foreach) for each in pair.both()]
            assert pair.agreements() == before + 1, "the norms of all gradients come from one exchange"
            for mine, theirs in zip(found, wanted, strict=True):
                same(mine, theirs)
            pair.check_step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_stock_clipping_by_norm(ranks, stage, way):
    ranks(check_clipping, 2, stage, way)


@pytest.mark.parametrize("stage", STAGES)
def test_stock_clipping_on_three_ranks(ranks, stage):
    ranks(check_clipping, 3, stage, whole_model)


def check_own_clipping(stage: int) -> list[float]:
    pair = Pair(stage)
    before = pair.agreements()
    found = zeor.clip_grad_norm_(pair.model, 0.05)
    same(found, clip_grad_norm_(pair.plain.parameters(), 0.05))
    assert pair.agreements() == before + 1
    pair.check_step()
    return [found.item()]


@pytest.mark.parametrize("stage", STAGES)
def test_zeors_own_clipping_returns_the_same_bits_everywhere(ranks, stage):
    first, second = ranks(check_own_clipping, 2, stage)
    assert first == second


def check_tiny_max_norm(stage: int) -> None:
    pair = Pair(stage)
    with zeor.full_params(pair.model):
        before = loops.values(pair.model)
    clip_grad_norm_(pair.model.parameters(), 1e-9)
    pair.optimizer.step()
    with zeor.full_params(pair.model):
        loops.assert_close(loops.values(pair.model), before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_a_tiny_max_norm_leaves_about_no_update(ranks, stage):
    ranks(check_tiny_max_norm, 2, stage)


def check_nonfinite(stage: int) -> None:
    pair = Pair(stage)
    rows = loops.mine(torch.arange(loops.ROWS)).tolist()
    x = torch.ones(2, loops.FEATURES, dtype=torch.float64)
    (pair.model(x).sum() * (INF if 0 in rows else 1.0)).backward()  # on rank 0 only
    for call in (
        lambda: clip_grad_norm_(pair.model.parameters(), 1.0, error_if_nonfinite=True),
        lambda: zeor.clip_grad_norm_(pair.model, 1.0, error_if_nonfinite=True),
    ):
        with pytest.raises(RuntimeError, match=r"total norm of order 2\.0"):
            call()
    assert not torch.isfinite(clip_grad_norm_(pair.model.parameters(), 1.0))


@pytest.mark.parametrize("stage", STAGES)
def test_error_if_nonfinite_raises_on_every_rank(ranks, stage):
    ranks(check_nonfinite, 2, stage)


def check_total_norm(stage: int) -> None:
    pair = Pair(stage)
    found, wanted = ([p.grad for p in each.parameters()] for each in (pair.model, pair.plain))
    for norm_type in (2.0, 1.0, 3.0, INF, -INF, 0.0, -1.0):
        for foreach in (None, True, False):
            same(get_total_norm(found, norm_type, foreach=foreach), get_total_norm(wanted, norm_type, foreach=foreach))
    for mine, theirs in zip(found, wanted):
        same(mine.norm(), theirs.norm())
        same(torch.norm(mine, 1), torch.norm(theirs, 1))
        for norm_type in (INF, -INF, 0, 0.5, -1):
            same(torch.linalg.vector_norm(mine, norm_type), torch.linalg.vector_norm(theirs, norm_type))
    assert torch.linalg.vector_norm(found[0], dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("stage", STAGES)
def test_total_norms_of_any_order(ranks, stage):
    ranks(check_total_norm, 2, stage)


# ---- clip_grad_value_ and other arithmetic in place


def check_clip_value(stage: int) -> None:
    for foreach in (None, True, False):
        pair = Pair(stage)
        for model, _ in pair.both():
            clip_grad_value_(model.parameters(), 0.003, foreach=foreach)
        pair.check_grads()
        pair.check_step()


@pytest.mark.parametrize("stage", STAGES)
def test_stock_clipping_by_value(ranks, stage):
    ranks(check_clip_value, 2, stage)


def _set_nan(grad: Tensor) -> None:
    grad.mul_(math.nan).nan_to_num_(nan=0.25)


def _foreach(name: str, *args: Any) -> Callable[[list[Tensor]], Any]:
    return lambda grads: getattr(torch, f"_foreach_{name}")(grads, *args)


def _each(change: Callable[[Tensor], Any]) -> Callable[[list[Tensor]], Any]:
    return lambda grads: [change(grad) for grad in grads]


def _augmented(grads: list[Tensor]) -> None:
    for grad in grads:
        grad *= 3.0
        grad /= 2.0
        grad += 0.001
        grad -= 0.002


ARITHMETIC = {
    "mul_": _each(lambda g: g.mul_(0.5)),
    "mul_ by a tensor": _each(lambda g: g.mul_(torch.tensor(-0.5, dtype=torch.float64))),
    "mul_ by a tensor of its shape": _each(lambda g: g.mul_(torch.arange(g.numel()).reshape(g.shape))),
    "div_": _each(lambda g: g.div_(3.0)),
    "div_ by a tensor": _each(lambda g: g.div_(torch.tensor(3.0, dtype=torch.float64))),
    "clamp_": _each(lambda g: g.clamp_(-0.002, 0.001)),
    "clamp_ one-sided": _each(lambda g: g.clamp_(min=0.0)),
    "zero_": _each(lambda g: g.zero_()),
    "nan_to_num_": _each(_set_nan),
    "add_": _each(lambda g: g.add_(torch.ones_like(g), alpha=0.01)),
    "add_ its own": _each(lambda g: g.add_(g, alpha=0.5)),
    "augmented": _augmented,
    "through .data": _each(lambda g: g.data.mul_(0.25)),
    "through detach": _each(lambda g: g.detach().clamp_(max=0.0)),
    "_foreach_mul_": _foreach("mul_", 0.5),
    "_foreach_mul_ by a tensor": _foreach("mul_", torch.tensor(0.5, dtype=torch.float64)),
    "_foreach_div_": _foreach("div_", 3.0),
    "_foreach_clamp_min_": _foreach("clamp_min_", 0.0),
    "_foreach_clamp_max_": _foreach("clamp_max_", 0.0),
    "_foreach_zero_": _foreach("zero_"),
    "_foreach_add_": _foreach("add_", 0.01),
    "_foreach_neg_": _foreach("neg_"),
}


def check_arithmetic(stage: int) -> None:
    for name, change in ARITHMETIC.items():
        pair = Pair(stage)
        for model, _ in pair.both():
            change([p.grad for p in model.parameters()])
        found, wanted = (get_total_norm([p.grad for p in m.parameters()]) for m, _ in pair.both())
        torch.testing.assert_close(found, wanted, **loops.TIGHT, msg=name)
        pair.check_grads()
        pair.check_step()


@pytest.mark.parametrize("stage", STAGES)
def test_arithmetic_on_gradients_in_place(ranks, stage):
    ranks(check_arithmetic, 2, stage)


def check_norms_follow_changes(stage: int) -> None:
    """Scale, ask, change one gradient, ask again: nothing remembered may be stale."""
    pair = Pair(stage)

    def total() -> None:
        same(*(get_total_norm([p.grad for p in m.parameters() if p.grad is not None]) for m, _ in pair.both()))

    total()
    for model, _ in pair.both():
        clip_grad_norm_(model.parameters(), 0.05)
    total()
    for model, _ in pair.both():
        model.head.bias.grad.add_(0.01)  # the factors of its whole lane are applied now
    total()
    for model, _ in pair.both():
        for param in model.parameters():
            param.grad.mul_(0.5)
    pair.check_grads()  # reading all gradients applies factors too
    total()
    pair.backward(1)
    total()
    for model, _ in pair.both():
        model.scale.grad = None
        clip_grad_norm_(model.parameters(), 0.01)
    total()
    pair.check_step()
    total()  # after the step gradients are still there


@pytest.mark.parametrize("stage", STAGES)
def test_norms_are_not_remembered_past_a_change(ranks, stage):
    ranks(check_norms_follow_changes, 2, stage)


def check_factor_is_kept(stage: int) -> None:
    """What the user does to a factor after multiplying by it is their own affair."""
    pair = Pair(stage)
    for model, _ in pair.both():
        factor = torch.tensor(0.5, dtype=torch.float64)
        for param in model.parameters():
            param.grad.mul_(factor)
        factor.fill_(100.0)
        torch._foreach_mul_([param.grad for param in model.parameters()], factor)
        factor.zero_()
    pair.check_grads()
    pair.check_step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_factor_may_change_after_it_was_used(ranks, stage):
    ranks(check_factor_is_kept, 2, stage)


def check_isfinite(stage: int) -> None:
    pair = Pair(stage)
    for model, _ in pair.both():
        assert all(torch.isfinite(p.grad).all() and not p.grad.isnan().any() for p in model.parameters())
        spoiled = torch.zeros(5, dtype=torch.float64)
        spoiled[4] = INF
        model.head.bias.grad.add_(spoiled)
    assert torch.isfinite(pair.model.head.bias.grad).tolist() == [True, True, True, True, False]
    assert torch.isinf(pair.model.head.bias.grad).any() and torch.isfinite(pair.model.head.weight.grad).all()
    assert torch.isfinite(pair.model.head.bias.grad).dtype == torch.bool


@pytest.mark.parametrize("stage", STAGES)
def test_isfinite_sees_every_element_on_every_rank(ranks, stage):
    ranks(check_isfinite, 2, stage)


# ---- dropping gradients


def _none_by_hand(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


def _deleted(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        del param.grad


ZEROING: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p.grad = None": _none_by_hand,
    "del p.grad": _deleted,
    "a part of the model": lambda model, optimizer: model.head.zero_grad(),
}


def check_zero_grad(stage: int) -> None:
    for name, zero in ZEROING.items():
        pair = Pair(stage)
        for model, optimizer in pair.both():
            clip_grad_norm_(model.parameters(), 0.05)  # a remembered factor must not outlive its gradient
            zero(model, optimizer)
        found, wanted = ([p.grad is None for p in m.parameters()] for m, _ in pair.both())
        assert found == wanted, name
        pair.check_grads()
        pair.backward(1)
        pair.check_grads()
        pair.check_step()


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_in_every_form(ranks, stage):
    ranks(check_zero_grad, 2, stage)


def check_no_step_without_gradient(stage: int) -> None:
    pair = Pair(stage)
    for model, _ in pair.both():
        model.zero_grad()
    pair.check_step()
    pair.backward(1)
    for model, _ in pair.both():
        model.head.weight.grad = None
        model.blocks[0].up.bias.grad = None
    pair.check_step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_gradient_is_not_updated(ranks, stage):
    ranks(check_no_step_without_gradient, 2, stage)
