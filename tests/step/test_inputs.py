"""What a unit is handed: aliases of its inputs, which nothing in the user's forward may tell from the inputs.

Each block here does something with its inputs that a careless alias would break: it compares them by identity,
changes them in place, finds them in containers, hands them on, or shares them with every other block. Trained at
stages 2 and 3 on two ranks in float64, each model must end where plain PyTorch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeor

WIDTH, PER_RANK, STEPS = 8, 2, 3


class Attention(nn.Module):
    """MultiheadAttention takes another path, with other rounding, where query, key and value are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query is key and key is value
        return query + self.attention(query, key, value)[0]


class InPlace(nn.Module):
    """The first thing it does is to overwrite what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))


class Containers(nn.Module):
    """Takes and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: dict[str, Any]) -> dict[str, Any]:
        x, (first, second) = state["x"], state["pair"]
        assert first is x
        return {"x": self.linear(x) + second, "pair": (None, second), "count": state["count"] + 1}


@dataclass
class State:
    x: Tensor


class Objects(nn.Module):
    """Takes and returns an object of the user's own; what it returns is a view, as of any Linear over sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        return State(self.linear(state.x))


class HandsOn(nn.Module):
    """Returns one of its inputs as it is, beside something new."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)) + skip, skip


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        block = {
            "attention": Attention, "in place": InPlace, "containers": Containers, "objects": Objects,
            "hands on": HandsOn, "shared": HandsOn, "checkpointed": HandsOn, "changed after": Objects,
        }[kind]  # fmt: skip
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.call = getattr(self, f"call_{kind.replace(' ', '_')}")

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.embed(x))

    def call_attention(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x, value=x)
        return x

    def call_in_place(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def call_checkpointed(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = checkpoint(block, x, x, use_reentrant=False)
        return x

    def call_changed_after(self, x: Tensor) -> Tensor:
        """The root changes what each block returned, the last one's included."""
        state = State(x)
        for block in self.blocks:
            state = block(state)
            state.x.mul_(0.5).add_(1.0)
        return state.x

    def call_containers(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(state={"x": x, "pair": (x, x * 0.5), "count": 0})["x"]
        return x

    def call_objects(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
            state.x = torch.tanh(state.x)
        return state.x

    def call_hands_on(self, x: Tensor) -> Tensor:
        skip = x
        for block in self.blocks:
            x, skip = block(x, skip)
        return x * skip

    def call_shared(self, x: Tensor) -> Tensor:
        memory = torch.sin(x)
        for block in self.blocks:
            x, _ = block(x, memory)
        return x


KINDS = ["attention", "in place", "containers", "objects", "hands on", "shared", "checkpointed", "changed after"]


def trained(kind: str, stage: int | None, part: slice) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if stage is not None:
        zeor.shard(model, optimizer, stage=stage)
    for step in range(STEPS):
        x = torch.randn(2 * PER_RANK, 3, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage is None:
        return [param.detach() for param in model.parameters()]
    with zeor.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def on_a_rank(kind: str, stage: int) -> list[Tensor]:
    rank = dist.get_rank()
    return trained(kind, stage, slice(rank * PER_RANK, (rank + 1) * PER_RANK))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_cannot_tell_aliases_from_its_inputs(ranks: Callable[..., list[Any]], stage: int, kind: str) -> None:
    expected = trained(kind, None, slice(None))
    for found in ranks(on_a_rank, 2, kind, stage):
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(found, expected, strict=True))


class Mixes(nn.Module):
    """Makes fp32 values between two layers, as position tables and masks of many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + torch.zeros(WIDTH, dtype=torch.float32))


def mix(stage: int) -> list[str]:
    model = Mixes()
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision="bf16")
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH))
    with pytest.raises(RuntimeError) as plain:
        model(torch.ones(2, WIDTH + 1))
    return [*getattr(caught.value, "__notes__", []), "|", *getattr(plain.value, "__notes__", [])]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take notes from Python 3.11 on; before it is logged")
@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_values_between_bf16_layers_end_in_a_sentence_that_says_why(ranks, stage: int) -> None:
    for note, bar, *others in ranks(mix, 1, stage):
        assert "bfloat16 (precision=)" in note and "x.to(layer.weight.dtype)" in note
        assert (bar, others) == ("|", []), "an error of another kind is left as it is"
