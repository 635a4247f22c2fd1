"""Models that other libraries have wrapped: what works, and the sentence where it cannot.

A drop-in optimizer under DistributedDataParallel uses DDP's own averages: the same bits as DDP with the stock
optimizer, and no gradient is reduced twice.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zeor
from tests import loops
from zeor.features.plain_grads import PlainGrads

Values = dict[str, list[float]]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}


def values(model: nn.Module) -> Values:
    return {name: param.detach().flatten().tolist() for name, param in model.named_parameters()}


def calls(optimizer: Any) -> dict[str, int]:
    """Collectives that zeor took part in."""
    return dict(optimizer._zeor.engine.axes.everyone.traffic.calls)


def run(make: Callable[[Any], Any], micro: int = 1, clip: bool = False, order: str = "ddp first", **ddp_options: Any):
    """Three steps of a DDP loop, each of `micro` backwards of which the last one synchronises."""
    model = loops.net()
    if order == "ddp first":
        wrapped = DDP(model, **ddp_options)
        optimizer = make(wrapped.parameters())
    else:
        optimizer = make(model.parameters())
        wrapped = DDP(model, **ddp_options)
    for step in range(3):
        for part in range(micro):
            with wrapped.no_sync() if part < micro - 1 else contextlib.nullcontext():
                (loops.own_loss(wrapped, step * micro + part) / micro).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        assert all(type(param.grad) is Tensor for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def beside_stock(name: str, stage: int, **how: Any) -> None:
    stock, _ = run(lambda params: getattr(torch.optim, name)(params, **OPTIMIZERS[name]), **how)
    model, optimizer = run(lambda params: getattr(zeor.optim, name)(params, **OPTIMIZERS[name], stage=stage), **how)
    assert values(model) == values(stock), "the same bits as DDP with the stock optimizer"
    assert "reduce" not in calls(optimizer), "DDP has reduced them"


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"micro": 3, "clip": True},
        {"order": "optimizer first"},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("name", "stage"), [("SGD", 1), ("AdamW", 2)])
def test_a_drop_in_under_ddp_equals_the_stock_optimizer_under_ddp_in_bits(ranks, name, stage, how):
    ranks(beside_stock, 2, name, stage, **how)


def joint(name: str) -> Values:
    model, _ = run(lambda params: getattr(zeor.optim, name)(params, **OPTIMIZERS[name]))
    return values(model)


@pytest.mark.parametrize("world", [2, 3])
def test_a_drop_in_under_ddp_equals_one_process_on_the_joint_batch(ranks, world):
    model = loops.net()
    loops.train(model, torch.optim.AdamW(model.parameters(), **OPTIMIZERS["AdamW"]), range(3))
    for found in ranks(joint, world, "AdamW"):
        for name, wanted in values(model).items():
            assert found[name] == pytest.approx(wanted, rel=1e-10, abs=1e-12)


def state_bytes() -> tuple[int, int]:
    model, optimizer = run(lambda params: zeor.optim.AdamW(params, **OPTIMIZERS["AdamW"]))
    whole = 2 * sum(param.numel() * param.itemsize for param in model.parameters())
    return optimizer._zeor.state.moments_nbytes(), whole


def test_optimizer_state_is_sliced_under_ddp(ranks):
    found = ranks(state_bytes, 2)
    assert max(mine for mine, _ in found) <= 0.6 * found[0][1]


class Branches(nn.Module):
    """A branch that no rank ever takes, and one that only rank 0 takes."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.one, self.both = (nn.Linear(loops.FEATURES, loops.CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x) + self.one(x) if dist.get_rank() == 0 else self.both(x)


def unused(make: Callable[[Any], Any]) -> Values:
    torch.manual_seed(0)
    model = Branches().double()
    wrapped = DDP(model, find_unused_parameters=True)
    optimizer = make(wrapped.parameters())
    loops.train(wrapped, optimizer, range(3), loops.own_loss)
    return values(model)


def test_parameters_without_a_gradient_under_ddp(ranks):
    wanted = ranks(unused, 2, lambda params: torch.optim.AdamW(params, lr=0.1))
    assert ranks(unused, 2, lambda params: zeor.optim.AdamW(params, lr=0.1)) == wanted


def with_scaler(make: Callable[[Any], Any]) -> tuple[Values, float]:
    model = loops.net(torch.float32)
    wrapped = DDP(model)
    optimizer = make(wrapped.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        bad = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        scaler.scale(loops.own_loss(wrapped, step, torch.float32) * bad).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model), scaler.get_scale()


def test_gradscaler_under_ddp(ranks):
    wanted = ranks(with_scaler, 2, lambda params: torch.optim.SGD(params, lr=0.1))
    found = ranks(with_scaler, 2, lambda params: zeor.optim.SGD(params, lr=0.1))
    assert found == wanted and found[0][1] == 2.0


def skipping() -> Values:
    model = loops.net()
    wrapped = DDP(model)
    optimizer = zeor.optim.SGD(wrapped.parameters(), lr=0.1, nonfinite="skip")
    before = values(model)
    (loops.own_loss(wrapped, 0) * float("nan")).backward()
    optimizer.step()
    assert values(model) == before
    return before


def test_nonfinite_skip_under_ddp(ranks):
    first, second = ranks(skipping, 2)
    assert first == second


def two_models() -> None:
    """Only one of two drop-ins is under DDP; the other reduces for itself."""
    under, alone = loops.net(), loops.net()
    wrapped = DDP(under)
    first, second = zeor.optim.SGD(wrapped.parameters(), lr=0.1), zeor.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        loops.train(wrapped, first, range(step, step + 1), loops.own_loss)
        loops.train(alone, second, range(step, step + 1), loops.own_loss)
    assert "reduce" not in calls(first) and calls(second)["reduce"] > 0
    loops.assert_close(loops.values(under), loops.values(alone))


def test_a_model_under_ddp_beside_one_that_is_not(ranks):
    ranks(two_models, 2)


def teardown() -> None:
    model, optimizer = run(lambda params: zeor.optim.SGD(params, lr=0.1))
    refs = [weakref.ref(model), weakref.ref(optimizer._zeor.engine)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_a_drop_in_under_ddp_keeps_nothing_alive(ranks):
    ranks(teardown, 2)


def past_the_wrapper() -> str:
    """The module inside is called: DDP reduces nothing, and nobody would notice."""
    model = loops.net()
    wrapped = DDP(model)
    optimizer = zeor.optim.SGD(wrapped.named_parameters(), lr=0.1)
    loops.own_loss(wrapped.module, 0).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_calling_the_module_inside_a_ddp_is_noticed_at_the_first_step(ranks):
    for text in ranks(past_the_wrapper, 2):
        assert "gradient of 'module.scale' differs between ranks" in text and "not the module inside it" in text


def compiled(ddp: bool) -> tuple[bool, list[str]]:
    model = loops.net(torch.float32)
    wrapped = DDP(model) if ddp else model
    optimizer = zeor.optim.SGD(model.parameters(), lr=0.1)
    run_fast = torch.compile(wrapped, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops.train(run_fast, optimizer, range(2), lambda model, step: loops.own_loss(model, step, torch.float32))
    given = optimizer._zeor.engine.feature(PlainGrads).given
    return given, [str(each.message) for each in caught if "hook" in str(each.message)]


@pytest.mark.parametrize("ddp", [False, True])
def test_torch_compile_around_a_ddp_or_a_plain_model_notices_nothing(ranks, ddp):
    assert ranks(compiled, 2, ddp) == [(ddp, [])] * 2


# ---- sentences


def refused(build: Callable[[], tuple[Any, Any]]) -> str:
    model, optimizer = build()
    with pytest.raises(TypeError) as caught:
        zeor.shard(model, optimizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ddp_model() -> tuple[Any, Any]:
    model = DDP(loops.net())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def ddp_inside() -> tuple[Any, Any]:
    model = nn.ModuleDict({"encoder": DDP(nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    return model, None


def data_parallel() -> tuple[Any, Any]:
    return nn.DataParallel(nn.Linear(2, 2)), None


def fully_sharded() -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, None


def tensor_parallel() -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel()}), None


def zero_redundancy() -> tuple[Any, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def other_library(package: str, name: str, base: type) -> type:
    """A class of a library that is not installed here, as its type shows."""
    return type(name, (base,), {"__module__": package})


def deepspeed_engine() -> tuple[Any, Any]:
    return other_library("deepspeed.runtime.engine", "DeepSpeedEngine", nn.Linear)(2, 2), None


def deepspeed_parameters() -> tuple[Any, Any]:
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0
    return model, None


def accelerated() -> tuple[Any, Any]:
    model = nn.Linear(2, 2)
    kind = other_library("accelerate.optimizer", "AcceleratedOptimizer", torch.optim.SGD)
    return model, kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (ddp_model, ["The model is wrapped in DistributedDataParallel", "stage=0 does what DDP does"]),
        (ddp_inside, ["Module 'encoder' is wrapped in DistributedDataParallel"]),
        (data_parallel, ["wrapped in DataParallel", "torchrun"]),
        (fully_sharded, ["sharded by fully_shard already"]),
        (tensor_parallel, ["Parameter '0.weight' is a DTensor"]),
        (zero_redundancy, ["(ZeroRedundancyOptimizer) is sharded already"]),
        (deepspeed_engine, ["is a DeepSpeed engine"]),
        (deepspeed_parameters, ["Parameter 'weight' was taken apart by deepspeed.zero.Init"]),
        (accelerated, ["(AcceleratedOptimizer) was prepared by Accelerate"]),
    ],
)
def test_what_another_library_has_taken_gets_one_sentence(ranks, build, told):
    for text in ranks(refused, 2, build):
        assert all(part in text for part in told), text


def inner_of_ddp() -> str:
    model = loops.net()
    wrapped = DDP(model)
    with pytest.raises(RuntimeError) as caught:
        zeor.shard(wrapped.module)
    return str(caught.value)


def test_the_module_inside_a_ddp_gets_a_sentence(ranks):
    for text in ranks(inner_of_ddp, 2):
        assert "inside a DistributedDataParallel" in text and "stage=0" in text


def ddp_of_sharded() -> str:
    model = zeor.shard(loops.net(), stage=1)
    with pytest.raises(RuntimeError) as caught:
        loops.own_loss(DDP(model), 0)
    return str(caught.value)


def test_a_ddp_around_a_sharded_model_is_told_to_go(ranks):
    for text in ranks(ddp_of_sharded, 2):
        assert "data-parallel already" in text and "drop DistributedDataParallel" in text


def drop_in_over_dtensors() -> str:
    model, _ = fully_sharded()
    with pytest.raises(TypeError) as caught:
        zeor.optim.SGD(model.named_parameters(), lr=0.1)
    return str(caught.value)


def test_a_drop_in_over_sharded_parameters_names_the_first(ranks):
    for text in ranks(drop_in_over_dtensors, 2):
        assert "Parameter 'weight' is a DTensor" in text


def wrap_a_sharded_model(stage: int) -> str:
    model = loops.net()
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    try:
        nn.parallel.DistributedDataParallel(model)(torch.ones(2, loops.FEATURES, dtype=torch.float64))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 3])
def test_ddp_around_a_sharded_model_is_told_to_go(ranks, stage):
    for said in ranks(wrap_a_sharded_model, 2, stage):
        assert "data-parallel already" in said and said.endswith("drop DistributedDataParallel.")
