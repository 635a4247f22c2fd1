"""iter_full: every parameter whole, streamed under a cap of bytes, in step on all ranks even when some leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]


def largest_nbytes(model: nn.Module) -> int:
    return max(param.numel() * 4 for param in model.parameters())  # as the user gave them


def ledger(model: nn.Module) -> Any:
    return vars(model)["_zeor_sharded"].engine.ledger


def trained(stage: int, dtype: torch.dtype, precision: str | None) -> nn.Module:
    model = loops.net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = zeor.shard(model, optimizer, stage=stage, precision=precision)
    loops.train(model, optimizer, range(2), lambda m, step: loops.own_loss(m, step, dtype).to(dtype))
    return model


def check_values(stage: int, precision: str | None) -> None:
    model = trained(stage, torch.float32, precision)
    with zeor.full_params(model):
        wanted = loops.values(model)
    for cap in (None, largest_nbytes(model) + 4096, 1 << 20):
        found = dict(zeor.iter_full(model, cap))
        loops.assert_equal({name: found[name] for name in wanted}, wanted)
        assert len(found) == len(wanted) and all(type(value) is Tensor for value in found.values())
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        for name, value in zeor.iter_full(model, dtype=dtype):
            assert value.dtype == dtype and torch.equal(value, wanted[name].to(dtype)), name


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stream_gives_what_full_params_shows(ranks, stage, precision):
    ranks(check_values, 2, stage, precision)


def test_a_stream_over_four_ranks_whose_slices_cut_every_parameter(ranks):
    ranks(check_values, 4, 3, "bf16")


def check_cap(precision: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)), nn.Linear(40, 300))
    model = zeor.shard(model, precision=precision)
    whole = sum(param.numel() * 4 for param in model.parameters())
    staging = 4096 if precision else 0
    for cap in (largest_nbytes(model) + staging, 2 * largest_nbytes(model), 80_000):
        assert cap < 1.1 * whole
        ledger(model).reset_peak()
        before = ledger(model).live_nbytes
        count = sum(1 for _ in zeor.iter_full(model, cap))
        assert count == 14 and ledger(model).live_nbytes == before
        assert 0 < ledger(model).peak_nbytes - before <= cap
    for dtype in (torch.float64, torch.bfloat16):
        cap = 300 * 40 * dtype.itemsize + 4096
        ledger(model).reset_peak()
        assert sum(1 for _ in zeor.iter_full(model, cap, dtype)) == 14
        assert ledger(model).peak_nbytes - ledger(model).live_nbytes <= cap


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_stream_stays_under_its_cap(ranks, precision):
    ranks(check_cap, 2, precision)


def check_real_bytes() -> None:
    """Every tensor that torch allocates while streaming, counted as it comes and goes."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.weak import WeakIdKeyDictionary

    model = zeor.shard(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))
    alive: Any = WeakIdKeyDictionary()
    most = [0]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and "empty" in str(func):
                alive[result] = result.nbytes
            most[0] = max(most[0], sum(alive.values()))
            return result

    with Count():
        for _, value in zeor.iter_full(model, 20_000):
            del value
    assert 64 * 64 * 4 <= most[0] <= 20_000


def test_what_a_stream_allocates_is_what_it_says(ranks):
    ranks(check_real_bytes, 2)


def check_too_small() -> str:
    model = zeor.shard(loops.net())
    with pytest.raises(ValueError) as caught:
        zeor.iter_full(model, 100)
    return str(caught.value)


def test_a_cap_below_the_largest_parameter_is_refused_before_anything_moves(ranks):
    for text in ranks(check_too_small, 2):
        assert text == (
            "zeor.iter_full cannot stay under max_bytes=100: parameter 'blocks.0.up.weight' alone takes 336; give at "
            "least that."
        )


def check_leaving(leaves_at: tuple[int, int, int], stage: int) -> None:
    """Ranks leave their loops at different places, then train on: nothing is out of step."""
    model, plain = loops.net(), loops.net()
    model, optimizer = zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    leave = leaves_at[dist.get_rank()]
    for step in range(3):
        for number, (_, value) in enumerate(zeor.iter_full(model, 400)):
            assert value.isfinite().all()
            if number == leave:
                break
        loops.train(model, optimizer, range(step, step + 1), loops.own_loss)
        loops.train(plain, theirs, range(step, step + 1))
    found, wanted = dict(zeor.iter_full(model)), loops.values(plain)
    loops.assert_close({name: found[name] for name in wanted}, wanted)
    assert ledger(model).live.get("full", 0) == 0


@pytest.mark.parametrize("leaves_at", [(0, 99, 99), (99, 2, 0), (1, 1, 1), (99, 99, 99)])
def test_a_stream_that_some_ranks_leave_early_corrupts_nothing(ranks, leaves_at):
    ranks(check_leaving, 3, leaves_at, 3)


def check_early_end() -> int:
    model = zeor.shard(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(10))))
    before = zeor.traffic(model)["calls"].get("broadcast", 0)
    for name, _ in zeor.iter_full(model, 32 * 32 * 4):
        if name == "2.weight":
            break
    return zeor.traffic(model)["calls"]["broadcast"] - before


def test_when_all_ranks_leave_the_rest_is_not_sent(ranks):
    for calls in ranks(check_early_end, 2):
        assert calls == 6, "three parameters, in two parts each"


def check_tied_and_buffers() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    model = zeor.shard(model)
    assert [name for name, _ in zeor.iter_full(model)] == ["0.weight", "1.weight", "1.bias"]
    held = dict(zeor.iter_full(model, buffers=True))
    assert list(held)[3:] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    held["1.running_mean"].fill_(5.0)
    assert model[1].running_mean.tolist() == [0.0] * 4, "a copy"


def test_tied_parameters_come_once_and_buffers_when_asked_for(ranks):
    ranks(check_tied_and_buffers, 2)


def test_what_is_kept_of_a_stream_is_the_callers():
    model = zeor.shard(loops.net())
    kept = dict(zeor.iter_full(model))
    with torch.no_grad(), zeor.full_params(model, write=True):
        for param in model.parameters():
            param.zero_()
    loops.assert_equal({name: kept[name] for name, _ in model.named_parameters()}, loops.values(loops.net()))
