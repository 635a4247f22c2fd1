"""Conditional execution with no flag and no list of leaf modules: ranks take different paths, and nothing is lost.

Gradients equal plain PyTorch on the joint batch; what nobody used keeps its optimizer state untouched.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeor
from tests.parity.calls import STAGES, Mlp, Parts, compare, finish, mean, parts_of, rank_of


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Moe(nn.Module):
    """A layer of experts: each token goes to the `top` experts its router likes best, by data alone."""

    def __init__(self, experts: int, top: int):
        super().__init__()
        self.top, self.router = top, nn.Linear(5, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.router(x), dim=-1).topk(self.top, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):  # an expert nobody chose is not called
                out = out.index_add(0, token, expert(x[token]) * weights[token, place].unsqueeze(-1))
        return out


class Routed(nn.Module):
    """Two such layers; `mode`: none, plain or reentrant checkpointing of each."""

    def __init__(self, mode: str = "none", experts: int = 6, top: int = 1):
        super().__init__()
        self.mode = mode
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.moes = nn.ModuleList(Moe(experts, top) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for moe in self.moes:
            if self.mode == "none":
                x = x + moe(x)
            else:
                x = x + checkpoint(moe, x, use_reentrant=self.mode == "reentrant")
        return self.last(x)


EXPERTS = {"units": [Expert, nn.Linear]}


def spread_out(model: Any, optimizer: Any, parts: Parts) -> list[bool]:
    """Inputs far apart on each rank, so that ranks choose different experts; returns who has a gradient."""
    losses = []
    for number, (x, y) in enumerate(parts):
        losses.append(F.mse_loss(model(x[:2] * (3.0 - 6.0 * (rank_of(number, parts) % 2))), y[:2]))
    mean(losses).backward()
    has = [param.grad is not None for param in model.parameters()]
    finish(optimizer)
    return has


@pytest.mark.parametrize("mode", ["none", "plain", "reentrant"])
def test_experts_routed_by_data(ranks, mode):
    ranks(compare, 2, spread_out, partial(Routed, mode), EXPERTS, 4, timeout=60)


def test_experts_routed_by_data_on_three_ranks(ranks):
    ranks(compare, 3, spread_out, partial(Routed, "none", 6, 2), {**EXPERTS, "overlap": False}, 4, timeout=60)


def test_experts_under_the_default_units(ranks):
    ranks(compare, 2, spread_out, Routed, None, 4, timeout=60)


def experts_differ() -> None:
    """That the tests above test something: ranks do choose different experts."""
    torch.manual_seed(11)
    model = Routed().double()
    x, _ = parts_of(0, dist.get_world_size())[dist.get_rank()]
    model(x[:2] * (3.0 - 6.0 * (dist.get_rank() % 2))).sum().backward()
    mine = torch.tensor([p.grad is not None for p in model.parameters()], dtype=torch.int32)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert not torch.equal(every[0], every[1]) and 0 in every[0] + every[1]


def test_the_ranks_do_choose_different_experts(ranks):
    ranks(experts_differ, 2)


class LayerDrop(Mlp):
    """Each layer is left out with a probability, differently on each rank and in each step."""

    generator: torch.Generator

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            if torch.rand((), generator=self.generator) > 0.5:
                x = x + torch.tanh(layer(x))
        return self.last(x) * self.gain


def dropped_by_rank(model: Any, optimizer: Any, parts: Parts) -> list[bool]:
    step = model.step = getattr(model, "step", -1) + 1
    losses = []
    for number, (x, y) in enumerate(parts):
        model.generator = torch.Generator().manual_seed(10 * step + rank_of(number, parts))
        losses.append(F.mse_loss(model(x), y))
    mean(losses).backward()
    has = [param.grad is not None for param in model.parameters()]
    finish(optimizer)
    return has


@pytest.mark.parametrize("world", [2, 3])
def test_layer_drop_differs_between_ranks(ranks, world):
    ranks(compare, world, dropped_by_rank, LayerDrop, None, 6, timeout=60)


class EarlyExit(Mlp):
    """Leaves after the first layer whose output is large enough: a decision of the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            if x.pow(2).sum() > 12:
                break
        return self.last(x) * self.gain


def exit_by_rank(model: Any, optimizer: Any, parts: Parts) -> None:
    losses = [F.mse_loss(model(x * (1 + 4 * rank_of(number, parts))), y) for number, (x, y) in enumerate(parts)]
    mean(losses).backward()
    finish(optimizer)


def test_early_exit_at_different_layers(ranks):
    ranks(compare, 2, exit_by_rank, EarlyExit, timeout=60)


class Towers(nn.Module):
    """Text, picture or both: a tower is called only where its input is there."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.picture = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 4))
        self.scale, self.last = nn.Parameter(torch.tensor(0.7)), nn.Linear(4, 2)

    def forward(self, text: Tensor | None = None, picture: Tensor | None = None) -> Tensor:
        seen = [tower(x) for tower, x in ((self.text, text), (self.picture, picture)) if x is not None]
        return self.last(torch.stack(seen).sum(0)) * self.scale


KINDS = [("both", "both"), ("text", "picture"), ("picture", "both"), ("text", "text"), ("picture", "text")]


def by_kind(model: Any, optimizer: Any, parts: Parts) -> list[bool]:
    step = model.step = getattr(model, "step", -1) + 1
    losses = []
    for number, (x, y) in enumerate(parts):
        kind = KINDS[step][rank_of(number, parts)]
        inputs = {name: x for name in ("text", "picture") if kind in (name, "both")}
        losses.append(F.mse_loss(model(**inputs), y))
    mean(losses).backward()
    has = [param.grad is not None for param in model.parameters()]
    finish(optimizer)
    return has


def test_ranks_hold_different_kinds_of_data(ranks):
    ranks(compare, 2, by_kind, Towers, None, len(KINDS), timeout=60)


# ---- what nobody used


class Pathed(Mlp):
    def forward(self, x: Tensor, path: list[int]) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        for number in path:
            x = torch.tanh(self.layers[number](x))
        return self.last(x) * self.gain


def rarely_used() -> None:
    """Expert 2 is used in the first and last step only, by one rank: its state has taken two steps, not four."""
    paths = [[[0, 2], [1]], [[0], [1]], [[3], [0]], [[1], [2]]]
    states = {}
    for stage in ("plain", *STAGES):
        torch.manual_seed(4)
        model = Pathed().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if stage != "plain":
            zeor.shard(model, optimizer, stage=stage)
        for step, path in enumerate(paths):
            parts = list(enumerate(parts_of(step, 2)))
            mine = parts if stage == "plain" else [parts[dist.get_rank()]]
            mean([F.mse_loss(model(x, path[rank]), y) for rank, (x, y) in mine]).backward()
            finish(optimizer)
        if stage != "plain":
            zeor.unshard(model, optimizer)
        states[stage] = {k: v.clone() for k, v in optimizer.state[model.layers[2].weight].items()}
    assert states["plain"]["step"] == 2
    for stage in STAGES:
        assert states[stage]["step"] == 2, f"stage {stage}: {states[stage]['step']} steps"
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(states[stage][name], states["plain"][name], rtol=0, atol=1e-14)


def test_an_expert_that_a_step_did_not_use_keeps_its_state(ranks):
    ranks(rarely_used, 2)
