"""On two axes: reading and writing whole parameters and gradients, single ones, penalties, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests import offloads
from tests.parity.models import Setting, placed
from zeor.access.sharded import state_of

PAIRS = [(0, 0), (0, 1), (2, 0), (1, 2), (3, 0), (3, 1), (3, 3)]


def used(pair: tuple[int, int], precision: str) -> dict[str, Any]:
    """Everything that is read on the way, and what is left when the model is a plain one again."""
    where = placed(Setting(pair, shape=(2, 2)))
    model, optimizers = offloads.made(precision=precision, keep_whole=8, **where)
    found: dict[str, Any] = {}
    offloads.loss_of(model, 0).backward()
    (1e-2 * zeor.penalty(model, lambda p: p.square().sum()) + offloads.loss_of(model, 1)).backward()
    found["norm"] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).clone()
    model.blocks[0].up.weight.grad.mul_(0.5)  # through the view
    with zeor.full_params(model, grads=True):
        found |= {f"grad of {name}": param.grad.clone() for name, param in model.named_parameters()}
    optimizers[0].step()
    model.zero_grad()
    with zeor.full_params(model, write=True), torch.no_grad():
        model.head.weight.mul_(1.25)
        model.blocks[1].up.bias.zero_()
    with torch.no_grad():
        model.scale.clamp_(max=1.4)  # small, so it is whole everywhere
    offloads.one_step(model, optimizers, 2, "clip")
    state = model.state_dict() if pair[0] < 3 else {}
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    engine = state_of(model).engine
    assert sum(engine.nbytes().values()) > 0
    plain, optimizer = zeor.unshard(model, optimizers[0])
    assert all(type(param) is nn.Parameter for param in plain.parameters())
    found |= {name: param.detach().clone() for name, param in plain.named_parameters()}
    for name, param in plain.named_parameters():
        found |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in optimizer.state[param].items()}
    return found


def same_at_all_pairs(precision: str) -> None:
    wanted = used(PAIRS[0], precision)
    for pair in PAIRS[1:]:
        offloads.same(used(pair, precision), wanted, (pair, precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_users_read_and_write_is_the_same_at_all_pairs(ranks: Callable, precision: str) -> None:
    ranks(same_at_all_pairs, 4, precision)
