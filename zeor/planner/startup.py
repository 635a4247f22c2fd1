"""The start-up block: what runs, where, on what, and what it will hold; some lines, on rank 0, through logging.

Shown by default: where nobody has set logging up, the `zeor` logger gets a plain handler on stderr. Silence it
with `logging.getLogger("zeor").setLevel("WARNING")`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from zeor.comm.axes import Axes
from zeor.features.wire_choice import describe
from zeor.memory import device as devices
from zeor.optim.kernels.registry import why_not
from zeor.plan import Plan, Wire
from zeor.planner.bytes import Loop, Source, kind_of, predicted, setting_of
from zeor.planner.peaks import Model, accumulated_nbytes
from zeor.step.unit import Unit

log = logging.getLogger("zeor")


def show_start(
    model: nn.Module, plan: Plan, axes: Axes, units: list[Unit], optimizers: list[Optimizer], note: str = ""
) -> None:  # fmt: skip
    """`note`: what else the user should hear of where it runs."""
    slots = [slot for unit in units for slot in unit.slots]
    if axes.whole.rank != 0:
        return
    make_visible()
    numel = sum(slot.param.numel() for slot in slots)
    frozen = sum(slot.param.numel() for slot in slots if slot.lane.grads is None)
    two = axes.across.size > 1
    stage, shape = (str(plan.stages), f" ({axes.across.size} x {axes.inside.size})") if two else (str(plan.stage), "")
    if axes.experts is not None and axes.experts.tensor is not None:
        [dim] = axes.experts.tensor.dims
        shape += f", experts over {dim.name}={dim.size}"
    if axes.tensor is not None:
        shape += f" of {axes.whole.size} ({' x '.join(f'{axis.name}={axis.size}' for axis in axes.tensor.dims)})"
    where = f"{axes.everyone.size} rank(s){shape}, {devices.describe(axes.device)}, {axes.everyone.backend}"
    log.info("stage %s on %s, torch %s%s", stage, where, torch.__version__, note and f"; {note}")
    log.info(
        "%s parameters%s in %d units; compute/reduce/master %s",
        f"{numel:,}", f" ({frozen:,} frozen)" if frozen else "", len(units), _dtypes(units),
    )  # fmt: skip
    if plan.wire is not None and axes.everyone.size > 1:
        log.info("wire %s", _wire(plan.wire, units))
    log.info("per rank: %s", _bytes(model, plan, axes, units, optimizers))
    for optimizer in optimizers[:1]:
        reason, name = why_not(optimizer, axes.device, plan.kernel), type(optimizer).__name__
        log.info("%s by %s", name, f"torch's own step ({reason})" if reason else "zeor's one-pass kernel")


def make_visible() -> None:
    """zeor's lines, in a program that has said nothing about logging; for rank 0."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter())
        log.addHandler(handler)
        log.propagate = False
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)


class _Formatter(logging.Formatter):
    """zeor: once, also before a sentence that says so itself, as it must where others show it."""

    def format(self, record: logging.LogRecord) -> str:
        return "zeor: " + super().format(record).removeprefix("zeor: ")


def _dtypes(units: list[Unit]) -> str:
    keys = {lane.key for unit in units for lane in unit.lanes}
    triples = {(k.compute_dtype, k.reduce_dtype, k.master_dtype) for k in keys}
    return "; ".join("/".join(str(d).removeprefix("torch.") for d in t) for t in sorted(triples, key=str))


def _wire(wire: Wire, units: list[Unit]) -> str:
    """In what, and how much of the model: what is left out is named in docs/communication.md."""
    if wire.auto:
        return f"'auto': {describe(wire)}, until some steps have been measured"
    lanes = [lane for unit in units for lane in unit.lanes]
    coded = sum(lane.layout.numel for lane in lanes if lane.spec.wires.any)
    share = coded / max(1, sum(lane.layout.numel for lane in lanes))
    return f"{describe(wire)}: {share:.1%} of the parameters travel as codes, the others exactly"


def _bytes(model: nn.Module, plan: Plan, axes: Axes, units: list[Unit], optimizers: list[Optimizer]) -> str:
    """Predicted bytes by role, and by tier where there are several; moments only where the planner knows the
    optimizer."""
    automatic = plan.offload is not None and plan.offload.auto
    native = axes.everyone.native_reduce and axes.device.type != "cpu"
    counted = replace(plan, offload=None) if automatic else plan
    source = Source(model, {"units": [unit.module for unit in units[1:] if unit.module is not None]})
    experts = None if axes.experts is None else axes.experts.sizes
    setting = setting_of(counted, axes.sizes, kind_of(optimizers), native, Loop(), experts)
    known = source.model(setting)
    found = predicted(known).prediction
    told = _told({role: getattr(found, role) for role in ("compute", "grad", "master", "moments", "residual")})
    if automatic:
        told += "; master and moments are placed by what is free at the first step"
    elif plan.streams:
        tiers = {tier: getattr(found, tier) for tier in ("device", "host", "disk", "window")}
        told += f"; by tier: {_told(tiers)}"
    return f"{told}; at most {found.transient / 1e6:,.1f} MB more while a step runs, {_sums(known)}"


def _sums(known: Model) -> str:
    """What micro-batches cost: whole sums inside zeor.no_sync, slices outside."""
    whole, slices = (
        accumulated_nbytes(replace(known, setting=replace(known.setting, accumulation=2, sums_each=each))) / 1e6
        for each in (False, True)
    )
    told = f"{whole:,.1f} MB" if whole == slices else f"{slices:,.1f} MB ({whole:,.1f} MB inside zeor.no_sync)"
    return f"and {told} in fp32 if it sums several micro-batches"


def _told(nbytes: dict[str, int]) -> str:
    return ", ".join(f"{name} {count / 1e6:,.1f} MB" for name, count in nbytes.items() if count)
