"""What the optimizer works on, and what clipping sees: the fp32 master by default, and one norm over everything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops

STAGES = (0, 1, 2, 3)


# ---- a model in bf16


def bf16_run(stage: int) -> dict[str, Any]:
    """Updates far below what bf16 can hold beside the value: with no fp32 master nothing would ever move."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("zeor")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 5, bias=False)).bfloat16()
    with torch.no_grad():
        model[1].weight.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    zeor.shard(model, optimizer, stage=stage)
    log.removeHandler(handler)
    log.setLevel(level)
    for _ in range(100):
        model(torch.full((2, 6), 1.0 + dist.get_rank(), dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.dim() > 0]
    with zeor.full_params(model):
        moved, dtype = model[1].weight.detach().clone(), model[1].weight.dtype
    return {
        "lines": lines, "report": zeor.report(model), "state": {v.dtype for v in state}, "moved": moved, "dtype": dtype,
    }  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_bf16_model_gets_an_fp32_master_and_moments_by_default(ranks, stage):
    found = ranks(bf16_run, 2, stage)
    numel, part = 66, 1 if stage == 0 else 2
    for each in found:
        assert each["dtype"] == torch.bfloat16, "the user sees the dtype they chose"
        assert each["state"] == {torch.float32}
        # The master is the other half of the bits beside bf16 compute: two bytes an element.
        assert 2 * numel / part <= each["report"]["master"] <= 2 * (numel + 16) / part
        far = (each["moved"].float() - 1.0).abs()
        assert (far - 100 * 1e-4).abs().max() <= 2.0**-8, "a step of 1e-4 is lost at 1.0 in bf16, a hundred are not"
        assert far.min() > 0


def test_dtypes_are_printed_once_at_start_on_rank_0(ranks):
    first, second = ranks(bf16_run, 2, 3)
    assert sum("compute/reduce/master bfloat16/bfloat16/float32" in line for line in first["lines"]) == 1
    assert second["lines"] == []


# ---- clipping over everything at once


class Everything(nn.Module):
    """Tied, frozen, integer and mixed-width parameters, of which some get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(loops.Block(6) for _ in range(2))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
        self.unused = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def check_clipping(stage: int, clip: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    plain = Everything().double()
    torch.manual_seed(1)
    model = Everything().double()
    theirs, mine = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)
    assert model.head.weight is model.embed.weight

    def loss(each: nn.Module, take: Callable, step: int) -> Tensor:
        tokens = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(step))
        logits = each(take(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), take(tokens).flatten())

    for step in range(3):
        loss(plain, lambda t: t, step).backward()
        loss(model, loops.mine, step).backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if clip == "stock":
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            found = zeor.clip_grad_norm_(model, 0.1)
        assert type(found) is Tensor and found.dim() == 0
        torch.testing.assert_close(found, wanted, **loops.TIGHT)
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    with zeor.full_params(model):
        values = loops.values(model)
    loops.assert_close(values, loops.values(plain))
    return values


@pytest.mark.parametrize("clip", ["stock", "zeor"])
def test_clipping_over_tied_frozen_and_unused_parameters_equals_one_process(ranks, clip):
    found = [ranks(check_clipping, 2, stage, clip)[0] for stage in STAGES]
    for other in found[1:]:
        loops.assert_equal(other, found[0])
