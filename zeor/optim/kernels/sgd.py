"""SGD as one pass over memory, with momentum or without. As adam.py, whose notes hold here too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeor.optim.kernels.protocol import DEFAULT_LAUNCH, Launch, LaunchOver, Tensors, check_run, launch_run, split_scalar


@dataclass(frozen=True)
class SGDSettings:
    """What a group of torch.optim.SGD says about its update."""

    lr: float | Tensor
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @classmethod
    def from_group(cls, group: dict[str, Any]) -> SGDSettings:
        return cls(*(group[each.name] for each in fields(cls)))


class SGDRun(NamedTuple):
    """As AdamRun. `momentum_buffer` is None where momentum is zero."""

    master: Tensor | None
    grad: Tensor
    momentum_buffer: Tensor | None = None
    compute: Tensor | None = None
    remainder: Tensor | None = None


class SGDKernel:
    classes: tuple[type[Optimizer], ...] = (torch.optim.SGD,)
    numbers: tuple[str, ...] = ("weight_decay", "momentum", "dampening")
    formats: tuple[str, ...] = ("exact",)

    def refuses(self, group: dict[str, Any]) -> str | None:
        return None

    def moments(self, groups: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        return ("momentum_buffer",) if any(group["momentum"] for group in groups) else ()

    def age(self, state: dict[str, Any], begun: Collection[str]) -> int:
        return int("momentum_buffer" in begun)

    def count(self, states: Sequence[dict[str, Any]]) -> None:
        """The momentum's being there is all that counts."""

    def launcher(self, optimizer: Optimizer, group: dict[str, Any], age: int) -> LaunchOver:
        settings = SGDSettings.from_group(group)

        def launch(at: Tensors, scale: Tensor | None) -> None:
            # A lane has momentum where any group asks for it; a group that does not leaves it alone.
            momentum = at.get("momentum_buffer") if settings.momentum else None
            weights = at.get("compute"), at.get("remainder")
            sgd_pass(SGDRun(at.get("master"), at["grad"], momentum, *weights), settings, age == 0, scale)

        return launch


def sgd_pass(
    run: SGDRun,
    settings: SGDSettings,
    first: bool | Tensor = False,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    launch: Launch = DEFAULT_LAUNCH,
) -> None:
    """One update of SGD over one run; `scale` and `found_inf` as in `adam_pass`.

    `first` says that the momentum buffer holds nothing yet: it becomes the gradient, undampened. It may be a
    0-d tensor on the device, for a caller that cannot know whether found_inf skipped the first step.
    """
    from zeor.optim.kernels.triton import sgd_kernel

    numel, device = check_run(run._asdict(), {}, (scale, found_inf))
    if (run.momentum_buffer is None) != (settings.momentum == 0):
        raise ValueError(f"momentum_buffer must be None just where momentum is 0; it is {settings.momentum}")
    if numel == 0:
        return
    first_tensor, first_value = split_scalar(first, device)
    lr_tensor, lr_value = split_scalar(settings.lr, device)
    numbers = (lr_value, float(settings.weight_decay), float(settings.momentum), 1.0 - settings.dampening)
    launch_run(
        sgd_kernel, launch, device, (*run, numel, scale, found_inf, lr_tensor, first_tensor, *numbers), numel,
        WEIGHT_DECAY=settings.weight_decay != 0, NESTEROV=settings.nesterov, MAXIMIZE=settings.maximize,
        FIRST=first_tensor is None and bool(first_value),
    )  # fmt: skip
