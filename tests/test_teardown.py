"""Shard, train, let go, five times over: nothing of it is left in the process.

Tensors, modules and hooks are counted; so are what Python does not see: the process's size, its threads, its open
files and its process groups.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops
from zeor.access.sharded import state_of

MB = 1 << 20
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
Pair = tuple[nn.Module, Any]


class Wide(nn.Module):
    """Three megabytes of parameters, and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def by_shard(stage: int, **options: Any) -> Callable[[nn.Module], Pair]:
    def build(model: nn.Module) -> Pair:
        return zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=stage, **options)

    return build


def by_drop_in(model: nn.Module) -> Pair:
    return model, zeor.optim.AdamW(model.parameters(), lr=1e-3, stage=2)


def once(build: Callable[[nn.Module], Pair]) -> list[weakref.ref]:
    """A short life: accumulation, clipping, evaluation, a closure over everything. What must be dead after it."""
    torch.manual_seed(0)
    model, optimizer = build(Wide())
    for step in range(2):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        (model(x).square().mean() / 2).backward()
        (model(x + 1).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(x)
    return [weakref.ref(thing) for thing in (optimizer, *model.modules(), *model.parameters())]


def live_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), Tensor))


def counted() -> dict[str, int]:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * PAGE_NBYTES
    return {
        "tensors": live_tensors(),
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "resident MB": resident // MB,
    }


def settled(limits: dict[str, int]) -> dict[str, int]:
    """The counts, once they are within the limits: Gloo's threads let go of a tensor a moment after the wait."""
    deadline = time.monotonic() + 5.0
    found = counted()
    while any(found[name] > limit for name, limit in limits.items()) and time.monotonic() < deadline:
        time.sleep(0.05)
        found = counted()
    return found


def five_times(build: Callable[[nn.Module], Pair]) -> tuple[dict[str, int], dict[str, int]]:
    for _ in range(2):
        once(build)  # what torch makes once and keeps, and the heap's own high-water mark
    before = counted()
    # Of 3 MB of parameters, 12 with their state: five leaks of even the smallest role would be seen.
    limits = {**before, "resident MB": before["resident MB"] + 6}
    for _ in range(5):
        refs = once(build)
        gc.collect()
        assert [ref() for ref in refs if ref() is not None] == []
    return limits, settled(limits)


@pytest.mark.parametrize(
    "build",
    [by_shard(0), by_shard(1), by_shard(2), by_shard(3), by_shard(3, precision="bf16", nonfinite="skip"), by_drop_in],
    ids=["0", "1", "2", "3", "3 bf16", "drop-in"],
)
def test_shard_train_and_let_go_five_times_leaves_nothing(ranks, build):
    for limits, found in ranks(five_times, 2, build):
        over = {name: (found[name], limit) for name, limit in limits.items() if found[name] > limit}
        assert not over, f"(found, limit): {over}"


def kept_model(stage: int) -> None:
    """The optimizer goes and the model stays, is given another optimizer by way of unshard, and goes on."""
    model = loops.net()
    plain = set(vars(model))
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zeor.shard(model, optimizer, stage=stage)
        loops.train(model, optimizer, range(1), loops.own_loss)
        zeor.unshard(model, optimizer)
        ref = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert ref() is None and set(vars(model)) == plain
        hooks = [getattr(m, name) for m in model.modules() for name in vars(m) if name.endswith("_hooks")]
        assert hooks and not any(hooks)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_sharded_and_unsharded_again_and_again_has_no_hooks_left(ranks, stage):
    ranks(kept_model, 2, stage)


def after_an_exception(stage: int) -> None:
    """A run that ended in an error, in forward or in backward, leaves no more than one that did not."""

    class Fails(loops.Net):
        where = ""

        def forward(self, x: Tensor) -> Tensor:
            if self.where == "forward":
                raise ArithmeticError("in forward")
            out = super().forward(x)
            if self.where == "backward":
                out.register_hook(lambda grad: 1 / 0)
            return out

    def life(where: str) -> weakref.ref:
        model = Fails().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zeor.shard(model, optimizer, stage=stage)
        loops.train(model, optimizer, range(1), loops.own_loss)
        model.where = where
        with pytest.raises(ArithmeticError):
            loops.own_loss(model, 1).backward()
        return weakref.ref(model)

    life("forward"), life("backward")
    before = {"tensors": live_tensors()}
    for where in ("forward", "backward"):
        ref = life(where)
        gc.collect()
        assert ref() is None, where
    assert settled(before)["tensors"] <= before["tensors"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_that_raised_leaves_nothing_either(ranks, stage):
    ranks(after_an_exception, 2, stage)


class Keeps(nn.Module):
    """A model that keeps a tensor of the graph it has made, as auxiliary losses are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.kept = x.square().mean()
        return x


def kept_graphs(build: Callable[[nn.Module], Pair]) -> None:
    """The last gradients are not set to None either: a plain parameter holds them where Python cannot look."""
    model, optimizer = build(Keeps())
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 8)).sum() + model.kept).backward()
        optimizer.step()
    refs = [weakref.ref(thing) for thing in (optimizer, *model.modules(), *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []


@pytest.mark.parametrize("build", [by_shard(0), by_shard(3), by_drop_in], ids=["0", "3", "drop-in"])
def test_a_model_that_keeps_its_graph_and_gradients_goes_when_it_is_dropped(ranks, build):
    ranks(kept_graphs, 2, build)


def orphans(stage: int) -> tuple[str, str]:
    """What is left of a model that is gone says so; it does not fail elsewhere."""
    model, optimizer = by_shard(stage)(Keeps())
    model(torch.ones(2, 8)).sum().backward()
    weight, grad = model.layers[0].weight, model.layers[0].weight.grad
    del model, optimizer
    gc.collect()
    texts = []
    for read in (lambda: weight.grad, lambda: grad.norm()):
        with pytest.raises(RuntimeError) as error:
            read()
        texts.append(str(error.value))
    return texts[0], texts[1]


def test_parameters_and_gradients_that_outlive_their_model_say_so(ranks):
    for of_weight, of_grad in ranks(orphans, 2, 3):
        assert "this parameter belongs to is gone" in of_weight and "this gradient belongs to is gone" in of_grad


class Mark:
    """Lives as long as the node of autograd that holds it."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Cached(nn.Module):
    """Blocks that take two tensors, and a cache in which each leaves what the later ones may read."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, first: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(self.linear(x).tanh())
            return x + cache[-1] + first

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(self.Block() for _ in range(layers))
        self.present: list[int] = []  # units gathered whenever the gradient of a block's output arrives

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        cache: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, first, cache)
            x.register_hook(lambda grad: self.present.append(sum(unit.present for unit in state_of(self).engine.units)))
        return x


def forgotten_forwards(stage: int) -> None:
    """Python's collector is off: a graph that nobody holds is gone at once, and not when it comes."""
    model = Cached(3)
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)

    def graph(backward: bool) -> weakref.ref:
        mark = Mark()
        loss = model(Marked.apply(torch.ones(2, 8, requires_grad=True), mark)).sum()
        if backward:
            loss.backward()
        return weakref.ref(mark)

    gc.disable()
    try:
        for backward in (False, True, True):
            assert graph(backward)() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_that_is_dropped_is_gone_at_once(ranks, stage):
    ranks(forgotten_forwards, 2, stage)


def gathered_in_backward() -> list[int]:
    model = Cached(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=3, keep_whole=0)
    for _ in range(2):
        model.present.clear()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.present


def test_a_cache_that_units_share_keeps_no_unit_gathered(ranks):
    """The root, the unit at work, the one prefetched and the one whose gradients are still to come: not all seven."""
    for present in ranks(gathered_in_backward, 2):
        assert len(present) == 6 and max(present) <= 4, present
