"""Parameters used outside the module that holds them, inside a forward: equal to plain PyTorch at every stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeor
from tests.parity.calls import Mlp, Parts, compare, finish, mean, mse, plain_step, rank_of


class TiedByUse(Mlp):
    """The last layer multiplies by the weight of the first, which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(self.body(x), self.first.weight.t())) * self.gain


class NeverCalled(Mlp):
    """A unit that is only ever read, and of which one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(x) @ self.table.weight)) * self.gain


class ReadBefore(Mlp):
    """A layer's weight is read before, inside and after the layers, and through a kept reference."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.layers[2].weight]

    def forward(self, x: Tensor) -> Tensor:
        shift = self.layers[2].weight.sum(0) * 0.1
        x = torch.tanh(self.first(x)) + shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) + F.linear(x, self.layers[1].weight) * 0.1
        return self.last(x @ self.kept[0]) * self.gain


class LossInside(Mlp):
    """The loss, computed inside forward, has a penalty on the weights of other units."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(layer.weight.pow(2).mean() for layer in self.layers) + self.last.weight.abs().mean()
        return super().forward(x) + 0.1 * penalty


class InUnit(Mlp):
    """One unit reads the weight of another in its own forward."""

    class Layer(nn.Linear):
        other: list[nn.Linear]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.other[0].weight, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(5, 5) for _ in range(4))
        for number, layer in enumerate(self.layers):
            layer.other = [self.layers[3 - number]]


class Recomputed(TiedByUse):
    """The use lies inside a checkpoint."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant

    def _end(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        return F.linear(x, self.first.weight.t())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self._end, self.body(x), use_reentrant=self.reentrant)) * self.gain


class Attention(nn.Module):
    """MultiheadAttention reads out_proj.weight without calling out_proj, here a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(0)
        return self.last(self.attention(x, x, x, need_weights=False)[0].squeeze(0))


class ReturnsWeight(Mlp):
    """A unit returns its own weight, or a part of it, for others to use; the root returns one too."""

    class Maker(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight, self.weight[:2]

    def __init__(self) -> None:
        super().__init__()
        self.makers = nn.ModuleList(self.Maker(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        whole, rows = self.makers[0](hidden)
        return F.linear(torch.tanh(hidden @ whole), rows) * self.gain, self.gain


def use_what_was_returned(model: Any, optimizer: Any, parts: Parts) -> None:
    outputs = [model(x) for x, _ in parts]
    mean([F.mse_loss(out, y) + gain.pow(2) for (out, gain), (_, y) in zip(outputs, parts)]).backward()
    values = [gain.item() for _, gain in outputs]  # still to be read after backward
    assert all(0.5 < value < 1.5 for value in values)
    finish(optimizer)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight tying by use": TiedByUse,
    "a unit that is never called": NeverCalled,
    "before and after its own call": ReadBefore,
    "a penalty inside forward": LossInside,
    "one unit by another": InUnit,
    "inside a checkpoint": partial(Recomputed, False),
    "inside a re-entrant checkpoint": partial(Recomputed, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_is_used_outside_its_module(ranks, name):
    ranks(compare, 2, plain_step, MODELS[name], timeout=60)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_is_used_outside_its_module_on_three_ranks(ranks, overlap):
    ranks(compare, 3, plain_step, TiedByUse, {"overlap": overlap}, timeout=60)


def test_attention_reads_the_weight_of_its_output_projection(ranks):
    ranks(compare_attention, 2)


def compare_attention() -> None:
    compare(plain_step, Attention, {"units": [nn.Linear]})


def test_a_module_returns_its_own_weight(ranks):
    ranks(compare, 2, use_what_was_returned, ReturnsWeight, timeout=60)


# ---- in loops


def two_backwards_of_one_graph(model: Any, optimizer: Any, parts: Parts) -> None:
    loss = mse(model, parts)
    loss.backward(retain_graph=True)
    loss.backward()
    finish(optimizer)


def two_forwards_two_backwards(model: Any, optimizer: Any, parts: Parts) -> None:
    first, second = mse(model, parts), mse(model, [(-x, y) for x, y in parts])
    first.backward()
    second.backward()
    finish(optimizer)


def evaluated_between(model: Any, optimizer: Any, parts: Parts) -> None:
    loss = mse(model, parts)
    with torch.no_grad():
        mse(model, parts)
    loss.backward()
    with torch.no_grad():
        mse(model, parts)
    finish(optimizer)


def gradient_penalty(model: Any, optimizer: Any, parts: Parts) -> None:
    losses = []
    for x, y in parts:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        losses.append(F.mse_loss(out, y) + (slope.norm(dim=-1) - 1).pow(2).mean())
    mean(losses).backward()
    finish(optimizer)


LOOPS = [two_backwards_of_one_graph, two_forwards_two_backwards, evaluated_between, gradient_penalty]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_parameter_is_used_outside_its_module_in_a_loop(ranks, loop):
    ranks(compare, 2, loop, ReadBefore, timeout=60)


class SometimesOutside(Mlp):
    """Which weights are read outside depends on the rank and the step."""

    reads: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for number in self.reads:
            x = x + torch.tanh(F.linear(x, self.layers[number].weight))
        return self.last(x) * self.gain


READS = [((), ()), ((1,), ()), ((), (2, 1)), ((3, 0), (0, 1, 3)), ((), ())]


def read_by_rank(model: Any, optimizer: Any, parts: Parts) -> None:
    model.step = getattr(model, "step", -1) + 1
    losses = []
    for number, (x, y) in enumerate(parts):
        model.reads = READS[model.step][rank_of(number, parts)]
        losses.append(F.mse_loss(model(x), y))
    mean(losses).backward()
    finish(optimizer)


def test_ranks_read_different_parameters_outside_their_modules(ranks):
    ranks(compare, 2, read_by_rank, SometimesOutside, None, len(READS), timeout=60)


# ---- what it costs, and where it ends


def memory_is_given_back() -> None:
    torch.manual_seed(1)
    model = ReadBefore().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3)
    engine = vars(model)["_zeor_sharded"].engine
    for step in range(3):
        model(torch.ones(2, 3, dtype=torch.float64) * dist.get_rank()).sum().backward()
        present = [unit.name for unit in engine.units if unit.present]
        assert not present, f"step {step}: {present} were not freed"
        finish(optimizer)
        with torch.no_grad():
            model(torch.ones(2, 3, dtype=torch.float64))
        assert not [unit.name for unit in engine.units if unit.present], f"after an evaluation of step {step}"
    gathers = zeor.traffic(model)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert gathers != zeor.traffic(model)


def test_a_unit_read_outside_its_module_is_freed_after_backward(ranks):
    ranks(memory_is_given_back, 2)


def read_outside_any_pass() -> None:
    torch.manual_seed(1)
    model = Mlp().double()
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    loss = mse(model, [(torch.ones(2, 3).double(), torch.ones(2, 2).double())])
    for _ in range(2):  # before backward and after it
        with pytest.raises(RuntimeError, match=r"'layers.1.weight' is sharded .* zeor.full_params\(model\)"):
            model.layers[1].weight.sum()
        loss.backward(retain_graph=True)


def test_a_read_outside_any_pass_names_the_parameter_and_full_params(ranks):
    ranks(read_outside_any_pass, 2)


def forward_by_name() -> None:
    torch.manual_seed(1)
    model = Mlp().double()
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with pytest.raises(RuntimeError, match=r"'gain' is sharded .* call model\(...\), not model.forward\(...\)"):
        model.forward(torch.ones(2, 3).double())
    model(torch.ones(2, 3).double()).sum().backward()


def test_forward_called_by_its_name_is_told_to_call_the_model(ranks):
    ranks(forward_by_name, 2)
