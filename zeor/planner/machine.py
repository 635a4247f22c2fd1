"""Machines as data: what a device computes and moves in a second. All constants of the time model are in this file.

H200: measured here (bf16 products, HBM, PCIe, attention, a step's parts; docs/benchmarks.md). The others: the maker's
peaks times the share of its peak that the H200 reached in the same kind of work, but for what is measured of them; so
nobody has checked them. Links inside a host and between hosts: makers' figures, and for hops of a collective the
latencies that NCCL's own tuning table assumes for rings (3.4 us over NVLink, 14 us over a network; small messages 0.6
and 2.7). Override any of them: `dataclasses.replace(zeor.Machine.parse("H100"), across=zeor.Link(50e9))`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeor.comm.links import Link, Links
from zeor.comm.meshes import GPU, NODE
from zeor.memory import device as devices
from zeor.memory.roles import Sizes
from zeor.plan import _nbytes, nearest

GIB = 1 << 30
_OF_PEAK = 680 / 989  # what products inside a model reach on an H200, of the maker's dense bf16 peak
_OF_FP8_PEAK = 1380 / 1979
_OF_HBM = 4.28 / 4.8
_ATTENTION = 375 / 989
_ELEMENTWISE = 2.4 / 4.8  # many small kernels, strided copies among them, reach less than one copy does

Along = tuple[str, int, Link]  # an axis: its name, how many members it has, and their link
_PCIE_PEERS, _HUNDRED_GBIT = Link(20e9), Link(12.5e9, 14e-6, 2.7e-6)


@dataclass(frozen=True)
class Machine:
    """Of one device, in bytes, operations and seconds.

    products, products8, products32: matrix products inside a model, in 16 and 8 bits and in fp32. attention: fused,
    by the operations that a causal mask leaves. hbm: bytes of one large pass, as an update is. pcie: each way, while
    both are used. launch: of the host, for one operation. fused: of the bytes that element-wise operations move, what
    torch.compile leaves. inside, across: links between the devices of a host, and of a whole host to the others. hides:
    messages travel while it computes; False where the same cores do both. cores: of a CPU, which its ranks share.
    present: this process runs on it, so what is cheap to measure is measured (the speed of codecs).
    """

    name: str
    memory: int
    products: float
    products32: float
    attention: float
    hbm: float
    elementwise: float  # bytes a second that element-wise operations of a model move
    products8: float = 0.0
    pcie: float = 49e9
    host_update: float = 3.8e9  # elements a second that all cores of a host update
    disk: float = 1.4e9
    launch: float = 100e-6
    fused: float = 0.25
    inside: Link = _PCIE_PEERS
    across: Link = _HUNDRED_GBIT
    per_host: int = 8
    hides: bool = True
    native: bool = True
    cores: int = 0
    present: bool = False

    @staticmethod
    def parse(value: Any) -> Machine:
        """A Machine, the name of one, or bytes of memory such as "80GiB": then a machine of about that size."""
        if isinstance(value, Machine):
            return value
        named = {name.lower(): machine for name, machine in MACHINES.items()}
        if str(value).lower() in named:
            return named[str(value).lower()]
        try:
            nbytes = _nbytes("gpu", value)
        except ValueError:
            raise ValueError(
                f"gpu={value!r} is not known{nearest(str(value), list(MACHINES))}; use one of {list(MACHINES)}, bytes "
                "such as '80GiB', or a zeor.Machine."
            ) from None
        assert nbytes is not None
        gpus = [machine for machine in MACHINES.values() if machine.native]
        like = min(gpus, key=lambda each: abs(each.memory - nbytes))
        return replace(like, memory=nbytes)

    @staticmethod
    def here() -> Machine:
        """This process's accelerator, by its name; else its CPU."""
        device = devices.default_device()
        if device.type == "cpu":
            return replace(MACHINES["CPU"], present=True)
        name = devices.describe(device)
        known = next((machine for key, machine in MACHINES.items() if key != "CPU" and key in name), None)
        if known is None:  # nobody knows: what it is called is kept, so that a reader sees it
            known = replace(MACHINES["A100"], name=f"{name} (speeds of an A100)")
        memory = devices.DeviceMemory(device).total_nbytes() or known.memory
        return replace(known, memory=memory, per_host=torch.accelerator.device_count(), present=True)

    def host_share(self, nbytes: int, world: int) -> int:
        """Of one rank, of a host's memory."""
        return nbytes // min(world, self.per_host)

    def links(self, sizes: Sizes, names: Sequence[str] = ("ranks",), link: Any = None) -> tuple[Along, ...]:
        """(name, members, link) by axis, the innermost first, for ranks that stand so on axes of these names (the
        outermost first). Ranks on one axis that fill several hosts still have two links. `link`: as the user gave it;
        one rate is that between hosts, or where all ranks fit into a host the one inside."""
        given = Links.parse(link, names)
        world = sizes.inside * sizes.across
        if sizes.across > 1:
            inner, (outer, near) = sizes.inside, names
        elif len(given.links) == 1 and given.sizes == (world,):  # measured over all of them, wherever they are
            return ((names[-1], world, given.links[0]),)
        else:
            inner, outer, near = min(world, self.per_host), NODE, GPU
        hosts = -(-world // inner)
        if hosts == 1:
            return ((names[-1], world, given.links[0] if given.links else self.inside),)
        inside, across = (*given.links, None, None)[:2] if len(given.links) > 1 else (None, *given.links, None)[:2]
        if across is None and world <= self.per_host:  # both axes are inside one host
            across = replace(self.inside, bandwidth=self.inside.bandwidth * inner)
        return ((near, inner, inside or self.inside), (outer, hosts, across or self.across))


def _nvidia(name: str, gib: float, peak: float, hbm: float, **more: Any) -> Machine:
    """From the maker's peaks: TFLOP/s of dense bf16, TB/s of HBM."""
    products8 = 2 * peak * 1e12 * _OF_FP8_PEAK if more.pop("fp8", False) else 0.0
    return Machine(
        name, int(gib * GIB), peak * 1e12 * _OF_PEAK, more.pop("fp32", 19.5) * 1e12 * 0.8, peak * 1e12 * _ATTENTION,
        hbm * 1e12 * _OF_HBM, hbm * 1e12 * _ELEMENTWISE, products8=products8, **more,
    )  # fmt: skip


def _net(gbit: float) -> Link:
    """Of a whole host."""
    return Link(gbit * 1e9 / 8, 14e-6, 2.7e-6)


_NVLINK4, _NVLINK3, _NVLINK2 = (Link(rate, 3.4e-6, 0.6e-6) for rate in (360e9, 235e9, 120e9))
MACHINES: dict[str, Machine] = {
    "H200": _nvidia("H200", 139.8, 989, 4.8, fp8=True, fp32=67, inside=_NVLINK4, across=_net(8 * 400)),
    "H100": _nvidia("H100", 79.1, 989, 3.35, fp8=True, fp32=67, inside=_NVLINK4, across=_net(8 * 400)),
    "A100": _nvidia("A100", 79.2, 312, 2.04, pcie=22e9, inside=_NVLINK3, across=_net(8 * 200)),
    "A100-40GB": _nvidia("A100-40GB", 39.4, 312, 1.56, pcie=22e9, inside=_NVLINK3, across=_net(8 * 200)),
    "V100": _nvidia("V100", 31.7, 125, 0.9, pcie=11e9, fp32=15.7, inside=_NVLINK2, across=_net(100), per_host=16),
    "4090": _nvidia("4090", 23.6, 165, 1.01, fp8=True, fp32=82, pcie=22e9, inside=Link(20e9), across=_net(100)),
    # Two cores of a server; benchmarks/forecast.py measures the machine it runs on.
    "CPU": Machine("CPU", 8 * GIB, 60e9, 60e9, 40e9, 8e9, 5e9, pcie=8e9, host_update=0.7e9, launch=4e-6, fused=1.0,
                   inside=Link(2e9, 100e-6), across=Link(0.1e9, 200e-6), hides=False, native=False,
                   cores=os.cpu_count() or 1),
}  # fmt: skip
