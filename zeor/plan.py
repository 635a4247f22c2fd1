"""The plan: everything a user can choose about a sharded run, in frozen dataclasses.

No JSON, no environment variables, no batch sizes. A plan is the same on every rank; `shard()`
compares the ranks' plans and says which rank differs. This module knows no tensor and no group.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

import torch

STAGES = (0, 1, 2, 3)
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Dtypes by role. None means "as the parameter is".

    compute: what forward and backward read. reduce: how gradients travel and rest until the step
    (None: as compute). master: what the optimizer updates; never narrower than fp32.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"Precision.{field.name} is {dtype!r}; give a floating torch.dtype or None.")
        if self.master is not None and self.master not in (torch.float32, torch.float64):
            raise ValueError(
                f"Precision.master is {self.master}; the master copy is torch.float32 or torch.float64, "
                "so that small updates are not rounded away."
            )

    @staticmethod
    def parse(value: Precision | str | None) -> Precision:
        if isinstance(value, Precision):
            return value
        if value is None:
            return Precision()
        if value == "fp32":
            return Precision(compute=torch.float32)
        if value in _HALF:
            return Precision(compute=_HALF[value])
        known = ["fp32", *_HALF]
        raise ValueError(
            f"precision={value!r} is not known{nearest(str(value), known)}; use one of {known} or a zeor.Precision."
        )


@dataclass(frozen=True)
class Plan:
    """What `shard()` was asked for. See `zeor.shard` for the meaning of each field."""

    stage: int = 3
    precision: Precision = Precision()
    reduction: str = "mean"
    overlap: bool = True
    prefetch: int = 1
    kernel: str = "auto"
    deterministic: bool = False
    buffers: str = "mean"
    nonfinite: str = "warn"
    timeout: float = 600.0
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in STAGES or isinstance(self.stage, bool):
            raise ValueError(f"stage={self.stage!r} is not a ZeRO stage; use 0, 1, 2 or 3.")
        _one_of("reduction", self.reduction, ("mean", "sum"))
        _one_of("kernel", self.kernel, ("auto", "stock"))
        _one_of("buffers", self.buffers, ("mean", "rank0", "local"))
        _one_of("nonfinite", self.nonfinite, ("warn", "raise", "skip", "ignore"))
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch!r}; give how many units to gather ahead: 0, 1, 2, ...")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r}; give the seconds a collective may take, more than 0.")

    @staticmethod
    def parse(options: dict[str, Any]) -> Plan:
        """A plan from keyword arguments; an unknown one is refused with the nearest known name."""
        known = [field.name for field in dataclasses.fields(Plan)]
        for name in options:
            if name not in known:
                raise TypeError(f"zeor has no option {name!r}{nearest(name, [*known, 'units', 'mesh'])}.")
        options = dict(options)
        options["precision"] = Precision.parse(options.get("precision"))
        methods = options.get("methods") or ()
        options["methods"] = (methods,) if isinstance(methods, str) else tuple(methods)
        if options.get("timeout") is None:
            options.pop("timeout", None)
        return Plan(**options)

    def describe(self) -> dict[str, str]:
        """Field by field as text: what ranks compare."""
        return {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}


def nearest(name: str, known: list[str]) -> str:
    """ ", did you mean 'x'?" or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known{nearest(str(value), list(known))}; use one of {list(known)}.")
