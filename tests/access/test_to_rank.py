"""full_params on one rank: it holds the model whole, the others pass parts on and keep nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops
from zeor.access import full


def trained(stage: int, dtype: torch.dtype = torch.float32, precision: str | None = None) -> nn.Module:
    model = loops.net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=stage, precision=precision)
    loops.train(model, optimizer, range(2), lambda m, step: loops.own_loss(m, step, dtype).to(dtype))
    return model


def check_one_holds(stage: int, to_rank: int, precision: str | None) -> None:
    model = trained(stage, precision=precision)
    with zeor.full_params(model):
        wanted = loops.values(model)
    with zeor.full_params(model, to_rank=to_rank, device="cpu") as inside:
        assert inside is model and zeor.is_sharded(model)
        if dist.get_rank() == to_rank:
            found = loops.values(model)
            loops.assert_equal(found, wanted)
            assert all(type(p) is nn.Parameter for p in model.parameters())
            loops.own_loss(model, 0, torch.float32)  # a plain model
        else:
            assert all(type(p) is not nn.Parameter for p in model.parameters())
            with pytest.raises(RuntimeError, match=rf"to_rank={to_rank}\) on another rank than {to_rank}"):
                model(torch.zeros(1, loops.FEATURES))
    with zeor.full_params(model):  # as it was, and it goes on
        loops.assert_equal(loops.values(model), wanted)
    loops.own_loss(model, 3, torch.float32).backward()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_rank_holds_the_model_whole(ranks, stage):
    ranks(check_one_holds, 2, stage, 1, None)


def test_masters_of_a_model_that_computes_in_bf16_on_three_ranks(ranks):
    ranks(check_one_holds, 3, 3, 2, "bf16")


def check_memory() -> list[int]:
    torch.manual_seed(0)
    model = zeor.shard(nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)), nn.Linear(40, 300)))
    ledger = vars(model)["_zeor_sharded"].engine.ledger
    before, cap = ledger.live_nbytes, full.DEFAULT_NBYTES
    full.DEFAULT_NBYTES = 4 * 300 * 40  # as small for this model as 256 MiB are for a large one
    try:
        ledger.reset_peak()
        with zeor.full_params(model, to_rank=0):
            pass
    finally:
        full.DEFAULT_NBYTES = cap
    return [ledger.peak_nbytes - before, ledger.live_nbytes - before]


def test_what_passes_through_a_rank_stays_under_the_cap_and_is_given_back(ranks):
    for peak, after in ranks(check_memory, 2):
        assert 0 < peak <= 4 * 300 * 40 and after == 0


def check_all_on_the_host() -> None:
    model = trained(3)
    with zeor.full_params(model):
        wanted = loops.values(model)
    with zeor.full_params(model, device="cpu"):
        loops.assert_equal(loops.values(model), wanted)


def test_a_device_alone_is_for_every_rank(ranks):
    ranks(check_all_on_the_host, 2)


def check_refused() -> list[str]:
    model = trained(3)
    found: list[str] = []

    def refused(kind: type[Exception], **options: Any) -> None:
        with pytest.raises(kind) as caught:
            with zeor.full_params(model, **options):
                pass
        found.append(str(caught.value))

    refused(ValueError, to_rank=0, write=True)
    refused(ValueError, to_rank=0, grads=True)
    refused(ValueError, to_rank=2)
    refused(ValueError, to_rank="0")
    with zeor.full_params(model, to_rank=0):
        refused(RuntimeError, to_rank=0)
        with pytest.raises(RuntimeError, match=r"inside zeor\.full_params"):
            zeor.save("nowhere", model, step=0)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"was written inside zeor\.full_params"):
            with zeor.full_params(model, to_rank=0), torch.no_grad():
                next(model.parameters()).add_(1)
    else:
        with zeor.full_params(model, to_rank=0):
            pass
    return found


def test_what_cannot_be_is_refused_on_every_rank(ranks):
    for found in ranks(check_refused, 2):
        assert [text.split(" needs ")[0] for text in found[:2]] == ["zeor.full_params(write=, grads=)"] * 2
        assert found[2] == "zeor.full_params(to_rank=2): give a rank, 0 to 1, or None for all."
        assert found[3] == "zeor.full_params(to_rank='0'): give a rank, 0 to 1, or None for all."
        assert found[4] == "zeor.full_params is open already; ask for more in the outer one."


def check_is_sharded() -> None:
    model = loops.net()
    compiled = torch.compile(model, backend="eager")
    assert not zeor.is_sharded(model) and not zeor.is_sharded(compiled)
    zeor.shard(model)
    assert zeor.is_sharded(model) and zeor.is_sharded(compiled) and not zeor.is_sharded(model.head)
    with zeor.full_params(model):
        assert zeor.is_sharded(model)
    zeor.unshard(model)
    assert not zeor.is_sharded(model)


def test_is_sharded(ranks):
    ranks(check_is_sharded, 2)


def check_values_survive(values: dict[str, Tensor] | None = None) -> None:
    model = trained(3)
    with zeor.full_params(model, to_rank=0):
        state = {name: value.clone() for name, value in model.state_dict().items()} if dist.get_rank() == 0 else None
    plain = loops.net(torch.float32)
    if state is not None:
        plain.load_state_dict(state)
        x, _ = loops.batch(0, torch.float32)
        kept = plain(x)
        box = [kept.detach()]
    else:
        box = [None]
    dist.broadcast_object_list(box, src=0)
    x, _ = loops.batch(0, torch.float32)
    torch.testing.assert_close(model(x).detach(), box[0])


def test_a_plain_model_of_that_state_computes_the_same(ranks):
    ranks(check_values_survive, 2)
