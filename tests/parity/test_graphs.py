"""Graphs that are not one forward and one backward: siamese use, several losses, penalties, two models in one loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeor
from tests.parity.calls import STAGES, Mlp, Parts, compare, finish, mean, mse, parts_of
from tests.parity.models import Run, full_state, largest

# ---- one model


def contrastive(model: Any, optimizer: Any, parts: Parts) -> None:
    """Siamese: the model is called three times before one backward."""
    losses = []
    for x, y in parts:
        anchor, same, other = model(x), model(x + 0.1), model(x.flip(0))
        losses.append(F.triplet_margin_loss(anchor, same, other, margin=2.0) + F.mse_loss(anchor, y))
    mean(losses).backward()
    finish(optimizer)


def three_losses_on_one_graph(model: Any, optimizer: Any, parts: Parts) -> None:
    outs = [(model(x), y) for x, y in parts]
    mean([F.mse_loss(out, y) for out, y in outs]).backward(retain_graph=True)
    mean([out.abs().mean() for out, _ in outs]).backward(retain_graph=True)
    mean([out.pow(4).mean() for out, _ in outs]).backward()
    finish(optimizer)


def interleaved(model: Any, optimizer: Any, parts: Parts) -> None:
    """Backward of an older graph after a newer forward, then the newer one's."""
    old = mse(model, parts)
    new = mse(model, [(x * 2, y) for x, y in parts])
    new.backward()
    old.backward()
    finish(optimizer)


def penalty_on_mixed_inputs(critic: Any, optimizer: Any, parts: Parts) -> None:
    """WGAN-GP: the gradient of the critic at points between real and false ones has norm 1."""
    losses = []
    for x, _ in parts:
        real, false = x, torch.cos(x)
        between = (0.3 * real + 0.7 * false).requires_grad_()
        score = critic(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
        losses.append(critic(false).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean())
    mean(losses).backward()
    finish(optimizer)


def penalty_every_other_step(critic: Any, optimizer: Any, parts: Parts) -> None:
    """Lazy regularisation: a second backward with a graph of its own, only now and then."""
    critic.step = getattr(critic, "step", -1) + 1
    mean([F.softplus(critic(x)).mean() for x, _ in parts]).backward()
    if critic.step % 2 == 0:
        losses = []
        for x, _ in parts:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            losses.append(slope.pow(2).sum(1).mean())
        mean(losses).backward()
    finish(optimizer)


def hessian_vector_product(model: Any, optimizer: Any, parts: Parts) -> None:
    """Two derivatives with respect to inputs, then one with respect to parameters."""
    losses = []
    for x, y in parts:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad((slope * y.sum()).sum(), x, create_graph=True)
        losses.append(curve.pow(2).mean() + F.mse_loss(out, y))
    mean(losses).backward()
    finish(optimizer)


def kept_activations(model: Any, optimizer: Any, parts: Parts) -> None:
    """Truncated: what one forward gave enters the next, detached and not."""
    losses = []
    for x, y in parts:
        first = model(x)
        again = model(torch.cat([first, first[:, :1]], dim=1))
        last = model(torch.cat([again.detach(), again[:, :1]], dim=1))
        losses.append(F.mse_loss(last, y) + F.mse_loss(first, y))
    mean(losses).backward()
    finish(optimizer)


LOOPS = [
    contrastive, three_losses_on_one_graph, interleaved, penalty_on_mixed_inputs, penalty_every_other_step,
    hessian_vector_product, kept_activations,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_one_model(ranks, loop):
    ranks(compare, 2, loop, Mlp, timeout=60)


class Twice(Mlp):
    """Every layer twice, the second time in the other order, and some of it checkpointed."""

    def __init__(self, mode: str):
        super().__init__()
        self.mode = mode

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.mode == "none":
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.mode == "reentrant")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in (*self.layers, *reversed(self.layers)):
            x = x + torch.tanh(self._call(layer, x))
        return self.last(x) * self.gain


@pytest.mark.parametrize("mode", ["none", "plain"])
@pytest.mark.parametrize("loop", [contrastive, three_losses_on_one_graph, interleaved], ids=lambda f: f.__name__)
def test_one_module_twice_in_one_forward(ranks, mode, loop):
    ranks(compare, 2, loop, partial(Twice, mode), timeout=60)


@pytest.mark.parametrize("loop", [contrastive, interleaved], ids=lambda f: f.__name__)
def test_one_module_twice_in_one_forward_under_reentrant_checkpoints(ranks, loop):
    """Not two backward passes of one graph: torch's re-entrant checkpoint cannot do that."""
    ranks(compare, 2, loop, partial(Twice, "reentrant"), timeout=60)


def test_one_module_twice_on_three_ranks(ranks):
    ranks(compare, 3, three_losses_on_one_graph, partial(Twice, "plain"), {"overlap": False}, timeout=60)


# ---- several models in one loss


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


Models = list[Any]
Steps = Callable[[Models, Sequence[Any], Parts], None]


def train_together(steps: Steps, build: Callable[[], Models], stages: Sequence[int] | None) -> Run:
    torch.manual_seed(5)
    models = [model.double() for model in build()]
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    optimizers = [torch.optim.Adam(params, lr=0.01) if params else None for params in trained]
    if stages is not None:
        for model, optimizer, stage in zip(models, optimizers, stages):
            zeor.shard(model, optimizer, stage=stage)
    for step in range(3):
        parts = parts_of(step, dist.get_world_size())
        steps(models, optimizers, parts if stages is None else [parts[dist.get_rank()]])
    states = [full_state(model) if stages is not None else dict(model.named_parameters()) for model in models]
    return Run({f"{number}.{k}": v.detach() for number, state in enumerate(states) for k, v in state.items()}, [], [])


def compare_together(steps: Steps, build: Callable[[], Models]) -> None:
    want, first = train_together(steps, build, None), None
    for stages in (*((stage,) * 3 for stage in STAGES), (3, 1, 0), (2, 3, 3)):
        got = train_together(steps, build, stages)
        assert largest(got, want) <= 1e-10, f"stages {stages}: off by {largest(got, want):.2e}"
        first = first or got
        assert got.digest() == first.digest(), f"stages {stages} are not the bits of stage 0"


def gan_with_one_forward(models: Models, optimizers: Sequence[Any], parts: Parts) -> None:
    """The maker runs once; the critic sees what it made detached, then not."""
    maker, judge = models
    made = [maker(x) for x, _ in parts]
    real = mean([F.softplus(-judge(y)).mean() for _, y in parts])
    (real + mean([F.softplus(judge(out.detach())).mean() for out in made])).backward()
    finish(optimizers[1])
    mean([F.softplus(-judge(out)).mean() for out in made]).backward()
    finish(optimizers[0])
    optimizers[1].zero_grad()


def gan_with_a_frozen_critic(models: Models, optimizers: Sequence[Any], parts: Parts) -> None:
    """The critic's parameters are frozen while the maker learns, as many loops do to save work."""
    maker, judge = models
    for param in judge.parameters():
        param.requires_grad_(True)
    with torch.no_grad():
        made = [maker(x) for x, _ in parts]
    mean([judge(out).mean() - judge(y).mean() for out, (_, y) in zip(made, parts)]).backward()
    finish(optimizers[1])
    for param in judge.parameters():
        param.requires_grad_(False)
    (-mean([judge(maker(x)).mean() for x, _ in parts])).backward()
    assert all(param.grad is None for param in judge.parameters())
    finish(optimizers[0])


def joint_loss(models: Models, optimizers: Sequence[Any], parts: Parts) -> None:
    """An actor and a critic: one loss, one backward through both, and the critic judges the actor's output twice."""
    actor, judge = models
    losses = []
    for x, y in parts:
        action = actor(x)
        advantage = F.mse_loss(judge(y), x[:, :1])
        losses.append(advantage - judge(action).mean() + 0.1 * (judge(action.detach()) - x[:, 1:2]).pow(2).mean())
    mean(losses).backward()
    for optimizer in optimizers:
        finish(optimizer)


def distilled(models: Models, optimizers: Sequence[Any], parts: Parts) -> None:
    """A frozen teacher without a graph, and one with a graph through its inputs; then a student's own loss."""
    teacher, student = models
    losses = []
    for x, y in parts:
        with torch.no_grad():
            target = teacher(x)
        out = student(x)
        hint = teacher(torch.cat([out, out[:, :1]], dim=1))  # frozen weights, gradients for the student
        losses.append(F.mse_loss(out, target) + F.mse_loss(out, y) + hint.pow(2).mean())
    mean(losses).backward()
    assert all(param.grad is None for param in teacher.parameters())
    finish(optimizers[1])


def slowly_following(models: Models, optimizers: Sequence[Any], parts: Parts) -> None:
    """A target network that only ever answers, beside one that learns from it through a third."""
    net, target, head = models
    losses = []
    for x, y in parts:
        with torch.no_grad():
            wanted = target(x)
        losses.append(F.mse_loss(head(net(x)), wanted.sum(1, keepdim=True)) + F.mse_loss(net(x), y))
    mean(losses).backward()
    finish(optimizers[0])
    finish(optimizers[2])


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


TOGETHER: list[tuple[Steps, Callable[[], Models]]] = [
    (gan_with_one_forward, lambda: [Mlp(), critic()]),
    (gan_with_a_frozen_critic, lambda: [Mlp(), critic()]),
    (joint_loss, lambda: [Mlp(), critic()]),
    (distilled, lambda: [frozen(Mlp(7)), Mlp()]),
    (slowly_following, lambda: [Mlp(), frozen(Mlp(6)), critic()]),
]


@pytest.mark.parametrize(("steps", "build"), TOGETHER, ids=lambda x: x.__name__)
def test_several_sharded_models_in_one_loss(ranks, steps, build):
    ranks(compare_together, 2, steps, build, timeout=90)
