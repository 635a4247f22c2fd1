"""Links: how fast bytes travel along each axis of ranks, given as text or measured by real collectives.

A `Link` is what one member of an axis sends while all members send, and what a message costs besides. `Links` holds one
per axis, the innermost first: with two, the first lies inside a host and the second across hosts, where a member is a
whole host. `measure_links` times gathers of two sizes along each axis, once, on request. What a step makes of links
is the planner's business (planner/network.py).

    link="400Gbit/s", link={"node": "100Gbit/s 20us", "gpu": "450GB/s"}, link=zeor.measure_links(mesh)
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from zeor.comm import small, verbs
from zeor.comm.axes import Axes, Axis
from zeor.comm.launch.world import ensure_process_group
from zeor.comm.meshes import GPU, NODE, make_axes
from zeor.memory import device as devices

LATENCY, SMALL_NBYTES, LARGE_NBYTES = 10e-6, 4096, 8 << 20
_ROUNDS, _TIMEOUT = 5, 60.0
_NO_LIMIT = 1e15  # of an axis with one rank
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_RATE = re.compile(  # b: bits, B: bytes
    rf"^\s*{_NUMBER}\s*([kKmMgGtT]?)(i?)(bit|b|B)\s*(?:/s|ps)\s*(?:,?\s*{_NUMBER}\s*(us|ms|s))?\s*$"
)
_LONG = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes a second that one member sends while all do. latency: seconds that a hop of a large collective
    costs besides. message: of a small message; None: as latency."""

    bandwidth: float
    latency: float = LATENCY
    message: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < math.inf) or not (0 <= self.latency < math.inf):
            raise ValueError(
                f"A link of {self.bandwidth!r} bytes/s with a latency of {self.latency!r} s; give numbers above zero."
            )

    @property
    def small(self) -> float:
        return self.latency if self.message is None else self.message

    @staticmethod
    def parse(value: Any) -> Link:
        """Text such as "100Mbit/s", "50GB/s" or "400Gbit/s 14us"; or bytes a second."""
        if isinstance(value, Link):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Link(float(value))
        found = _RATE.match(str(value))
        if found is None:
            raise ValueError(f"link={value!r} is not a rate; write such as '100Mbit/s', '50GB/s' or '400Gbit/s 14us'.")
        number, scale, binary, unit, wait, measure = found.groups()
        power = " kmgt".index(scale.lower()) if scale else 0
        rate = float(number) * (1024.0 if binary else 1000.0) ** power / (1 if unit == "B" else 8)
        return Link(rate, LATENCY if wait is None else float(wait) * _LONG[measure])

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.3g} GB/s, {self.latency * 1e6:.3g} us"


@dataclass(frozen=True)
class Links:
    """By axis, the innermost first. sizes: how many members each has, where that is known."""

    links: tuple[Link, ...] = ()
    names: tuple[str, ...] = ("ranks",)
    sizes: tuple[int, ...] = ()

    @staticmethod
    def parse(value: Any, names: Sequence[str] = ("ranks",)) -> Links:
        """From what a user says of axes of these names (the outermost first): one rate, or one for each axis. Axes can
        be called "across" and "inside" too, or "node" and "gpu"."""
        if value is None:
            return Links()
        if isinstance(value, Links):
            return value
        if not isinstance(value, Mapping):
            return Links((Link.parse(value),))
        called = [each for each in (tuple(names), (NODE, GPU), ("across", "inside")) if set(each) == set(value)]
        if not called:
            raise ValueError(
                f"link={dict(value)!r} names the axes {list(value)}; use one rate, or one for each of {list(names)}."
                if len(names) > 1
                else f"link={dict(value)!r} names the axes {list(value)}; use one rate, or 'node' and 'gpu'."
            )
        order = called[0][::-1]
        return Links(tuple(Link.parse(value[name]) for name in order), order)

    def __str__(self) -> str:
        sizes = [f" ({size})" for size in self.sizes] or [""] * len(self.names)
        return "; ".join(f"{name}{size}: {link}" for name, size, link in zip(self.names, sizes, self.links))


def measure_links(mesh: Any = None, hierarchy: int | str | None = None) -> Links:
    """Bandwidth and latency along each axis of ranks, timed with real gathers, in a few seconds at most.

    Every rank calls it, and all get the same numbers: those of the slowest. `mesh` and `hierarchy` are as zeor.shard
    takes them; zeor.predict and zeor.choose take the answer as link=.
    """
    device = torch.device(getattr(mesh, "device_type", None) or devices.default_device())
    ensure_process_group(device, _TIMEOUT)
    if dist.is_initialized() and device.type != "cpu" and device.type not in str(dist.get_backend_config()):
        device = torch.device("cpu")  # a group that moves nothing of the accelerator's
    axes = make_axes(mesh, device, False, _TIMEOUT, hierarchy)
    if axes.everyone.size == 1:
        raise ValueError("There is one rank alone, so there are no links to measure; start several (torchrun).")
    return measure_along(axes)


def measure_along(axes: Axes) -> Links:
    """The same over axes that are there; nothing may be under way on them."""
    if axes.across.size == 1:
        return Links((_measure(axes.everyone, axes.everyone),), (axes.everyone.name,), (axes.everyone.size,))
    found = [_measure(axis, axes.everyone) for axis in axes.each]
    # Across, all ranks of a host sent at once: the link is that of the whole host.
    found[1] = replace(found[1], bandwidth=found[1].bandwidth * axes.inside.size)
    return Links(tuple(found), (axes.inside.name, axes.across.name), tuple(axes.sizes))


def _measure(axis: Axis, everyone: Axis) -> Link:
    """From a small gather and a large one: t = hops * latency + bytes sent / bandwidth."""
    if axis.size == 1:
        return Link(_NO_LIMIT, 0.0)
    quick, slow = (_seconds(axis, everyone, nbytes) for nbytes in (SMALL_NBYTES, LARGE_NBYTES))
    sent = [nbytes * (axis.size - 1) / axis.size for nbytes in (SMALL_NBYTES, LARGE_NBYTES)]
    rate = (sent[1] - sent[0]) / max(slow - quick, 1e-9)
    return Link(rate, max(quick - sent[0] / rate, 0.0) / (axis.size - 1), _message_seconds(axis, everyone))


def _seconds(axis: Axis, everyone: Axis, nbytes: int) -> float:
    """The best of a few gathers of so many bytes, which all ranks begin together; that of the slowest rank."""
    full = torch.zeros(nbytes // axis.size * axis.size, dtype=torch.uint8, device=axis.device)
    mine = full.view(axis.size, -1)[axis.rank].clone()
    best = math.inf
    for _ in range(_ROUNDS + 1):  # the first makes connections; it is the slowest, so the best leaves it out
        _together(everyone)
        begin = time.perf_counter()
        verbs.gather(axis, full, mine, "measuring of links").wait()
        if axis.device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return _slowest(everyone, best)


def _message_seconds(axis: Axis, everyone: Axis) -> float:
    """Of one small host message: an agreement takes ceil(log2 N) of them in a row."""
    best = math.inf
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        _together(axis)
        best = min(best, time.perf_counter() - begin)
    return _slowest(everyone, best) / math.ceil(math.log2(axis.size))


def _together(axis: Axis) -> None:
    small.largest(axis, torch.zeros(1, dtype=torch.int64))


def _slowest(axis: Axis, seconds: float) -> float:
    return float(small.largest(axis, torch.tensor([seconds], dtype=torch.float64)))
