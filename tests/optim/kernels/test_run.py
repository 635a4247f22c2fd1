"""The builder of runs and the resident update, on a CPU: kernels are replaced by what they mean in plain torch.

Resident and streamed lanes go through the same kernels, in the bits of the stock step; and a kernel that is registered
serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeor
from tests import loops
from tests.optim.kernels import reference
from zeor.optim.kernels import adam, registry, sgd
from zeor.optim.kernels.protocol import Kernel, LaunchOver, Tensors

MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "groups": lambda model: torch.optim.Adam([{"params": [p], "lr": 0.01 + p.dim() / 100} for p in model.parameters()]),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
}
MAKE["momentum in one group"] = lambda model: torch.optim.SGD(
    [
        {"params": model.head.parameters(), "momentum": 0.9},
        {"params": [model.scale, *model.blocks.parameters()]},
    ],
    lr=0.1,
)
HOW: dict[str, dict[str, Any]] = {"resident": {}, "streamed": {"offload": zeor.Offload(chunk=256)}}


@contextmanager
def kernels_here(*more: Kernel) -> Iterator[list[int]]:
    """Kernels run on this device; the lengths of the runs they were launched over. `more`: beside those there are."""
    found: list[int] = []
    before = adam.adam_pass, sgd.sgd_pass, registry.unavailable_reason, registry.KERNELS

    def told(what: Callable[..., None]) -> Any:
        return lambda run, *rest: (found.append(run.grad.numel()), what(run, *rest))[1]

    adam.adam_pass, sgd.sgd_pass = told(reference.adam_pass_reference), told(reference.sgd_pass_reference)
    registry.unavailable_reason, registry.KERNELS = (lambda device: None), (*registry.KERNELS, *more)  # type: ignore[assignment]
    try:
        yield found
    finally:
        adam.adam_pass, sgd.sgd_pass, registry.unavailable_reason, registry.KERNELS = before


def trained(make: Callable[[nn.Module], Optimizer], **how: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and state after three steps."""
    model = loops.net(torch.float32)
    optimizer = make(model)
    zeor.shard(model, optimizer, **how)
    for step in range(3):
        loops.own_loss(model, step, torch.float32).backward()
        zeor.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    zeor.unshard(model, optimizer)
    return loops.values(model), optimizer.state_dict()["state"]


def check(name: str, how: str, together: bool) -> None:
    """`together`: neighbours are one run, as gradients lie side by side where they were reduced."""
    wanted, state = trained(MAKE[name], kernel="stock")
    with kernels_here() as launches:
        got, kept = trained(MAKE[name], **HOW[how])
    for param, value in wanted.items():
        torch.testing.assert_close(got[param], value, rtol=1e-6, atol=1e-7)
    for index, entries in state.items():
        for entry, value in entries.items():
            if isinstance(value, Tensor):  # SGD without momentum says None
                torch.testing.assert_close(kept[index][entry], value, rtol=1e-5, atol=1e-8)
    assert launches and max(launches) <= 256
    if together:
        assert len(launches) <= 3 * 4, "one for each of the units"
    elif how == "resident":
        assert len(launches) == 3 * len(wanted), "adopted gradients lie each for itself"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MAKE)
def test_a_kernel_does_the_stock_steps_arithmetic_wherever_state_rests(name, how):
    check(name, how, together=False)


@pytest.mark.parametrize("how", HOW)
def test_neighbours_are_one_run(ranks, how):
    ranks(check, 2, "AdamW", how, True)


class Halving:
    """A kernel for Rprop that keeps a count and halves every weight."""

    classes: tuple[type[Optimizer], ...] = (torch.optim.Rprop,)
    numbers: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("exact",)

    def refuses(self, group: dict[str, Any]) -> str | None:
        return None

    def moments(self, groups: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        return ("seen",)

    def age(self, state: dict[str, Any], begun: Collection[str]) -> int:
        return int(state.setdefault("step", torch.zeros(())))

    def count(self, states: Sequence[dict[str, Any]]) -> None:
        for state in states:
            state["step"] += 1

    def launcher(self, optimizer: Optimizer, group: dict[str, Any], age: int) -> LaunchOver:
        def launch(at: Tensors, scale: Tensor | None) -> None:
            at["master"].mul_(0.5)
            at["seen"].add_(age + 1)

        return launch


@pytest.mark.parametrize("how", HOW)
def test_a_new_kernel_is_one_line_in_the_registry(how):
    with kernels_here(Halving()):
        got, kept = trained(lambda model: torch.optim.Rprop(model.parameters()), **HOW[how])
    for name, value in loops.values(loops.net(torch.float32)).items():
        assert torch.equal(got[name], value / 8), "three steps"
    for entries in kept.values():
        assert float(entries["step"]) == 3.0
        assert torch.equal(entries["seen"], torch.full_like(entries["seen"], 1.0 + 2.0 + 3.0))
