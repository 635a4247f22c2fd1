"""Context parallelism beside zeor: ranks that share one batch and cut its sequences are one process on whole ones.

How ranks attend to each other's keys and values is the model's business: here by gathering them, or by Ulysses (each
rank all positions of some heads). zeor gives all of them the same batch, shards over dp x cp, divides by all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zeor

VOCAB, WIDTH, HEADS, LENGTH, BATCH, STEPS, PAD = 13, 16, 4, 8, 2, 3, 0


class Gathered(torch.autograd.Function):
    """All parts of a sequence, of every rank of the group."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class Swapped(torch.autograd.Function):
    """(batch, part of the sequence, heads, ...) to (batch, sequence, part of the heads, ...), or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, cut: int, join: int) -> Tensor:
        ctx.given = group, cut, join
        sent = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=cut)]
        received = [torch.empty_like(part) for part in sent]
        dist.all_to_all(received, sent, group=group)
        return torch.cat(received, dim=join)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, cut, join = ctx.given
        return Swapped.apply(grads[0], group, join, cut), None, None, None


class Attention(nn.Module):
    def __init__(self, group: Any, way: str):
        super().__init__()
        self.qkv, self.out, self._group, self._way = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), group, way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(x).chunk(3, dim=-1))
        begin = 0
        if self._group is not None and self._way == "gather":
            begin = dist.get_rank(self._group) * x.shape[1]
            k, v = Gathered.apply(k, self._group), Gathered.apply(v, self._group)
        elif self._group is not None:
            q, k, v = (Swapped.apply(each, self._group, 2, 1) for each in (q, k, v))
        mask = begin + torch.arange(q.shape[1])[:, None] >= torch.arange(k.shape[1])
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), attn_mask=mask)
        mixed = mixed.transpose(1, 2)
        if self._group is not None and self._way == "ulysses":
            mixed = Swapped.apply(mixed, self._group, 1, 2)
        return x + self.out(mixed.flatten(2))


class Model(nn.Module):
    def __init__(self, group: Any = None, way: str = ""):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Attention(group, way) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def texts() -> Tensor:
    """Of unequal lengths: padding is no item of the loss."""
    tokens = torch.randint(1, VOCAB, (24, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    for row, text in enumerate(tokens):
        text[LENGTH + 1 - row % 4 :] = PAD
    return tokens


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")


def whole(batches: list[Tensor]) -> Model:
    torch.manual_seed(1)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for rows in batches:
        inputs, targets = rows[:, :-1], rows[:, 1:]
        (loss_sum(model(inputs), targets) / (targets != PAD).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def cut(way: str, stage: int) -> float:
    mesh = zeor.mesh(device="cpu", dp=2, cp=2)
    cp = mesh["cp"]
    torch.manual_seed(1)
    model = Model(cp.get_group(), way).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, mesh=mesh["dp", "cp"], keep_whole=16)
    loader = zeor.data.shard(DataLoader(TensorDataset(texts()), BATCH, shuffle=True), mesh=mesh["dp"], seed=3)
    seen = []
    for (rows,), _ in zip(loader, range(STEPS), strict=False):
        everyone = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, rows)
        assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[2], everyone[3])
        assert not torch.equal(everyone[0], everyone[2])
        seen.append(torch.cat([everyone[0], everyone[2]]))
        inputs, targets = (each.chunk(2, dim=1)[cp.get_local_rank()] for each in (rows[:, :-1], rows[:, 1:]))
        zeor.mean_loss(model, loss_sum(model(inputs), targets), (targets != PAD).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == STEPS
    wanted = dict(whole(seen).named_parameters())
    with zeor.full_params(model):
        return max((param - wanted[name]).abs().max().item() for name, param in model.named_parameters())


@pytest.mark.parametrize(("way", "stage"), [("gather", 3), ("gather", 1), ("ulysses", 3)])
def test_ranks_that_cut_a_sequence_are_one_process(ranks: Callable, way: str, stage: int) -> None:
    assert max(ranks(cut, 4, way, stage)) < 1e-10
