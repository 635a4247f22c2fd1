"""Hooks of the user's own: on units, inside them, on parameters, on activations, on saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zeor
from tests.parity.calls import STAGES, Mlp, Parts, compare, finish, mse, parts_of, plain_step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(Mlp):
    """Units with modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))


# ---- hooks on modules


def watched(register: Callable[[Any, list], list]) -> Callable:
    """A loop with the user's hooks; returns how often each was called, and the shapes it saw."""

    def loop(model: Any, optimizer: Any, parts: Parts) -> list:
        seen: list = []
        handles = register(model, seen)
        mse(model, parts[:1]).backward()
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
        calls = sorted(map(str, seen))
        register_quietly = register(model, [])
        plain_step(model, optimizer, parts)
        for handle in register_quietly:
            handle.remove()
        return calls

    return loop


def places(model: Any) -> list[nn.Module]:
    """The root, a unit, and a module inside one."""
    return [model, model.layers[1], model.layers[1].up, model.first]


def forward_hooks(model: Any, seen: list) -> list:
    def before(module: nn.Module, args: tuple) -> tuple:
        seen.append(("before", type(module).__name__, tuple(module.bias.shape) if hasattr(module, "bias") else None))
        return (args[0] * 1.5,)

    def after(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        seen.append(("after", type(module).__name__, tuple(out.shape)))
        return out + 0.1

    return [h for m in places(model) for h in (m.register_forward_pre_hook(before), m.register_forward_hook(after))]


def forward_hooks_with_kwargs(model: Any, seen: list) -> list:
    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        return (args[0] + 0.5,), kwargs

    def after(module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> Tensor:
        seen.append(type(module).__name__)
        return out * 0.9

    first = [m.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for m in places(model)]
    return first + [m.register_forward_hook(after, prepend=True, with_kwargs=True) for m in places(model)]


def hooks_that_read_parameters(model: Any, seen: list) -> list:
    """What a hook sees of the module's own parameters is the full value."""

    def after(module: Any, args: tuple, out: Tensor) -> Tensor:
        seen.append((tuple(module.weight.shape), round(module.weight.sum().item(), 9)))
        return out + module.weight.mean()

    return [m.register_forward_hook(after, prepend=True) for m in (model.layers[1].up, model.first, model.last)]


def full_backward_hooks(model: Any, seen: list) -> list:
    def before(module: nn.Module, grads: tuple) -> tuple:
        seen.append(("before", type(module).__name__, tuple(grads[0].shape)))
        return (grads[0] * 1.1,)

    def after(module: nn.Module, grads_in: tuple, grads_out: tuple) -> Any:
        shapes = [None if g is None else tuple(g.shape) for g in (*grads_in, *grads_out)]
        seen.append(("after", type(module).__name__, shapes))
        return None if grads_in[0] is None else (grads_in[0] * 0.9,)

    handles = [m.register_full_backward_pre_hook(before) for m in places(model)]
    return handles + [m.register_full_backward_hook(after) for m in places(model)]


REGISTERS = [forward_hooks, forward_hooks_with_kwargs, hooks_that_read_parameters, full_backward_hooks]


@pytest.mark.parametrize("register", REGISTERS, ids=lambda register: register.__name__)
def test_hooks_on_units_inside_them_and_on_the_root(ranks, register):
    ranks(compare, 2, watched(register), Net, timeout=60)


def hooked_before_shard(register: Callable) -> Callable:
    def build() -> nn.Module:
        model = Net()
        register(model, [])
        return model

    return build


@pytest.mark.parametrize("register", REGISTERS, ids=lambda register: register.__name__)
def test_hooks_put_on_before_shard(ranks, register):
    ranks(compare, 2, plain_step, hooked_before_shard(register), timeout=60)


# ---- hooks on parameters


def parameter_hook(model: Any, optimizer: Any, parts: Parts) -> list[tuple]:
    """A hook that scales one gradient, masks another, and is gone when it was removed."""
    seen = []
    mask = torch.arange(25, dtype=torch.float64).view(5, 5) % 2

    def scale(grad: Tensor) -> Tensor:
        seen.append(tuple(grad.shape))
        return grad * 0.3

    handles = [
        model.layers[0].up.weight.register_hook(scale),
        model.last.weight.register_hook(lambda grad: grad.clamp(min=0.0) if grad.dim() == 1 else grad * mask[:2]),
        model.gain.register_hook(scale),
    ]
    mse(model, parts).backward()
    for handle in handles:
        handle.remove()
    (0.1 * mse(model, parts)).backward()
    finish(optimizer)
    return sorted(seen)


def test_a_hook_on_a_parameter_reaches_the_full_gradient(ranks):
    ranks(compare, 2, parameter_hook, Net, timeout=60)


def after_accumulation(model: Any, optimizer: Any, parts: Parts) -> list[str]:
    """Called once per backward and parameter, with the parameter, its gradient in place and ready to be changed."""
    names = {id(param): name for name, param in model.named_parameters()}
    seen = []

    def halve(param: nn.Parameter) -> None:
        seen.append(names[id(param)])
        assert param.grad is not None and param.grad.shape == param.shape
        param.grad.mul_(0.5)

    handles = [p.register_post_accumulate_grad_hook(halve) for p in (model.gain, model.layers[2].down.bias)]
    mse(model, parts).backward()
    mse(model, [(-x, y) for x, y in parts]).backward()  # what was halved is added to and halved again
    for handle in handles:
        handle.remove()
    (0.1 * mse(model, parts)).backward()
    finish(optimizer)
    return sorted(seen)


def test_a_post_accumulate_hook_sees_the_reduced_gradient(ranks):
    ranks(compare, 2, after_accumulation, Net, timeout=60)


# ---- hooks on activations and saved tensors


def retained_activations() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    plain = Net().double()
    x, y = parts_of(0, world)[rank]
    wanted = _grads_of_activations(plain, x, y)
    for stage in STAGES:
        torch.manual_seed(3)
        model = Net().double()
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        for got, want in zip(_grads_of_activations(model, x, y), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def _grads_of_activations(model: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of a unit's output, of one inside a unit, and of the root's input and output."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    x = x.clone().requires_grad_()
    handles = [m.register_forward_hook(keep) for m in (model.first, model.layers[1], model.layers[2].up)]
    out = model(x)
    out.retain_grad()
    F.mse_loss(out, y).backward()
    for handle in handles:
        handle.remove()
    return [tensor.grad for tensor in (*kept, out, x)]


def test_retain_grad_on_activations(ranks):
    ranks(retained_activations, 2)


def saved_on_cpu(model: Any, optimizer: Any, parts: Parts) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = mse(model, parts)
    loss.backward()
    finish(optimizer)


def saved_as_copies(model: Any, optimizer: Any, parts: Parts) -> None:
    """Everything that is saved for backward, weights included, is packed and unpacked by the user."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone() * 2, lambda t: t / 2):
        loss = mse(model, parts)
    loss.backward()
    finish(optimizer)


@pytest.mark.parametrize("loop", [saved_on_cpu, saved_as_copies], ids=lambda loop: loop.__name__)
def test_hooks_on_saved_tensors(ranks, loop):
    ranks(compare, 2, loop, Net, timeout=60)


# ---- gradients of chosen tensors


def only_some_inputs(model: Any, optimizer: Any, parts: Parts) -> list[bool]:
    """loss.backward(inputs=...) leaves every other gradient alone."""
    mse(model, parts).backward(inputs=[*model.layers[1].parameters(), model.gain])
    has = [param.grad is not None for param in model.parameters()]
    torch.autograd.backward(mse(model, parts), inputs=model.last.weight)
    finish(optimizer)
    return has


def test_backward_with_respect_to_some_parameters(ranks):
    ranks(compare, 2, only_some_inputs, Net, timeout=60)


def grad_of_parameters() -> None:
    """torch.autograd.grad gives this rank's own gradients, as under DDP; .grad is untouched by it."""
    for stage in STAGES:
        torch.manual_seed(3)
        model, plain = Net().double(), Net().double()
        plain.load_state_dict(model.state_dict())
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        x, y = parts_of(0, dist.get_world_size())[dist.get_rank()]
        loss = F.mse_loss(model(x), y)
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        wanted = torch.autograd.grad(F.mse_loss(plain(x), y), list(plain.parameters()))
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())


def test_autograd_grad_of_parameters_is_this_ranks_own(ranks):
    ranks(grad_of_parameters, 2)

