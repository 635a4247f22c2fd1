"""Against plain PyTorch in one process on the joint batch: float64 within 1e-10, fp32 with SGD within 1e-6.

First the factors of test_stages, pairwise; then models of odd sizes; then what users do in loops. A loop is
written once, as `loop(model, optimizer, parts)`: plain PyTorch gets the parts of all ranks, zeor each rank its
own, and a step's loss is the mean over parts. Comparing happens on the ranks, at every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import zeor
from tests.parity.models import (
    FACTORS,
    SELECTIONS,
    Net,
    Odd,
    One,
    Run,
    Setting,
    build_model,
    full_state,
    joint_batches,
    largest,
    loss_of,
    make_optimizer,
    net,
    pairs_here,
    pairwise,
    part,
    product,
    reference,
    steps,
    train,
)
from zeor.step import reduces

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)


def odd(setting: Setting) -> nn.Module:
    return Odd(dist.get_world_size())


def one_scalar(setting: Setting) -> nn.Module:
    return One()


def one_vector(setting: Setting) -> nn.Module:
    return One((5,))


def tied(setting: Setting) -> nn.Module:
    return Net(setting.checkpoint, tied=True)


def compare(settings: list[Setting], tolerance: float, build: Callable = net) -> None:
    """On ranks: every setting against plain PyTorch on the joint batch."""
    for setting in settings:
        want, got = reference(setting, dist.get_world_size(), build), train(setting, build)
        difference = largest(got, want)
        assert difference <= tolerance, f"{setting}: parameters are off by {difference:.2e}"
        mine = torch.tensor(got.losses, dtype=torch.float64)
        dist.all_reduce(mine)
        apart = (mine / dist.get_world_size() - torch.tensor(want.losses, dtype=torch.float64)).abs().max()
        assert apart <= 10 * tolerance, f"{setting}: losses are off by {apart:.2e}"
        assert len(got.norms) == len(want.norms) == (0 if setting.clip == "none" else steps(int(setting.micro[0])))
        norms = torch.tensor(got.norms) / torch.tensor(want.norms) - 1
        assert all(norms.abs() <= max(tolerance, 1e-6)), f"{setting}: norms are off by {norms}"


# ---- the factors


@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_float64(ranks, world, select):
    factors = {**FACTORS, "optimizer": ("AdamW", "SGD"), "precision": ("fp64",)}
    ranks(compare, world, select(world, WORLDS, **factors), 1e-10)


@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_fp32_with_sgd(ranks, world, select):
    factors = {**FACTORS, "optimizer": ("SGD",), "precision": ("fp32", None)}
    ranks(compare, world, select(world, WORLDS, **factors), 1e-6)


ODD_FACTORS = {"stage": STAGES, "optimizer": ("AdamW", "SGD"), "clip": ("stock", "zeor"), "precision": ("fp64",)}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("build", [odd, one_scalar, one_vector], ids=lambda build: build.__name__)
def test_odd_sizes(ranks, world, build):
    ranks(compare, world, pairs_here(world, WORLDS, **ODD_FACTORS), 1e-10, build)


@pytest.mark.whole
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("build", [odd, one_scalar, one_vector], ids=lambda build: build.__name__)
def test_odd_sizes_in_every_setting(ranks, world, build):
    ranks(compare, world, product(**ODD_FACTORS), 1e-10, build)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tied(ranks, world):
    factors = {"stage": STAGES, "micro": ("1", "3 no_sync"), "checkpoint": FACTORS["checkpoint"]}
    ranks(compare, world, pairwise(**factors, clip=("none", "stock"), precision=("fp64",)), 1e-10, tied)


def one_object() -> None:
    for stage in STAGES:
        torch.manual_seed(3)
        model, plain = Net(tied=True).double(), Net(tied=True).double()
        plain.load_state_dict(model.state_dict())
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        assert model.head.weight is model.embed.weight
        [[(tokens, targets)], *_] = joint_batches(dist.get_world_size(), 1)
        loss_of(model, part(tokens), part(targets)).backward()
        loss_of(plain, tokens, targets).backward()
        assert model.head.weight is model.embed.weight
        with zeor.full_params(model, grads=True):
            assert model.head.weight is model.embed.weight
            assert (model.embed.weight.grad - plain.embed.weight.grad).abs().max() < 1e-12, f"stage {stage}"


def test_tied_parameter_is_one_object_whose_gradient_is_the_sum_of_both_uses(ranks):
    ranks(one_object, 2)


# ---- loops

Parts = Sequence[tuple[Tensor, Tensor]]
Loop = Callable[[nn.Module, Any, Parts], Any]


class Mlp(nn.Module):
    """Four equal layers, each a unit, and a first and last of their own."""

    def __init__(self, dim: int = 5):
        super().__init__()
        self.first = nn.Linear(3, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))
        self.last = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def parts_of(step: int, world: int) -> Parts:
    """Every rank's (inputs, targets) of one step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world, 4, 3, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.sin(x[..., :2] * 2)))


def mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def mse(model: nn.Module, parts: Parts) -> Tensor:
    return mean([mse_loss(model(x), y) for x, y in parts])


def run_loop(loop: Loop, build: Callable[[], nn.Module], options: dict[str, Any] | None, steps: int = 4) -> Run:
    """Plain PyTorch where there are no options, zeor with these otherwise."""
    torch.manual_seed(11)
    model = build().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    world = dist.get_world_size()
    if options is not None:
        zeor.shard(model, optimizer, **options)
    seen = []
    for step in range(steps):
        parts = parts_of(step, world)
        seen.append(loop(model, optimizer, parts if options is None else [parts[dist.get_rank()]]))
    params = dict(model.named_parameters()) if options is None else full_state(model)
    return Run({name: p.detach().clone() for name, p in params.items()}, seen, [])


def compare_loop(loop: Loop, build: Callable[[], nn.Module] = Mlp, stages: Sequence[int] = STAGES) -> None:
    """On ranks: a loop by zeor at every stage against the same loop in plain PyTorch."""
    want = run_loop(loop, build, None)
    for stage in stages:
        for overlap in (True, False) if stage == 3 else (True,):  # elsewhere test_stages has compared them
            got = run_loop(loop, build, {"stage": stage, "overlap": overlap})
            difference = largest(got, want)
            assert difference <= 1e-10, f"stage {stage}, overlap {overlap}: off by {difference:.2e}"
            if any(seen is not None for seen in want.losses):
                assert got.losses == want.losses, f"stage {stage}: saw {got.losses}, plain {want.losses}"


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def with_closure(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, parts)
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0] and len(calls) == 1


def two_losses(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    outputs = [model(x) for x, _ in parts]
    mean([mse_loss(out, y) for out, (_, y) in zip(outputs, parts)]).backward(retain_graph=True)
    mean([out.pow(2).mean() for out in outputs]).backward()
    finish(optimizer)


def one_graph_twice(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    loss = mse(model, parts)
    loss.backward(retain_graph=True)
    loss.backward()
    finish(optimizer)


def two_backwards(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward()
    mse(model, [(-x, y) for x, y in parts]).backward()
    finish(optimizer)


def two_forwards_then_backward(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    (mse(model, parts) + mse(model, [(-x, y) for x, y in parts])).backward()
    finish(optimizer)


def two_forwards_two_backwards(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    first, second = mse(model, parts), mse(model, [(-x, y) for x, y in parts])
    first.backward()
    second.backward()
    finish(optimizer)


def gradient_penalty(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    losses = []
    for x, y in parts:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        losses.append(mse_loss(out, y) + (slope.norm(dim=-1) - 1).pow(2).mean())
    mean(losses).backward()
    finish(optimizer)


def input_gradient(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    """An adversarial example: autograd.grad with respect to inputs leaves parameters alone."""
    moved = []
    for x, y in parts:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mse_loss(model(x), y), x)
        moved.append((x.detach() + 0.1 * slope.sign(), y))
    assert all(p.grad is None for p in model.parameters())
    mse(model, moved).backward()
    finish(optimizer)


def double_backward(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward(create_graph=True)
    optimizer.zero_grad()
    mse(model, parts).backward()
    finish(optimizer)


def eval_between(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    loss = mse(model, parts)
    model.eval()
    with torch.no_grad():
        mse(model, parts)
    model.train()
    loss.backward()
    with torch.no_grad():
        mse(model, parts)
    optimizer.step()
    with torch.inference_mode():
        mse(model, parts)
    optimizer.zero_grad()


def zero_to_zero(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    optimizer.zero_grad(set_to_none=False)
    mse(model, parts).backward()
    optimizer.step()


def zero_by_model(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    mse(model, parts).backward()
    for p in model.parameters():
        p.grad.mul_(0.5)
    optimizer.step()
    for p in model.parameters():
        p.grad = None


def drop_one_gradient(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    """A parameter whose gradient was taken away is not updated, and its decay not applied."""
    mse(model, parts).backward()
    model.layers[1].weight.grad = None
    finish(optimizer)


def clip_by_value(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    finish(optimizer)


def clip_a_subset(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward()
    torch.nn.utils.clip_grad_norm_(model.layers.parameters(), 0.01, norm_type=1.0)
    torch.nn.utils.clip_grad_norm_(model.last.parameters(), 0.02, norm_type=float("inf"), foreach=False)
    finish(optimizer)


class Trouble(Exception):
    pass


def _raise_in_forward(model: nn.Module, parts: Parts) -> None:
    def trouble(*args: Any) -> None:
        raise Trouble

    handle = model.layers[2].register_forward_pre_hook(trouble)
    with pytest.raises(Trouble):
        mse(model, parts)
    handle.remove()


def raise_in_forward(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    _raise_in_forward(model, parts)
    mse(model, parts).backward()
    finish(optimizer)


def raise_in_forward_before_step(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    """The gradients that were there before the exception are still stepped with."""
    mse(model, parts).backward()
    _raise_in_forward(model, parts)
    finish(optimizer)


def raise_in_forward_before_zero_grad(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward()
    _raise_in_forward(model, parts)
    model.zero_grad()
    mse(model, parts).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    model.zero_grad()


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Trouble


def raise_in_backward(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    handle = model.layers[1].register_forward_hook(lambda module, args, out: RaiseInBackward.apply(out))
    with pytest.raises(Trouble):
        mse(model, parts).backward()
    handle.remove()
    optimizer.zero_grad()
    mse(model, parts).backward()
    finish(optimizer)


LOOPS = [
    with_closure, two_losses, one_graph_twice, two_backwards, two_forwards_then_backward,
    two_forwards_two_backwards, gradient_penalty, input_gradient, double_backward, eval_between, zero_to_zero,
    zero_by_model, drop_one_gradient, clip_by_value, clip_a_subset, raise_in_forward,
    raise_in_forward_before_step, raise_in_forward_before_zero_grad, raise_in_backward,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop(ranks, loop):
    ranks(compare_loop, 2, loop, timeout=60)


def two_models(stage: int | None) -> Run:
    """A generator and its critic, sharded each for itself, trained in turns through each other."""
    torch.manual_seed(2)
    models = [Mlp().double(), nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    if stage is not None:
        for model, optimizer in zip(models, optimizers):
            zeor.shard(model, optimizer, stage=stage)
    maker, critic = models
    for step in range(3):
        parts = parts_of(step, dist.get_world_size())
        parts = parts if stage is None else [parts[dist.get_rank()]]
        mean([critic(maker(x).detach()).mean() - critic(y).mean() for x, y in parts]).backward()
        finish(optimizers[1])
        (-mean([critic(maker(x)).mean() for x, _ in parts])).backward()
        finish(optimizers[0])
        optimizers[1].zero_grad()
    states = [full_state(model) if stage is not None else dict(model.named_parameters()) for model in models]
    return Run({f"{number}.{k}": v.detach() for number, state in enumerate(states) for k, v in state.items()}, [], [])


def compare_two_models() -> None:
    want = two_models(None)
    for stage in STAGES:
        difference = largest(two_models(stage), want)
        assert difference <= 1e-10, f"stage {stage}: off by {difference:.2e}"


def test_two_models_trained_through_each_other(ranks):
    ranks(compare_two_models, 2, timeout=60)


# ---- models that use their units in unusual ways


def plain_step(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    mse(model, parts).backward()
    finish(optimizer)


class Siamese(Mlp):
    """A layer is called twice with others in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for number in (0, 1, 2, 0, 3, 1):
            x = x + torch.tanh(self.layers[number](x))
        return self.last(x)


class Stopped(Mlp):
    """A layer is called without gradients, then with them; another only without."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            hint = self.layers[3](self.layers[0](x))
        x = x + torch.tanh(self.layers[0](x)) + hint
        return self.last(torch.tanh(self.layers[2](self.layers[1](x))))


class Functional(Mlp):
    """The root uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.scale * self.scale).sum() * 0.1


class Wrapped(Mlp):
    """Checkpoints over two layers at once, and around everything."""

    def __init__(self, reentrant: bool, whole: bool):
        super().__init__()
        self.reentrant, self.whole = reentrant, whole

    def _two(self, x: Tensor, begin: int) -> Tensor:
        for layer in self.layers[begin : begin + 2]:
            x = x + torch.tanh(layer(x))
        return x

    def _all(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for begin in (0, 2):
            x = checkpoint(self._two, x, begin, use_reentrant=self.reentrant)
        return self.last(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return checkpoint(self._all, x.clone().requires_grad_(), use_reentrant=self.reentrant)
        return self._all(x)


class Frozen(Mlp):
    """Some parameters do not train: a whole unit, and a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)
        self.first.requires_grad_(False)


class Recurrent(nn.Module):
    """An LSTM keeps a list of its weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.unsqueeze(0))[0]).squeeze(0)


class ManyOutputs(Mlp):
    """Units that take and return dictionaries, of which some entries are not used."""

    class Layer(nn.Module):
        def __init__(self, dim: int):
            super().__init__()
            self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

        def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"x": state["x"] + torch.tanh(self.a(state["x"])), "aside": self.b(state["aside"])}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": torch.tanh(self.first(x)), "aside": x.new_ones(5)}
        for layer in self.layers:
            state = layer(state)
        return self.last(state["x"])


class Force(Mlp):
    """A backward inside forward: the output is the gradient of an energy. The root computes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = super().forward(x).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.scale * force[..., :2]


class InnerForce(Mlp):
    """The same inside one unit."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(y).tanh().sum(), y, create_graph=True)
            return super().forward(x) + slope

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(5, 5) for _ in range(3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "siamese": Siamese,
    "no_grad": Stopped,
    "root parameter": Functional,
    "checkpoint over two": partial(Wrapped, False, False),
    "re-entrant checkpoint over two": partial(Wrapped, True, False),
    "checkpoint over all": partial(Wrapped, False, True),
    "re-entrant checkpoint over all": partial(Wrapped, True, True),
    "frozen": Frozen,
    "recurrent": Recurrent,
    "many outputs": ManyOutputs,
    "force": Force,
    "force of a unit": InnerForce,
}


@pytest.mark.parametrize("name", MODELS)
def test_model(ranks, name):
    ranks(compare_loop, 2, plain_step, MODELS[name], timeout=60)


@pytest.mark.parametrize("name", ["siamese", "re-entrant checkpoint over two", "checkpoint over all"])
def test_model_with_two_backwards(ranks, name):
    ranks(compare_loop, 3, two_backwards, MODELS[name], timeout=60)


# ---- conditional use


class Choice(Mlp):
    """Which layer is used depends on the data: on the sign of the first input of each part."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        layer = self.layers[int(x[0, 0] > 0)]
        return self.last(self.layers[3](hidden + torch.tanh(layer(hidden))))


def choose(positive: Sequence[bool]) -> Loop:
    """A loop in which part r takes the layer positive[r]."""

    def loop(model: nn.Module, optimizer: Any, parts: Parts) -> list[bool]:
        whole = len(parts) == dist.get_world_size() and (len(parts) > 1 or dist.get_world_size() == 1)
        wanted = positive if whole else [positive[dist.get_rank()]]
        moved = [(torch.where(torch.tensor(flag), x.abs(), -x.abs()), y) for flag, (x, y) in zip(wanted, parts)]
        mse(model, moved).backward()
        has = [p.grad is not None for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return has

    return loop


@pytest.mark.parametrize("positive", [(True, True), (False, True), (True, False)])
def test_unused_on_all_or_one_rank(ranks, positive):
    """Gradients, and which of them are None, are those of the joint batch; layer 2 is never used."""
    ranks(compare_loop, 2, choose(positive), Choice, timeout=60)


@pytest.mark.parametrize("positive", [(True, False, True), (False, False, True)])
def test_unused_on_one_of_three(ranks, positive):
    ranks(compare_loop, 3, choose(positive), Choice, timeout=60)


class Path(Mlp):
    """Which layers are used, and in which order, is decided from outside."""

    path: Sequence[int] = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for number in self.path:
            x = x + torch.tanh(self.layers[number](x))
        return self.last(x)


def along(paths: Sequence[Sequence[Sequence[int]]]) -> Loop:
    """In its n-th step a loop takes, on rank r, the path paths[n][r]."""

    def loop(model: nn.Module, optimizer: Any, parts: Parts) -> list[bool]:
        step = model.steps = getattr(model, "steps", -1) + 1
        losses = []
        for rank, (x, y) in enumerate(parts):
            model.path = paths[step][rank if len(parts) > 1 else dist.get_rank()]
            losses.append(mse_loss(model(x), y))
        mean(losses).backward()
        has = [p.grad is not None for p in model.parameters()]
        finish(optimizer)
        return has

    return loop


PATHS = {
    "first used late": [[[0, 1]] * 2, [[0, 1]] * 2, [[0, 1, 2]] * 2, [[0, 1, 2, 3]] * 2],
    "first used late on one rank": [[[0, 1]] * 2, [[0, 1], [0, 2]], [[3], [0, 1]], [[0, 1], [0, 1]]],
    "other orders": [[[0, 1, 2, 3], [3, 2, 1, 0]], [[3, 1], [1, 3]], [[0, 1, 2, 3], [2, 3, 0, 1]], [[1], [2, 1]]],
    "one goes round twice": [[[0, 1], [1, 0, 1]], [[0], [2, 2, 3, 2]], [[0, 1, 0, 1], [1]], [[], [0, 1, 2, 3, 0]]],
    "nothing in common": [[[0, 1], [2, 3]], [[2, 3], [0, 1]], [[0], [3]], [[], [0, 1, 2, 3]]],
}


@pytest.mark.parametrize("name", PATHS)
def test_ranks_take_different_paths(ranks, name):
    ranks(compare_loop, 2, along(PATHS[name]), Path, timeout=60)


class TwoHeads(Mlp):
    """Forward is the same on every rank; what the loss uses of it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(5, 2) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.heads[0](x), self.heads[1](x)


def one_head_per_rank(model: nn.Module, optimizer: Any, parts: Parts) -> None:
    losses = []
    for rank, (x, y) in enumerate(parts):
        out = model(x)
        losses.append(mse_loss(out[rank if len(parts) > 1 else dist.get_rank()], y))
    mean(losses).backward()
    finish(optimizer)


def impatiently(fn: Callable, *args: Any) -> None:
    """Waiting for a rank on another path takes seconds at first; tests have no time for that."""
    patience = reduces.PATIENCE_SECONDS
    reduces.PATIENCE_SECONDS = 0.1
    try:
        fn(*args)
    finally:
        reduces.PATIENCE_SECONDS = patience


def test_a_loss_skips_a_branch_on_one_rank(ranks):
    """Backward alone differs: what one rank waits for must not make it keep from the other what that waits for."""
    ranks(impatiently, 2, compare_loop, one_head_per_rank, TwoHeads, timeout=60)


def untouched_state() -> None:
    for stage in STAGES:
        torch.manual_seed(1)
        model = Choice().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        zeor.shard(model, optimizer, stage=stage)
        before = full_state(model)
        for _ in range(2):
            x = torch.rand(4, 3, dtype=torch.float64) + 0.1
            model(x).pow(2).mean().backward()
            assert model.layers[0].weight.grad is None and model.layers[1].weight.grad is not None
            finish(optimizer)
        after = full_state(model)
        for name in before:
            used = not name.startswith(("layers.0", "layers.2"))
            assert torch.equal(before[name], after[name]) is not used, f"stage {stage}: {name}"
        zeor.unshard(model, optimizer)
        assert not optimizer.state.get(model.layers[0].weight), f"stage {stage}: an unused parameter got state"
        state = optimizer.state[model.layers[1].weight]
        assert state["step"] == 2 and state["exp_avg"].shape == (5, 5)


def test_unused_parameter_keeps_its_value_and_has_no_state(ranks):
    ranks(untouched_state, 2)


# ---- gradients as such


def sum_and_mean() -> None:
    world = dist.get_world_size()
    for stage in STAGES:
        grads = {}
        for reduction in ("sum", "mean"):
            torch.manual_seed(1)
            model = Mlp().double()
            zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, reduction=reduction)
            x, y = parts_of(0, world)[dist.get_rank()]
            mse_loss(model(x), y).backward()
            with zeor.full_params(model, grads=True):
                grads[reduction] = {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.manual_seed(1)
        plain = Mlp().double()
        sum(mse_loss(plain(x), y) for x, y in parts_of(0, world)).backward()
        for name, p in plain.named_parameters():
            assert torch.allclose(grads["sum"][name], p.grad, rtol=0, atol=1e-12), f"stage {stage}: sum of {name}"
            assert torch.allclose(grads["mean"][name] * world, p.grad, rtol=0, atol=1e-12), f"stage {stage}: {name}"


@pytest.mark.parametrize("world", [1, 3])
def test_reduction(ranks, world):
    ranks(sum_and_mean, world)


def micro_batches_against_one() -> None:
    setting = Setting(precision="fp64", optimizer="AdamW")
    world = dist.get_world_size()
    plain = build_model(setting, net)
    optimizer = make_optimizer(setting.optimizer, plain.parameters())
    for batches in joint_batches(world, 3):
        loss_of(plain, torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])).backward()
        finish(optimizer)
    want = Run({name: p.detach() for name, p in plain.named_parameters()}, [], [])
    for stage in STAGES:
        for hold in (False, True):
            model = build_model(setting, net)
            optimizer = make_optimizer(setting.optimizer, model.parameters())
            zeor.shard(model, optimizer, stage=stage)
            for batches in joint_batches(world, 3):
                *first, last = batches
                for x, y in first:
                    if hold:
                        with zeor.no_sync(model):
                            (loss_of(model, part(x), part(y)) / 3).backward()
                    else:
                        (loss_of(model, part(x), part(y)) / 3).backward()
                (loss_of(model, part(last[0]), part(last[1])) / 3).backward()
                finish(optimizer)
            difference = largest(Run(full_state(model), [], []), want)
            assert difference <= 1e-10, f"stage {stage}, no_sync {hold}: off by {difference:.2e}"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_three_micro_batches_equal_one_batch(ranks, world):
    ranks(micro_batches_against_one, world)


# ---- optimizers


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.3, "lr": 0.05}, {"params": rest, "weight_decay": 0.0, "lr": 0.01}]


def two_groups(model: nn.Module, shard: Callable) -> list[Any]:
    optimizer = torch.optim.AdamW(groups_of(model))
    shard(optimizer)
    return [optimizer]


def tensor_lr(model: nn.Module, shard: Callable) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), foreach=False)
    shard(optimizer)
    return [optimizer]


def scheduler_before(model: nn.Module, shard: Callable) -> list[Any]:
    optimizer = torch.optim.SGD(groups_of(model), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    shard(optimizer)
    return [optimizer, scheduler]


def scheduler_after(model: nn.Module, shard: Callable) -> list[Any]:
    optimizer = torch.optim.SGD(groups_of(model), momentum=0.9)
    shard(optimizer)
    return [optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)]


def stepped_before(model: nn.Module, shard: Callable) -> list[Any]:
    """The optimizer has state already when it is sharded."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    finish(optimizer)
    shard(optimizer)
    return [optimizer]


def several(model: nn.Module, shard: Callable) -> list[Any]:
    head = torch.optim.SGD(model.last.parameters(), lr=0.1)
    body = torch.optim.AdamW([*model.first.parameters(), *model.layers.parameters()], lr=0.02)
    shard([head, body])
    return [head, body]


def several_over_one_unit(model: nn.Module, shard: Callable) -> list[Any]:
    """Weights by one optimizer, biases by another: every unit belongs to both."""
    weights = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)
    biases = torch.optim.Adagrad([p for p in model.parameters() if p.dim() == 1], lr=0.02)
    shard([weights, biases])
    return [weights, biases]


def some_parameters(model: nn.Module, shard: Callable) -> list[Any]:
    """Parameters that no optimizer has stay as they are."""
    optimizer = torch.optim.AdamW(model.layers[1:].parameters(), lr=0.02)
    shard(optimizer)
    return [optimizer]


MAKERS = [
    two_groups, tensor_lr, scheduler_before, scheduler_after, stepped_before, several, several_over_one_unit,
    some_parameters,
]  # fmt: skip


def train_with(make: Callable, shard: Callable | None) -> Run:
    torch.manual_seed(5)
    model = Mlp().double()
    steppers = make(model, (lambda optimizer: None) if shard is None else partial(shard, model))
    lrs = []
    for step in range(4):
        parts = parts_of(step, dist.get_world_size())
        mse(model, parts if shard is None else [parts[dist.get_rank()]]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in steppers:
            each.step()
        lrs.append([float(group["lr"]) for group in steppers[0].param_groups])
        model.zero_grad()
    params = dict(model.named_parameters()) if shard is None else full_state(model)
    return Run({name: p.detach() for name, p in params.items()}, lrs, [])


def compare_optimizers(make: Callable, late: bool) -> None:
    want = train_with(make, None)
    for stage in STAGES:
        options = {"stage": stage, "overlap": stage != 2}

        def shard(model: nn.Module, optimizer: Any, options: dict = options) -> None:
            if late:
                assert zeor.shard(model, **options) is model
                assert zeor.shard(model, optimizer) == (model, optimizer)
            else:
                assert zeor.shard(model, optimizer, **options) == (model, optimizer)

        got = train_with(make, shard)
        difference = largest(got, want)
        assert difference <= 1e-10, f"stage {stage}: off by {difference:.2e}"
        assert got.losses == want.losses, f"stage {stage}: learning rates {got.losses}, plain {want.losses}"


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_optimizers(ranks, make):
    ranks(compare_optimizers, 2, make, False, timeout=60)


@pytest.mark.parametrize("make", [two_groups, scheduler_before, several], ids=lambda make: make.__name__)
def test_optimizers_given_later(ranks, make):
    ranks(compare_optimizers, 3, make, True, timeout=60)


def made_after() -> None:
    """An optimizer made from the parameters of a model that is sharded already, after an evaluation."""
    want = train_with(two_groups, None)
    for stage in STAGES:

        def make(model: nn.Module, shard: Callable, stage: int = stage) -> list[Any]:
            zeor.shard(model, stage=stage)
            with torch.no_grad():
                model(parts_of(0, 1)[0][0])
            optimizer = torch.optim.AdamW(groups_of(model))
            zeor.shard(model, optimizer)
            return [optimizer]

        got = train_with(make, lambda *args: None)
        assert largest(got, want) <= 1e-10, f"stage {stage}: off by {largest(got, want):.2e}"


def test_optimizer_made_after_shard(ranks):
    ranks(made_after, 2)
