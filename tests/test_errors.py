"""What goes wrong is told in one clear sentence: at shard(), while training, and when ranks lose each other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode

import zeor
from tests import loops
from zeor.memory.device import one_device

TIMEOUT_SECONDS = 3.0
# The timeout, the wait for the others' notes, the patience with a reduce under way, and a busy machine.
GIVE_UP_SECONDS = TIMEOUT_SECONDS + TIMEOUT_SECONDS / 2 + 2.0 + 2.0


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def sentence(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# ---- options


@pytest.mark.parametrize("stage", [4, -1, "3", True, 1.5, None])
def test_a_wrong_stage(stage):
    assert sentence(lambda: zeor.shard(loops.net(), stage=stage)) == (
        f"stage={stage!r} is not a ZeRO stage; use 0, 1, 2 or 3."
    )


def test_an_unknown_option_gets_the_nearest_name():
    model = loops.net()
    assert "no option 'stge' (did you mean 'stage'?)" in sentence(lambda: zeor.shard(model, stge=3), TypeError)
    assert "did you mean 'precision'?" in sentence(lambda: zeor.shard(model, precison="bf16"), TypeError)
    assert "did you mean 'units'?" in sentence(lambda: zeor.shard(model, unit=[nn.Linear]), TypeError)
    assert "no option 'batch_size'" in sentence(lambda: zeor.shard(model, batch_size=8), TypeError)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "bf-16"}, "did you mean 'bf16'?"),
        ({"precision": "int8"}, "use one of ['fp32', 'bf16', 'fp16', 'fp8'] or a zeor.Precision"),
        ({"reduction": "means"}, "did you mean 'mean'?"),
        ({"offload": "cpu"}, "did you mean 'host'?"),
        ({"kernel": "triton"}, "use one of ['auto', 'stock']"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_wrong_values_of_options(options, text):
    assert text in sentence(lambda: zeor.shard(loops.net(), **options))


def test_a_master_narrower_than_fp32_is_refused():
    assert "small updates are not rounded away" in sentence(lambda: zeor.Precision(master=torch.bfloat16))
    assert "give a floating torch.dtype" in sentence(lambda: zeor.Precision(compute=torch.int8))
    assert "give a floating torch.dtype" in sentence(lambda: zeor.Precision(reduce="bf16"))


def test_wrong_kinds_of_objects():
    model = loops.net()
    assert "takes a torch.nn.Module, not a list" in sentence(lambda: zeor.shard([model]), TypeError)
    assert "torch optimizers; it was given a float" in sentence(lambda: zeor.shard(model, 0.1), TypeError)
    assert "no parameters" in sentence(lambda: zeor.shard(nn.ReLU()))
    stranger = nn.Linear(2, 2)
    assert "not part of the model" in sentence(lambda: zeor.shard(model, units=[stranger]))
    assert "names the class Conv2d, which" in sentence(lambda: zeor.shard(model, units=[nn.Conv2d]))
    assert "a container that is never called" in sentence(lambda: zeor.shard(model, units=[model.blocks]))
    text = sentence(lambda: zeor.shard(model, units=["head"]), TypeError)
    assert "give modules of the model or module classes" in text


# ---- models and optimizers


def test_an_optimizer_of_another_model():
    model, other = loops.net(), nn.Linear(7, 3)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=0.1)
    text = sentence(lambda: zeor.shard(model, optimizer))
    assert "SGD holds a parameter of shape (3, 7) (group 1, position 0) that is not in the sharded model" in text
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_a_third_shard_of_the_same_model():
    model = loops.net()
    zeor.shard(model)
    zeor.shard(model, sgd(model))
    assert "sharded already" in sentence(lambda: zeor.shard(model, sgd(model)))
    assert "sharded already" in sentence(lambda: zeor.shard(model))
    again = loops.net()
    zeor.shard(again)
    text = sentence(lambda: zeor.shard(again, sgd(again), stage=1))
    assert "once more only to add its optimizer(s)" in text and "alone" in text


def test_a_part_or_a_whole_of_a_sharded_model():
    model = loops.net()
    zeor.shard(model)
    text = sentence(lambda: zeor.shard(nn.Sequential(model)))
    assert "'0.scale' belongs to a model that is sharded already; zeor.unshard" in text
    assert "sharded already" in sentence(lambda: zeor.shard(model.head))


def test_calls_that_need_a_sharded_model():
    model = loops.net()

    def enter(context: Any) -> None:
        with context:
            pass

    for call in (
        lambda: enter(zeor.no_sync(model)),
        lambda: enter(zeor.full_params(model)),
        lambda: zeor.clip_grad_norm_(model, 1.0),
        lambda: zeor.unshard(model),
        lambda: zeor.traffic(model),
        lambda: zeor.report(model),
    ):
        assert sentence(call) == "This model is not sharded; call zeor.shard(model, optimizer) first."


def test_a_drop_in_optimizer_of_a_model_on_meta_says_what_to_call():
    with torch.device("meta"):
        model = loops.net()
    text = sentence(lambda: zeor.optim.SGD(model.named_parameters(), lr=0.1))
    assert "'scale' is still on the meta device, and a drop-in optimizer needs its values" in text
    assert "zeor.shard(model, optimizer), which takes such models" in text


def test_a_model_on_two_devices():
    """Fake tensors stand for a GPU: the check looks at devices only."""
    with FakeTensorMode():
        mixed = [("body", torch.empty(2)), ("head", torch.empty(2, device="cuda:0"))]
        text = sentence(lambda: one_device(mixed))
    assert text.startswith("The model lies on two devices: 'body' on cpu, 'head' on cuda:0; move it with")


# ---- ranks that differ


def differing(change: str) -> str:
    rank = dist.get_rank()
    model, options, odd = loops.net(), {"stage": 3}, rank == 2
    if change == "shape" and odd:
        model.head = nn.Linear(loops.FEATURES, 4).double()
    if change == "dtype" and odd:
        model.blocks[1].up.float()
    if change == "frozen" and odd:
        model.blocks[0].norm.weight.requires_grad_(False)
    if change == "missing" and odd:
        model.head.bias = None
    if change == "stage" and odd:
        options["stage"] = 2
    if change == "option" and odd:
        options["reduction"] = "sum"
    if change == "units" and odd:
        options["units"] = [loops.Block]
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if change == "lr" and odd:
        groups[0]["lr"] = 0.2
    if change == "order" and odd:
        groups[0]["params"].reverse()
    if change == "groups" and odd:
        groups = [{"params": groups[0]["params"][:3]}, {"params": groups[0]["params"][3:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    given = None if change == "no optimizer" and odd else optimizer
    return sentence(lambda: zeor.shard(model, given, **options))


DIFFERENCES = {
    "shape": ["models differ", "rank 0 has 'head.weight': (5, 6)", "rank 2 has 'head.weight': (4, 6)"],
    "dtype": ["models differ", "rank 2 has 'blocks.1.up.weight': (7, 6), torch.float32"],
    "frozen": ["models differ", "rank 2 has 'blocks.0.norm.weight': (6,), torch.float64, frozen"],
    "missing": ["models differ", "rank 0 has 'head.bias'", "rank 2 has nothing there"],
    "stage": ["plans differ: rank 0 has stage=3, rank 2 has stage=2"],
    "option": ["plans differ: rank 0 has reduction=mean, rank 2 has reduction=sum"],
    "units": ["models differ", "in unit", "rank 2 has"],
    "lr": ["optimizer groups differ", "'lr': 0.1", "rank 2 has", "'lr': 0.2"],
    "order": ["optimizer groups differ", "rank 0 has optimizer 0 (SGD), group 0: 'scale'", "rank 2 has", "'head.bias'"],
    "groups": ["optimizer groups differ", "rank 2 has optimizer 0 (SGD), group 1"],
    "no optimizer": ["optimizer groups differ", "rank 2 has nothing there"],
}


@pytest.mark.parametrize("change", DIFFERENCES)
def test_ranks_that_differ_are_told_which_and_where(ranks, change):
    texts = ranks(differing, 3, change)
    assert len(set(texts)) == 1, "every rank says the same"
    for part in DIFFERENCES[change]:
        assert part in texts[0], texts[0]


# ---- while training


def check_autocast(stage: int) -> list[str]:
    model = loops.net(torch.float32)
    zeor.shard(model, sgd(model), stage=stage)
    x, _ = loops.batch(0, torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(x).float().sum().backward()
    return [str(warning.message) for warning in caught if "autocast" in str(warning.message)]


def test_autocast_at_stage_3_warns_once_naming_precision(ranks):
    for texts in ranks(check_autocast, 2, 3):
        assert len(texts) == 1 and "undoes the sharding" in texts[0] and "precision='bf16'" in texts[0]
    assert ranks(check_autocast, 2, 2) == [[], []]


def check_step_after_no_sync(stage: int) -> None:
    model = loops.net()
    _, optimizer = zeor.shard(model, sgd(model), stage=stage)
    with zeor.no_sync(model):
        loops.own_loss(model, 0).backward()
    for call in (optimizer.step, lambda: zeor.clip_grad_norm_(model, 1.0)):
        text = sentence(call, RuntimeError)
        assert "no_sync" in text and "outside no_sync" in text
    loops.own_loss(model, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_after_no_sync_alone(ranks, stage):
    ranks(check_step_after_no_sync, 2, stage)


# ---- lost ranks


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def be_elsewhere() -> str:
    """Alive, but on another path until rank 0 has given up: a rank that is gone is noticed at once."""
    default_store().wait(["rank 0 gave up"], timedelta(seconds=4 * GIVE_UP_SECONDS))
    return ""


def skip(what: str, stage: int) -> tuple[str, float]:
    """Rank 1 leaves something out; what rank 0 then says, and after how many seconds."""
    model = loops.net()
    _, optimizer = zeor.shard(model, sgd(model), stage=stage, timeout=TIMEOUT_SECONDS)
    loops.train(model, optimizer, range(2), loops.own_loss)
    if dist.get_rank() == 1:
        return be_elsewhere(), 0.0
    started = time.monotonic()
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: loops.own_loss(model, 2),
        "training": lambda: loops.train(model, optimizer, range(2, 4), loops.own_loss),
        "full_params": lambda: zeor.full_params(model).__enter__(),
    }
    text = sentence(calls[what], RuntimeError)
    seconds = time.monotonic() - started
    default_store().set("rank 0 gave up", "")
    return text, seconds


@pytest.mark.parametrize(
    ("what", "stage", "operation"),
    [
        ("forward", 3, "meeting before a forward with gradients"),
        ("training", 2, "meeting before a backward"),
    ],
)
def test_a_rank_that_skips_a_collective_is_named_within_the_timeout(ranks, what, stage, operation):
    (text, seconds), _ = ranks(skip, 2, what, stage)
    assert "on rank 0 of 2" in text and "rank 1 did not take part" in text
    assert f"{operation} did not complete within {TIMEOUT_SECONDS:g} s" in text
    assert seconds < GIVE_UP_SECONDS


def test_a_rank_that_does_not_come_to_full_params_is_named_within_the_timeout(ranks):
    """No collective has begun yet: the ranks meet in the store first (comm/attendance.py)."""
    (text, seconds), _ = ranks(skip, 2, "full_params", 3)
    assert f"Every rank must call zeor.full_params; ranks [1] did not within {TIMEOUT_SECONDS:g} s" in text
    assert seconds < GIVE_UP_SECONDS


def skip_first_forward() -> str:
    """The very first exchange of a run, before any order is learned."""
    model = loops.net()
    zeor.shard(model, sgd(model), stage=1, timeout=TIMEOUT_SECONDS)
    if dist.get_rank() == 1:
        return be_elsewhere()
    text = sentence(lambda: loops.own_loss(model, 0).backward(), RuntimeError)
    default_store().set("rank 0 gave up", "")
    return text


def test_a_rank_that_never_runs_a_forward_is_named(ranks):
    text, _ = ranks(skip_first_forward, 2)
    assert "meeting before a forward with gradients did not complete within 3 s" in text
    assert "rank 1 did not take part" in text


def elsewhere() -> str:
    """Both come to something that all must do: each is told where the other is."""
    model = loops.net()
    zeor.shard(model, sgd(model), stage=3, timeout=TIMEOUT_SECONDS)
    loops.own_loss(model, 0).backward()
    if dist.get_rank() == 1:
        return sentence(lambda: zeor.clip_grad_norm_(model, 1.0), RuntimeError)
    return sentence(lambda: loops.own_loss(model, 1), RuntimeError)


def test_ranks_on_different_paths_raise_on_both(ranks):
    first, second = ranks(elsewhere, 2)
    assert first == second
    assert "rank 0 is at a forward with gradients; rank 1 is at the norms of the gradients" in first


def fail_in_mid_step(note: str) -> None:
    """Run by zeor.launch: rank 1 dies between forward and backward of its third step, and notes when."""
    model = loops.net()
    _, optimizer = zeor.shard(model, sgd(model), stage=3)
    for step in range(10):
        loss = loops.own_loss(model, step)
        if step == 2 and dist.get_rank() == 1:
            Path(note).write_text(str(time.monotonic()))
            raise ArithmeticError("lost my marbles")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one_rank_raising_in_mid_step_ends_all(tmp_path):
    with pytest.raises(zeor.RankError, match="ArithmeticError: lost my marbles") as caught:
        zeor.launch(fail_in_mid_step, str(tmp_path / "note"), ranks=3, threads=1)
    seconds = time.monotonic() - float((tmp_path / "note").read_text())
    assert caught.value.rank == 1 and "in fail_in_mid_step" in str(caught.value)
    assert seconds < 15
