"""Optimizers of others: 8-bit states of bitsandbytes and torchao on a CPU, and a hand-written one with a counter.

8-bit states are rounded block by block. A block that lies in a segment is not the block of the whole parameter, so
what is promised is: stages 1 to 3 are the same bits, and all are close to one process, within the bounds below.
torchao keeps 8 bits only of what is a multiple of its block of 256; slices are cut at rows, so rows of 256 are.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeor
from tests import loops
from tests.optim import stages

LR, STEPS = 0.01, 4
WIDTH = {"bitsandbytes": 136, "torchao": 256}  # with 136, blocks of segments and of the whole differ


def net(package: str) -> nn.Module:
    torch.manual_seed(3)
    width = WIDTH[package]
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))


def shard(package: str, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(package)
    return zeor.shard(model, make(package, model), stage=stage, units=[nn.Linear])


def make(package: str, model: nn.Module) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if package == "bitsandbytes":
            import bitsandbytes

            return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=LR)
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), lr=LR)


def train(model: nn.Module, optimizer: Any, steps: range, loss: Any) -> None:
    # torchao compiles its step: eager is the same arithmetic and takes no seconds for each shape.
    with torch.compiler.set_stance("force_eager"):
        loops.train(model, optimizer, steps, lambda m, s: loss(m, s, torch.float32))


def sharded(package: str, stage: int) -> dict[str, Tensor]:
    model, optimizer = shard(package, stage)
    train(model, optimizer, range(STEPS), loops.own_loss)
    assert narrow_states(optimizer) > 0, "it keeps 8 bits"
    with zeor.full_params(model):
        return loops.values(model)


def narrow_states(optimizer: Any) -> int:
    """How many tensors of the state are 8 bits an element."""
    found = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
    return sum(v.dtype == torch.uint8 or type(v) is not Tensor for v in found)


def check_close(package: str) -> tuple[float, float]:
    plain = net(package)
    theirs = make(package, plain)
    train(plain, theirs, range(STEPS), loops.joint_loss)
    found = {stage: sharded(package, stage) for stage in stages.STAGES}
    for stage in (1, 2):
        loops.assert_equal(found[stage], found[3])
    apart = torch.cat([(a - b).abs().view(-1) for v in found.values() for a, b in zip(v.values(), plain.parameters())])
    moved = STEPS * LR  # at most, and about
    return apart.max().item() / moved, apart.mean().item() / moved


@pytest.mark.long  # importing the packages alone takes seconds
@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_8_bit_states_are_the_same_bits_at_stages_1_to_3_and_close_to_one_process(ranks, package):
    for largest, mean in ranks(check_close, 2, package):
        assert mean < 0.01 and largest < 0.5, (largest, mean)


def check_round_trip(package: str) -> None:
    model, optimizer = shard(package, 2)
    train(model, optimizer, range(2), loops.own_loss)
    saved = io.BytesIO()  # torchao's states cannot be copied, only saved
    torch.save(optimizer.state_dict(), saved)
    with zeor.full_params(model):
        weights = loops.values(model)
    train(model, optimizer, range(2, 4), loops.own_loss)
    other, resumed = shard(package, 2)
    other.load_state_dict(weights)
    saved.seek(0)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    train(other, resumed, range(2, 4), loops.own_loss)
    with zeor.full_params(model), zeor.full_params(other):
        loops.assert_equal(loops.values(other), loops.values(model))


@pytest.mark.long  # importing the packages alone takes seconds
@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_8_bit_state_dicts_round_trip_in_bits(ranks, package):
    ranks(check_round_trip, 2, package)


def check_refused(package: str) -> tuple[str, str]:
    model, optimizer = shard(package, 3)
    train(model, optimizer, range(1), loops.own_loss)
    with pytest.raises(RuntimeError) as caught:
        zeor.unshard(model, optimizer)
    train(model, optimizer, range(1, 2), loops.own_loss)  # and it goes on
    nbytes = zeor.report(model)["moments"]
    elements = sum(p.numel() for p in optimizer.state)
    assert nbytes < 4 * elements, "less than an fp32 moment alone, and two are kept"
    return str(caught.value), package


@pytest.mark.long  # importing the packages alone takes seconds
@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_8_bit_states_cannot_be_put_together_and_say_so(ranks, package):
    found = ranks(check_refused, 2, package)
    assert found[0] == found[1]
    assert "made for this rank's part of it alone" in found[0][0] and "zeor.full_params" in found[0][0]


def check_whole_state_refused(package: str) -> str:
    """Trained plainly first: whole blocks cannot become blocks of parts."""
    model = net(package)
    optimizer = make(package, model)
    train(model, optimizer, range(1), loops.joint_loss)
    with pytest.raises(ValueError) as caught:
        zeor.shard(model, optimizer, stage=3, units=[nn.Linear])
    assert all(type(param) is nn.Parameter for param in model.parameters())
    return str(caught.value)


@pytest.mark.long  # importing the packages alone takes seconds
@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_8_bit_state_of_whole_parameters_is_not_cut_silently(ranks, package):
    texts = ranks(check_whole_state_refused, 2, package)
    assert texts[0] == texts[1]
    assert "so it cannot be cut; shard before the first step" in texts[0] and "'2.weight'" in texts[0]


# ---- a counter in the group


class Decaying(torch.optim.Optimizer):
    """Momentum whose rate falls with a counter that lives in the group."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    param.add_(moment.mul_(0.9).add_(param.grad), alpha=-group["lr"] / group["count"])


@pytest.mark.parametrize("world", [2, 4])
def test_a_hand_written_optimizer_with_a_counter_equals_one_process(ranks, world):
    ranks(stages.check, world, lambda model: Decaying(model.parameters()))
