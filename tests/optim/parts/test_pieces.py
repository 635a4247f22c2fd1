"""An optimizer's state in pieces: taken at one world size and stage, put back at another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops
from tests.optim import stages
from tests.optim.owners.test_owners import Shampoo
from zeor.api import _state
from zeor.optim.parts.pieces import Piece


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon(stages.matrices(model), lr=0.05)


def adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def shampoo(model: nn.Module) -> Optimizer:
    return Shampoo(model.parameters())


def begin(make: Callable, stage: int) -> tuple[dict[str, Tensor], list[Piece]]:
    model = loops.net()
    _, optimizer = zeor.shard(model, make(model), stage=stage)
    loops.train(model, optimizer, range(2), loops.own_loss)
    with zeor.full_params(model):
        return loops.values(model), list(_state(model).steppers[0].state.pieces())


def go_on(make: Callable, stage: int, weights: dict[str, Tensor], pieces: list[Piece]) -> dict[str, Tensor]:
    model = loops.net(seed=99)
    _, optimizer = zeor.shard(model, make(model), stage=stage)
    model.load_state_dict(weights)
    _state(model).steppers[0].state.put(pieces)
    loops.train(model, optimizer, range(2, 4), loops.own_loss)
    with zeor.full_params(model):
        return loops.values(model)


def plain(make: Callable) -> dict[str, Tensor]:
    model = loops.net()
    loops.train(model, make(model), range(4))
    return loops.values(model)


@pytest.mark.parametrize("make", [adamw, muon, adafactor, shampoo])
@pytest.mark.parametrize(("world", "stage", "new_world", "new_stage"), [(2, 3, 3, 2), (3, 1, 1, 3), (1, 2, 2, 3)])
def test_a_run_goes_on_at_another_world_size_from_pieces(ranks, make, world, stage, new_world, new_stage):
    found = ranks(begin, world, make, stage)
    pieces = [piece for _, mine in found for piece in mine]
    done = ranks(go_on, new_world, make, new_stage, found[0][0], pieces)
    for values in done:
        loops.assert_close(values, plain(make))


@pytest.mark.parametrize("make", [adamw, muon, adafactor])
def test_pieces_hold_every_element_once(ranks, make):
    """Each element of a state lies in the piece of exactly one rank; what has no elements lies there whole."""
    found = ranks(begin, 3, make, 2)
    shapes = {name: param.shape for name, param in loops.net().named_parameters()}
    elements: dict[Any, list[range]] = {}
    for _, pieces in found:
        for piece in pieces:
            if piece.begin is not None:
                assert piece.value.dim() == 1
                end = piece.begin + piece.value.numel()
                elements.setdefault((piece.name, piece.key), []).append(range(piece.begin, end))
    for (name, _), ranges in elements.items():
        assert sorted(i for each in ranges for i in each) == list(range(shapes[name].numel())), name
    assert elements


def check_unknown() -> None:
    model = loops.net()
    zeor.shard(model, adamw(model), stage=3)
    with pytest.raises(ValueError, match="There is state for 'elsewhere', which AdamW does not hold"):
        _state(model).steppers[0].state.put([Piece("elsewhere", ("exp_avg",), 0, torch.zeros(3))])


def test_pieces_of_a_parameter_that_is_not_there_are_refused(ranks):
    ranks(check_unknown, 2)
